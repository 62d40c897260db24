//! The one who may change a bucket: one at a time, see [`Bucket::lock`].
//!
//! Every change of slots lies between two changes of the version ([`Changing`]), so that readers know.
//! Growth and shrinking re-spread the whole bucket, a microsecond or two.

use super::{
    bucket::{Bucket, DIRECT, LISTS, PAGE_LIMIT, home},
    entry::{Entry, Meta, MixedKey},
    page::{Page, Pool, SLOTS},
};
use larder_proto::Location;
use parking_lot::MutexGuard;
use smallvec::SmallVec;
use std::sync::atomic::{
    Ordering::{Relaxed, Release},
    fence,
};

/// Slots at the end that are nobody's home, for what the last homes push out. A key with many locations
/// near the end needs more, and the homes then move together (`rebuild`).
const SLACK: usize = 6;

/// Entries that `pages` pages take: three of four slots. A hit then looks at 2 entries and an insert moves
/// a few; with four of five slots they looked at 3 and moved twice as many, for 3 bytes an entry less.
fn load_limit(pages: usize) -> usize {
    if pages == 0 { 0 } else { (pages * SLOTS - SLACK) * 3 / 4 }
}

/// The fewest pages whose load limit is at least `entries`.
fn pages_for(entries: usize) -> usize {
    if entries == 0 { 0 } else { ((entries * 4).div_ceil(3) + SLACK).div_ceil(SLOTS) }
}

impl Bucket {
    /// Waits for other writers.
    pub(super) fn lock<'a>(&'a self, pool: &'a Pool) -> Writer<'a> {
        let alone = self.writer.lock();
        let pages = usize::from(self.pages.load(Relaxed));
        let homes = usize::from(self.homes.load(Relaxed));
        let numbers = (0..pages).map_while(|at| self.page_number(pool, at)).collect();
        Writer { bucket: self, pool, numbers, homes, _alone: alone }
    }
}

/// The one who may change a bucket.
#[derive(Debug)]
pub(super) struct Writer<'a> {
    bucket: &'a Bucket,
    pool: &'a Pool,
    numbers: SmallVec<[u32; DIRECT]>,
    homes: usize,
    _alone: MutexGuard<'a, ()>,
}

/// Where an entry is, or would be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    slot: usize,
    /// What is there of the key and location that were looked for.
    pub(super) held: Option<Meta>,
}

/// While it lives, readers know that slots change.
struct Changing<'a>(&'a Bucket);

impl<'a> Changing<'a> {
    fn begin(bucket: &'a Bucket) -> Self {
        bucket.version.store(bucket.version.load(Relaxed).wrapping_add(1), Relaxed);
        // The odd version is seen before any change of a slot.
        fence(Release);
        Self(bucket)
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.version.store(self.0.version.load(Relaxed).wrapping_add(1), Release);
    }
}

impl Writer<'_> {
    fn slots(&self) -> usize {
        self.numbers.len() * SLOTS
    }

    fn page(&self, at: usize) -> &Page {
        self.pool.page(self.numbers[at]).expect("the pool gave this page to this bucket")
    }

    fn get(&self, slot: usize) -> Option<Entry> {
        self.page(slot / SLOTS).load(slot % SLOTS)
    }

    fn set(&self, slot: usize, entry: Option<Entry>) {
        self.page(slot / SLOTS).store(slot % SLOTS, entry);
    }

    fn set_len(&self, entries: usize) {
        let entries = u32::try_from(entries).expect("a bucket is bounded by its pages");
        self.bucket.entries.store(entries, Relaxed);
    }

    /// The place of what `location` holds of `key`.
    pub(super) fn find(&self, key: MixedKey, location: Location) -> Place {
        let home = home(key.order, self.homes);
        let mut first = home % SLOTS;
        for at in home / SLOTS..self.numbers.len() {
            let page = self.page(at);
            for slot in first..SLOTS {
                if page.order(slot) < key.order {
                    continue;
                }
                let held = match page.load(slot) {
                    Some(entry) if entry.rank() < (key, location) => continue,
                    Some(entry) if entry.rank() == (key, location) => Some(entry.meta),
                    _ => None,
                };
                return Place { slot: at * SLOTS + slot, held };
            }
            first = 0;
        }
        Place { slot: self.slots(), held: None }
    }

    /// Changes the entry at a place where one was found.
    pub(super) fn replace(&mut self, place: Place, entry: Entry) {
        let _changing = Changing::begin(self.bucket);
        self.set(place.slot, Some(entry));
    }

    /// Adds an entry at the place where it was not found. False when the bucket or the pool is full.
    pub(super) fn insert(&mut self, place: Place, entry: Entry) -> bool {
        let entries = self.bucket.len() + 1;
        let pages = self.numbers.len();
        let room = entries <= load_limit(pages);
        match self.free_from(place.slot) {
            Some(free) if room => {
                let _changing = Changing::begin(self.bucket);
                for slot in (place.slot..free).rev() {
                    self.set(slot + 1, self.get(slot));
                }
                self.set(place.slot, Some(entry));
                self.set_len(entries);
                true
            }
            _ => {
                let mut all = self.all();
                all.insert(all.partition_point(|other| other.rank() < entry.rank()), entry);
                // An eighth more, so that the cost of growing stays in proportion in large buckets.
                self.rebuild(&all, if room { pages } else { pages + pages / 8 })
            }
        }
    }

    /// The first empty slot from a slot on.
    fn free_from(&self, from: usize) -> Option<usize> {
        let mut first = from % SLOTS;
        for at in from / SLOTS..self.numbers.len() {
            let page = self.page(at);
            if let Some(slot) = (first..SLOTS).find(|slot| page.meta(*slot).is_empty()) {
                return Some(at * SLOTS + slot);
            }
            first = 0;
        }
        None
    }

    /// Removes the entry at a place where one was found.
    pub(super) fn remove(&mut self, place: Place) {
        let entries = self.bucket.len() - 1;
        let pages = self.numbers.len();
        let changing = Changing::begin(self.bucket);
        let mut hole = place.slot;
        // Whoever is not at home moves one slot back.
        while let Some(next) = (hole + 1 < self.slots()).then(|| self.get(hole + 1)).flatten() {
            if home(next.key.order, self.homes) > hole {
                break;
            }
            self.set(hole, Some(next));
            hole += 1;
        }
        self.set(hole, None);
        self.set_len(entries);
        drop(changing);
        // Gives a page back only with some room to spare, so that a bucket at the edge does not
        // grow and shrink in turn.
        if entries <= load_limit(pages - 1) * 7 / 8 {
            self.rebuild(&self.all(), 0);
        }
    }

    /// Entries in the bucket.
    pub(super) fn len(&self) -> usize {
        self.bucket.len()
    }

    /// Takes out all entries of which `of` is true.
    pub(super) fn extract(&mut self, of: impl FnMut(&Entry) -> bool) -> Vec<Entry> {
        let (taken, kept): (Vec<Entry>, Vec<Entry>) = self.all().into_iter().partition(of);
        if !taken.is_empty() {
            self.rebuild(&kept, 0);
        }
        taken
    }

    /// Changes what entries say, where `to` says how; not their locations.
    pub(super) fn change(&mut self, mut to: impl FnMut(&Entry) -> Option<Meta>) {
        let _changing = Changing::begin(self.bucket);
        for slot in 0..self.slots() {
            if let Some(entry) = self.get(slot)
                && let Some(meta) = to(&entry)
            {
                self.set(slot, Some(Entry { meta, ..entry }));
            }
        }
    }

    /// All entries, sorted.
    pub(super) fn all(&self) -> Vec<Entry> {
        let mut all = Vec::with_capacity(self.bucket.len() + 1);
        for at in 0..self.numbers.len() {
            let page = self.page(at);
            all.extend((0..SLOTS).filter_map(|slot| page.load(slot)));
        }
        all
    }

    /// Makes `sorted` the content, in as few pages as its load allows but at least `pages`. False, and
    /// nothing changes, when the bucket or the pool cannot hold it; what is no more than now is always held.
    pub(super) fn rebuild(&mut self, sorted: &[Entry], pages: usize) -> bool {
        let pages = pages_for(sorted.len()).max(pages);
        let old = self.numbers.len();
        if pages > PAGE_LIMIT || !self.take_pages(pages) {
            return false;
        }
        let lists = |pages: usize| pages.saturating_sub(DIRECT).div_ceil(Page::NUMBERS);
        let surplus: SmallVec<[u32; DIRECT]> = self.numbers.drain(pages..).collect();
        let spare_lists: SmallVec<[u32; LISTS]> = (lists(pages)..lists(old))
            .map(|list| self.bucket.numbers[DIRECT + list].load(Relaxed))
            .collect();
        self.homes = homes_for(sorted, pages);
        let changing = Changing::begin(self.bucket);
        self.publish_pages();
        let mut rest = sorted.iter().peekable();
        for at in 0..pages {
            let page = self.page(at);
            for slot in 0..SLOTS {
                let here = at * SLOTS + slot;
                let due = rest.next_if(|entry| home(entry.key.order, self.homes) <= here);
                page.store(slot, due.copied());
            }
        }
        self.set_len(sorted.len());
        drop(changing);
        surplus.iter().chain(&spare_lists).for_each(|number| self.pool.give_back(*number));
        true
    }

    /// Brings `numbers` up to `pages`, and the bucket to the list pages that as many need. All or nothing.
    fn take_pages(&mut self, pages: usize) -> bool {
        let lists = |pages: usize| pages.saturating_sub(DIRECT).div_ceil(Page::NUMBERS);
        let (old, old_lists) = (self.numbers.len(), lists(self.numbers.len()));
        let (more, more_lists) =
            (pages.saturating_sub(old), lists(pages).saturating_sub(old_lists));
        let taken: SmallVec<[u32; DIRECT]> =
            (0..more + more_lists).map_while(|_| self.pool.take()).collect();
        if taken.len() < more + more_lists {
            taken.iter().for_each(|number| self.pool.give_back(*number));
            return false;
        }
        self.numbers.extend_from_slice(&taken[..more]);
        for (list, number) in taken[more..].iter().enumerate() {
            // Nobody follows a list beyond the published count of pages.
            self.bucket.numbers[DIRECT + old_lists + list].store(*number, Relaxed);
        }
        true
    }

    /// Writes `numbers` and `homes` to where readers find them.
    fn publish_pages(&self) {
        for (at, number) in self.numbers.iter().enumerate() {
            if at < DIRECT {
                self.bucket.numbers[at].store(*number, Relaxed);
                continue;
            }
            let (list, at) = ((at - DIRECT) / Page::NUMBERS, (at - DIRECT) % Page::NUMBERS);
            let list = self.bucket.numbers[DIRECT + list].load(Relaxed);
            if let Some(page) = self.pool.page(list) {
                page.set_number(at, u64::from(*number));
            }
        }
        let bounded = |count| u16::try_from(count).expect("pages are bounded by PAGE_LIMIT");
        self.bucket.pages.store(bounded(self.numbers.len()), Relaxed);
        self.bucket.homes.store(bounded(self.homes), Relaxed);
    }
}

/// The most homes with which the last entries find a slot before the end, with a little room for more. With
/// a single home all entries lie in one run, which always fits.
fn homes_for(sorted: &[Entry], pages: usize) -> usize {
    let slots = pages * SLOTS;
    let fits = |homes: usize| {
        let home = |entry: &Entry| home(entry.key.order, homes);
        let end = sorted.iter().fold(0, |next, entry| home(entry).max(next) + 1);
        end + slots / 64 <= slots
    };
    let mut homes = slots.saturating_sub(SLACK);
    while homes > 1 && !fits(homes) {
        homes -= homes.div_ceil(16);
    }
    homes
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_proto::{Tier, TierSet};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn entry(order: u64, rest: u64, location: u32) -> Entry {
        let meta = Meta::new(Location(location), 0, TierSet::of(Tier::Dram), false);
        Entry { key: MixedKey { order, rest }, meta }
    }

    fn read(bucket: &Bucket, pool: &Pool, key: MixedKey) -> Vec<Meta> {
        let mut found = Vec::new();
        assert!(bucket.read(pool, key, &mut |_| true, usize::MAX, &mut found));
        found
    }

    #[test]
    fn a_bucket_fills_a_cache_line() {
        assert_eq!((size_of::<Bucket>(), size_of::<Page>()), (64, 2_048));
        for entries in 1..20_000 {
            let pages = pages_for(entries);
            assert!(load_limit(pages) >= entries && load_limit(pages - 1) < entries);
        }
    }

    #[test]
    fn one_key_with_thousands_of_locations_fills_list_pages_and_gives_them_back() {
        let pool = Pool::new(10_000);
        let bucket = Bucket::empty();
        let key = MixedKey { order: u64::MAX, rest: 7 };
        let mut held = 0;
        for location in 0..20_000 {
            let mut writer = bucket.lock(&pool);
            let place = writer.find(key, Location(location));
            if writer.insert(place, entry(key.order, key.rest, location)) {
                held += 1;
            }
        }
        assert_eq!(held, bucket.len());
        assert!(held > 16_000, "{held}");
        assert_eq!(read(&bucket, &pool, key).len(), held);
        for location in (0..20_000).rev() {
            let mut writer = bucket.lock(&pool);
            let place = writer.find(key, Location(location));
            if place.held.is_some() {
                writer.remove(place);
            }
        }
        assert_eq!((bucket.len(), pool.used()), (0, 0));
    }

    #[test]
    fn a_reader_finds_an_entry_that_a_writer_moves_to_and_fro() {
        let (pool, bucket) = (Pool::new(10_000), Bucket::empty());
        let steady: Vec<Entry> = (1_000..1_020).map(|rest| entry(1 << 40, rest, 1)).collect();
        for entry in &steady {
            let mut writer = bucket.lock(&pool);
            let place = writer.find(entry.key, Location(1));
            assert!(writer.insert(place, *entry));
        }
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Before the others in their run, so that they move; often enough to grow and shrink.
                while !stop.load(Relaxed) {
                    let moving: Vec<Entry> = (0..100).map(|rest| entry(1 << 40, rest, 1)).collect();
                    for entry in &moving {
                        let mut writer = bucket.lock(&pool);
                        let place = writer.find(entry.key, Location(1));
                        assert!(writer.insert(place, *entry));
                    }
                    for entry in &moving {
                        let mut writer = bucket.lock(&pool);
                        let place = writer.find(entry.key, Location(1));
                        writer.remove(place);
                    }
                }
            });
            let (mut whole, mut lost) = (0, 0);
            let mut found = Vec::new();
            while whole < 200_000 {
                let entry = &steady[whole % steady.len()];
                found.clear();
                if bucket.read(&pool, entry.key, &mut |_| true, 9, &mut found) {
                    lost += usize::from(found != [entry.meta]);
                    whole += 1;
                }
            }
            stop.store(true, Relaxed); // Before the assertion, so that its failure ends the test.
            assert_eq!(lost, 0);
        });
    }

    proptest! {
        #[test]
        fn a_bucket_holds_what_a_sorted_map_holds(
            ops in prop::collection::vec((any::<bool>(), 0u64..40, 0u64..2, 0u32..3, 0u32..64), 1..600)
        ) {
            let pool = Pool::new(10_000);
            let bucket = Bucket::empty();
            let mut model = BTreeMap::new();
            for (insert, order, rest, location, shift) in ops {
                // Crowded at the end, where there is no room to push on.
                let order = u64::MAX - (order << (shift % 60));
                let entry = entry(order, rest, location);
                let mut writer = bucket.lock(&pool);
                let place = writer.find(entry.key, Location(location));
                prop_assert_eq!(place.held, model.get(&entry.rank()).copied());
                match (insert, place.held) {
                    (true, None) => {
                        prop_assert!(writer.insert(place, entry));
                        model.insert(entry.rank(), entry.meta);
                    }
                    (false, Some(_)) => {
                        writer.remove(place);
                        model.remove(&entry.rank());
                    }
                    _ => {}
                }
                prop_assert!(writer.all().iter().map(Entry::rank).eq(model.keys().copied()));
                drop(writer);
                let of_key: Vec<Meta> = model.iter().filter(|(rank, _)| rank.0 == entry.key).map(|(_, meta)| *meta).collect();
                prop_assert_eq!(read(&bucket, &pool, entry.key), of_key);
            }
            let mut writer = bucket.lock(&pool);
            prop_assert!(writer.rebuild(&[], 0));
            drop(writer);
            prop_assert_eq!(pool.used(), 0);
        }
    }
}
