//! Finding everything again after a restart.
//!
//! [`SsdPath::open`] reads the first page of each file: enough to write again. An [`Adoption`] then reads
//! footers, newest segment first, while the node serves. A segment without a footer was open when the
//! node ended: its records prove themselves, header and bytes, and it is sealed with those that do, so a
//! second recovery finds the same.

use super::{
    SsdError,
    format::{FooterEntry, RecordHeader, SegmentHeader, Unreadable},
    io::{AlignedBuffer, Folder, PAGE, ReadBuffer, is_of_the_disk},
    path::{Health, PathCounters, PathSettings, SsdPath, State, Use, slot_name, slot_of},
    removals::{self, ReadFailed, Removed, UseId},
    segment::{Segment, SsdCopy},
    steps::{Steps, in_steps},
};
use larder_proto::{
    Generation,
    ids::{Incarnation, NodeId},
};
use std::{
    collections::{HashSet, VecDeque},
    io,
    sync::Arc,
};

/// Whose a path is, and what that node knows of its earlier lives.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    /// The node.
    pub node: NodeId,
    /// The life that it is in.
    pub life: Incarnation,
    /// The last life before this one in which parts were removed by command, if there was one. A path that has not
    /// taken part in it may still hold them, so what it holds is given up.
    pub last_removal: Option<Incarnation>,
}

/// Why a path cannot be used. Nothing in it was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The folder or a file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A later Larder wrote it.
    #[error("{file}: {why}; it is left as it is. Use the newer version, or another folder")]
    Newer {
        /// The file.
        file: String,
        /// Which format.
        why: Unreadable,
    },
    /// It holds the parts of another node.
    #[error(
        "{file} belongs to node {owner}; it is left as it is. Use another folder, or empty this one"
    )]
    OfAnotherNode {
        /// The file.
        file: String,
        /// Whose it is.
        owner: NodeId,
    },
    /// Too small to write in turns.
    #[error(
        "a capacity of {capacity} bytes holds {slots} segments of {segment_bytes} bytes; at least 4 are needed"
    )]
    TooSmall {
        /// What was given.
        capacity: u64,
        /// Bytes of a segment.
        segment_bytes: u64,
        /// Segments that fit, beside what is kept for the rest.
        slots: u32,
    },
}

impl OpenError {
    /// Whether the disk has failed, and not whoever chose the folder.
    pub fn is_of_the_disk(&self) -> bool {
        match self {
            Self::Io(error) => is_of_the_disk(error),
            Self::Newer { .. } | Self::OfAnotherNode { .. } | Self::TooSmall { .. } => false,
        }
    }
}

/// What an adoption found, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by what was found")]
pub struct AdoptionCounts {
    pub segments: u64,
    /// Segments without a whole footer: their records were found one by one.
    pub unsealed_segments: u64,
    /// Files whose header is damaged: given up, and removed.
    pub damaged_segments: u64,
    pub records: u64,
    /// Records that were removed for good.
    pub removed_records: u64,
    /// Records of open segments that did not prove themselves.
    pub unproved_records: u64,
}

impl AdoptionCounts {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            segments: self.segments + other.segments,
            unsealed_segments: self.unsealed_segments + other.unsealed_segments,
            damaged_segments: self.damaged_segments + other.damaged_segments,
            records: self.records + other.records,
            removed_records: self.removed_records + other.removed_records,
            unproved_records: self.unproved_records + other.unproved_records,
        }
    }
}

/// Segments that are given up side by side.
const AT_ONCE: usize = 32;

/// Segments of an earlier life, to be adopted one after the other.
#[derive(Debug)]
pub struct Adoption {
    path: Arc<SsdPath>,
    /// Newest first.
    left: VecDeque<Arc<Segment>>,
    removed: HashSet<Generation>,
    counts: AdoptionCounts,
}

/// The header of each slot file, where it can be read.
struct Slots {
    found: Vec<(u32, SegmentHeader)>,
    /// Files without a header that means anything.
    blank: Vec<u32>,
    dropped: Dropped,
    /// Files of another length, or beyond the capacity.
    odd: Vec<String>,
    last_sequence: u64,
}

impl Slots {
    /// Gives up for good what was found: another restart shall not find it either.
    fn empty(&mut self, folder: &dyn Folder, steps: &Steps) -> Result<(), OpenError> {
        for some in self.found.chunks(AT_ONCE) {
            let files = some.iter().map(|(slot, _)| folder.open(&slot_name(*slot)));
            let files: Vec<_> = files.collect::<Result<_, _>>()?;
            let page = AlignedBuffer::zeroed(PAGE).freeze();
            let writes: Vec<_> =
                files.iter().map(|file| file.write(0, vec![page.clone()])).collect();
            for write in writes {
                write.wait()?;
                steps.step();
            }
            let syncs: Vec<_> = files.iter().map(|file| file.sync()).collect();
            for sync in syncs {
                sync.wait()?;
                steps.step();
            }
        }
        self.blank.extend(self.found.drain(..).map(|(slot, _)| slot));
        Ok(())
    }
}

/// Files that may have held records and are dropped, by reason: what was cached there is lost, so that is said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Dropped {
    /// Whole ones, written with another `ssd.segment`.
    other_length: u64,
    /// Whole ones, for which a smaller `capacity` has no room.
    beyond_capacity: u64,
    /// Cut short or made longer by somebody else.
    wrong_length: u64,
    damaged_header: u64,
}

impl Dropped {
    fn files(self) -> u64 {
        let Self { other_length, beyond_capacity, wrong_length, damaged_header } = self;
        other_length + beyond_capacity + wrong_length + damaged_header
    }

    fn say(self, settings: &PathSettings) {
        let Self { other_length, beyond_capacity, wrong_length, damaged_header } = self;
        let (path, files) = (settings.name.display(), self.files());
        if files > 0 {
            tracing::warn!(
                %path, files, other_length, beyond_capacity, wrong_length, damaged_header,
                "segment files are dropped with all that they hold. other_length: they were made with another \
                 ssd.segment than is set now; beyond_capacity: there are more than ssd.path.capacity has room for; \
                 wrong_length: somebody cut or stretched them; damaged_header: what they are cannot be read"
            );
        }
    }
}

impl SsdPath {
    /// Opens a folder. What an earlier life left there is to be adopted, unless it is of a use that has `failed`
    /// since or cannot know of all removals: then it is given up, and that is said in the log.
    ///
    /// # Errors
    /// The folder cannot be used; nothing in it was changed. Or its disk did not answer one request in time.
    pub async fn open(
        owner: Owner,
        folder: Arc<dyn Folder>,
        settings: PathSettings,
        failed: Arc<HashSet<UseId>>,
    ) -> Result<(Arc<Self>, Adoption), OpenError> {
        let (limit, counters) = (settings.deadline, Arc::default());
        let open = move |steps: &_| open(owner, folder, settings, Some(&failed), counters, steps);
        in_steps(limit, open).await?
    }

    /// Opens a folder for another use in the same life of the node: what it holds is given up for good, and
    /// the counts go on.
    ///
    /// # Errors
    /// The folder cannot be used. What it holds may be given up in part.
    pub async fn open_empty(
        owner: Owner,
        folder: Arc<dyn Folder>,
        settings: PathSettings,
        counters: Arc<PathCounters>,
    ) -> Result<Arc<Self>, OpenError> {
        let limit = settings.deadline;
        let open = move |steps: &_| open(owner, folder, settings, None, counters, steps);
        in_steps(limit, open).await?.map(|(path, _)| path)
    }
}

/// With none that `failed`: nothing is kept.
fn open(
    owner: Owner,
    folder: Arc<dyn Folder>,
    settings: PathSettings,
    failed: Option<&HashSet<UseId>>,
    counters: Arc<PathCounters>,
    steps: &Steps,
) -> Result<(Arc<SsdPath>, Adoption), OpenError> {
    let slots_limit = super::path::slots_of(&settings);
    if slots_limit < 4 {
        let PathSettings { capacity, segment_bytes, .. } = settings;
        return Err(OpenError::TooSmall { capacity, segment_bytes, slots: slots_limit });
    }
    let files = folder.list()?;
    let numbers = files.iter().filter_map(|(name, _)| removals::log_number(name)).collect();
    steps.step();
    let mut slots =
        read_headers(owner.node, folder.as_ref(), &files, &settings, slots_limit, steps)?;
    let removed = removals::read_all(folder.as_ref(), numbers, owner.life);
    let removed = removed.map_err(|failed| match failed {
        ReadFailed::Io(error) => OpenError::Io(error),
        ReadFailed::Format(why) => OpenError::Newer { file: "the removal log".to_owned(), why },
    })?;
    steps.step();
    let keep = failed.is_some_and(|failed| may_keep(owner, &settings, &slots, &removed, failed));
    if keep {
        slots.dropped.say(&settings); // Otherwise nothing is kept, and that is said.
    }
    // From here on things are changed.
    for name in &slots.odd {
        folder.remove(name)?;
        steps.step();
    }
    if !keep {
        slots.empty(folder.as_ref(), steps)?;
    }
    begin(owner, folder, settings, slots, removed, counters, steps)
}

/// Whether all that was removed by command is known to this path.
fn may_keep(
    owner: Owner,
    settings: &PathSettings,
    slots: &Slots,
    removed: &Removed,
    failed: &HashSet<UseId>,
) -> bool {
    let (path, segments) = (settings.name.display(), slots.found.len());
    if removed.uses.iter().any(|one| failed.contains(one)) {
        tracing::warn!(%path, segments, "the path had failed: it starts empty");
        return false;
    }
    if removed.damaged {
        tracing::error!(%path, segments, "the removal log is damaged: what the path holds is given up");
        return false;
    }
    match removed.made_in {
        None if segments > 0 => {
            tracing::error!(%path, segments, "the removal log is gone, or was cut: what the path holds is given up");
            false
        }
        Some(last) if owner.last_removal.is_some_and(|removal| removal > last) => {
            tracing::warn!(
                %path, segments,
                "parts were removed by command while this path could not note it (it was away, or its disk was full): \
                 what it holds is given up"
            );
            false
        }
        _ => true,
    }
}

fn begin(
    owner: Owner,
    folder: Arc<dyn Folder>,
    settings: PathSettings,
    slots: Slots,
    removed: Removed,
    counters: Arc<PathCounters>,
    steps: &Steps,
) -> Result<(Arc<SsdPath>, Adoption), OpenError> {
    let Removed { log, generations, .. } = removed;
    let highest = slots.found.iter().map(|(slot, _)| *slot).chain(slots.blank.iter().copied());
    let mut uses = vec![Use::NoFile; highest.max().map_or(0, |slot| slot as usize + 1)];
    slots.blank.iter().for_each(|slot| uses[*slot as usize] = Use::Blank);
    for (slot, header) in &slots.found {
        uses[*slot as usize] = Use::Begun(header.sequence);
    }
    let state = State {
        health: Health::Healthy,
        open: None,
        prepared: None,
        sealed: VecDeque::new(),
        free: slots.blank,
        in_hand: None,
        last_sequence: slots.last_sequence,
        uses,
        disk_full: false,
    };
    let path = SsdPath::new(owner, Arc::clone(&folder), settings, log, state, counters);
    let mut left = Vec::new();
    for (slot, header) in slots.found {
        let file = folder.open(&slot_name(slot))?;
        steps.step();
        let SegmentHeader { nonce, sequence, .. } = header;
        left.push(Segment::begun(Arc::downgrade(&path), slot, nonce, sequence, file));
    }
    left.sort_unstable_by_key(|segment| std::cmp::Reverse(segment.sequence));
    let counts = AdoptionCounts {
        damaged_segments: slots.dropped.damaged_header,
        ..AdoptionCounts::default()
    };
    let adoption =
        Adoption { path: Arc::clone(&path), left: left.into(), removed: generations, counts };
    Ok((path, adoption))
}

fn read_headers(
    node: NodeId,
    folder: &dyn Folder,
    files: &[(String, u64)],
    settings: &PathSettings,
    slots_limit: u32,
    steps: &Steps,
) -> Result<Slots, OpenError> {
    let dropped = Dropped::default();
    let mut slots =
        Slots { found: Vec::new(), blank: Vec::new(), dropped, odd: Vec::new(), last_sequence: 0 };
    for (name, len) in files {
        let Some(slot) = slot_of(name) else { continue };
        steps.step();
        let header = match *len < PAGE as u64 {
            true => Err(Unreadable::Absent("segment header")),
            false => first_page(folder, name)?,
        };
        let fits = *len == settings.segment_bytes;
        let dropped = &mut slots.dropped;
        match &header {
            Ok(header) if header.segment_bytes != *len => dropped.wrong_length += 1,
            Ok(_) if !fits => dropped.other_length += 1,
            Ok(_) if slot >= slots_limit => dropped.beyond_capacity += 1,
            Ok(_) => {}
            Err(Unreadable::Absent(_)) if *len < PAGE as u64 => dropped.wrong_length += 1,
            Err(Unreadable::Absent(_)) => {} // It held nothing any more.
            Err(_) => dropped.damaged_header += 1,
        }
        match header {
            Err(why @ Unreadable::Newer { .. }) => {
                return Err(OpenError::Newer { file: name.clone(), why });
            }
            Ok(header) if header.node != node => {
                return Err(OpenError::OfAnotherNode { file: name.clone(), owner: header.node });
            }
            _ if !fits || slot >= slots_limit => slots.odd.push(name.clone()),
            Ok(header) if header.segment_bytes == *len => slots.found.push((slot, header)),
            Ok(_) | Err(Unreadable::Absent(_)) => slots.blank.push(slot),
            Err(_) => slots.odd.push(name.clone()), // Gone, so that it is counted once.
        }
    }
    slots.last_sequence = slots.found.iter().map(|(_, header)| header.sequence).max().unwrap_or(0);
    Ok(slots)
}

fn first_page(
    folder: &dyn Folder,
    name: &str,
) -> Result<Result<SegmentHeader, Unreadable>, OpenError> {
    let into: Box<dyn ReadBuffer> = Box::new(AlignedBuffer::zeroed(PAGE));
    let mut got = folder.open(name)?.read(0, vec![into]).wait()?;
    let page = got.pop();
    Ok(page.map_or(Err(Unreadable::Absent("segment header")), |mut page| {
        let bytes = page.bytes_mut();
        match SegmentHeader::decode(bytes) {
            // A file that is given up has zeroes there, and so has one that was not begun.
            Err(Unreadable::Absent(what)) if bytes.iter().any(|byte| *byte != 0) => {
                Err(Unreadable::Sum(what))
            }
            header => header,
        }
    }))
}

impl Adoption {
    /// The path that is adopted.
    pub fn path(&self) -> &Arc<SsdPath> {
        &self.path
    }

    /// Segments that are not read yet.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// What was found so far.
    pub fn counts(&self) -> AdoptionCounts {
        self.counts
    }

    /// The records of the next segment; `None` when all were read. A segment that cannot be read is
    /// counted and given up.
    ///
    /// # Errors
    /// The disk failed, and the path is fenced.
    pub async fn next(&mut self) -> Option<Result<Vec<(FooterEntry, SsdCopy)>, SsdError>> {
        let segment = self.left.pop_front()?;
        if let Err(fenced) = self.path.must_take_part() {
            return Some(Err(fenced)); // By command: its disk may still answer.
        }
        Some(self.adopt(segment).await)
    }

    async fn adopt(
        &mut self,
        segment: Arc<Segment>,
    ) -> Result<Vec<(FooterEntry, SsdCopy)>, SsdError> {
        self.counts.segments += 1;
        let entries = match self.path.records(&segment).await {
            Ok(entries) => {
                self.path.adopted(&segment);
                entries
            }
            // No whole footer of this use: it was open, or the node ended while it was sealed, or the
            // footer is damaged. The records speak for themselves.
            Err(error) if error.is_of_the_copy() => {
                let entries = self.prove_all(&segment).await?;
                if entries.is_empty() {
                    return Ok(Vec::new());
                }
                self.counts.unsealed_segments += 1;
                segment.fill_with(entries.clone());
                self.path.seal_if_full(&segment).await?;
                entries
            }
            Err(error) => return Err(error),
        };
        let total = entries.len() as u64;
        let alive = entries.into_iter().filter(|entry| !self.removed.contains(&entry.generation));
        let with_copy = |entry| {
            let copy = SsdCopy::of(Arc::clone(&segment), &entry);
            (entry, copy)
        };
        let alive: Vec<_> = alive.map(with_copy).collect();
        self.counts.records += alive.len() as u64;
        self.counts.removed_records += total - alive.len() as u64;
        Ok(alive)
    }

    /// Records of a segment without a footer: those whose header and bytes are whole. A record that was
    /// not written to its end may lie between others.
    async fn prove_all(&mut self, segment: &Arc<Segment>) -> Result<Vec<FooterEntry>, SsdError> {
        const WINDOW: u64 = 256; // Pages of one read, unless a record is longer.
        let pages = segment.file.len() / PAGE as u64;
        let (mut page, mut entries) = (1, Vec::new());
        let (mut first, mut window) = (0, AlignedBuffer::zeroed(0));
        let mut wanted = 1; // Pages from `page` on that the window has to hold.
        while page < pages {
            if page + wanted > first + (window.len() / PAGE) as u64 {
                let len = usize::try_from(wanted.max(WINDOW).min(pages - page)).unwrap_or(1) * PAGE;
                window = match self.path.read_pages(&segment.file, page * PAGE as u64, len).await {
                    Err(error) if error.is_of_the_copy() => break, // Cut since it was listed.
                    read => read?,
                };
                first = page;
            }
            let from = usize::try_from(page - first).unwrap_or(0) * PAGE;
            let (here, left) = (&window[from..], pages - page);
            wanted = 1;
            match prove(segment, page, here, left) {
                Proof::NoneBegins => page += 1,
                Proof::Unproved => {
                    self.counts.unproved_records += 1;
                    page += 1;
                }
                Proof::Record(entry) => {
                    page += entry.pages();
                    entries.push(*entry);
                }
                Proof::Needs(pages) => wanted = pages,
            }
        }
        Ok(entries)
    }
}

/// What is known of a place in a segment.
enum Proof {
    NoneBegins,
    /// Something begins that is no whole record of this use of the segment.
    Unproved,
    Record(Box<FooterEntry>),
    /// So many pages have to be seen first: more than there were, and no more than are left.
    Needs(u64),
}

/// Looks at the pages from `page` on; `left` of them are in the segment.
fn prove(segment: &Segment, page: u64, here: &[u8], left: u64) -> Proof {
    if !RecordHeader::may_begin(here) {
        return Proof::NoneBegins;
    }
    let there = (here.len() / PAGE) as u64;
    let header_pages = RecordHeader::pages_from_front(here);
    match header_pages as u64 {
        pages if pages > left => return Proof::Unproved,
        pages if pages > there => return Proof::Needs(pages),
        _ => {}
    }
    let (header, payload) = here.split_at(header_pages * PAGE);
    let Ok(header) = RecordHeader::decode(&segment.nonce, header) else { return Proof::Unproved };
    let at_page = u32::try_from(page).unwrap_or(u32::MAX);
    let entry = FooterEntry::of(&header, at_page, u16::try_from(header_pages).unwrap_or(u16::MAX));
    match entry.pages() {
        pages if pages > left => return Proof::Unproved,
        pages if pages > there => return Proof::Needs(pages),
        _ => {}
    }
    let len = usize::try_from(header.info.len).unwrap_or(usize::MAX);
    match header.info.sums.verify(0, &payload[..len]) {
        Ok(()) => Proof::Record(Box::new(entry)),
        Err(_) => Proof::Unproved,
    }
}
