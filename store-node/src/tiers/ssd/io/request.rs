//! A request on its way through a driver, with all that it owns.

use super::{
    Completion, Pending, ReadInto,
    counts::CountsSoFar,
    progress::{Direction, Progress},
    uring::Registration,
};
use bytes::Bytes;
use parking_lot::Mutex;
use std::{
    fmt::Debug,
    io, mem,
    os::fd::OwnedFd,
    sync::{Arc, OnceLock},
};

/// Carries requests out. Dropping the last handle lets what was submitted end, and then ends the driver; it
/// does not wait for that.
pub(super) trait Driver: Debug + Send + Sync {
    /// Takes a request over. Never waits for the disk.
    fn submit(&self, request: Request);

    /// What it did so far.
    fn counts(&self) -> CountsSoFar;

    /// Ends when the driver has ended.
    fn ended(&self) -> Pending<()>;
}

/// A descriptor, and what drivers need to know of it. Requests share it, so it is open until the last one has
/// ended.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) fd: OwnedFd,
    /// Whether requests go past the page cache.
    pub(super) direct: bool,
    /// Its place in the table of the ring; given back when this is dropped.
    pub(super) registration: OnceLock<Registration>,
}

impl OpenFile {
    pub(super) fn new(fd: OwnedFd, direct: bool) -> Self {
        Self { fd, direct, registration: OnceLock::new() }
    }
}

/// What is asked of the disk, and the memory for it.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) file: Arc<OpenFile>,
    pub(super) work: Work,
}

#[derive(Debug)]
pub(super) enum Work {
    Write { pieces: Vec<Bytes>, progress: Progress, done: Completion<()> },
    Read { into: ReadInto, progress: Progress, done: Completion<ReadInto> },
    Sync { done: Completion<()> },
}

impl Request {
    pub(super) fn write(
        file: &Arc<OpenFile>,
        offset: u64,
        pieces: Vec<Bytes>,
    ) -> (Self, Pending<()>) {
        let lens = pieces.iter().map(Bytes::len).collect();
        let progress = Progress::new(Direction::Write, offset, lens);
        let (done, pending) = Pending::new();
        (Self { file: Arc::clone(file), work: Work::Write { pieces, progress, done } }, pending)
    }

    pub(super) fn read(
        file: &Arc<OpenFile>,
        offset: u64,
        mut into: ReadInto,
    ) -> (Self, Pending<ReadInto>) {
        let lens = into.iter_mut().map(|buffer| buffer.bytes_mut().len()).collect();
        let progress = Progress::new(Direction::Read, offset, lens);
        let (done, pending) = Pending::new();
        (Self { file: Arc::clone(file), work: Work::Read { into, progress, done } }, pending)
    }

    pub(super) fn sync(file: &Arc<OpenFile>) -> (Self, Pending<()>) {
        let (done, pending) = Pending::new();
        (Self { file: Arc::clone(file), work: Work::Sync { done } }, pending)
    }

    /// Tells what became of it. To be called when the kernel uses its memory no more.
    pub(super) fn end(self, result: io::Result<()>) {
        // Whoever waited may be gone; the memory is freed here then.
        match self.work {
            Work::Write { done, pieces, .. } => {
                drop(pieces); // Before the answer: who waits for it may want the space.
                let _ = done.send(result);
            }
            Work::Read { done, into, .. } => {
                let _ = done.send(result.map(|()| into));
            }
            Work::Sync { done } => {
                let _ = done.send(result);
            }
        }
    }

    /// Gives it up while the kernel may still use its memory, which is lost for ever therefore (F15).
    pub(super) fn abandon(self, why: io::Error) {
        match self.work {
            Work::Write { done, pieces, .. } => {
                mem::forget(pieces);
                let _ = done.send(Err(why));
            }
            Work::Read { done, into, .. } => {
                mem::forget(into);
                let _ = done.send(Err(why));
            }
            Work::Sync { done } => {
                let _ = done.send(Err(why));
            }
        }
    }
}

/// Those who wait for the end of a driver.
#[derive(Debug)]
pub(super) struct Ended(Mutex<Option<Vec<Completion<()>>>>);

impl Ended {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Some(Vec::new())))
    }

    pub(super) fn watch(&self) -> Pending<()> {
        let (done, pending) = Pending::new();
        match &mut *self.0.lock() {
            Some(watchers) => watchers.push(done),
            None => return Pending::ended(Ok(())),
        }
        pending
    }

    pub(super) fn tell(&self) {
        for done in self.0.lock().take().into_iter().flatten() {
            let _ = done.send(Ok(())); // Nobody has to wait.
        }
    }
}
