//! The dram tier: one arena of shared memory, handed out in extents.
//!
//! ```text
//! allocate -> Extent<Writable>  (one owner, may write)  -> freeze -> Copy (many owners, read only)
//! ```
//!
//! An extent gives its space back when its last owner is gone, never before; there is no other way to
//! free. So a writer that was revoked, a reader with a lease and a transfer under way keep what they
//! reach (P2, P7), and the sum of all extents is what `used_bytes` says (P9).
//!
//! Allocation is O(1) (two-level segregated fit over pages). A part takes whole pages.

use crate::sync::{AtomicU64, Counted, Mutex};
use larder_client::memory::{PAGE, SharedMemory};
use offset_allocator::{Allocation, Allocator};
use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

/// One arena: the memory that clients of one isolation domain may map.
pub struct Arena {
    memory: SharedMemory,
    allocator: Mutex<Allocator<u32>>,
    used_pages: AtomicU64,
}

impl Arena {
    /// Memory of `capacity` bytes, touched page by page so that it is really there. `progress` hears the
    /// bytes touched so far, and may end it.
    ///
    /// # Errors
    /// There is no such memory; or those of `progress`.
    pub fn new(
        capacity: usize,
        progress: impl FnMut(usize) -> io::Result<()>,
    ) -> io::Result<Arc<Self>> {
        let mut memory = SharedMemory::create("larder-arena", capacity)?;
        memory.populate(256 << 20, progress)?;
        memory.seal_against_writers()?;
        let pages = u32::try_from(memory.len() / PAGE).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "an arena is at most 16 TiB")
        })?;
        // The allocator's own memory grows with the number of extents it can hand out. Parts are rarely
        // below 16 KiB, so 4 M extents are enough for 64 GiB of the smallest.
        let extents = pages.clamp(16, 4 << 20);
        let allocator = Mutex::new(Allocator::with_max_allocs(pages, extents));
        Ok(Arc::new(Self { memory, allocator, used_pages: AtomicU64::new(0) }))
    }

    /// Bytes of the arena.
    pub fn capacity_bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Bytes in extents that are not freed.
    pub fn used_bytes(&self) -> u64 {
        self.used_pages.load(Ordering::Relaxed) * PAGE as u64
    }

    /// What a client maps, read-only.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Space for `len` bytes; `None` when there is no gap of that length.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<WritableExtent> {
        let pages = u32::try_from(len.div_ceil(PAGE).max(1)).ok()?;
        let allocation = self.allocator.lock().allocate(pages)?;
        self.used_pages.fetch_add(u64::from(pages), Ordering::Relaxed);
        Some(WritableExtent(Extent { arena: Arc::clone(self), allocation, len, pages }))
    }
}

/// Space of the arena; given back when dropped.
struct Extent {
    arena: Arc<Arena>,
    allocation: Allocation<u32>,
    len: usize,
    pages: u32,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("used_bytes", &self.used_bytes()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Extent({}+{})", self.offset(), self.len)
    }
}

impl Extent {
    fn offset(&self) -> usize {
        self.allocation.offset as usize * PAGE
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        // In this order: who gets the space next counts it after us, so that no sum exceeds the capacity.
        self.arena.used_pages.fetch_sub(u64::from(self.pages), Ordering::Relaxed);
        self.arena.allocator.lock().free(self.allocation);
    }
}

/// Space with one owner, who fills it. May hold another part's old bytes until then, so it is readable
/// by nobody else.
#[derive(Debug)]
pub struct WritableExtent(Extent);

impl WritableExtent {
    /// The bytes to fill.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocator gave this range to this extent alone, `&mut self` is its only owner, and
        // clients can map the arena for reading only and are told of a range only once it is frozen.
        #[expect(unsafe_code, reason = "the proof is the extent's ownership of its range")]
        unsafe {
            self.0.arena.memory.bytes_mut(self.0.offset(), self.0.len)
        }
    }

    /// The whole pages that the bytes lie in: what a device fills directly.
    pub fn pages_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes_mut`; the allocator hands out whole pages.
        #[expect(unsafe_code, reason = "the proof is the extent's ownership of its range")]
        unsafe {
            self.0.arena.memory.bytes_mut(self.0.offset(), self.0.pages as usize * PAGE)
        }
    }

    /// Ends the writing: from here on the bytes never change.
    pub fn freeze(mut self) -> DramCopy {
        // What a device writes are whole pages, and nobody else's old bytes shall go with them.
        let len = self.0.len;
        self.pages_mut()[len..].fill(0);
        DramCopy(Counted::new(self.0))
    }
}

/// Bytes of a part in the arena: immutable, and in place until the last clone is dropped.
#[derive(Debug, Clone)]
pub struct DramCopy(Counted<Extent>);

impl DramCopy {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: made by `freeze`, which consumed the only writer; the range is not handed out again
        // before the last clone of this copy is dropped.
        #[expect(unsafe_code, reason = "the proof is the extent's ownership of its range")]
        unsafe {
            self.0.arena.memory.bytes(self.0.offset(), self.0.len)
        }
    }

    /// The whole pages that the bytes lie in; zeroes behind the bytes.
    pub fn pages(&self) -> &[u8] {
        // SAFETY: as in `bytes`; the allocator hands out whole pages.
        #[expect(unsafe_code, reason = "the proof is the extent's ownership of its range")]
        unsafe {
            self.0.arena.memory.bytes(self.0.offset(), self.0.pages as usize * PAGE)
        }
    }

    /// Where the bytes lie in the arena.
    pub fn offset(&self) -> u64 {
        self.0.offset() as u64
    }

    /// Bytes of the arena that freeing this copy gives back.
    pub fn footprint_bytes(&self) -> u64 {
        u64::from(self.0.pages) * PAGE as u64
    }

    /// Whether somebody besides the holder of this clone still reads the bytes. A no is certain while nobody
    /// else can clone *this* clone, as under the catalog's shard lock: whoever clones another was counted.
    pub fn is_shared(&self) -> bool {
        Counted::strong_count(&self.0) > 1
    }

    /// Flips one bit in place: what a failing memory does. For tests of everything that verifies.
    #[cfg(test)]
    pub(crate) fn flip_bit(&self, byte: usize) {
        // SAFETY: this breaks the promise of `bytes` on purpose, in tests alone, to show that damage is
        // found; the tests hold no slice of the copy while they call it.
        #[expect(unsafe_code, reason = "fault injection")]
        unsafe {
            self.0.arena.memory.bytes_mut(self.0.offset() + byte, 1)[0] ^= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn taking_memory_can_be_ended_between_two_steps() {
        let mut heard = Vec::new();
        let ended = Arena::new(600 << 20, |touched| {
            heard.push(touched);
            Err(io::ErrorKind::Interrupted.into())
        });
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert_eq!(heard, [256 << 20]);
    }

    #[test]
    fn space_comes_back_only_when_the_last_reader_is_gone() {
        let arena = Arena::new(4 * PAGE, |_| Ok(())).unwrap();
        let mut extent = arena.allocate(3 * PAGE).unwrap();
        extent.bytes_mut().fill(7);
        let copy = extent.freeze();
        let reader = copy.clone();
        assert!(copy.is_shared());
        drop(copy);
        assert!(arena.allocate(2 * PAGE).is_none(), "the reader keeps it");
        assert!(reader.bytes().iter().all(|byte| *byte == 7));
        drop(reader);
        assert_eq!(arena.used_bytes(), 0);
        assert!(arena.allocate(4 * PAGE).is_some());
    }

    proptest! {
        #[test]
        fn extents_never_overlap_and_their_sum_is_what_is_reported(
            ops in prop::collection::vec((any::<bool>(), 1usize..9 * PAGE), 1..120),
        ) {
            let arena = Arena::new(64 * PAGE, |_| Ok(())).unwrap();
            let mut live: Vec<(WritableExtent, u8)> = Vec::new(); // The model: who wrote what.
            for (i, (take, len)) in ops.into_iter().enumerate() {
                if take {
                    if let Some(mut extent) = arena.allocate(len) {
                        let mark = u8::try_from(i % 251).unwrap();
                        extent.bytes_mut().fill(mark);
                        live.push((extent, mark));
                    }
                } else if !live.is_empty() {
                    live.swap_remove(len % live.len());
                }
                let pages: u64 = live.iter().map(|(extent, _)| u64::from(extent.0.pages)).sum();
                prop_assert_eq!(arena.used_bytes(), pages * PAGE as u64);
            }
            for (extent, mark) in &mut live {
                prop_assert!(extent.bytes_mut().iter().all(|byte| byte == mark));
            }
        }
    }
}
