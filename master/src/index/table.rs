//! All entries of one inventory shard (1/256 of the index, by the first byte of the key), in buckets.
//!
//! Linear hashing: with `n` buckets a key's bucket is the low bits of its `order` word, as many as number
//! `n - 1` has; numbers that do not exist yet fall back on one bit less. So the table grows by splitting one
//! bucket at a time, some 5 microseconds each, and never stops anybody. The inventory shard decides the
//! table, so that the snapshot of a shard is compared with 1/256 of the index and not with all of it.
//!
//! A split fills the new bucket, then publishes the new count, then empties the old one. A reader looks at the
//! count again after it has read: if its key belongs elsewhere by now, it starts again.

use super::{
    bucket::Bucket,
    entry::{Entry, Meta, MixedKey},
    page::Pool,
    writer::Writer,
};
use parking_lot::Mutex;
use std::sync::{
    OnceLock,
    atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

/// Entries a bucket that a table aims at: between splits a bucket has half to twice as many.
const ENTRIES_A_BUCKET: u64 = 256;
/// Segments of buckets: one bucket, then as many as all before. 2^25 buckets are 4 billion entries.
const SEGMENTS: usize = 26;
/// Times that a reader meets a writer before it takes the lock.
const PATIENCE: u32 = 64;

/// The entries of one inventory shard.
#[derive(Debug)]
pub(super) struct Table {
    /// How many buckets there are.
    count: AtomicU32,
    entries: AtomicU64,
    splitting: Mutex<()>,
    segments: [OnceLock<Box<[Bucket]>>; SEGMENTS],
}

/// The bucket of a key when there are `count` buckets.
#[inline]
fn bucket_of(order: u64, count: u32) -> u32 {
    let mask = count.next_power_of_two() - 1;
    let bucket = (order & 0xffff_ffff) as u32 & mask;
    if bucket < count { bucket } else { bucket & mask >> 1 }
}

impl Table {
    /// A table of one empty bucket.
    pub(super) fn new() -> Self {
        let table = Self {
            count: AtomicU32::new(1),
            entries: AtomicU64::new(0),
            splitting: Mutex::new(()),
            segments: [const { OnceLock::new() }; SEGMENTS],
        };
        table.prepare(0);
        table
    }

    /// Makes room for bucket `number`, which is at most the count.
    fn prepare(&self, number: u32) -> bool {
        let (segment, _) = position(number);
        let len = if segment == 0 { 1 } else { 1 << (segment - 1) };
        let segment = self.segments.get(segment);
        segment
            .map(|segment| segment.get_or_init(|| (0..len).map(|_| Bucket::empty()).collect()))
            .is_some()
    }

    /// A bucket below a count that was published.
    #[inline]
    fn bucket(&self, number: u32) -> Option<&Bucket> {
        let (segment, at) = position(number);
        self.segments.get(segment)?.get()?.get(at)
    }

    /// Begins to look for a key.
    #[inline]
    pub(super) fn probe(&self, key: MixedKey) -> Probe<'_> {
        let count = self.count.load(Acquire);
        let bucket = self.bucket(bucket_of(key.order, count)).expect("published buckets exist");
        Probe { table: self, key, count, bucket }
    }

    /// Waits for the bucket of a key.
    pub(super) fn lock<'a>(&'a self, pool: &'a Pool, key: MixedKey) -> Writer<'a> {
        loop {
            let number = bucket_of(key.order, self.count.load(Acquire));
            let writer = self.bucket(number).expect("published buckets exist").lock(pool);
            // A split holds the lock of the bucket it splits, so from here on the number stays right.
            if bucket_of(key.order, self.count.load(Relaxed)) == number {
                return writer;
            }
        }
    }

    /// Buckets there are now.
    pub(super) fn buckets(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Waits for a bucket by number, below [`Self::buckets`].
    pub(super) fn lock_number<'a>(&'a self, pool: &'a Pool, number: u32) -> Option<Writer<'a>> {
        Some(self.bucket(number)?.lock(pool))
    }

    /// Says that entries were removed.
    pub(super) fn removed(&self, entries: u64) {
        self.entries.fetch_sub(entries, Relaxed);
    }

    /// Says that an entry was added; splits a bucket when it is time and nobody else does. To be called
    /// without the lock of a bucket.
    pub(super) fn added(&self, pool: &Pool) {
        let entries = self.entries.fetch_add(1, Relaxed) + 1;
        if entries > ENTRIES_A_BUCKET * u64::from(self.count.load(Relaxed))
            && let Some(_turn) = self.splitting.try_lock()
        {
            self.split(pool);
        }
    }

    fn split(&self, pool: &Pool) {
        let count = self.count.load(Relaxed);
        let source = count - (1 << count.ilog2());
        if !self.prepare(count) {
            return; // 4 billion entries: buckets become fuller from here on.
        }
        let (Some(source), Some(target)) = (self.bucket(source), self.bucket(count)) else {
            return;
        };
        let (mut source, mut target) = (source.lock(pool), target.lock(pool));
        let all = source.all();
        let (go, stay): (Vec<Entry>, Vec<Entry>) =
            all.into_iter().partition(|entry| bucket_of(entry.key.order, count + 1) == count);
        if target.rebuild(&go, 0) {
            self.count.store(count + 1, Release);
            source.rebuild(&stay, 0);
        }
    }

    /// Bytes taken from the allocator, besides pages.
    pub(super) fn bytes(&self) -> u64 {
        let segments = self.segments.iter().filter_map(OnceLock::get);
        segments.map(|segment| size_of_val::<[_]>(segment) as u64).sum()
    }
}

/// A key that is looked for, and the bucket where it should be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probe<'a> {
    table: &'a Table,
    key: MixedKey,
    /// Buckets there were when `bucket` was chosen.
    count: u32,
    bucket: &'a Bucket,
}

impl Probe<'_> {
    /// Loads the bucket, so that the loads of a batch overlap. The value means nothing.
    #[inline]
    pub(super) fn touch(&self) -> u64 {
        self.bucket.touch()
    }

    /// Loads the home slot, so that the loads of a batch overlap. The value means nothing.
    #[inline]
    pub(super) fn touch_home(&self, pool: &Pool) -> u64 {
        self.bucket.touch_home(pool, self.key.order)
    }

    /// Appends to `found` what `keep` keeps of the holders of the key, by rising location and up to `limit`.
    /// `keep` may be asked about entries that turn out to be torn, and again about the same one.
    #[inline]
    pub(super) fn read(
        self,
        pool: &Pool,
        mut keep: impl FnMut(Meta) -> bool,
        limit: usize,
        found: &mut Vec<Meta>,
    ) {
        let start = found.len();
        let whole = self.bucket.read(pool, self.key, &mut keep, limit, found);
        if !whole || self.moved() {
            found.truncate(start);
            self.read_again(pool, keep, limit, found);
        }
    }

    /// Whether the key belongs to another bucket by now.
    #[inline]
    fn moved(&self) -> bool {
        let now = self.table.count.load(Relaxed);
        now != self.count && bucket_of(self.key.order, now) != bucket_of(self.key.order, self.count)
    }

    #[cold]
    fn read_again(
        self,
        pool: &Pool,
        mut keep: impl FnMut(Meta) -> bool,
        limit: usize,
        found: &mut Vec<Meta>,
    ) {
        let start = found.len();
        for attempt in 0.. {
            let probe = self.table.probe(self.key);
            let whole = if attempt < PATIENCE {
                probe.bucket.read(pool, probe.key, &mut keep, limit, found)
            } else {
                probe.bucket.read_alone(pool, probe.key, &mut keep, limit, found);
                true
            };
            if whole && !probe.moved() {
                return;
            }
            found.truncate(start);
            std::hint::spin_loop();
        }
    }
}

/// Segment and place in it of a bucket.
#[inline]
fn position(number: u32) -> (usize, usize) {
    match number.checked_ilog2() {
        None => (0, 0),
        Some(power) => (power as usize + 1, (number - (1 << power)) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::entry::finalise;
    use larder_proto::{Location, Tier, TierSet};

    fn entry(n: u64) -> Entry {
        let meta = Meta::new(Location(1), 0, TierSet::of(Tier::Ssd), false);
        Entry { key: MixedKey { order: finalise(n), rest: n }, meta }
    }

    fn insert(table: &Table, pool: &Pool, entry: Entry) {
        let mut writer = table.lock(pool, entry.key);
        let place = writer.find(entry.key, entry.meta.location());
        assert!(place.held.is_none() && writer.insert(place, entry));
        drop(writer);
        table.added(pool);
    }

    #[test]
    fn every_entry_is_found_after_many_splits_and_memory_stays_dense() {
        let (table, pool) = (Table::new(), Pool::new(100_000));
        let mut found = Vec::new();
        for n in 0..100_000 {
            insert(&table, &pool, entry(n));
            if n > 2_000 && n % 1_000 == 0 {
                let bytes = pool.used() * 2_048 + table.bytes();
                assert!(bytes <= n * 40, "{bytes} bytes for {n} entries");
            }
        }
        assert!(table.buckets() > 350);
        for n in 0..100_000 {
            found.clear();
            table.probe(entry(n).key).read(&pool, |_| true, 9, &mut found);
            assert_eq!(found.len(), 1);
        }
        table.probe(entry(100_001).key).read(&pool, |_| true, 9, &mut found);
        assert_eq!(found.len(), 1, "an unknown key adds nothing");
    }

    #[test]
    fn readers_find_an_entry_at_every_moment_of_growth() {
        let (table, pool) = (Table::new(), Pool::new(100_000));
        insert(&table, &pool, entry(0));
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (1..60_000).for_each(|n| insert(&table, &pool, entry(n)));
                done.store(true, Release);
            });
            let mut found = Vec::new();
            let mut rounds = 0u64;
            while !done.load(Acquire) || rounds == 0 {
                found.clear();
                table.probe(entry(0).key).read(&pool, |_| true, 9, &mut found);
                assert_eq!(found, [entry(0).meta]);
                rounds += 1;
            }
        });
    }
}
