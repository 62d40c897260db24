//! What is the ring's own: slots, places of files, and submissions that fail.

use super::{
    super::{
        AlignedBuffer, PAGE, Pending, ReadInto,
        counts::Counts,
        lock::FolderLock,
        progress::MAX_OPERATION,
        request::{Driver, OpenFile, Request, Work},
        tests::bed::{Seen, buffers, pages, pattern},
    },
    Uring,
    memory::Registered,
    queue::{Command, Shared},
    ring::{self, Setup},
    slots::{After, Slots},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    pipe::pipe,
};
use std::{io, sync::Arc};
use tempfile::TempDir;

/// A ring with a file of so many bytes, made of a pattern.
struct Bench {
    ring: Uring,
    file: Arc<OpenFile>,
    dir: TempDir,
}

fn lock() -> Arc<FolderLock> {
    let dir = tempfile::tempdir().unwrap();
    Arc::new(FolderLock::take(std::fs::File::open(dir.path()).unwrap()).unwrap())
}

/// `None`, and said, where rings are forbidden.
fn start(depth: usize) -> Option<Uring> {
    match Uring::start(depth, MAX_OPERATION, &[], &lock()) {
        Ok((ring, _)) => Some(ring),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn plain_file(dir: &TempDir, content: &[u8]) -> Arc<OpenFile> {
    let path = dir.path().join("file");
    std::fs::write(&path, content).unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    Arc::new(OpenFile::new(file.into(), false))
}

impl Bench {
    fn new(depth: usize, len: usize) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let file = plain_file(&dir, &pattern(1, len));
        Some(Self { ring: start(depth)?, file, dir })
    }

    fn read(&self, offset: usize, into: ReadInto) -> Pending<ReadInto> {
        let (request, pending) = Request::read(&self.file, offset as u64, into);
        self.ring.submit(request);
        pending
    }

    fn write(&self, offset: usize, bytes: bytes::Bytes) -> Pending<()> {
        let (request, pending) = Request::write(&self.file, offset as u64, vec![bytes]);
        self.ring.submit(request);
        pending
    }
}

#[test]
fn requests_survive_submissions_that_the_kernel_refuses_and_waiters_that_leave() {
    const HALF: usize = 500 * PAGE;
    let Some(bench) = Bench::new(16, 2 * HALF) else { return };
    let seen = Seen::default();
    let mut kept = Vec::new();
    for request in 0..500 {
        let faults = [libc::EAGAIN, libc::EINTR, libc::EBUSY, libc::EAGAIN];
        bench.ring.shared.faults.lock().extend(&faults[..request % 5]);
        let reading = bench.read(request * PAGE, vec![seen.buffer(PAGE)]);
        let writing = bench.write(HALF + request * PAGE, pages(request as u64, PAGE));
        if request % 2 == 0 {
            kept.push((reading, writing));
        }
    }
    for (reading, writing) in kept {
        reading.wait().unwrap();
        writing.wait().unwrap();
    }
    let Bench { ring, file, dir } = bench;
    let (ended, counts) = (ring.ended(), ring.shared.counts.so_far());
    drop(ring);
    ended.wait().unwrap();
    assert!(counts.retries > 0, "{counts:?}");
    let mut at_drop = seen.at_drop();
    let mut expected: Vec<Vec<u8>> = pattern(1, HALF).chunks(PAGE).map(<[u8]>::to_vec).collect();
    at_drop.sort();
    expected.sort();
    assert!(at_drop == expected, "each buffer was freed once, and only after it was filled");
    drop(file);
    let content = std::fs::read(dir.path().join("file")).unwrap();
    for (request, page) in content[HALF..].chunks(PAGE).enumerate() {
        assert!(page == pattern(request as u64, PAGE), "write {request}");
    }
}

#[test]
fn memory_that_the_kernel_has_is_never_freed_when_the_ring_fails() {
    let Some(ring) = start(4) else { return };
    let (from, _to) = pipe().unwrap(); // Nobody writes: the read stays in the kernel.
    let pipe = Arc::new(OpenFile::new(from, false));
    let (in_kernel, refused) = (Seen::default(), Seen::default());
    let (request, reading) = Request::read(&pipe, 0, vec![in_kernel.buffer(PAGE)]);
    ring.submit(request);
    ring.shared.faults.lock().push_back(libc::EINVAL);
    let (request, second) = Request::read(&pipe, 0, vec![in_kernel.buffer(PAGE)]);
    ring.submit(request); // Wakes the thread, whose next submission fails.
    let ended = ring.ended();
    assert!(reading.wait().is_err());
    assert!(second.wait().is_err());
    ended.wait().unwrap();

    let (request, third) = Request::read(&pipe, 0, vec![refused.buffer(PAGE)]);
    ring.submit(request);
    let error = third.wait().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "as the submission failed: {error}");
    assert_eq!(refused.at_drop().len(), 1, "the kernel never had it");
    let freed = in_kernel.at_drop().len();
    assert!(freed <= 1, "at most the second, if it came when the ring had failed: {freed}");
}

#[test]
fn a_file_is_closed_in_the_kernel_too_once_its_last_request_has_ended() {
    let Some(ring) = start(4) else { return };
    let (reader, writer) = pipe().unwrap();
    let file = Arc::new(OpenFile::new(writer, false));
    let (request, written) = Request::write(&file, 0, vec![pages(1, PAGE)]);
    ring.submit(request);
    written.wait().unwrap();
    assert!(file.registration.get().is_some(), "it has a place in the table");
    let mut page = [0; PAGE];
    assert_eq!(rustix::io::read(&reader, &mut page).unwrap(), PAGE);
    drop(file);
    // The end of the pipe is seen when nobody can write any more, the table of the ring included.
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    let events = PollFd::new(&reader, PollFlags::IN);
    assert_eq!(poll(&mut [events], Some(&limit)).unwrap(), 1, "the ring keeps the file open");
    assert_eq!(rustix::io::read(&reader, &mut page).unwrap(), 0);
}

#[test]
fn more_files_than_the_table_has_places_are_used_all_the_same() {
    let Some(bench) = Bench::new(4, 4 * PAGE) else { return };
    let path = bench.dir.path().join("file");
    let open = || -> OwnedFd { std::fs::File::open(&path).unwrap().into() };
    let files: Vec<_> = (0..600).map(|_| Arc::new(OpenFile::new(open(), false))).collect();
    for file in &files {
        let (request, reading) = Request::read(file, PAGE as u64, buffers(&[PAGE]));
        bench.ring.submit(request);
        assert!(*reading.wait().unwrap()[0].bytes_mut() == pattern(1, 2 * PAGE)[PAGE..]);
    }
    let placed = |file: &&Arc<OpenFile>| file.registration.get().is_some();
    let with_place = files.iter().filter(placed).count();
    assert!(with_place < files.len(), "{with_place} places");
}

/// Sixteen requests are there before the thread starts; it takes them all at once.
#[test]
fn one_system_call_hands_many_requests_over() {
    if start(1).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = plain_file(&dir, &pattern(1, 16 * PAGE));
    let shared = Arc::new(Shared::new().unwrap());
    let read = |page: usize| {
        let (request, pending) = Request::read(&file, (page * PAGE) as u64, buffers(&[PAGE]));
        shared.push(Command::Start(request));
        pending
    };
    let pending: Vec<_> = (0..16).map(read).collect();
    shared.stop();
    let (ready, started) = Pending::new();
    let setup = Setup { depth: 16, limit: MAX_OPERATION, memory: Vec::new() };
    ring::run(&shared, lock(), setup, ready);
    started.wait().unwrap();
    for (page, pending) in pending.into_iter().enumerate() {
        let read = &mut pending.wait().unwrap()[0];
        assert!(*read.bytes_mut() == pattern(1, 16 * PAGE)[page * PAGE..][..PAGE]);
    }
    let counts = shared.counts.so_far();
    assert_eq!((counts.operations, counts.submissions), (16, 1));
}

#[test]
fn a_completion_that_belongs_to_another_operation_ends_nothing() {
    let (file, counts) = (tempfile::tempfile().unwrap(), Counts::default());
    let file = Arc::new(OpenFile::new(file.into(), false));
    let mut slots = Slots::new(1, PAGE, Registered::default());
    let bytes = AlignedBuffer::zeroed(2 * PAGE).freeze();
    let (request, pending) = Request::write(&file, 0, vec![bytes]);
    let number = slots.put(request, None);
    assert!(!slots.has_room(), "one slot was asked for");
    let first = slots.operation(number).get_user_data();
    let page = i32::try_from(PAGE).unwrap();
    for other in [first ^ 1, first ^ 1 << 32, 0, u64::MAX] {
        assert!(matches!(slots.completed(other, page, &counts), After::Nothing));
        assert!(!slots.has_room(), "{other:x}");
    }
    let second_is_due = |after: After| matches!(after, After::Again(slot) if slot == number);
    assert!(second_is_due(slots.completed(first, page, &counts)));
    let second = slots.operation(number).get_user_data();
    assert!(matches!(slots.completed(first, page, &counts), After::Nothing), "that one is over");
    assert!(!slots.has_room());
    let After::Ended(request, result) = slots.completed(second, page, &counts) else {
        panic!("not ended");
    };
    assert!(slots.has_room() && slots.is_empty());
    request.end(result);
    pending.wait().unwrap();
}

#[test]
fn an_error_of_the_kernel_is_the_requests_error() {
    let (file, counts) = (tempfile::tempfile().unwrap(), Counts::default());
    let file = Arc::new(OpenFile::new(file.into(), false));
    let mut slots = Slots::new(1, PAGE, Registered::default());
    let (done, _pending) = Pending::new();
    let number = slots.put(Request { file, work: Work::Sync { done } }, None);
    let sync = slots.operation(number).get_user_data();
    let After::Ended(_, Err(error)) = slots.completed(sync, -libc::EIO, &counts) else {
        panic!("not failed");
    };
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
}
