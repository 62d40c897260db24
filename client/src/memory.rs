//! Memory that a node and a process on the same host share: the arena and staging areas.
//!
//! A [`SharedMemory`] is a memfd of fixed size: growing and shrinking are sealed, so a mapping can never
//! fault because somebody cut the file. The node seals its arena against further writable mappings
//! before it hands out a descriptor; only the node's own mapping can write it (P3).
//!
//! Bytes are reached through [`SharedMemory::bytes`] and [`SharedMemory::bytes_mut`], whose callers prove
//! that nobody writes, or nobody else reaches, the range.
//!
//! Where the kernel gives them, the memory lies in huge pages: a disk or a network card is then handed a part in
//! one piece and not in hundreds of pages that lie anywhere, and the processor finds it with fewer lookups.

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{MemfdFlags, Mode, OFlags, SealFlags},
    mm::{Advice, MapFlags, ProtFlags},
};
use std::{ffi::c_void, io, ptr::NonNull};

/// Bytes of a page; offsets and lengths of extents are multiples of it.
pub const PAGE: usize = 4096;

/// Bytes of a huge page, on the machines that have them of this length. A mapping begins at a multiple of it.
pub const HUGE_PAGE: usize = 2 << 20;

/// A mapping of a memfd.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    not_huge: Option<io::Error>,
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
        let base = reserve(len)?;
        // SAFETY: it replaces the part of an address range that `reserve` made for it alone, so it aliases no
        // Rust memory. `len` is the size of the file, which is sealed against shrinking, so no access can
        // fault.
        let mapped = unsafe {
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            rustix::mm::mmap(base.as_ptr(), len, protection, flags, &fd, 0)
        };
        if let Err(error) = mapped {
            // SAFETY: the reserved range, which nothing else knows.
            let _ = unsafe { rustix::mm::munmap(base.as_ptr(), len) };
            return Err(error.into());
        }
        // SAFETY: advice about the mapping just made: it says how pages are to be laid out, not what is in
        // them. A kernel that does not know it goes on with small pages.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr(), len, Advice::LinuxHugepage) };
        Ok(Self { fd, base: base.cast(), len, writable, not_huge: None })
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

    /// Touches every page, so that the memory is really there, in huge pages as far as the kernel gives them.
    /// `progress` hears the bytes touched after each `step` of them, and may end it.
    ///
    /// # Errors
    /// Those of `progress`.
    pub fn populate(
        &mut self,
        step: usize,
        mut progress: impl FnMut(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        assert!(self.writable, "only a writable mapping can be populated");
        let step = step.min(self.len).next_multiple_of(HUGE_PAGE);
        let mut try_huge = true;
        for start in (0..self.len).step_by(step) {
            let len = step.min(self.len - start);
            let huge = len - len % HUGE_PAGE;
            if try_huge && huge > 0 {
                // One page of each is there, and the kernel makes the rest of it with the huge page.
                self.touch(start, huge, HUGE_PAGE);
                if let Err(error) = self.collapse(start, huge) {
                    // Something held a page of it just then: the next may well succeed.
                    try_huge = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY));
                    self.not_huge = Some(error);
                }
            }
            self.touch(start, len, PAGE);
            progress(start + len)?;
        }
        Ok(())
    }

    /// Why not all that was populated and could lie in huge pages does, if so.
    pub fn not_huge(&self) -> Option<&io::Error> {
        self.not_huge.as_ref()
    }

    /// Touches the first of every `every` bytes of a range.
    fn touch(&self, start: usize, len: usize, every: usize) {
        for offset in (start..start + len).step_by(every) {
            // SAFETY: inside the mapping, which is writable; nobody reaches it yet but its creator, who
            // populates it before sharing it. The value is what the page holds already: zero.
            unsafe { self.base.as_ptr().add(offset).write_volatile(0) };
        }
    }

    /// Moves a range into huge pages, whatever the machine is set to do by itself (since Linux 6.1).
    fn collapse(&self, start: usize, len: usize) -> io::Result<()> {
        self.check(start, len);
        // SAFETY: inside the mapping. It moves what the pages hold, and nothing else.
        let answer = unsafe {
            libc::madvise(self.base.as_ptr().add(start).cast::<c_void>(), len, libc::MADV_COLLAPSE)
        };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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

/// A range of addresses for a mapping of `len` bytes, which begins where a huge page can.
fn reserve(len: usize) -> io::Result<NonNull<c_void>> {
    let len = len.next_multiple_of(PAGE);
    let room = len.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: a fresh range at an address that the kernel picks, which nobody may reach. What is cut off of it
    // here is known to nobody.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let range =
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, ProtFlags::empty(), flags)?;
        let before = range.cast::<u8>().align_offset(HUGE_PAGE);
        let base = range.byte_add(before);
        if before > 0 {
            rustix::mm::munmap(range, before)?;
        }
        rustix::mm::munmap(base.byte_add(len), HUGE_PAGE - before)?;
        NonNull::new(base).ok_or(io::ErrorKind::InvalidData.into())
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
        let mut arena = SharedMemory::create("larder-test", 3 * PAGE).unwrap();
        arena.populate(PAGE, |_| Ok(())).unwrap();
        assert!(arena.not_huge().is_none(), "too short for a huge page");
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

    #[test]
    fn memory_says_truly_whether_it_lies_in_huge_pages_and_keeps_every_byte_wherever_it_lies() {
        let len = 3 * HUGE_PAGE + PAGE;
        let mut memory = SharedMemory::create("larder-test-huge", len).unwrap();
        let mut steps = Vec::new();
        let note = |at| {
            steps.push(at);
            Ok(())
        };
        memory.populate(HUGE_PAGE, note).unwrap();
        // Nobody has to have huge pages: a kernel without them is no failure, but it has to be said.
        println!("in small pages: {:?}", memory.not_huge());
        assert_eq!(steps, [HUGE_PAGE, 2 * HUGE_PAGE, 3 * HUGE_PAGE, len]);
        assert_eq!(memory.base.addr().get() % HUGE_PAGE, 0);
        assert_eq!(resident(&memory, "Rss:"), len);
        if memory.not_huge().is_none() {
            assert_eq!(resident(&memory, "ShmemPmdMapped:"), 3 * HUGE_PAGE);
        }
        // SAFETY: nobody else reaches the memory.
        let bytes = unsafe { memory.bytes_mut(0, len) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        let pattern = || (0..251).flat_map(|value| [value; 7]).cycle();
        bytes.iter_mut().zip(pattern()).for_each(|(byte, value)| *byte = value);
        let reader = SharedMemory::open(memory.read_only_fd().unwrap(), len, false).unwrap();
        // SAFETY: nobody writes any more.
        let read = unsafe { reader.bytes(0, len) };
        assert!(read.iter().zip(pattern()).all(|(byte, value)| *byte == value));
    }

    /// Bytes of a mapping that the kernel counts under this name.
    fn resident(memory: &SharedMemory, name: &str) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{:x}-", memory.base.addr());
        let of_it = maps.lines().skip_while(|line| !line.starts_with(&begin));
        let line = of_it.skip(1).find(|line| line.starts_with(name)).unwrap();
        let kib = line.split_whitespace().nth(1).unwrap();
        kib.parse::<usize>().unwrap() << 10
    }
}
