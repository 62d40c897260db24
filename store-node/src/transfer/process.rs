//! The process at the other end of a Unix socket, and its end.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};
use tokio::io::{Interest, unix::AsyncFd};

/// A process whose end can be awaited.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    /// A pidfd: readable when the process is gone.
    watched: AsyncFd<OwnedFd>,
}

impl Process {
    /// The process that connected a socket.
    ///
    /// Where the kernel knows it (`SO_PEERPIDFD`, Linux 6.5) the pidfd is the one of the connection
    /// itself; before that it is opened by number, and a process that is gone by then is an error. It
    /// is never taken for one whose leases may end.
    ///
    /// # Errors
    /// The process cannot be watched, for example since it lives in another pid namespace.
    pub fn of_peer(socket: &impl AsFd) -> io::Result<Self> {
        let socket = socket.as_fd().as_raw_fd();
        let nobody = libc::ucred { pid: 0, uid: 0, gid: 0 };
        // SAFETY: `ucred` is three integers.
        let credentials = unsafe { option(socket, libc::SO_PEERCRED, nobody)? };
        if credentials.pid <= 0 {
            let why = "the peer's process is in another pid namespace, so its end cannot be seen";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        // SAFETY: an integer.
        match unsafe { option::<libc::c_int>(socket, SO_PEERPIDFD, -1) } {
            Ok(fd) => {
                // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                Self::watch(credentials.pid, fd)
            }
            Err(_) => Self::open(credentials.pid),
        }
    }

    /// The process with this number.
    ///
    /// # Errors
    /// There is none, or it cannot be watched.
    pub fn open(pid: i32) -> io::Result<Self> {
        let number = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = rustix::process::PidfdFlags::NONBLOCK;
        Self::watch(pid, rustix::process::pidfd_open(number, flags)?)
    }

    fn watch(pid: i32, fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` keeps its descriptor open and the same for its whole life, which ends
        // after the registration's: `AsyncFd` owns both.
        let watched = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        Ok(Self { pid, watched: watched.map_err(io::Error::from)? })
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits until the process is gone.
    pub(super) async fn gone(&self) {
        // The descriptor is registered for as long as `self` lives, so waiting cannot fail but at the
        // shutdown of the runtime, when nothing is left to protect.
        let _ = self.watched.readable().await;
    }
}

/// `SO_PEERPIDFD` of asm-generic/socket.h, which the libc crate does not name on all targets.
const SO_PEERPIDFD: libc::c_int = 77;

/// Reads a socket option of level `SOL_SOCKET` into plain data.
///
/// # Safety
/// Every bit pattern has to be a value of `T`.
unsafe fn option<T>(socket: libc::c_int, name: libc::c_int, mut value: T) -> io::Result<T> {
    let mut len = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    // SAFETY: `value` is `len` bytes, of which the kernel writes at most `len`; any bytes are a `T` (the
    // caller's promise).
    let read = unsafe {
        let into = (&raw mut value).cast::<libc::c_void>();
        libc::getsockopt(socket, libc::SOL_SOCKET, name, into, &raw mut len)
    };
    match read {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}
