//! A bucket: about 256 entries, sorted, in two to eight pages. The unit of locking and of growth.
//!
//! Order: slots are filled by ordered linear probing. A key's home slot grows with its `order` word, entries
//! are sorted by (key, location), and there is no empty slot between an entry and its home. So a lookup
//! starts at the home slot and ends at the first empty slot or greater key; all holders of a key lie in one
//! run; a removal shifts back and leaves no tombstone; growth by one page re-spreads a few hundred entries.
//!
//! Readers take no lock and write nothing, so that a prompt everybody asks for costs no traffic between
//! cores, and a reader never keeps a writer waiting. They read the version, look, and read it again: odd or
//! changed means that a writer was here, and they look again. Changes are in `writer`.
//!
//! At the limit ([`PAGE_LIMIT`] pages, some 17,000 entries) an insert is refused. Only a key with
//! thousands of locations gets there: `table` splits buckets long before.

use super::{
    entry::{Meta, MixedKey},
    page::{Page, Pool, SLOTS},
};
use parking_lot::Mutex;
use std::sync::atomic::{
    AtomicU16, AtomicU32,
    Ordering::{Acquire, Relaxed},
    fence,
};

/// Page numbers in the bucket itself, as many as a bucket needs between splits and as fit its cache line;
/// more are in list pages.
pub(super) const DIRECT: usize = 11;
pub(super) const LISTS: usize = 1;
/// The most pages of a bucket.
pub(super) const PAGE_LIMIT: usize = DIRECT + LISTS * Page::NUMBERS;

/// A few pages of sorted entries.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Bucket {
    /// Odd while a writer changes slots.
    pub(super) version: AtomicU32,
    pub(super) writer: Mutex<()>,
    pub(super) pages: AtomicU16,
    pub(super) homes: AtomicU16,
    pub(super) entries: AtomicU32,
    pub(super) numbers: [AtomicU32; DIRECT + LISTS],
}

/// The home slot: `order` scaled to the homes, so that greater keys have no smaller ones.
#[inline]
pub(super) fn home(order: u64, homes: usize) -> usize {
    ((order >> 32).wrapping_mul(homes as u64) >> 32) as usize
}

impl Bucket {
    /// A bucket without pages.
    pub(super) fn empty() -> Self {
        Self {
            version: AtomicU32::new(0),
            writer: Mutex::new(()),
            pages: AtomicU16::new(0),
            homes: AtomicU16::new(0),
            entries: AtomicU32::new(0),
            numbers: [const { AtomicU32::new(0) }; DIRECT + LISTS],
        }
    }

    /// Entries in it.
    pub(super) fn len(&self) -> usize {
        self.entries.load(Relaxed) as usize
    }

    /// Loads the bucket itself, so that the loads of a batch overlap. The value means nothing.
    #[inline]
    pub(super) fn touch(&self) -> u64 {
        u64::from(self.version.load(Relaxed))
    }

    /// Loads the lines where a key most likely is, so that the loads of a batch overlap. The value means
    /// nothing.
    #[inline]
    pub(super) fn touch_home(&self, pool: &Pool, order: u64) -> u64 {
        let slot = home(order, usize::from(self.homes.load(Relaxed)));
        let page = self.page_number(pool, slot / SLOTS).and_then(|number| pool.page(number));
        page.map_or(0, |page| page.touch(slot % SLOTS))
    }

    /// Appends to `found` what `keep` keeps of the holders of `key`, up to `limit` of them. False when a
    /// writer came between: then what was appended means nothing, and neither does what `keep` saw.
    #[inline]
    pub(super) fn read(
        &self,
        pool: &Pool,
        key: MixedKey,
        keep: &mut impl FnMut(Meta) -> bool,
        limit: usize,
        found: &mut Vec<Meta>,
    ) -> bool {
        let version = self.version.load(Acquire);
        if version % 2 == 1 {
            return false;
        }
        self.scan(pool, key, keep, limit, found);
        // Keeps the loads of `scan`, and those of `keep`, before the second look at the version.
        fence(Acquire);
        self.version.load(Relaxed) == version
    }

    /// [`Self::read`] behind the lock, for a reader that met writers again and again.
    pub(super) fn read_alone(
        &self,
        pool: &Pool,
        key: MixedKey,
        keep: &mut impl FnMut(Meta) -> bool,
        limit: usize,
        found: &mut Vec<Meta>,
    ) {
        let _alone = self.writer.lock();
        self.scan(pool, key, keep, limit, found);
    }

    /// What it reads may be torn by a writer, so nothing here may panic or run on: page numbers may be
    /// of other tables, counts may not fit together.
    #[inline]
    fn scan(
        &self,
        pool: &Pool,
        key: MixedKey,
        keep: &mut impl FnMut(Meta) -> bool,
        limit: usize,
        found: &mut Vec<Meta>,
    ) {
        let pages = usize::from(self.pages.load(Relaxed));
        if pages == 0 {
            return;
        }
        let home = home(key.order, usize::from(self.homes.load(Relaxed)));
        let mut slot = home % SLOTS;
        let mut numbers = home / SLOTS..pages;
        let mut next = || pool.page(self.page_number(pool, numbers.next()?)?);
        let Some(mut page) = next() else { return };
        // Two loops, so that the processor has one hard guess a key: where the first one ends.
        while page.order(slot) < key.order {
            slot += 1;
            if slot == SLOTS {
                let Some(following) = next() else { return };
                (page, slot) = (following, 0);
            }
        }
        let full = found.len() + limit;
        while page.order(slot) == key.order {
            let meta = page.meta(slot);
            if meta.is_empty() {
                return;
            }
            if page.rest(slot) == key.rest && keep(meta) {
                found.push(meta);
                if found.len() >= full {
                    return;
                }
            }
            slot += 1;
            if slot == SLOTS {
                let Some(following) = next() else { return };
                (page, slot) = (following, 0);
            }
        }
    }

    /// The number of the bucket's page `at`.
    #[inline]
    pub(super) fn page_number(&self, pool: &Pool, at: usize) -> Option<u32> {
        if at < DIRECT {
            return Some(self.numbers[at].load(Relaxed));
        }
        let (list, at) = ((at - DIRECT) / Page::NUMBERS, (at - DIRECT) % Page::NUMBERS);
        let list = self.numbers.get(DIRECT + list)?.load(Relaxed);
        u32::try_from(pool.page(list)?.number(at)).ok()
    }
}
