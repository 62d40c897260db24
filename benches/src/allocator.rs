//! Counts bytes that are allocated and not freed, for as long as somebody asks for it.
//!
//! The count is exact from [`start`] on, as long as nothing that was allocated before is freed after: benches
//! start it before they make what they measure. Until then the cost is one load a call.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed},
};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
static COUNTS: AtomicBool = AtomicBool::new(false);
static HELD: AtomicI64 = AtomicI64::new(0);

/// Begins to count.
pub(crate) fn start() {
    COUNTS.store(true, Relaxed);
}

/// Bytes allocated and not freed since [`start`], as asked for: without what the allocator adds.
pub(crate) fn held_bytes() -> i64 {
    HELD.load(Relaxed)
}

fn count(allocated: usize, freed: usize) {
    if COUNTS.load(Relaxed) {
        let signed = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        HELD.fetch_add(signed(allocated) - signed(freed), Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches two atomics and never
// allocates.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: `ptr` came from this allocator, which is the system's, with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size, layout.size());
        // SAFETY: `ptr` came from this allocator, which is the system's, with this layout, and the caller
        // promises that `new_size` is valid.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
