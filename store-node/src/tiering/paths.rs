//! The paths of a tier over their uses: fenced, out, and taken in again without a restart of the node.
//!
//! ```text
//! in use --- fails, or fence by command ---> fenced --- readmit ---> out --- opened empty ---> in use
//!                                              ^                      |
//!                                              +---- cannot be opened +
//! ```
//!
//! A path whose disk fails when the node starts is out from the beginning. What it holds is not given up for that
//! alone: when it is opened by a later life, and nothing was removed by command meanwhile, all of it is adopted.
//!
//! An [`SsdPath`] that is fenced stays fenced: taking a path in again is a new [`SsdPath`] over the same
//! folder. What was being done with the old one when it was fenced (a late write, a removal log half
//! written) must not reach a file of the new one. That is what the lock of the folder is for: it is free
//! only when the old path, its files and their last request have ended, and nobody is given another one
//! before.
//!
//! A path that is fenced or out cannot note removals, so whatever it holds is given up, durably, before it
//! is in use again. A removal of a part that was being written meanwhile, and that may yet come to lie on the
//! new path, is noted there before the path takes part.

use super::Tiering;
use crate::tiers::ssd::{
    Adoption, AdoptionCounts, Health, OpenError, Owner, PathCounters, PathSettings, SsdPath, UseId,
    io::{DriverInUse, Folder},
};
use larder_proto::Generation;
use parking_lot::Mutex;
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout_at},
};

/// How often a folder is tried again while requests of its last use have not ended.
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// What the tier needs of the node around it. Its calls wait for a disk.
pub trait PathHost: Send + Sync + 'static {
    /// Opens the folder of a path for this node alone.
    ///
    /// # Errors
    /// It cannot be opened. `ResourceBusy`: its last use by this process has not ended yet. `AlreadyExists`: another
    /// process uses it.
    fn open(&self, dir: &Path) -> io::Result<Arc<dyn Folder>>;

    /// Remembers for good that what these uses of a path have left is given up, wherever its folder lies.
    ///
    /// # Errors
    /// It cannot be remembered.
    fn note_failed(&self, uses: &[UseId]) -> io::Result<()>;
}

/// Why a path was not fenced or not taken in again.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// There is no such path.
    #[error("{} is no ssd path of this node; its paths: {}", dir.display(), list(known))]
    Unknown {
        /// What was named.
        dir: PathBuf,
        /// What there is.
        known: Vec<PathBuf>,
    },
    /// It takes part.
    #[error("{} is not fenced", .0.display())]
    NotFenced(PathBuf),
    /// Somebody else is at it.
    #[error("{} is being taken in already", .0.display())]
    InProgress(PathBuf),
    /// Requests to the disk have not ended: what they write must not reach the new use.
    #[error("{}: its disk has not answered requests of before yet; try again when it has", .0.display())]
    NotEnded(PathBuf),
    /// The disk does not answer now.
    #[error("{}: its disk does not answer; try again when it does", .0.display())]
    Silent(PathBuf),
    /// Another process has the folder.
    #[error(transparent)]
    InUse(io::Error),
    /// The folder cannot be used.
    #[error("{}: {source}", dir.display())]
    Open {
        /// The path.
        dir: PathBuf,
        /// Why not.
        source: OpenError,
    },
    /// The node cannot remember it.
    #[error("{}: it cannot be remembered over a restart: {source}", dir.display())]
    NotRemembered {
        /// The path.
        dir: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

fn list(paths: &[PathBuf]) -> String {
    match paths {
        [] => "none".to_owned(),
        some => some.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
    }
}

/// How far taking in what an earlier life left on a path is.
#[derive(Debug, Clone, Copy, Default)]
pub struct AdoptionProgress {
    /// Segments that were there.
    pub segments: u64,
    /// What was found so far.
    pub counts: AdoptionCounts,
    /// It has not ended.
    pub goes_on: bool,
}

/// The folder that is being opened, if it is: a disk that hangs keeps one thread, however often it is tried again.
type Readmission = Option<tokio::task::JoinHandle<io::Result<Arc<dyn Folder>>>>;

/// A path of the tier, whatever becomes of it.
#[derive(Debug)]
pub struct Member {
    owner: Owner,
    settings: PathSettings,
    counters: Arc<PathCounters>,
    seat: Mutex<Seat>,
    /// The path came or went.
    changed: Notify,
    /// Held while it is taken in again.
    readmission: tokio::sync::Mutex<Readmission>,
    pub(super) adoption: Mutex<AdoptionProgress>,
    /// Held by a scrub on demand.
    pub(super) scrub: tokio::sync::Mutex<()>,
    /// Uses that have failed, which the node could not remember.
    pub(super) not_remembered: Mutex<Vec<UseId>>,
}

#[derive(Debug)]
struct Seat {
    /// None: it is out.
    path: Option<Arc<SsdPath>>,
    /// Why it was fenced last.
    fenced_because: Arc<str>,
    /// Removals that the next use has to note first; bounded by the parts that wait to be written.
    missed: Vec<Generation>,
}

impl From<Arc<SsdPath>> for Member {
    fn from(path: Arc<SsdPath>) -> Self {
        let (settings, counters) = (path.settings().clone(), Arc::clone(path.counters()));
        Self::of(path.owner(), settings, counters, Some(path), "")
    }
}

impl Member {
    /// A path that could not be opened: it is out from the start, for this reason, until it is taken in
    /// again. It notes no removals: whoever opens it in a later life is told of them ([`Owner::last_removal`]).
    pub fn out(owner: Owner, settings: PathSettings, reason: &str) -> Self {
        Self::of(owner, settings, Arc::default(), None, reason)
    }

    fn of(
        owner: Owner,
        settings: PathSettings,
        counters: Arc<PathCounters>,
        path: Option<Arc<SsdPath>>,
        reason: &str,
    ) -> Self {
        let adoption = AdoptionProgress { goes_on: path.is_some(), ..AdoptionProgress::default() };
        let seat = Seat { path, fenced_because: reason.into(), missed: Vec::new() };
        Self {
            owner,
            settings,
            counters,
            seat: Mutex::new(seat),
            changed: Notify::new(),
            readmission: tokio::sync::Mutex::default(),
            adoption: adoption.into(),
            scrub: tokio::sync::Mutex::default(),
            not_remembered: Mutex::default(),
        }
    }

    /// What an earlier life left there is about to be adopted.
    #[must_use]
    pub fn adopting(mut self, adoption: &Adoption) -> Self {
        self.adoption.get_mut().segments = adoption.left() as u64;
        self
    }

    /// How it is used.
    pub fn settings(&self) -> &PathSettings {
        &self.settings
    }

    /// What it did since the start of the node.
    pub fn counters(&self) -> &PathCounters {
        &self.counters
    }

    /// The path as it is used now, fenced or not. Whoever keeps it keeps the folder locked.
    pub fn path(&self) -> Option<Arc<SsdPath>> {
        self.seat.lock().path.clone()
    }

    /// Whether it takes part.
    pub fn health(&self) -> Health {
        let (path, why) = {
            let seat = self.seat.lock();
            (seat.path.clone(), Arc::clone(&seat.fenced_because))
        };
        path.map_or(Health::Fenced(why), |path| path.health())
    }

    /// Bytes of segments that hold records.
    pub fn used_bytes(&self) -> u64 {
        self.path().map_or(0, |path| path.used_bytes())
    }

    /// Whether its file system has less room than its capacity, as far as was seen.
    pub fn disk_is_full(&self) -> bool {
        self.path().is_some_and(|path| path.disk_is_full())
    }

    /// How far the adoption of this life is. A path that was out when the node started has none.
    pub fn adoption(&self) -> AdoptionProgress {
        *self.adoption.lock()
    }

    /// How its folder is read and written; nothing while it is out.
    pub fn driver(&self) -> Option<DriverInUse> {
        self.path()?.driver().cloned()
    }

    /// Ends when the path came or went.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The next use has to note these removals. `only_if_out`: whether it is out, else nothing was done.
    pub(super) fn missed(&self, gone: &[Generation], only_if_out: bool) -> bool {
        let mut seat = self.seat.lock();
        let takes = !only_if_out || seat.path.is_none();
        if takes {
            seat.missed.extend_from_slice(gone);
        }
        takes
    }

    #[cfg(test)]
    pub(super) fn missed_count(&self) -> usize {
        self.seat.lock().missed.len()
    }

    /// Takes a fenced path out. What it was, if it was in.
    fn leave(&self) -> Result<Option<Arc<SsdPath>>, PathError> {
        let mut seat = self.seat.lock();
        let Some(path) = &seat.path else { return Ok(None) };
        let Health::Fenced(why) = path.health() else {
            return Err(PathError::NotFenced(self.settings.name.clone()));
        };
        seat.fenced_because = why;
        Ok(seat.path.take())
    }

    /// A new use begins; removals that were missed are noted first.
    async fn join(&self, path: Arc<SsdPath>) -> Result<(), crate::tiers::ssd::SsdError> {
        loop {
            let missed = {
                let mut seat = self.seat.lock();
                if seat.missed.is_empty() {
                    seat.path = Some(path);
                    break;
                }
                seat.missed.clone()
            };
            let noted = missed.len();
            path.remove_unwritten(missed).await?;
            self.seat.lock().missed.drain(..noted);
        }
        self.changed.notify_one();
        Ok(())
    }
}

impl Tiering {
    /// The paths.
    pub fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    /// The path of this folder.
    ///
    /// # Errors
    /// There is none.
    pub fn member(&self, dir: &Path) -> Result<&Arc<Member>, PathError> {
        let known = || self.members.iter().map(|member| member.settings.name.clone()).collect();
        let found = self.members.iter().find(|member| member.settings.name == dir);
        found.ok_or_else(|| PathError::Unknown { dir: dir.to_owned(), known: known() })
    }

    /// Takes a path out of use: everything on it is withdrawn, and never adopted again. How many copies were
    /// withdrawn. One that is fenced already stays so, for its first reason; what one holds that could not be opened
    /// is not given up for that.
    ///
    /// # Errors
    /// There is no such path, or the fence cannot be remembered; it stands until the restart then.
    pub fn fence(&self, dir: &Path, reason: &str) -> Result<u64, PathError> {
        let member = self.member(dir)?;
        let Some(path) = member.path() else { return Ok(0) };
        path.fence(reason);
        let (withdrawn, remembered) = self.give_up(member, &path);
        let not_remembered = |source| PathError::NotRemembered { dir: dir.to_owned(), source };
        remembered.map(|()| withdrawn).map_err(not_remembered)
    }

    /// Takes a fenced path in again, empty. Waits until the last request of its last use has ended, for as
    /// long as one request may take. If it fails or is cancelled, the path stays out, and this can be tried
    /// again.
    ///
    /// # Errors
    /// The path is not fenced, or it cannot be used.
    pub async fn readmit(&self, dir: &Path) -> Result<(), PathError> {
        let member = self.member(dir)?;
        let Ok(mut only) = member.readmission.try_lock() else {
            return Err(PathError::InProgress(dir.to_owned()));
        };
        if let Some(fenced) = member.leave()? {
            let (_, remembered) = self.give_up(member, &fenced);
            fenced.nudge(); // Its keeper lets go of it.
            if let Err(source) = remembered {
                return Err(PathError::NotRemembered { dir: dir.to_owned(), source });
            }
        }
        let folder = self.folder_of(member, &mut only).await?;
        let open = |source: OpenError| match source {
            OpenError::Io(late) if late.kind() == io::ErrorKind::TimedOut => {
                PathError::Silent(dir.to_owned())
            }
            source => PathError::Open { dir: dir.to_owned(), source },
        };
        let (settings, counters) = (member.settings.clone(), Arc::clone(&member.counters));
        let path =
            SsdPath::open_empty(member.owner, folder, settings, counters).await.map_err(open)?;
        self.measure_anew(member);
        if let Err(error) = member.join(Arc::clone(&path)).await {
            let _ = self.note_failed(member, path.uses());
            return Err(open(io::Error::other(error).into()));
        }
        tracing::info!(path = %dir.display(), "ssd path taken in again, empty");
        Ok(())
    }

    /// The folder of a path, once its last use has ended. A disk that hangs keeps one thread, however often this is
    /// tried again; what an earlier try may still get is a sign that the disk answers, and nothing more: the
    /// folder may be another one by now.
    async fn folder_of(
        &self,
        member: &Member,
        readmission: &mut Readmission,
    ) -> Result<Arc<dyn Folder>, PathError> {
        let dir = &member.settings.name;
        let until = Instant::now() + member.settings.deadline;
        if let Some(earlier) = readmission.as_mut() {
            if timeout_at(until, earlier).await.is_err() {
                return Err(PathError::Silent(dir.clone()));
            }
            *readmission = None;
        }
        let mut in_use = false;
        loop {
            let opening = readmission.get_or_insert_with(|| {
                let (host, of) = (Arc::clone(&self.host), dir.clone());
                tokio::task::spawn_blocking(move || host.open(&of))
            });
            let Ok(opened) = timeout_at(until, opening).await else {
                let why = if in_use { PathError::NotEnded } else { PathError::Silent };
                return Err(why(dir.clone()));
            };
            *readmission = None;
            match opened.unwrap_or_else(|panicked| Err(io::Error::other(panicked))) {
                Ok(folder) => return Ok(folder),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    if Instant::now() >= until {
                        return Err(PathError::NotEnded(dir.clone()));
                    }
                    in_use = true;
                    sleep(TRY_AGAIN).await;
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(PathError::InUse(error));
                }
                Err(source) => {
                    return Err(PathError::Open { dir: dir.clone(), source: source.into() });
                }
            }
        }
    }
}
