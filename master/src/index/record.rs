//! What a location says of its blocks: stored, removed, and the snapshot of a shard.

use super::{
    Index, IndexSetId, SpaceId, WARM_LIMIT,
    entry::{Entry, Meta},
    locations::Tally,
    spaces::Spaces,
};
use larder_proto::{
    BlockKey, Location, TierSet,
    event::{RecordKind, Shard},
};
use std::sync::atomic::Ordering::Relaxed;

/// What became of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upsert {
    /// The location did not hold the block.
    Added,
    /// It held other parts of it, or in other tiers.
    Changed,
    /// It is known already: a duplicate does nothing.
    Known,
    /// It is not held, and its shard is not comparable: the index is at a limit, or the space was retired.
    LeftOut,
    /// The location was forgotten.
    Ignored,
}

impl Index {
    /// Records that `location` holds the parts of `set` of a block, in at least one tier, and nothing else
    /// of it. At the limit of entries a block that is not held yet is left out. Without a tier, or with the
    /// set of a retired space, it is left out too.
    pub fn upsert(
        &self,
        location: Location,
        key: &BlockKey,
        set: IndexSetId,
        tiers: TierSet,
    ) -> Upsert {
        let shard = Shard::of(key);
        let spaces = self.spaces.read();
        let Some(space) = spaces.space_of(set).filter(|_| !tiers.is_empty()) else {
            let Some(mut tally) = self.locations.tally(location) else { return Upsert::Ignored };
            tally.leave_out_retired(shard);
            return Upsert::LeftOut;
        };
        let key = space.mixer.mix(key);
        let mut bucket = self.table(shard).lock(&self.pool, key);
        let Some(mut tally) = self.locations.tally(location) else { return Upsert::Ignored };
        let meta = Meta::new(location, set.slot, tiers, tally.shard(shard).colour);
        let entry = Entry { key, meta };
        let digest = digest(&spaces, entry);
        let place = bucket.find(key, location);
        if let Some(held) = place.held {
            if held != meta {
                let old = self::digest(&spaces, Entry { key, meta: held });
                tally.shard(shard).change(old, digest, held.colour());
                bucket.replace(place, entry);
            }
            let same = held.with_colour(meta.colour()) == meta;
            return if same { Upsert::Known } else { Upsert::Changed };
        }
        if !self.reserve() {
            self.locations.leave_out(&mut tally, shard);
            return Upsert::LeftOut;
        }
        if !bucket.insert(place, entry) {
            self.entries.fetch_sub(1, Relaxed);
            self.locations.leave_out(&mut tally, shard);
            return Upsert::LeftOut;
        }
        tally.add(shard, digest);
        space.entries.fetch_add(1, Relaxed);
        drop((tally, bucket));
        self.table(shard).added(&self.pool);
        Upsert::Added
    }

    /// Takes the right to one more entry.
    fn reserve(&self) -> bool {
        let within = |entries| (entries < self.limits.entries).then_some(entries + 1);
        self.entries.fetch_update(Relaxed, Relaxed, within).is_ok()
    }

    /// Counts a block that cannot be recorded because a limit left it without space or set: the digest of
    /// its shard is not compared, and answers are limited.
    pub fn leave_out(&self, location: Location, key: &BlockKey) -> Upsert {
        let Some(mut tally) = self.locations.tally(location) else { return Upsert::Ignored };
        self.locations.leave_out(&mut tally, Shard::of(key));
        Upsert::LeftOut
    }

    /// Records that `location` holds nothing of a block, and why. What is remembered of it for
    /// [`Self::recall`]: `evicted`, `removed`, `damaged`. True when it was held.
    pub fn remove(
        &self,
        location: Location,
        space: SpaceId,
        key: &BlockKey,
        kind: RecordKind,
    ) -> bool {
        let shard = Shard::of(key);
        let spaces = self.spaces.read();
        // A retired space too: its digests stay those of the node for as long as its entries are here.
        let Some(row) = spaces.row_until_swept(space) else { return false };
        let key = row.mixer.mix(key);
        match kind {
            RecordKind::Evicted | RecordKind::Removed | RecordKind::Damaged => {
                self.removals.remember(key, kind);
            }
            RecordKind::Stored | RecordKind::Absent => {}
        }
        let mut bucket = self.table(shard).lock(&self.pool, key);
        let Some(mut tally) = self.locations.tally(location) else { return false };
        let place = bucket.find(key, location);
        let Some(held) = place.held else { return false };
        bucket.remove(place);
        self.take_off(&spaces, &mut tally, shard, Entry { key, meta: held });
        true
    }

    /// The books of an entry that was taken out of its bucket.
    pub(super) fn take_off(&self, spaces: &Spaces, tally: &mut Tally, shard: Shard, entry: Entry) {
        tally.remove(shard, digest(spaces, entry), entry.meta.colour());
        if let Some((_, space)) = spaces.of_entry(entry.meta.set()) {
            space.entries.fetch_sub(1, Relaxed);
        }
        self.table(shard).removed(1);
        self.entries.fetch_sub(1, Relaxed);
    }

    /// Replaces all that is known of a shard of a location, over all spaces, and says how many entries were
    /// dropped. For a snapshot in one piece.
    pub fn replace_shard(
        &self,
        location: Location,
        shard: Shard,
        entries: impl IntoIterator<Item = (BlockKey, IndexSetId, TierSet)>,
    ) -> u64 {
        self.begin_replace(location, shard);
        let mut entries = entries.into_iter().filter(|(key, ..)| Shard::of(key) == shard);
        loop {
            let some: Vec<_> = entries.by_ref().take(WARM_LIMIT).collect();
            if some.is_empty() {
                break;
            }
            self.warm(some.iter().map(|(key, set, _)| (*set, key)));
            for (key, set, tiers) in &some {
                self.upsert(location, key, *set, *tiers);
            }
        }
        self.end_replace(location, shard)
    }

    /// Begins the snapshot of a shard: what the location holds of it follows by [`Self::upsert`]s and ends with
    /// [`Self::end_replace`]. Meanwhile answers show old and new together. A snapshot that broke off is
    /// given up by the next one that begins.
    pub fn begin_replace(&self, location: Location, shard: Shard) {
        let Some(mut tally) = self.locations.tally(location) else { return };
        let broken_off = std::mem::take(&mut tally.shard(shard).replacing);
        let colour = tally.shard(shard).colour;
        drop(tally);
        if broken_off {
            self.recolour(location, shard, colour);
        }
        if let Some(mut tally) = self.locations.tally(location) {
            self.locations.begin_replace(&mut tally, shard);
        }
    }

    /// Ends the snapshot of a shard: what it did not name is dropped, and how many those were is
    /// returned. Walks the shard's table (1/256 of the index), bucket by bucket, but only when something was
    /// not named.
    pub fn end_replace(&self, location: Location, shard: Shard) -> u64 {
        let Some(mut tally) = self.locations.tally(location) else { return 0 };
        if !tally.shard(shard).replacing {
            return 0;
        }
        let (stale, colour) =
            (self.locations.end_replace(&mut tally, shard), tally.shard(shard).colour);
        drop(tally);
        if !stale {
            return 0;
        }
        let table = self.table(shard);
        let mut dropped = 0;
        for number in (0..).take_while(|number| *number < table.buckets()) {
            let spaces = self.spaces.read();
            let Some(mut bucket) = table.lock_number(&self.pool, number) else { break };
            let Some(mut tally) = self.locations.tally(location) else { break };
            let stale =
                |entry: &Entry| entry.meta.location() == location && entry.meta.colour() != colour;
            for entry in bucket.extract(stale) {
                self.take_off(&spaces, &mut tally, shard, entry);
                dropped += 1;
            }
        }
        dropped
    }

    /// Gives all entries of a shard of a location one colour.
    fn recolour(&self, location: Location, shard: Shard, colour: bool) {
        let table = self.table(shard);
        for number in (0..).take_while(|number| *number < table.buckets()) {
            let Some(mut bucket) = table.lock_number(&self.pool, number) else { return };
            bucket.change(|entry| {
                let other = entry.meta.location() == location && entry.meta.colour() != colour;
                other.then(|| entry.meta.with_colour(colour))
            });
        }
    }
}

/// The contribution of an entry to the digest of its shard.
fn digest(spaces: &Spaces, entry: Entry) -> u64 {
    let Some((set, space)) = spaces.of_entry(entry.meta.set()) else { return 0 };
    set.digester.digest(&space.mixer.unmix(entry.key), entry.meta.tiers())
}
