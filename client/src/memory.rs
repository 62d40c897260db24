//! Memory that a node and a process on the same host share: the arena and staging areas.
//!
//! A [`SharedMemory`] is a memfd of fixed size: growing and shrinking are sealed, so a mapping can never
//! fault because somebody cut the file. The node seals its arena against further writable mappings
//! before it hands out a descriptor; only the node's own mapping can write it (P3).
//!
//! Bytes are reached through [`SharedMemory::bytes`] and [`SharedMemory::bytes_mut`], whose callers prove
//! that nobody writes, or nobody else reaches, the range.

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{MemfdFlags, Mode, OFlags, SealFlags},
    mm::{MapFlags, ProtFlags},
};
use std::{io, ptr::NonNull};

/// Bytes of a page; offsets and lengths of extents are multiples of it.
pub const PAGE: usize = 4096;

/// A mapping of a memfd.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: the mapping is plain memory at a fixed address for the life of the value; every access goes
// through `bytes` and `bytes_mut`, whose contracts rule out data races.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New zeroed memory of `len` bytes (rounded up to pages), mapped for reading and writing. `name`
    /// shows up in `/proc`.
    pub fn create(name: &str, len: usize) -> io::Result<Self> {
        let len = len.next_multiple_of(PAGE).max(PAGE);
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Self::map(fd, len, true)
    }

    /// Maps memory that another process made, after checking that its size is as stated and sealed.
    pub fn open(fd: OwnedFd, len: usize, writable: bool) -> io::Result<Self> {
        let size = rustix::fs::fstat(&fd)?.st_size;
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        if usize::try_from(size) != Ok(len) || !seals.contains(SealFlags::SHRINK) {
            let why = format!("shared memory of {size} bytes is not the sealed {len} bytes stated");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Self::map(fd, len, writable)
    }

    fn map(fd: OwnedFd, len: usize, writable: bool) -> io::Result<Self> {
        let protection =
            if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address that the kernel picks aliases no Rust memory. `len` is
        // the size of the file, which is sealed against shrinking, so no access can fault.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &fd, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { fd, base, len, writable })
    }

    /// Refuses every later writable mapping or write of this memory, in any process. This mapping stays
    /// writable.
    pub fn seal_against_writers(&self) -> io::Result<()> {
        Ok(rustix::fs::fcntl_add_seals(&self.fd, SealFlags::FUTURE_WRITE)?)
    }

    /// A descriptor of the same memory that was opened for reading only.
    pub fn read_only_fd(&self) -> io::Result<OwnedFd> {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes of the mapping.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Touches every page, so that the memory is really there, and reports the bytes touched after each
    /// `step` of them.
    pub fn populate(&self, step: usize, mut progress: impl FnMut(usize)) {
        assert!(self.writable, "only a writable mapping can be populated");
        for page in (0..self.len).step_by(PAGE) {
            // SAFETY: inside the mapping, which is writable; nobody reaches it yet but its creator, who
            // calls this before sharing it. The value is what the page holds already: zero.
            unsafe { self.base.as_ptr().add(page).write_volatile(0) };
            if (page + PAGE).is_multiple_of(step) {
                progress(page + PAGE);
            }
        }
        progress(self.len);
    }

    /// Bytes of a range.
    ///
    /// # Panics
    /// When the range is outside the mapping.
    ///
    /// # Safety
    /// For as long as the slice lives nobody may write the range, in any process.
    pub unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        self.check(offset, len);
        // SAFETY: inside the mapping (checked above), initialised (a memfd starts as zeroes), and not
        // written meanwhile (the caller's promise).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }

    /// Bytes of a range, for writing.
    ///
    /// # Panics
    /// When the range is outside the mapping or the mapping is read-only.
    ///
    /// # Safety
    /// For as long as the slice lives nobody else may read or write the range, in any process.
    #[expect(
        clippy::mut_from_ref,
        reason = "exclusive access to the range is the caller's promise"
    )]
    pub unsafe fn bytes_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        self.check(offset, len);
        assert!(self.writable, "the mapping is read-only");
        // SAFETY: inside the writable mapping (checked above), initialised, and reached by nobody else
        // meanwhile (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(offset), len) }
    }

    /// Copies a range that another process may be writing at the same time. What is copied then is
    /// undefined but harmless: whole bytes, to be checked by the caller *in the copy*.
    ///
    /// # Panics
    /// When the range is outside the mapping.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        // SAFETY: inside the mapping; `into` is exclusive and cannot overlap a mapping that is only
        // reached through this type. A racing writer is another process, outside this program's
        // memory model: the copy reads plain bytes and nothing is inferred from them.
        unsafe {
            let from = self.base.as_ptr().add(offset).cast_const();
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len());
        }
    }

    fn check(&self, offset: usize, len: usize) {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "range {offset}+{len} is outside a mapping of {} bytes",
            self.len
        );
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are what `mmap` gave in `map`, and nothing borrows from `self` any
        // more. Unmapping cannot fail for a range that was mapped.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_arena_can_be_read_but_not_mapped_for_writing_by_others() {
        let arena = SharedMemory::create("larder-test", 3 * PAGE).unwrap();
        arena.populate(PAGE, |_| ());
        arena.seal_against_writers().unwrap();
        // SAFETY: nobody else reaches the memory yet.
        unsafe { arena.bytes_mut(PAGE, 4) }.copy_from_slice(b"kept");

        let reader = SharedMemory::open(arena.read_only_fd().unwrap(), 3 * PAGE, false).unwrap();
        // SAFETY: nobody writes any more.
        assert_eq!(unsafe { reader.bytes(PAGE, 4) }, b"kept");

        let descriptor = arena.read_only_fd().unwrap();
        assert!(SharedMemory::open(descriptor, 3 * PAGE, true).is_err());
        let writable = rustix::io::dup(arena.fd()).unwrap();
        assert!(SharedMemory::open(writable, 3 * PAGE, true).is_err(), "sealed");
        let descriptor = arena.read_only_fd().unwrap();
        assert!(SharedMemory::open(descriptor, 4 * PAGE, false).is_err(), "another size");
    }
}
