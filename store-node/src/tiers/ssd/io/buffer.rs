//! Memory that a device can read and write directly.

use super::PAGE;
use crate::tiers::dram::WritableExtent;
use bytes::Bytes;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    any::Any,
    ptr::NonNull,
};

/// Memory that a read fills: whole pages at a page's bound, owned by whoever holds the value.
pub trait ReadBuffer: Send + 'static {
    /// All of it, at the same address each time.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// The buffer itself, to hand it back as what it was.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

impl std::fmt::Debug for dyn ReadBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReadBuffer")
    }
}

impl ReadBuffer for WritableExtent {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.pages_mut()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl ReadBuffer for AlignedBuffer {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

/// Zeroed memory of its own, in whole pages at a page's bound.
pub struct AlignedBuffer {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its memory as a `Box<[u8]>` does; only the alignment differs.
#[expect(unsafe_code, reason = "aligned memory")]
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above; shared access only reads.
#[expect(unsafe_code, reason = "aligned memory")]
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// At least `len` zero bytes, rounded up to whole pages.
    ///
    /// # Panics
    /// When `len` is above what an allocation may have.
    pub fn zeroed(len: usize) -> Self {
        let len = len.next_multiple_of(PAGE).max(PAGE);
        let layout = Self::layout(len);
        // SAFETY: the layout's size is at least a page.
        #[expect(unsafe_code, reason = "aligned memory")]
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, len }
    }

    /// The bytes of `from`, and zeroes up to the end of the page.
    pub fn copy_of(from: &[u8]) -> Self {
        let mut buffer = Self::zeroed(from.len());
        buffer[..from.len()].copy_from_slice(from);
        buffer
    }

    /// The same memory, for many readers.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }

    #[expect(
        clippy::expect_used,
        reason = "a page is a power of two, and the length was allocated"
    )]
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, PAGE).expect("whole pages fit an allocation")
    }
}

impl std::ops::Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that this value owns.
        #[expect(unsafe_code, reason = "aligned memory")]
        unsafe {
            std::slice::from_raw_parts(self.base.as_ptr(), self.len)
        }
    }
}

impl std::ops::DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is the only way to it.
        #[expect(unsafe_code, reason = "aligned memory")]
        unsafe {
            std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len)
        }
    }
}

impl AsRef<[u8]> for AlignedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuffer({})", self.len)
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this very layout; nobody else frees it.
        #[expect(unsafe_code, reason = "aligned memory")]
        unsafe {
            dealloc(self.base.as_ptr(), Self::layout(self.len));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_whole_zeroed_pages_at_a_pages_bound() {
        for (asked, given) in [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)] {
            let buffer = AlignedBuffer::zeroed(asked);
            assert_eq!(buffer.len(), given);
            assert_eq!(buffer.as_ptr().align_offset(PAGE), 0);
            assert!(buffer.iter().all(|byte| *byte == 0));
        }
        let copy = AlignedBuffer::copy_of(b"larder").freeze();
        assert_eq!((&copy[..6], copy.len()), (&b"larder"[..], PAGE));
    }
}
