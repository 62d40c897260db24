//! Requests carried out by a few threads that wait for the disk: what is left where io_uring is forbidden or
//! direct I/O is refused.

use super::{
    Pending,
    counts::{Counts, CountsSoFar},
    driver_gone,
    lock::FolderLock,
    progress::{Progress, Step},
    request::{Driver, Ended, OpenFile, Request, Work},
};
use parking_lot::{Condvar, Mutex};
use rustix::fs::{Advice, fadvise};
use std::{
    collections::VecDeque,
    io::{self, IoSlice, IoSliceMut},
    num::NonZeroU64,
    sync::Arc,
    thread,
};

/// Most threads. A disk is busy with as many large requests (measured: full at a depth of 1 to 8).
const MAX_THREADS: usize = 8;

/// See the module.
#[derive(Debug)]
pub(super) struct Threads {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    /// Most bytes of an operation.
    limit: usize,
    counts: Counts,
    ended: Ended,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    /// No handle is left, so no request will come.
    stop: bool,
    /// Threads that serve the queue.
    serving: usize,
}

impl Threads {
    /// As many threads as requests are to run side by side, up to a few. The folder stays locked until the
    /// last of them has ended.
    pub(super) fn start(depth: usize, limit: usize, lock: &Arc<FolderLock>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            limit,
            counts: Counts::default(),
            ended: Ended::new(),
        });
        let this = Self { shared }; // If a thread cannot be started, its drop ends the others.
        for _ in 0..depth.clamp(1, MAX_THREADS) {
            let worker = Worker::new(&this.shared, lock);
            thread::Builder::new().name("larder-ssd".to_owned()).spawn(move || worker.run())?;
        }
        Ok(this)
    }
}

impl Driver for Threads {
    fn submit(&self, request: Request) {
        self.shared.counts.request();
        let mut queue = self.shared.queue.lock();
        if queue.serving > 0 {
            queue.requests.push_back(request);
            drop(queue);
            self.shared.work.notify_one();
        } else {
            drop(queue);
            request.end(Err(driver_gone()));
        }
    }

    fn counts(&self) -> CountsSoFar {
        self.shared.counts.so_far()
    }

    fn ended(&self) -> Pending<()> {
        self.shared.ended.watch()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.queue.lock().stop = true;
        self.shared.work.notify_all();
    }
}

/// One thread's part in the pool, from before its start to its end, however it ends.
#[derive(Debug)]
struct Worker {
    shared: Arc<Shared>,
    lock: Option<Arc<FolderLock>>,
}

impl Worker {
    fn new(shared: &Arc<Shared>, lock: &Arc<FolderLock>) -> Self {
        shared.queue.lock().serving += 1;
        Self { shared: Arc::clone(shared), lock: Some(Arc::clone(lock)) }
    }

    fn run(self) {
        while let Some(request) = self.next() {
            carry_out(request, self.shared.limit, &self.shared.counts);
        }
    }

    /// Waits for a request; `None` when there will be no more.
    fn next(&self) -> Option<Request> {
        let mut queue = self.shared.queue.lock();
        loop {
            if let Some(request) = queue.requests.pop_front() {
                return Some(request);
            }
            if queue.stop {
                return None;
            }
            self.shared.work.wait(&mut queue);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.lock = None; // Before the end is told.
        let mut queue = self.shared.queue.lock();
        queue.serving -= 1;
        if queue.serving > 0 {
            return;
        }
        let left = std::mem::take(&mut queue.requests);
        drop(queue);
        for request in left {
            request.end(Err(driver_gone()));
        }
        self.shared.ended.tell();
    }
}

/// Carries one request out on this thread.
fn carry_out(mut request: Request, limit: usize, counts: &Counts) {
    let result = match &mut request.work {
        Work::Write { pieces, progress, .. } => {
            let write = |progress: &Progress| {
                let slices: Vec<IoSlice<'_>> = progress
                    .pieces(limit)
                    .map(|(piece, bytes)| IoSlice::new(&pieces[piece][bytes]))
                    .collect();
                rustix::io::pwritev(&request.file.fd, &slices, progress.offset())
            };
            until_moved(&request.file, progress, limit, counts, write)
        }
        Work::Read { into, progress, .. } => {
            let read = |progress: &Progress| {
                let mut named = progress.pieces(limit).peekable();
                let mut slices: Vec<IoSliceMut<'_>> = Vec::new();
                for (number, buffer) in into.iter_mut().enumerate() {
                    if let Some((_, bytes)) = named.next_if(|(piece, _)| *piece == number) {
                        slices.push(IoSliceMut::new(&mut buffer.bytes_mut()[bytes]));
                    }
                }
                rustix::io::preadv(&request.file.fd, &mut slices, progress.offset())
            };
            until_moved(&request.file, progress, limit, counts, read)
        }
        Work::Sync { .. } => {
            counts.operation();
            counts.submission();
            rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&request.file.fd))
                .map_err(Into::into)
        }
    };
    request.end(result);
}

/// Runs operations until all bytes of a request are moved.
fn until_moved(
    file: &OpenFile,
    progress: &mut Progress,
    limit: usize,
    counts: &Counts,
    mut operation: impl FnMut(&Progress) -> rustix::io::Result<usize>,
) -> io::Result<()> {
    let from = progress.offset();
    loop {
        counts.operation();
        counts.submission();
        let result = operation(progress);
        match progress.moved(result.map_err(Into::into), limit) {
            Step::Again(cause) => counts.again(cause),
            Step::Done => break,
            Step::Failed(error) => return Err(error),
        }
    }
    if !file.direct {
        // Begins to write what is dirty and forgets what is clean, so that parts do not fill the page cache
        // too. A file system without it has no such cache to empty.
        let moved = NonZeroU64::new(progress.offset() - from);
        let _ = fadvise(&file.fd, from, moved, Advice::DontNeed);
    }
    Ok(())
}
