//! Finds out, once at start, how a folder can be read and written.
//!
//! The best way is tried first: a page is written and read back by it. Any failure, of whatever kind, leads to
//! the next way (F48): containers, kernels and file systems refuse in many different words.

use super::{
    AlignedBuffer, PAGE, ReadBuffer,
    folder::{DiskOptions, open_in},
    is_full,
    lock::{FolderLock, LOCK_FILE, page_of_this_process},
    progress::MAX_OPERATION,
    request::{Driver, OpenFile, Request},
    threads::Threads,
    uring::Uring,
};
use rustix::{fd::BorrowedFd, fs::OFlags};
use std::{fmt, io, path::Path, sync::Arc};
use tracing::{info, warn};

/// What is to carry out the requests of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DriverChoice {
    /// io_uring, or threads where it cannot be used.
    #[default]
    Auto,
    /// io_uring with direct I/O, or an error.
    IoUring,
    /// Threads.
    Threads,
}

/// What carries out requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverKind {
    /// A ring of its own.
    IoUring,
    /// A few threads that wait.
    Threads,
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        })
    }
}

/// How a folder is read and written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInUse {
    /// By what.
    pub kind: DriverKind,
    /// Whether requests go past the page cache.
    pub direct: bool,
    /// The better ways that were tried before, each with what it said.
    pub refused: Vec<String>,
    /// Why the memory in [`DiskOptions::memory`] is not locked once for all requests, where it should be.
    pub not_locked: Option<String>,
}

impl fmt::Display for DriverInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, direct, .. } = *self;
        Way::new(kind, direct).fmt(f)
    }
}

impl DriverInUse {
    /// Why it is not a better one, or not used at its best; empty where it is.
    pub fn why_not_better(&self) -> String {
        let reasons: Vec<&str> =
            self.refused.iter().chain(&self.not_locked).map(String::as_str).collect();
        reasons.join("; ")
    }

    /// Says it in the log.
    pub(super) fn say(&self, path: &Path) {
        let Self { kind, direct, refused, not_locked } = self;
        let path = path.display();
        if let Some(why) = not_locked {
            warn!(%path, why, "ssd folder without locked memory");
        }
        if refused.is_empty() {
            info!(%path, driver = %kind, direct, "ssd folder opened");
            return;
        }
        let why = refused.join("; ");
        warn!(
            %path, driver = %kind, direct, why,
            "ssd folder opened, but not in the best way; io_uring needs a kernel and a container profile that \
             allow io_uring_setup, io_uring_enter and io_uring_register, direct I/O a file system that has it"
        );
    }
}

/// A way to read and write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) kind: DriverKind,
    pub(super) direct: bool,
    /// Most bytes of an operation.
    pub(super) limit: usize,
}

impl Way {
    pub(super) const fn new(kind: DriverKind, direct: bool) -> Self {
        Self { kind, direct, limit: MAX_OPERATION }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with{} direct I/O", self.kind, if self.direct { "" } else { "out" })
    }
}

/// The ways that a choice allows, the best first. Without direct I/O a ring has nothing over threads: the
/// kernel then waits in threads of its own.
pub(super) fn ways(choice: DriverChoice) -> Vec<Way> {
    let ring = Way::new(DriverKind::IoUring, true);
    let threads = Way::new(DriverKind::Threads, true);
    let buffered = Way::new(DriverKind::Threads, false);
    match choice {
        DriverChoice::Auto => vec![ring, threads, buffered],
        DriverChoice::IoUring => vec![ring],
        DriverChoice::Threads => vec![threads, buffered],
    }
}

/// A way that does not work, and what it said.
pub(super) type Refused = (Way, io::Error);

/// For people.
pub(super) fn said((way, error): &Refused) -> String {
    format!("{way}: {error}")
}

/// The first way that works, and what those before it said; or what all of them said.
pub(super) fn first_that_works(
    folder: BorrowedFd<'_>,
    lock: &Arc<FolderLock>,
    options: &DiskOptions,
    ways: &[Way],
) -> Result<(Arc<dyn Driver>, DriverInUse), Vec<Refused>> {
    let mut refused = Vec::new();
    for way in ways {
        match start(folder, lock, options, *way) {
            Ok((driver, not_locked)) => {
                let Way { kind, direct, .. } = *way;
                let refused = refused.iter().map(said).collect();
                return Ok((driver, DriverInUse { kind, direct, refused, not_locked }));
            }
            Err(error) => refused.push((*way, error)),
        }
    }
    Err(refused)
}

fn start(
    folder: BorrowedFd<'_>,
    lock: &Arc<FolderLock>,
    options: &DiskOptions,
    way: Way,
) -> io::Result<(Arc<dyn Driver>, Option<String>)> {
    let file = OpenFile::new(open_in(folder, LOCK_FILE, way.direct, OFlags::empty())?, way.direct);
    let depth = options.queue_depth;
    let (driver, not_locked): (Arc<dyn Driver>, _) = match way.kind {
        DriverKind::IoUring => {
            let (ring, not_locked) = Uring::start(depth, way.limit, &options.memory, lock)?;
            (Arc::new(ring), not_locked)
        }
        DriverKind::Threads => (Arc::new(Threads::start(depth, way.limit, lock)?), None),
    };
    match try_out(&*driver, &Arc::new(file)) {
        // Nothing was learned of the driver, and space may come back (F14).
        Err(error) if !is_full(&error) => Err(error),
        _ => Ok((driver, not_locked)),
    }
}

/// Writes the page of the lock file and reads it back.
fn try_out(driver: &dyn Driver, file: &Arc<OpenFile>) -> io::Result<()> {
    let page = page_of_this_process().freeze();
    let (write, written) = Request::write(file, 0, vec![page.clone()]);
    driver.submit(write);
    written.wait()?;
    let into: Box<dyn ReadBuffer> = Box::new(AlignedBuffer::zeroed(PAGE));
    let (read, filled) = Request::read(file, 0, vec![into]);
    driver.submit(read);
    let same = filled.wait()?.iter_mut().all(|buffer| *buffer.bytes_mut() == page);
    if same {
        Ok(())
    } else {
        let why = "a page was read otherwise than it was written";
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    }
}
