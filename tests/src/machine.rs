//! What a machine can do to a node: file systems that are small, odd or fail, and system calls that are
//! refused.
//!
//! Each test gets a thread with a mount namespace and system calls of its own, which processes that are
//! started from it inherit. Both end with the thread and its children, so nothing is left behind.

use std::{
    ffi::CString,
    future::Future,
    io,
    path::Path,
    process::{Command, Stdio},
    thread,
};

/// Runs `test` on a thread whose mounts nobody else sees. Where that is not permitted the test is
/// skipped, and says so. Nothing that is mounted on is dropped before the thread has ended.
///
/// # Panics
/// As the test does.
pub fn with_own_mounts<F: Future<Output = io::Result<()>>>(test: impl FnOnce() -> F + Send) {
    on_own_thread(|| {
        own_mounts()?;
        run(test())?
    });
}

/// Runs `test` on a thread on which, and in the children of which, io_uring is refused with `errno`.
///
/// # Panics
/// As the test does.
pub fn without_io_uring<F: Future<Output = io::Result<()>>>(
    errno: i32,
    test: impl FnOnce() -> F + Send,
) {
    on_own_thread(|| {
        refuse_io_uring(errno)?;
        run(test())?
    });
}

/// An error means that the machine does not permit what the test needs.
fn on_own_thread(test: impl FnOnce() -> io::Result<()> + Send) {
    let outcome = thread::scope(|scope| scope.spawn(test).join());
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => println!("skipped: this machine does not permit it: {error}"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// One thread, so that all children come from it.
fn run<T>(test: impl Future<Output = T>) -> io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(test))
}

/// Mounts a file system without a device.
///
/// # Errors
/// It is not permitted, or there is none of this kind.
pub fn mount(kind: &str, options: &str, on: &Path) -> io::Result<()> {
    let on = text(on.to_str().ok_or(io::ErrorKind::InvalidInput)?)?;
    let (kind, options) = (text(kind)?, text(options)?);
    // SAFETY: all pointers are of strings that live until the end of this function.
    #[expect(unsafe_code, reason = "mounts have no safe wrapper among our crates")]
    checked(unsafe {
        libc::mount(kind.as_ptr(), on.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast())
    })
}

/// Makes an ext4 file system in a file and mounts it. The device goes with the mount.
///
/// # Errors
/// It is not permitted, or a program for it is missing.
pub fn mount_ext4(image: &Path, bytes: u64, on: &Path) -> io::Result<()> {
    std::fs::File::create(image)?.set_len(bytes)?;
    done(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(image))?;
    done(
        Command::new("mount")
            .args(["-t", "ext4", "-o", "loop,errors=remount-ro"])
            .args([image, on]),
    )
}

/// From now on every request to the ext4 or xfs that is mounted here fails, as if its device was gone.
///
/// # Errors
/// The file system has no such request.
pub fn shut_down(mounted: &Path) -> io::Result<()> {
    const SHUTDOWN: libc::Ioctl = 0x8004_587d; // _IOR('X', 125, __u32)
    let without_flush: u32 = 2;
    let root = std::fs::File::open(mounted)?;
    // SAFETY: the request reads one u32, which lives until it returns.
    #[expect(unsafe_code, reason = "the request has no safe wrapper among our crates")]
    checked(unsafe {
        libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&root), SHUTDOWN, &raw const without_flush)
    })
}

/// The ext4 that is mounted here finds an error, and turns read-only under everybody who writes.
///
/// # Errors
/// It cannot be told to.
pub fn turn_read_only(mounted: &Path) -> io::Result<()> {
    // Not `self`: that is the first thread, which has other mounts.
    let mounts = std::fs::read_to_string("/proc/thread-self/mounts")?;
    let device = mounts.lines().find_map(|line| {
        let (device, rest) = line.split_once(' ')?;
        (rest.split(' ').next()? == mounted.to_str()?).then(|| device.trim_start_matches("/dev/"))
    });
    let device = device.ok_or(io::ErrorKind::NotFound)?;
    std::fs::write(format!("/sys/fs/ext4/{device}/trigger_fs_error"), "a test")
}

/// A file system whose writers wait, as for a disk that hangs, until this is dropped.
#[derive(Debug)]
pub struct Frozen(std::fs::File);

/// The ext4 that is mounted here takes no write from now on, and answers none.
///
/// # Errors
/// It is not permitted.
pub fn freeze(mounted: &Path) -> io::Result<Frozen> {
    const FREEZE: libc::Ioctl = 0xc004_5877; // _IOWR('X', 119, int)
    let root = std::fs::File::open(mounted)?;
    own_ioctl(&root, FREEZE)?;
    Ok(Frozen(root))
}

impl Drop for Frozen {
    fn drop(&mut self) {
        const THAW: libc::Ioctl = 0xc004_5878; // _IOWR('X', 120, int)
        if let Err(error) = own_ioctl(&self.0, THAW) {
            println!("a file system stays frozen: {error}");
        }
    }
}

fn own_ioctl(file: &std::fs::File, request: libc::Ioctl) -> io::Result<()> {
    let mut unused = 0i32;
    // SAFETY: the request may write one int, which lives until it returns.
    #[expect(unsafe_code, reason = "the request has no safe wrapper among our crates")]
    checked(unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(file), request, &raw mut unused) })
}

fn own_mounts() -> io::Result<()> {
    let (none, root) = (text("none")?, text("/")?);
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let nothing = std::ptr::null();
    // SAFETY: all pointers are null or of strings that live until the end of this function. The namespace
    // is this thread's alone.
    #[expect(unsafe_code, reason = "namespaces have no safe wrapper among our crates")]
    unsafe {
        checked(libc::unshare(libc::CLONE_NEWNS))?;
        checked(libc::mount(none.as_ptr(), root.as_ptr(), nothing, private, nothing.cast()))
    }
}

fn refuse_io_uring(errno: i32) -> io::Result<()> {
    const SETUP: u32 = 425; // The same on every architecture; `enter` and `register` follow.
    const REGISTER: u32 = 427;
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: u16::try_from(code).unwrap_or(u16::MAX),
        jt,
        jf,
        k,
    };
    let (load, jump, give) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    );
    let refused = libc::SECCOMP_RET_ERRNO | errno.unsigned_abs();
    let mut steps = [
        step(load, 0, 0, 0), // The number of the call.
        step(jump | libc::BPF_JGE, 0, 2, SETUP),
        step(jump | libc::BPF_JGT, 1, 0, REGISTER),
        step(give, 0, 0, refused),
        step(give, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let len = u16::try_from(steps.len()).unwrap_or(u16::MAX);
    let program = libc::sock_fprog { len, filter: steps.as_mut_ptr() };
    // SAFETY: the filter lives until the call returns; it is of this thread and its children alone.
    #[expect(unsafe_code, reason = "filters have no safe wrapper among our crates")]
    unsafe {
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        checked(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program))
    }
}

fn checked(rc: i32) -> io::Result<()> {
    match rc {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn text(text: &str) -> io::Result<CString> {
    Ok(CString::new(text)?)
}

fn done(command: &mut Command) -> io::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{}: {}",
            command.get_program().display(),
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}
