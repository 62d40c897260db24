//! One path: a folder with a capacity, its segments, and its health.
//!
//! Files are numbered slots of one length. `prepare` keeps one segment ready beside the open one, so a
//! write seldom waits for a file; whoever runs it takes the oldest segment with [`SsdPath::oldest`] when no
//! slot is left, and lets go of what lies in it. A file system that is full before the capacity is reached
//! counts as no slot left: the path goes on with the files it has, and takes more when there is room (F14).

use super::{
    SsdError,
    format::{Nonce, SegmentHeader, Trailer},
    io::{AlignedBuffer, DriverInUse, File, Folder, PAGE, is_full},
    recovery::Owner,
    removals::{RemovalLog, UseId},
    segment::Segment,
};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    future::Future,
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::timeout};

/// What a power loss may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// What was written survives the end of the process; a power loss may take any of it.
    None,
    /// A sealed segment survives a power loss too.
    Segment,
}

/// How a path is used.
#[derive(Debug, Clone)]
pub struct PathSettings {
    /// For people.
    pub name: PathBuf,
    /// Bytes that all of its files may take, at most.
    pub capacity: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// What a power loss may take.
    pub durability: Durability,
    /// A disk that needs longer for one request counts as failed.
    pub deadline: Duration,
}

/// Why a path takes part no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// It reads and writes.
    Healthy,
    /// It does neither, for this reason.
    Fenced(Arc<str>),
}

/// What a path did since the start.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "the names are those of the metrics they feed, documented there")]
pub struct PathCounters {
    pub written_records: AtomicU64,
    pub written_bytes: AtomicU64,
    pub read_records: AtomicU64,
    pub read_bytes: AtomicU64,
    pub damaged_records: AtomicU64,
    pub sealed_segments: AtomicU64,
    pub reclaimed_segments: AtomicU64,
    pub carried_records: AtomicU64,
    pub scrubbed_records: AtomicU64,
    pub scrubbed_bytes: AtomicU64,
}

/// See the module.
pub struct SsdPath {
    pub(super) owner: Owner,
    pub(super) folder: Arc<dyn Folder>,
    pub(super) settings: PathSettings,
    pub(super) state: Mutex<State>,
    pub(super) removals: RemovalLog,
    /// Something changed that `prepare` may care for.
    pub(super) changed: Notify,
    /// A segment is ready, or none will be.
    pub(super) ready: Notify,
    pub(super) stopping: AtomicBool,
    pub(super) counters: Arc<PathCounters>,
}

/// The segments of a path.
#[derive(Debug)]
pub(super) struct State {
    pub(super) health: Health,
    pub(super) open: Option<Arc<Segment>>,
    pub(super) prepared: Option<Arc<Segment>>,
    /// Oldest first.
    pub(super) sealed: VecDeque<Arc<Segment>>,
    /// Slots whose file is there and that nobody uses.
    pub(super) free: Vec<u32>,
    /// The slot that is being made ready: its file holds nothing that anybody could read.
    pub(super) in_hand: Option<u32>,
    /// By slot.
    pub(super) uses: Vec<Use>,
    pub(super) last_sequence: u64,
    /// The file system has had no room for another file, and that was said.
    pub(super) disk_full: bool,
}

/// What a restart would find in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    NoFile,
    /// A file that is being made, or that was not begun yet.
    Making,
    /// A file that was there already. It is left alone in this life.
    LeftOut,
    /// A file that holds nothing.
    Blank,
    /// A segment of this sequence.
    Begun(u64),
}

impl State {
    /// A slot to use, and whether its file has to be made.
    fn take_slot(&mut self, limit: u32) -> Option<(u32, bool)> {
        if let Some(slot) = self.free.pop() {
            self.in_hand = Some(slot);
            return Some((slot, false));
        }
        let no_file = |of: &Use| *of == Use::NoFile;
        let gap = self.uses.iter().position(no_file).unwrap_or(self.uses.len());
        let slot = u32::try_from(gap).ok().filter(|slot| *slot < limit)?;
        self.uses.resize(self.uses.len().max(gap + 1), Use::NoFile);
        self.uses[gap] = Use::Making;
        Some((slot, true))
    }

    /// No segment that a restart would find was begun before the one of this sequence.
    pub(super) fn oldest_use(&self) -> u64 {
        let begun = self.uses.iter().filter_map(|of| match of {
            Use::Begun(sequence) => Some(*sequence),
            Use::NoFile | Use::Making | Use::LeftOut | Use::Blank => None,
        });
        begun.min().unwrap_or(0)
    }

    fn insert_sealed(&mut self, segment: &Arc<Segment>) {
        if self.health == Health::Healthy {
            let after = self.sealed.partition_point(|other| other.sequence < segment.sequence);
            self.sealed.insert(after, Arc::clone(segment));
        }
    }
}

impl std::fmt::Debug for SsdPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SsdPath").field(&self.settings.name).finish()
    }
}

/// The file of a slot.
pub fn slot_name(slot: u32) -> String {
    format!("segment-{slot:06}")
}

/// The slot of a file, if it is one.
pub(super) fn slot_of(name: &str) -> Option<u32> {
    let slot = name.strip_prefix("segment-")?.parse().ok()?;
    (slot_name(slot) == name).then_some(slot)
}

/// Slots that the capacity allows.
pub fn slots_of(settings: &PathSettings) -> u32 {
    let room = settings.capacity.saturating_sub(reserve_bytes(settings));
    u32::try_from(room / settings.segment_bytes.max(1)).unwrap_or(u32::MAX)
}

/// Bytes of a path that are kept for the removal log, the folder and what the file system adds.
fn reserve_bytes(settings: &PathSettings) -> u64 {
    (settings.capacity / 256).max(4 << 20)
}

impl SsdPath {
    pub(super) fn new(
        owner: Owner,
        folder: Arc<dyn Folder>,
        settings: PathSettings,
        removals: RemovalLog,
        state: State,
        counters: Arc<PathCounters>,
    ) -> Arc<Self> {
        Arc::new(Self {
            owner,
            folder,
            settings,
            state: Mutex::new(state),
            removals,
            changed: Notify::new(),
            ready: Notify::new(),
            stopping: AtomicBool::new(false),
            counters,
        })
    }

    /// Whose it is.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// By what it is known when it has failed, wherever its folder lies by then.
    pub fn uses(&self) -> &[UseId] {
        self.removals.uses()
    }

    /// How its folder is read and written, if that is a disk's.
    pub fn driver(&self) -> Option<&DriverInUse> {
        self.folder.driver_in_use()
    }

    /// How it is used.
    pub fn settings(&self) -> &PathSettings {
        &self.settings
    }

    /// What it did since the start of the node, in all of its uses.
    pub fn counters(&self) -> &Arc<PathCounters> {
        &self.counters
    }

    /// Whether it takes part.
    pub fn health(&self) -> Health {
        self.state.lock().health.clone()
    }

    /// Whether it takes part.
    pub fn is_healthy(&self) -> bool {
        self.state.lock().health == Health::Healthy
    }

    /// Slots that the capacity allows.
    pub fn slots_limit(&self) -> u32 {
        slots_of(&self.settings)
    }

    /// Bytes of segments that hold records, and of the open one's filled part: of those that are not
    /// sealed or adopted yet, too, and of those that readers still hold. Nothing of a fenced path.
    pub fn used_bytes(&self) -> u64 {
        let state = self.state.lock();
        if state.health != Health::Healthy {
            return 0;
        }
        let is_made = |of: &&Use| matches!(of, Use::Blank | Use::Begun(_));
        let files = state.uses.iter().filter(is_made).count();
        let in_part = state.free.len()
            + state.prepared.iter().chain(&state.open).count()
            + usize::from(state.in_hand.is_some());
        let open = state.open.iter().map(|open| open.used_pages() * PAGE as u64).sum::<u64>();
        files.saturating_sub(in_part) as u64 * self.settings.segment_bytes + open
    }

    /// Whether the file system had no room for the file of another segment when it was last asked for one.
    pub fn disk_is_full(&self) -> bool {
        self.state.lock().disk_full
    }

    /// Takes the path out: nothing is read from or written to it from now on. Whether it took part until
    /// now, and the reason is new.
    pub fn fence(&self, reason: &str) -> bool {
        let mut state = self.state.lock();
        if state.health != Health::Healthy {
            return false;
        }
        state.health = Health::Fenced(reason.into());
        // A segment that is dropped gives its slot back under the same lock.
        let let_go = (state.open.take(), state.prepared.take(), std::mem::take(&mut state.sealed));
        drop(state);
        drop(let_go);
        tracing::error!(path = %self.settings.name.display(), reason, "ssd path fenced");
        self.changed.notify_one();
        self.ready.notify_waiters();
        true
    }

    /// Wakes whoever waits for a change.
    pub fn nudge(&self) {
        self.changed.notify_one();
    }

    /// Ends with the next change of the segments or of the health. Safe to cancel.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Nobody makes segments ready any more: who waits for one need not.
    pub fn stop_waiting(&self) {
        self.stopping.store(true, Ordering::Release);
        self.ready.notify_waiters();
    }

    /// Writes the footer of a segment that is full and at rest.
    pub(super) async fn seal_if_full(&self, segment: &Arc<Segment>) -> Result<(), SsdError> {
        let Some(entries) = segment.take_to_seal() else { return Ok(()) };
        let closing = Trailer::close(segment.nonce, &entries).freeze();
        let offset = segment.file.len() - closing.len() as u64;
        self.in_time(segment.file.write(offset, vec![closing])).await?;
        if self.settings.durability == Durability::Segment {
            self.in_time(segment.file.sync()).await?;
        }
        self.counters.sealed_segments.fetch_add(1, Ordering::Relaxed);
        self.state.lock().insert_sealed(segment);
        segment.closed();
        self.changed.notify_one();
        Ok(())
    }

    /// Makes the next segment ready, if none is and a slot is there for it. Whether one is ready; a full
    /// disk has no slot beyond the files that are there.
    ///
    /// # Errors
    /// The disk failed, and the path is fenced; or it is fenced.
    pub async fn prepare(self: &Arc<Self>) -> Result<bool, SsdError> {
        if !self.begin_log().await? {
            self.no_room();
            return Ok(false);
        }
        let (slot, sequence, is_new, file) = loop {
            let (slot, sequence, is_new) = {
                let mut state = self.state.lock();
                if state.health != Health::Healthy {
                    drop(state);
                    return Err(self.fenced());
                }
                if state.prepared.is_some() {
                    return Ok(true);
                }
                let Some((slot, is_new)) = state.take_slot(self.slots_limit()) else {
                    return Ok(false);
                };
                state.last_sequence += 1;
                (slot, state.last_sequence, is_new)
            };
            match self.open_slot(slot, is_new).await {
                Ok(file) => break (slot, sequence, is_new, file),
                Err(error) if is_full(&error) => {
                    {
                        let mut state = self.state.lock();
                        (state.uses[slot as usize], state.in_hand) = (Use::NoFile, None);
                    }
                    self.no_room();
                    return Ok(false);
                }
                Err(error) if is_new && error.kind() == io::ErrorKind::AlreadyExists => {
                    self.state.lock().uses[slot as usize] = Use::LeftOut;
                    let (path, name) = (self.settings.name.display(), slot_name(slot));
                    tracing::warn!(
                        %path, name,
                        "a file that this node did not make in this life: its place is left out until the restart, \
                         which takes the file as one of its own. Move it away before, if it is somebody's"
                    );
                }
                Err(error) => return Err(self.failed(error)),
            }
        };
        let nonce = draw_nonce();
        self.begin(&file, nonce, sequence).await?;
        let segment = Segment::begun(Arc::downgrade(self), slot, nonce, sequence, file);
        let mut state = self.state.lock();
        (state.uses[slot as usize], state.in_hand) = (Use::Begun(sequence), None);
        state.disk_full &= !is_new;
        // One that is not wanted gives its slot back, which takes the same lock.
        let not_wanted = match state.health {
            Health::Healthy => state.prepared.replace(segment),
            Health::Fenced(_) => Some(segment),
        };
        drop(state);
        drop(not_wanted);
        self.ready.notify_waiters();
        Ok(true)
    }

    /// Makes the removal log of this life, if that is still to be made. A full disk goes on with the logs of
    /// earlier ones, and the first removal tries again. Whether there is a log: nothing is written before.
    async fn begin_log(&self) -> Result<bool, SsdError> {
        let oldest = self.state.lock().oldest_use();
        let begun = async {
            match self.removals.begin(&self.folder, oldest).await {
                Err(error) if is_full(&error) => Ok(self.removals.is_there().await),
                begun => begun.map(|()| true),
            }
        };
        self.in_time(begun).await
    }

    /// A segment of an earlier life, with its footer: the next to be reclaimed in its turn.
    pub(super) fn adopted(&self, segment: &Arc<Segment>) {
        segment.fill_with(Vec::new());
        self.state.lock().insert_sealed(segment);
    }

    /// The file of a slot, made if it is new, and made anew if somebody has cut it or taken it away.
    async fn open_slot(&self, slot: u32, is_new: bool) -> io::Result<Arc<dyn File>> {
        let (folder, bytes) = (Arc::clone(&self.folder), self.settings.segment_bytes);
        let open = move || {
            let name = slot_name(slot);
            if !is_new {
                match folder.open(&name) {
                    Ok(file) if file.len() == bytes => return Ok(file),
                    Ok(_) => folder.remove(&name)?,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            let file = folder.create(&name, bytes)?;
            folder.sync()?;
            Ok(file)
        };
        let opened = timeout(self.settings.deadline, tokio::task::spawn_blocking(open)).await;
        opened.map_err(|_| late())?.map_err(io::Error::other)?
    }

    /// The disk has no room for another file. That passes, so it is tried again with each want of a segment,
    /// and said once.
    fn no_room(&self) {
        if !std::mem::replace(&mut self.state.lock().disk_full, true) {
            let path = self.settings.name.display();
            tracing::warn!(%path, "the disk is full below the capacity of the path: oldest parts make room");
        }
    }

    /// Makes a file ready for another use: what was in it means nothing from then on.
    async fn begin(
        &self,
        file: &Arc<dyn File>,
        nonce: Nonce,
        sequence: u64,
    ) -> Result<(), SsdError> {
        let bytes = self.settings.segment_bytes;
        let header = SegmentHeader { node: self.owner.node, nonce, sequence, segment_bytes: bytes };
        self.in_time(file.write(0, vec![header.encode().freeze()])).await?;
        // Removals of what the file held may be forgotten only when it cannot come back.
        self.in_time(file.sync()).await
    }

    /// Whether another segment could be begun after the prepared one.
    pub fn has_spare_slot(&self) -> bool {
        let limit = self.slots_limit() as usize;
        let state = self.state.lock();
        let taken = |of: &&Use| !matches!(of, Use::NoFile);
        !state.free.is_empty() || state.uses.iter().filter(taken).count() < limit
    }

    /// The segment that takes records now, if it has any.
    pub fn open_segment(&self) -> Option<Arc<Segment>> {
        let open = self.state.lock().open.clone()?;
        (!open.entries().is_empty()).then_some(open)
    }

    /// The segment that was begun last.
    pub fn last_sequence(&self) -> u64 {
        self.state.lock().last_sequence
    }

    /// Sealed segments that were begun no later than this one.
    pub fn sealed_up_to(&self, sequence: u64) -> usize {
        self.state.lock().sealed.partition_point(|segment| segment.sequence <= sequence)
    }

    /// The oldest sealed segment that was begun after this number, and its own number.
    pub fn sealed_after(&self, sequence: u64) -> Option<(u64, Arc<Segment>)> {
        let state = self.state.lock();
        let after = state.sealed.partition_point(|segment| segment.sequence <= sequence);
        state.sealed.get(after).map(|segment| (segment.sequence, Arc::clone(segment)))
    }

    /// The oldest sealed segment, for the caller to let go of what lies in it.
    pub fn oldest(&self) -> Option<Arc<Segment>> {
        let oldest = self.state.lock().sealed.pop_front();
        if oldest.is_some() {
            self.counters.reclaimed_segments.fetch_add(1, Ordering::Relaxed);
        }
        oldest
    }

    /// Makes a segment unknown to a restart, before anything that lies in it is let go of: what is removed
    /// by command later could not be noted any more. Who reads it by its copies still can. What was carried
    /// on to other segments is as safe there as it was here.
    ///
    /// # Errors
    /// The disk failed, and the path is fenced.
    pub async fn disown(
        &self,
        segment: &Arc<Segment>,
        carried_to: &[Arc<Segment>],
    ) -> Result<(), SsdError> {
        if self.settings.durability == Durability::Segment {
            for segment in carried_to {
                self.in_time(segment.file.sync()).await?;
            }
        }
        let blank = AlignedBuffer::zeroed(PAGE).freeze();
        self.in_time(segment.file.write(0, vec![blank])).await?;
        self.in_time(segment.file.sync()).await
    }

    /// Removals that are remembered.
    #[cfg(test)]
    pub(crate) async fn removed_generations(&self) -> usize {
        self.removals.live().await
    }

    /// Segments whose footer is written.
    #[cfg(test)]
    pub(super) fn sealed_sequences(&self) -> Vec<u64> {
        self.state.lock().sealed.iter().map(|segment| segment.sequence).collect()
    }

    /// A slot that nobody uses any more.
    pub(super) fn given_back(&self, slot: u32) {
        self.state.lock().free.push(slot);
        self.changed.notify_one();
    }

    /// Waits for a request, but not for ever. A failure fences the path: it is never tried again and
    /// believed. A file that somebody has cut is no failure of its disk.
    pub(super) async fn in_time<T>(
        &self,
        pending: impl Future<Output = io::Result<T>>,
    ) -> Result<T, SsdError> {
        let answer = timeout(self.settings.deadline, pending).await;
        answer.unwrap_or_else(|_| Err(late())).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => SsdError::Cut(error), // Of a read alone.
            _ => self.failed(error),
        })
    }

    fn failed(&self, error: io::Error) -> SsdError {
        self.fence(&error.to_string());
        SsdError::Io(error)
    }

    /// For what reads at its leisure.
    ///
    /// # Errors
    /// The path is fenced.
    pub fn must_take_part(&self) -> Result<(), SsdError> {
        match self.health() {
            Health::Healthy => Ok(()),
            Health::Fenced(reason) => Err(SsdError::Fenced(reason)),
        }
    }

    pub(super) fn fenced(&self) -> SsdError {
        match self.health() {
            Health::Fenced(reason) => SsdError::Fenced(reason),
            Health::Healthy => SsdError::Busy, // Taken back in meanwhile.
        }
    }
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "slower than its deadline")
}

/// A name that nobody can guess and no use has had before.
fn draw_nonce() -> Nonce {
    let mut nonce = Nonce::default();
    let drawn = rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty());
    assert_eq!(drawn, Ok(nonce.len()), "the kernel gives up to 256 random bytes at once");
    nonce
}
