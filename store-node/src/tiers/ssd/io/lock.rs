//! One folder, one node: a lock that ends with the process that holds it.

use super::{AlignedBuffer, PAGE};
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{FlockOperation, Mode, OFlags, flock, openat},
    io::Errno,
};
use std::io;

/// The file that is locked. Its only page names the holder; it is also what a driver is tried on, because it
/// is there even when the disk is full.
pub(super) const LOCK_FILE: &str = "LOCK";
const HOLDER: &str = "held by process ";

/// The right to use a folder. Drivers hold it until their last request has ended.
#[derive(Debug)]
pub(super) struct FolderLock {
    _fd: OwnedFd,
}

/// Why there is no lock.
#[derive(Debug)]
pub(super) enum NotLocked {
    /// Another node has it: this process, if it says so.
    Held(Option<u32>),
    Io(io::Error),
}

impl FolderLock {
    pub(super) fn take(folder: impl AsFd) -> Result<Self, NotLocked> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = openat(folder, LOCK_FILE, flags, Mode::RUSR | Mode::WUSR)?;
        match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(NotLocked::Held(holder(&fd))),
            Err(error) => return Err(error.into()),
        }
        // For people alone: on a full disk it may fail, and the lock still holds.
        let _ = rustix::io::pwrite(&fd, &page_of_this_process(), 0);
        Ok(Self { _fd: fd })
    }
}

/// What the lock file says while this process holds it.
pub(super) fn page_of_this_process() -> AlignedBuffer {
    AlignedBuffer::copy_of(format!("{HOLDER}{}\n", std::process::id()).as_bytes())
}

fn holder(lock: &OwnedFd) -> Option<u32> {
    let mut page = [0; PAGE];
    let len = rustix::io::pread(lock, &mut page, 0).ok()?;
    let text = std::str::from_utf8(&page[..len]).ok()?;
    text.strip_prefix(HOLDER)?.split('\n').next()?.parse().ok()
}

impl From<Errno> for NotLocked {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}
