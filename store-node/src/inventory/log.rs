//! The change log of a node: every change of its catalog, numbered once for all masters.
//!
//! Contract: the catalog appends while it holds the lock of the block's shard, so the changes of one
//! block are in order, and whoever holds that lock and reads [`ChangeLog::head`] knows which changes the
//! shard has seen. Numbers start at 1 and belong to this life of the node.
//!
//! The log keeps a bounded ring of the last changes, and for each of the 256 shards its digest and the
//! number of its last change, both as of the head. A reader that fell off the ring is told so, and goes
//! on from the head: the digests then show its master which shards to ask for.
//!
//! `append` never waits for a reader: it takes one short lock, and readers copy what they need.
//!
//! So that the lag of masters can be told, some changes are *timed*: the first one that comes after a reader
//! had seen everything, which is the one of its batch that waits longest, and at least one in
//! [`TIMED_EVERY`]. The clock is read for those alone.

use super::part_sets::{BlockState, PartSets, SetId};
use larder_proto::{
    block_key::BlockKey,
    event::{Record, RecordKind, SHARDS, Shard},
    part::TierSet,
};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::{Notify, futures::Notified};

/// Changes of a long batch of which one is timed.
pub const TIMED_EVERY: u64 = 64;

/// One change of one block. Made by its constructors, so that no change contradicts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    key: BlockKey,
    before: Option<BlockState>,
    after: Option<BlockState>,
    space: SetId,
    kind: RecordKind,
}

/// Why a node holds a block no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Evicted to make room.
    Evicted,
    /// Removed by command.
    Removed,
    /// Its copy was found damaged.
    Damaged,
}

impl Change {
    /// The node now holds `after` of the block; `before` is what it held, if anything.
    pub fn stored(key: BlockKey, before: Option<BlockState>, after: BlockState) -> Self {
        Self { key, before, after: Some(after), space: after.set, kind: RecordKind::Stored }
    }

    /// The node held `before` of the block and now holds nothing.
    pub fn lost(key: BlockKey, before: BlockState, loss: Loss) -> Self {
        let kind = match loss {
            Loss::Evicted => RecordKind::Evicted,
            Loss::Removed => RecordKind::Removed,
            Loss::Damaged => RecordKind::Damaged,
        };
        Self { key, before: Some(before), after: None, space: before.set, kind }
    }

    /// The node was asked for the block and does not hold it. `space` is any set of the block's tenant
    /// and model version, for example [`PartSets::space`].
    pub fn absent(key: BlockKey, space: SetId) -> Self {
        Self { key, before: None, after: None, space, kind: RecordKind::Absent }
    }

    fn record(&self) -> Record {
        let tiers = self.after.map_or(TierSet::EMPTY, |after| after.tiers);
        Record { key: self.key, set: self.space.0, tiers, kind: self.kind, reserved: 0 }
    }
}

/// The reader asked for changes that the ring no longer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fallen;

/// The state of all shards after change `seq`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digests {
    /// The last change that they include.
    pub seq: u64,
    /// One a shard.
    pub shards: Box<[u64; SHARDS]>,
}

/// How long ago a timed change was logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Age {
    /// How long.
    pub age: Duration,
    /// Changes from this one on to the next timed one: they are younger.
    pub changes: u64,
}

/// See the module.
#[derive(Debug)]
pub struct ChangeLog {
    sets: Arc<PartSets>,
    capacity: usize,
    inner: Mutex<Inner>,
    grown: Notify,
}

#[derive(Debug)]
struct Inner {
    head: u64,
    ring: VecDeque<Record>,
    /// Of changes in the ring, and of the last one before: so there are no more than changes in it.
    timed: VecDeque<Timed>,
    /// A reader has seen everything, so the next change begins a batch.
    all_read: bool,
    digests: Box<[u64; SHARDS]>,
    last_change: Box<[u64; SHARDS]>,
}

/// When a change was logged.
#[derive(Debug, Clone, Copy)]
struct Timed {
    seq: u64,
    at: Instant,
}

impl Inner {
    fn time_if_due(&mut self, clock: impl FnOnce() -> Instant) {
        let last = self.timed.back().map_or(0, |timed| timed.seq);
        if self.all_read || self.head - last >= TIMED_EVERY {
            self.timed.push_back(Timed { seq: self.head, at: clock() });
            self.all_read = false;
        }
        let before_ring = self.head - self.ring.len() as u64;
        while self.timed.get(1).is_some_and(|next| next.seq <= before_ring) {
            self.timed.pop_front();
        }
    }
}

impl ChangeLog {
    /// Changes that a ring keeps by default: 40 bytes each.
    pub const DEFAULT_CAPACITY: usize = 65_536;

    /// An empty log whose ring keeps `capacity` changes, one at least.
    pub fn new(sets: Arc<PartSets>, capacity: usize) -> Self {
        let inner = Inner {
            head: 0,
            ring: VecDeque::new(),
            timed: VecDeque::new(),
            all_read: true,
            digests: Box::new([0; SHARDS]),
            last_change: Box::new([0; SHARDS]),
        };
        Self { sets, capacity: capacity.max(1), inner: Mutex::new(inner), grown: Notify::new() }
    }

    /// The part sets that changes refer to.
    pub fn sets(&self) -> &Arc<PartSets> {
        &self.sets
    }

    /// Numbers a change and returns its number. The caller holds the lock of the block's shard.
    pub fn append(&self, change: Change) -> u64 {
        self.append_by(change, || tokio::time::Instant::now().into_std())
    }

    /// The same, with a clock that is read if this change is to be timed.
    fn append_by(&self, change: Change, clock: impl FnOnce() -> Instant) -> u64 {
        let digest = |state: Option<BlockState>| {
            state.map_or(0, |state| self.sets.digester(state.set).digest(&change.key, state.tiers))
        };
        let difference = digest(change.before) ^ digest(change.after);
        let shard = usize::from(Shard::of(&change.key).0);
        let seq = {
            let mut inner = self.inner.lock();
            inner.head += 1;
            inner.digests[shard] ^= difference;
            if change.kind != RecordKind::Absent {
                inner.last_change[shard] = inner.head;
            }
            if inner.ring.len() == self.capacity {
                inner.ring.pop_front();
            }
            inner.ring.push_back(change.record());
            inner.time_if_due(clock);
            inner.head
        };
        self.grown.notify_waiters();
        seq
    }

    /// The number of the last change; 0 before the first.
    pub fn head(&self) -> u64 {
        self.inner.lock().head
    }

    /// Ends when something was appended after this call. Enable it before looking at the log, so that
    /// nothing is missed in between.
    pub fn grown(&self) -> Notified<'_> {
        self.grown.notified()
    }

    /// The digests of all shards, as of the head.
    pub fn digests(&self) -> Digests {
        let inner = self.inner.lock();
        Digests { seq: inner.head, shards: inner.digests.clone() }
    }

    /// Appends to `out` the changes after number `after`, `limit` at most.
    ///
    /// # Errors
    /// The ring no longer has the first of them; `out` is unchanged.
    pub fn read(&self, after: u64, limit: usize, out: &mut Vec<Record>) -> Result<(), Fallen> {
        let mut inner = self.inner.lock();
        let missing = usize::try_from(inner.head.saturating_sub(after)).unwrap_or(usize::MAX);
        let Some(skip) = inner.ring.len().checked_sub(missing) else { return Err(Fallen) };
        out.extend(inner.ring.range(skip..).take(limit));
        inner.all_read |= missing <= limit;
        Ok(())
    }

    /// How long ago the timed changes among `after + 1 ..= last` were logged. When they have all left the
    /// ring, the age of the oldest that is known: theirs is more.
    pub fn ages(&self, after: u64, last: u64, now: Instant) -> Vec<Age> {
        let inner = self.inner.lock();
        let first = inner.timed.partition_point(|timed| timed.seq <= after);
        let behind = inner.timed.partition_point(|timed| timed.seq <= last).max(first);
        let asked = inner.timed.range(first..behind);
        let oldest = inner.timed.front().filter(|oldest| after < last && last < oldest.seq);
        let mut ages: Vec<Age> = Vec::new();
        let mut ended = last;
        for timed in asked.chain(oldest).rev() {
            let changes = (ended + 1).saturating_sub(timed.seq).max(1);
            ages.push(Age { age: now.saturating_duration_since(timed.at), changes });
            ended = ended.min(timed.seq.saturating_sub(1));
        }
        ages.reverse();
        ages
    }

    /// Sorts shards by their last change, most recent first: what is written is what is asked for.
    pub fn hottest_first(&self, shards: &mut [Shard]) {
        let last_change = self.inner.lock().last_change.clone();
        shards.sort_by_key(|shard| std::cmp::Reverse(last_change[usize::from(shard.0)]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_proto::{
        ContentFingerprint, LayoutFingerprint, ModelVersion,
        event::{PartSet, PartSetDef},
        ids::TenantId,
        part::{PartNumber, Tier},
    };
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn sets() -> Arc<PartSets> {
        let sets = PartSets::new(8);
        for part in 0..4 {
            let model = ModelVersion {
                content: ContentFingerprint::from_bytes([1; 32]),
                layout: LayoutFingerprint::from_bytes([2; 32]),
            };
            let parts = PartSet::of([PartNumber(part)]).unwrap();
            sets.intern(&PartSetDef { tenant: TenantId::from_bytes([3; 16]), model, parts })
                .unwrap();
        }
        Arc::new(sets)
    }

    fn key(shard: u8, n: u8) -> BlockKey {
        let mut bytes = [n; 32];
        bytes[0] = shard;
        BlockKey::from_bytes(bytes)
    }

    fn state(set: u32) -> BlockState {
        BlockState { set: SetId(set), tiers: TierSet::of(Tier::Dram) }
    }

    #[test]
    fn a_reader_gets_what_it_misses_or_is_told_that_it_fell_off() {
        let log = ChangeLog::new(sets(), 4);
        for n in 1..=6 {
            assert_eq!(log.append(Change::stored(key(n, n), None, state(0))), u64::from(n));
        }
        let mut out = Vec::new();
        log.read(2, 10, &mut out).unwrap();
        assert_eq!(
            out.iter().map(|r| r.key).collect::<Vec<_>>(),
            (3..=6).map(|n| key(n, n)).collect::<Vec<_>>()
        );
        out.clear();
        log.read(3, 2, &mut out).unwrap();
        assert_eq!(out.iter().map(|r| r.key).collect::<Vec<_>>(), [key(4, 4), key(5, 5)]);
        assert_eq!(log.read(1, 10, &mut out), Err(Fallen));
        let mut shards = [Shard(0), Shard(5), Shard(6)];
        log.hottest_first(&mut shards);
        assert_eq!(shards, [Shard(6), Shard(5), Shard(0)]);
        out.clear();
        log.read(6, 10, &mut out).unwrap();
        assert!(out.is_empty());
    }

    #[test]
    fn the_first_change_of_a_batch_is_timed_and_one_in_many_of_a_long_one() {
        let log = ChangeLog::new(sets(), 256);
        let began = tokio::time::Instant::now().into_std();
        let at = |ms| began + Duration::from_millis(ms);
        let append = |ms| log.append_by(Change::stored(key(1, 1), None, state(0)), || at(ms));
        let ages = |after, last, ms| -> Vec<u128> {
            log.ages(after, last, at(ms)).iter().map(|age| age.age.as_millis()).collect()
        };
        let read = |after| log.read(after, 1024, &mut Vec::new()).unwrap();
        (1..=3).for_each(|ms| _ = append(ms));
        read(0);
        assert_eq!((append(10), append(11)), (4, 5));
        assert_eq!(ages(0, 5, 12), [11, 2]);
        let stand_for = log.ages(0, 5, at(12)).iter().map(|age| age.changes).collect::<Vec<_>>();
        assert_eq!(stand_for, [3, 2], "every change counts once");
        assert_eq!(ages(1, 3, 12), [0u128; 0], "changes 2 and 3 stand behind change 1");
        // Nobody reads: one in so many is timed, and none is remembered for longer than the ring is.
        (0..100 * TIMED_EVERY).for_each(|n| _ = append(100 + n));
        let (last, now) = (log.head(), 100 + 100 * TIMED_EVERY);
        assert_eq!(ages(last - 2 * TIMED_EVERY, last, now).len(), 2);
        assert!(ages(0, last, now).len() <= 5);
        assert_eq!(ages(0, 5, now).len(), 1, "they left the ring: at least as old as the oldest");
        assert!(ages(0, 5, now)[0] >= 256);
    }

    #[test]
    fn an_absent_notice_is_numbered_and_changes_no_digest() {
        let log = ChangeLog::new(sets(), 4);
        assert_eq!(log.append(Change::absent(key(1, 1), SetId(0))), 1);
        assert_eq!(log.digests(), Digests { seq: 1, shards: Box::new([0; SHARDS]) });
    }

    proptest! {
        #[test]
        fn digests_depend_on_what_is_held_and_not_on_how_it_came(
            ops in prop::collection::vec((0u8..3, 0u8..4, 0u32..5), 0..60),
        ) {
            let sets = sets();
            let log = ChangeLog::new(Arc::clone(&sets), 8);
            let mut held: HashMap<BlockKey, BlockState> = HashMap::new();
            for (shard, n, set) in ops {
                let key = key(shard, n);
                let before = held.get(&key).copied();
                if set < 4 {
                    log.append(Change::stored(key, before, state(set)));
                    held.insert(key, state(set));
                } else if let Some(before) = before {
                    log.append(Change::lost(key, before, Loss::Evicted));
                    held.remove(&key);
                }
            }
            let mut expected = [0u64; SHARDS];
            for (key, state) in &held {
                expected[usize::from(Shard::of(key).0)] ^= sets.digester(state.set).digest(key, state.tiers);
            }
            prop_assert_eq!(*log.digests().shards, expected);
        }
    }
}
