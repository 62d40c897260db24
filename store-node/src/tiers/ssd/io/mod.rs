//! What the ssd tier needs of a file system: a folder of preallocated files, read and written directly.
//!
//! A request owns its memory from submission until the device is done with it, whatever becomes of the
//! future that waits for it: a buffer comes back only through a completion (F15). A request moves exactly
//! the bytes it names, or fails; there is no short success (F12). Offsets, lengths and addresses are
//! multiples of [`PAGE`], as direct I/O wants them.

mod area;
mod buffer;
mod counts;
mod file;
mod folder;
mod lock;
mod progress;
mod request;
#[cfg(test)]
pub(crate) mod simulated;
mod start;
#[cfg(test)]
mod tests;
mod threads;
mod uring;

pub use area::Area;
pub use buffer::{AlignedBuffer, ReadBuffer};
pub use counts::CountsSoFar;
pub use folder::{DiskFolder, DiskOptions, OpenError, Space};
pub use start::{DriverChoice, DriverInUse, DriverKind};

use bytes::Bytes;
use std::{
    fmt::Debug,
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::sync::oneshot;

/// Bytes of a page of memory and of the unit of direct I/O.
pub const PAGE: usize = larder_client::memory::PAGE;

/// One folder of a path. Its calls wait for the disk, so they are made where waiting is allowed.
pub trait Folder: Debug + Send + Sync + 'static {
    /// Names of the files that are there, with their lengths.
    ///
    /// # Errors
    /// The folder cannot be read.
    fn list(&self) -> io::Result<Vec<(String, u64)>>;

    /// A new file of `len` bytes, all of whose space is taken from the file system now, so that no later
    /// write can run out of it (F14).
    ///
    /// # Errors
    /// It exists, or there is no room; nothing is left behind then.
    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>>;

    /// A file that is there.
    ///
    /// # Errors
    /// It is not, or may not be opened.
    fn open(&self, name: &str) -> io::Result<Arc<dyn File>>;

    /// Removes a file; requests on it that are under way still end.
    ///
    /// # Errors
    /// It is not there, or may not be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes creations and removals survive a power loss.
    ///
    /// # Errors
    /// The device failed.
    fn sync(&self) -> io::Result<()>;

    /// Bytes that the files of this folder take on the device, what the file system needs for them
    /// included.
    ///
    /// # Errors
    /// The folder cannot be read.
    fn physical_bytes(&self) -> io::Result<u64>;

    /// How its files are read and written, if they are on a disk.
    fn driver_in_use(&self) -> Option<&DriverInUse>;
}

/// A file of fixed length. Requests run side by side and end in any order.
#[expect(clippy::len_without_is_empty, reason = "a file is never empty")]
pub trait File: Debug + Send + Sync + 'static {
    /// Bytes of the file.
    fn len(&self) -> u64;

    /// Writes the pieces one behind the other.
    fn write(&self, offset: u64, pieces: Vec<Bytes>) -> Pending<()>;

    /// Fills the buffers one behind the other, and gives them back.
    fn read(&self, offset: u64, into: Vec<Box<dyn ReadBuffer>>) -> Pending<ReadInto>;

    /// Makes all writes that have ended survive a power loss; it does not wait for others.
    fn sync(&self) -> Pending<()>;

    /// Whether its folder still names it, with the length that it had: nobody has taken it away or cut it. Waits
    /// for no device.
    fn is_whole(&self) -> bool;
}

/// The buffers of a read, filled.
pub type ReadInto = Vec<Box<dyn ReadBuffer>>;

/// A request that was handed over. Dropping it does not stop the request; its memory stays the driver's
/// until it has ended.
#[must_use = "a request is over only when it says so"]
#[derive(Debug)]
pub struct Pending<T>(oneshot::Receiver<io::Result<T>>);

/// Where a driver says what became of a request.
pub type Completion<T> = oneshot::Sender<io::Result<T>>;

impl<T> Pending<T> {
    /// A request, and where its end is to be told.
    pub fn new() -> (Completion<T>, Self) {
        let (done, pending) = oneshot::channel();
        (done, Self(pending))
    }

    /// A request that has ended already.
    pub fn ended(result: io::Result<T>) -> Self {
        let (done, pending) = Self::new();
        let _ = done.send(result); // The receiver is right here.
        pending
    }

    /// Waits on a thread that may wait.
    ///
    /// # Errors
    /// The request's.
    pub fn wait(self) -> io::Result<T> {
        self.0.blocking_recv().unwrap_or_else(|_| Err(driver_gone()))
    }
}

impl<T> Future for Pending<T> {
    type Output = io::Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.0).poll(context));
        Poll::Ready(answer.unwrap_or_else(|_| Err(driver_gone())))
    }
}

/// Whether a file system has no room, or none for us. That passes.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Whether the device or its file system has failed, and not somebody who named the wrong folder or may not
/// use it. A disk that has no room for as little as a lock counts too: the node can go on without it.
pub(in crate::tiers::ssd) fn is_of_the_disk(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, TimedOut, UnexpectedEof, WriteZero};
    // What a driver found out by itself, without a word of the kernel.
    let of_driver = matches!(error.kind(), InvalidData | TimedOut | UnexpectedEof | WriteZero);
    let of_kernel = |errno| {
        matches!(
            errno,
            libc::EIO
                | libc::EROFS
                | libc::ENXIO
                | libc::ENODEV
                | libc::ENOMEDIUM
                | libc::EREMOTEIO
                | libc::EUCLEAN
                | libc::EBADMSG
                | libc::EILSEQ
                | libc::ESTALE
                | libc::ENOTCONN
                | libc::ENOLINK
                | libc::ESHUTDOWN
                | libc::EHOSTDOWN
        )
    };
    of_driver || is_full(error) || error.raw_os_error().is_some_and(of_kernel)
}

fn driver_gone() -> io::Error {
    io::Error::other("the disk driver has ended")
}
