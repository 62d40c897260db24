//! Processes that are forbidden things, as containers do it: io_uring by a seccomp filter, locked memory by a
//! limit.

use super::{
    super::{
        AlignedBuffer, Area, DiskFolder, DiskOptions, DriverChoice, DriverKind, Folder, PAGE,
        ReadBuffer,
    },
    bed::{content, filled, pattern},
};
use crate::tiers::dram::Arena;
use std::{
    cell::RefCell,
    io::{self, Write},
    process::Command,
    sync::{Arc, Once},
};

/// From here on this thread and those that it starts get `error` from the given system calls.
#[expect(unsafe_code, reason = "a seccomp filter has no safe wrapper among our crates")]
fn forbid(calls: &[i64], error: i32) -> io::Result<()> {
    let code = |parts: &[u32]| u16::try_from(parts.iter().sum::<u32>()).unwrap();
    let number = |number: i64| u32::try_from(number).unwrap();
    let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    // Load the number of the call, which comes first; refuse it if it is one of ours; allow it.
    let (refuse, allow) = (libc::SECCOMP_RET_ERRNO | error.unsigned_abs(), libc::SECCOMP_RET_ALLOW);
    let answer = code(&[libc::BPF_RET, libc::BPF_K]);
    let mut filter = vec![step(code(&[libc::BPF_LD, libc::BPF_W, libc::BPF_ABS]), 0, 0)];
    for (at, call) in calls.iter().enumerate() {
        let to_refuse = u8::try_from(calls.len() - at).unwrap();
        filter.push(step(
            code(&[libc::BPF_JMP, libc::BPF_JEQ, libc::BPF_K]),
            to_refuse,
            number(*call),
        ));
    }
    filter.extend([step(answer, 0, allow), step(answer, 0, refuse)]);
    let len = u16::try_from(filter.len()).unwrap();
    let program = libc::sock_fprog { len, filter: filter.as_mut_ptr() };
    let check = |rc| if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the program and its filter live until the end of this function, and the kernel copies them.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        check(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program))
    }
}

/// On a thread of its own, so that the filter ends with it. Skipped, and said, where none can be set.
fn where_forbidden(calls: &'static [i64], error: i32, test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let done = scope.spawn(|| match forbid(calls, error) {
            Ok(()) => test(),
            Err(error) => println!("skipped: no seccomp filter can be set here: {error}"),
        });
        done.join().unwrap();
    });
}

thread_local! {
    static SAID: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// What this thread says in the log while `work` runs.
///
/// One subscriber for all threads: with one for each, what a line's place decided for another thread at the
/// same moment may hold for this one.
fn logged<T>(work: impl FnOnce() -> T) -> (T, String) {
    struct Log;
    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            SAID.with_borrow_mut(|said| said.write(bytes))
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    static SUBSCRIBER: Once = Once::new();
    SUBSCRIBER.call_once(|| {
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(|| Log);
        tracing::subscriber::set_global_default(subscriber.finish()).unwrap();
    });
    SAID.take();
    let done = work();
    (done, String::from_utf8(SAID.take()).unwrap())
}

const SETUP: &[i64] = &[libc::SYS_io_uring_setup];
const ENTER: &[i64] = &[libc::SYS_io_uring_enter];
const ALL: &[i64] =
    &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// The words in which kernels and containers refuse.
const REFUSALS: [i32; 5] =
    [libc::EPERM, libc::ENOSYS, libc::EACCES, libc::EOPNOTSUPP, libc::ENOMEM];

#[test]
fn where_io_uring_is_forbidden_threads_do_the_work_and_it_is_said_once() {
    let cases = REFUSALS.map(|error| (ALL, error));
    for (calls, error) in cases.into_iter().chain([(SETUP, libc::EPERM), (ENTER, libc::EPERM)]) {
        where_forbidden(calls, error, || {
            let dir = tempfile::tempdir().unwrap();
            let (folder, log) =
                logged(|| DiskFolder::open(dir.path(), &DiskOptions::default()).unwrap());
            let in_use = folder.driver();
            assert_eq!(in_use.kind, DriverKind::Threads, "{in_use:?}");
            let why = io::Error::from_raw_os_error(error).to_string();
            assert!(in_use.refused[0].contains(&why), "{in_use:?}");
            assert_eq!(log.lines().count(), 1, "{log}");
            assert!(log.contains("WARN") && log.contains(&why), "{log}");
            assert!(log.contains(dir.path().to_str().unwrap()), "{log}");
            let file = filled(&folder, "segment", 1, 10 * PAGE);
            assert!(content(&*file) == pattern(1, 10 * PAGE));
        });
    }
}

#[test]
fn where_io_uring_is_forbidden_and_wanted_it_is_an_error() {
    where_forbidden(ALL, libc::EPERM, || {
        let dir = tempfile::tempdir().unwrap();
        let options = DiskOptions { driver: DriverChoice::IoUring, ..DiskOptions::default() };
        let error = DiskFolder::open(dir.path(), &options).unwrap_err().to_string();
        assert!(error.contains("io_uring_setup: Operation not permitted"), "{error}");
    });
}

#[test]
fn where_only_registering_is_forbidden_the_ring_is_used_without() {
    where_forbidden(&[libc::SYS_io_uring_register], libc::EPERM, || {
        let dir = tempfile::tempdir().unwrap();
        let folder = DiskFolder::open(dir.path(), &DiskOptions::default()).unwrap();
        if !io_uring_works() {
            return;
        }
        assert_eq!(folder.driver().kind, DriverKind::IoUring, "{:?}", folder.driver());
        let file = filled(&folder, "segment", 2, 10 * PAGE);
        assert!(content(&*file) == pattern(2, 10 * PAGE));
    });
}

fn io_uring_works() -> bool {
    io_uring::IoUring::new(1).inspect_err(|error| println!("skipped: {error}")).is_ok()
}

/// Writes and reads memory of an arena that the ring was told of, in one stretch and in pieces.
fn write_and_read_arena(folder: &DiskFolder, arena: &Arc<Arena>) {
    struct Pages(crate::tiers::dram::DramCopy);
    impl AsRef<[u8]> for Pages {
        fn as_ref(&self) -> &[u8] {
            self.0.pages()
        }
    }
    let file = folder.create("segment", 9 * PAGE as u64).unwrap();
    let mut extent = arena.allocate(8 * PAGE).unwrap();
    extent.bytes_mut().copy_from_slice(&pattern(3, 8 * PAGE));
    let body = bytes::Bytes::from_owner(Pages(extent.freeze()));
    let header = AlignedBuffer::copy_of(&pattern(4, PAGE)).freeze();
    file.write(PAGE as u64, vec![body.clone()]).wait().unwrap();
    let into: Box<dyn ReadBuffer> = Box::new(arena.allocate(8 * PAGE).unwrap());
    let mut read = file.read(PAGE as u64, vec![into]).wait().unwrap();
    assert!(*read[0].bytes_mut() == pattern(3, 8 * PAGE));
    file.write(0, vec![header, body]).wait().unwrap();
    assert!(content(&*file) == [pattern(4, PAGE), pattern(3, 8 * PAGE)].concat());
}

#[test]
fn memory_that_is_locked_beforehand_is_written_and_read_like_any_other() {
    if !io_uring_works() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let arenas: Vec<_> = (0..2).map(|_| Arena::new(32 * PAGE, |_| Ok(())).unwrap()).collect();
    let memory = arenas.iter().map(Area::of).collect();
    let options = DiskOptions { memory, ..DiskOptions::default() };
    let folder = DiskFolder::open(dir.path(), &options).unwrap();
    println!("{:?}", folder.driver());
    for arena in &arenas {
        write_and_read_arena(&folder, arena);
        folder.remove("segment").unwrap();
    }
    let (ended, options_arena) = (folder.ended(), Arc::downgrade(&arenas[0]));
    drop((folder, options, arenas));
    ended.wait().unwrap();
    assert!(options_arena.upgrade().is_none(), "the ring lets go of it at its end");
}

/// In the child, where it says what is to be done.
const CHILD: &str = "LARDER_TEST_LOW_MEMLOCK";

/// The limit is the process's, so the test starts itself once more as a child.
#[test]
fn a_low_limit_on_locked_memory_is_named_with_its_remedy_and_the_work_goes_on() {
    if std::env::var_os(CHILD).is_some() {
        return with_low_limit();
    }
    let test = std::thread::current().name().unwrap().to_owned();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout) + String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
    said.lines().filter(|line| line.contains("skipped: ")).for_each(|line| println!("{line}"));
}

fn with_low_limit() {
    if !io_uring_works() {
        return;
    }
    if let Err(error) = limit_locked_memory(64 << 10) {
        println!("skipped: the limit cannot be set: {error}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let arena = Arena::new(4 << 20, |_| Ok(())).unwrap();
    let options = DiskOptions { memory: vec![Area::of(&arena)], ..DiskOptions::default() };
    let (folder, log) = logged(|| DiskFolder::open(dir.path(), &options).unwrap());
    assert_eq!(folder.driver().kind, DriverKind::IoUring, "{:?}", folder.driver());
    let about_memory: Vec<&str> = log.lines().filter(|line| line.contains("lock")).collect();
    let [message] = about_memory.as_slice() else { panic!("one message: {log}") };
    for expected in
        ["WARN", "4096 KiB", "limit is 64 KiB", "ulimit -l", "LimitMEMLOCK=", "--ulimit"]
    {
        assert!(message.contains(expected), "{expected}: {message}");
    }
    write_and_read_arena(&folder, &arena);
}

/// A limit binds only who may not lift it: CAP_IPC_LOCK is given up too.
#[expect(unsafe_code, reason = "capabilities have no safe wrapper among our crates")]
fn limit_locked_memory(bytes: u64) -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    const IPC_LOCK: u32 = 1 << 14;
    let header = Header { version: 0x2008_0522, pid: 0 };
    let mut sets = [[0u32; 3]; 2]; // Effective, permitted, inheritable; low and high halves.
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    let check = |rc: i64| if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the pointers are of values that live until the end of this function and have the layout of
    // `struct __user_cap_header_struct`, two `struct __user_cap_data_struct` and `struct rlimit`.
    unsafe {
        check(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit).into())?;
        check(libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr()))?;
        sets[0].iter_mut().for_each(|set| *set &= !IPC_LOCK);
        check(libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()))
    }
}
