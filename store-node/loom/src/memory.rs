//! Memory of an arena in which loom sees every access: it reports a page that is written while, or without
//! having been told that, somebody else reaches it.

use loom::cell;
use std::{cell::UnsafeCell, io};

/// As the node's.
pub const PAGE: usize = 4096;

/// In place of a mapping.
#[derive(Debug)]
pub struct SharedMemory {
    bytes: Box<[UnsafeCell<u8>]>,
    /// One a page: reached whenever the page is.
    watched: Box<[cell::UnsafeCell<()>]>,
}

// SAFETY: bytes are reached through `bytes` and `bytes_mut` alone, whose contracts rule out data races, and
// loom runs one thread at a time.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    pub fn create(_: &str, len: usize) -> io::Result<Self> {
        let len = len.next_multiple_of(PAGE);
        Ok(Self {
            bytes: (0..len).map(|_| UnsafeCell::new(0)).collect(),
            watched: (0..len / PAGE).map(|_| cell::UnsafeCell::new(())).collect(),
        })
    }

    pub fn populate(
        &mut self,
        _: usize,
        mut progress: impl FnMut(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        progress(self.len())
    }

    pub fn seal_against_writers(&self) -> io::Result<()> {
        Ok(())
    }

    #[expect(clippy::len_without_is_empty, reason = "as the node's")]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// # Safety
    /// For as long as the slice lives nobody may write the range. Loom checks that for the moment of the
    /// call: a test that keeps a slice calls again at the end.
    pub unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        self.pages(offset, len).iter().for_each(|page| page.with(|_| ()));
        let range = &self.bytes[offset..offset + len];
        // SAFETY: an `UnsafeCell<u8>` is laid out as a `u8`; nobody writes meanwhile (the caller's promise).
        unsafe { std::slice::from_raw_parts(range.as_ptr().cast(), len) }
    }

    /// # Safety
    /// For as long as the slice lives nobody else may read or write the range. Loom checks that for the
    /// moment of the call.
    #[expect(clippy::mut_from_ref, reason = "as the node's")]
    pub unsafe fn bytes_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        self.pages(offset, len).iter().for_each(|page| page.with_mut(|_| ()));
        let range = &self.bytes[offset..offset + len];
        // SAFETY: as in `bytes`, from cells that may be written through a shared reference; reached by
        // nobody else meanwhile (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(range.as_ptr().cast::<u8>().cast_mut(), len) }
    }

    pub fn copy_out(&self, _: usize, _: &mut [u8]) {
        unreachable!("nothing is staged here");
    }

    fn pages(&self, offset: usize, len: usize) -> &[cell::UnsafeCell<()>] {
        &self.watched[offset / PAGE..(offset + len).div_ceil(PAGE)]
    }
}
