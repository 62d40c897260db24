//! Pages of entry slots, and the pool that all tables take them from.
//!
//! A page is 2 KiB: 85 slots and one spare word. Pages never move and never go back to the allocator:
//! a page given back is used again by any table, so memory is the highest use so far, and a table grows by
//! a page without a large copy or a large free.
//!
//! Words are atomics so that readers may look at a page while a writer changes it; what they saw counts
//! only if the version of the bucket says that nobody wrote meanwhile (`bucket`). That is why a page may be
//! recycled under a reader without harm.

use super::entry::{Entry, Meta, MixedKey};
use parking_lot::Mutex;
use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// Slots of a page.
pub(super) const SLOTS: usize = 85;
const WORDS: usize = 256;
/// Pages that the pool takes from the allocator at a time: 512 KiB.
const SEGMENT: usize = 256;

/// 85 slots of three words (order, rest, meta), and a word that links free pages.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Page([AtomicU64; WORDS]);

impl Page {
    fn empty() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }

    /// The high word of the key in a slot.
    #[inline]
    pub(super) fn order(&self, slot: usize) -> u64 {
        self.0[slot * 3].load(Relaxed)
    }

    /// The low word of the key in a slot.
    #[inline]
    pub(super) fn rest(&self, slot: usize) -> u64 {
        self.0[slot * 3 + 1].load(Relaxed)
    }

    /// What a slot says of its key.
    #[inline]
    pub(super) fn meta(&self, slot: usize) -> Meta {
        Meta(self.0[slot * 3 + 2].load(Relaxed))
    }

    /// Loads a slot's line and the next. The value means nothing.
    #[inline]
    pub(super) fn touch(&self, slot: usize) -> u64 {
        self.order(slot) ^ self.0[(slot * 3 + 8).min(WORDS - 1)].load(Relaxed)
    }

    /// The entry in a slot.
    #[inline]
    pub(super) fn load(&self, slot: usize) -> Option<Entry> {
        let meta = self.meta(slot);
        let key = MixedKey { order: self.order(slot), rest: self.rest(slot) };
        (!meta.is_empty()).then_some(Entry { key, meta })
    }

    /// Puts an entry into a slot, or empties it.
    #[inline]
    pub(super) fn store(&self, slot: usize, entry: Option<Entry>) {
        if let Some(Entry { key, meta }) = entry {
            self.0[slot * 3].store(key.order, Relaxed);
            self.0[slot * 3 + 1].store(key.rest, Relaxed);
            self.0[slot * 3 + 2].store(meta.0, Relaxed);
        } else {
            // The greatest order, so that a search for a key stops here by looking at orders alone.
            self.0[slot * 3].store(u64::MAX, Relaxed);
            self.0[slot * 3 + 2].store(0, Relaxed);
        }
    }

    /// One of the [`Self::NUMBERS`] numbers of a page that holds numbers instead of entries.
    pub(super) fn number(&self, at: usize) -> u64 {
        self.0[at].load(Relaxed)
    }

    /// Sets a number.
    pub(super) fn set_number(&self, at: usize, number: u64) {
        self.0[at].store(number, Relaxed);
    }

    /// Numbers that a page can hold instead of entries.
    pub(super) const NUMBERS: usize = WORDS - 1;
    const LINK: usize = WORDS - 1;
}

/// All pages of an index.
#[derive(Debug)]
pub(super) struct Pool {
    segments: Box<[OnceLock<Box<[Page]>>]>,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    /// Pages from this number on were never used.
    fresh: u32,
    /// Pages that were given back, each linking to the next: number + 1, or 0 at the end.
    head: u64,
    /// How many those are.
    returned: u32,
}

impl Pool {
    /// A pool that can grow to at least `pages`.
    pub(super) fn new(pages: u64) -> Self {
        let segments = usize::try_from(pages.min(u64::from(u32::MAX) - SEGMENT as u64))
            .unwrap_or(usize::MAX)
            .div_ceil(SEGMENT);
        Self {
            segments: (0..segments).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(Free { fresh: 0, head: 0, returned: 0 }),
        }
    }

    /// The page with this number. Readers may hold a number that was torn or is newer than what they can
    /// see, and then get `None`; for a number that [`Self::take`] gave the caller there is always a page.
    #[inline]
    pub(super) fn page(&self, number: u32) -> Option<&Page> {
        let segment = self.segments.get(number as usize / SEGMENT)?.get()?;
        segment.get(number as usize % SEGMENT)
    }

    /// A page of undefined content, unless the pool is at its limit.
    pub(super) fn take(&self) -> Option<u32> {
        let mut free = self.free.lock();
        if free.head != 0 {
            let number = u32::try_from(free.head - 1).ok()?;
            free.head = self.page(number)?.number(Page::LINK);
            free.returned -= 1;
            return Some(number);
        }
        let number = free.fresh;
        let segment = self.segments.get(number as usize / SEGMENT)?;
        segment.get_or_init(|| (0..SEGMENT).map(|_| Page::empty()).collect());
        free.fresh += 1;
        Some(number)
    }

    /// Takes a page back.
    pub(super) fn give_back(&self, number: u32) {
        let mut free = self.free.lock();
        if let Some(page) = self.page(number) {
            page.set_number(Page::LINK, free.head);
            free.head = u64::from(number) + 1;
            free.returned += 1;
        }
    }

    /// Pages in use.
    #[cfg(test)]
    pub(super) fn used(&self) -> u64 {
        (self.page_bytes() - self.spare_bytes()) / size_of::<Page>() as u64
    }

    /// Bytes of pages that nobody uses.
    pub(super) fn spare_bytes(&self) -> u64 {
        let free = self.free.lock();
        let used = u64::from(free.fresh - free.returned) * size_of::<Page>() as u64;
        drop(free);
        self.page_bytes() - used
    }

    fn page_bytes(&self) -> u64 {
        let segments = (self.free.lock().fresh as usize).div_ceil(SEGMENT);
        (segments * SEGMENT * size_of::<Page>()) as u64
    }

    /// Bytes taken from the allocator.
    pub(super) fn bytes(&self) -> u64 {
        self.page_bytes() + size_of_val::<[_]>(&self.segments) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_given_back_are_used_again_before_new_ones() {
        let pool = Pool::new(10_000);
        let taken: Vec<u32> = (0..2_000).map(|_| pool.take().unwrap()).collect();
        let bytes = pool.bytes();
        for _ in 0..3 {
            taken.iter().for_each(|number| pool.give_back(*number));
            assert_eq!(pool.used(), 0);
            let mut again: Vec<u32> = (0..2_000).map(|_| pool.take().unwrap()).collect();
            again.sort_unstable();
            assert_eq!(again, taken);
        }
        assert_eq!(pool.bytes(), bytes);
    }

    #[test]
    fn a_pool_at_its_limit_says_so() {
        let pool = Pool::new(1_024);
        assert_eq!((0..2_000).map_while(|_| pool.take()).count(), 1_024);
        pool.give_back(5);
        assert_eq!((pool.take(), pool.take()), (Some(5), None));
    }
}
