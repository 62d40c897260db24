//! Making room: eviction from the high to the low watermark, and for the part at hand.

use super::{BlockId, Catalog, Loss, OnSsd};
use crate::{
    eviction::{Proposal, Unit, Verdict},
    sync::Mutex,
    tiers::dram::WritableExtent,
};
use larder_proto::Tier;
use std::sync::{Arc, atomic::Ordering};

/// Shares of the arena's capacity at which eviction starts and stops.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Watermarks {
    /// Starts above this share.
    pub high: f64,
    /// Stops below this share.
    pub low: f64,
}

impl Catalog {
    /// Space for a part. Evicts when the tier is above its high watermark, and on until the part fits;
    /// `None` when nothing more may go.
    pub(super) fn make_room(&self, len: usize) -> Option<WritableExtent> {
        let capacity = self.arena.capacity_bytes();
        if len as u64 > capacity {
            return None;
        }
        let share = |share: f64| bytes_of_share(capacity, share);
        if self.arena.used_bytes() + len as u64 > share(self.watermarks.high) {
            let goal = share(self.watermarks.low).saturating_sub(len as u64);
            self.evict(&mut || self.arena.used_bytes() <= goal);
        }
        // Enough may be free and no gap long enough: then more has to go.
        let mut extent = None;
        self.evict(&mut || {
            extent = self.arena.allocate(len);
            extent.is_some()
        });
        extent
    }

    /// Takes a block into the eviction order.
    pub(super) fn admit(&self, unit: Arc<Unit>) {
        let mut order = self.order.lock();
        order.admit(unit, &self.clock);
        // Blocks that were removed by command leave their place in the order behind; it is cleared
        // before such places outnumber the blocks.
        let parts = usize::try_from(self.part_count()).unwrap_or(usize::MAX);
        if order.places() > parts.saturating_mul(2).saturating_add(1024) {
            order.retain(&mut |unit| self.is_current(unit));
        }
    }

    /// Evicts, what would be missed least first, until there is enough or no more may go.
    fn evict(&self, enough: &mut dyn FnMut() -> bool) {
        // Mostly there is room, and then nobody waits for the order.
        if !enough() {
            self.order.lock().evict(&self.clock, &mut |unit, from| self.judge(unit, from), enough);
        }
    }

    /// Evicts a block if it may go.
    fn judge(&self, unit: &Unit, proposal: Proposal) -> Verdict {
        let id: &BlockId = &unit.id;
        let parent = {
            let mut shard = self.shard(id);
            let Some(block) = shard.get_mut(id) else { return Verdict::Gone };
            if !block.unit.as_ref().is_some_and(|current| std::ptr::eq(&raw const **current, unit))
            {
                return Verdict::Gone;
            }
            if block.is_in_use() {
                return Verdict::InUse;
            }
            if !block.tiers().has(Tier::Dram) {
                return Verdict::Gone; // It left the arena by another way.
            }
            let bytes: u64 = block.all_stored().map(|(_, stored)| stored.dram_bytes()).sum();
            if block.all_stored().all(|(_, stored)| stored.ssd.is_some()) {
                // It stays here, so its descendants do not matter.
                for stored in block.all_stored_mut() {
                    self.tally.gone(stored);
                    stored.dram = None;
                    self.tally.came(stored);
                }
                match proposal {
                    Proposal::Policy => unit.bytes.store(0, Ordering::Relaxed),
                    // It has a place in the policy still, which is to be stale when the block comes back to the
                    // arena and gets a new one.
                    Proposal::Spare => block.unit = Some(unit.again()),
                }
                self.announce(id, block, Loss::Evicted);
                self.counters.demoted_blocks.fetch_add(1, Ordering::Relaxed);
                self.counters.demoted_bytes.fetch_add(bytes, Ordering::Relaxed);
                return Verdict::Evicted(None);
            }
            if !block.children.is_empty() {
                block.parked |= proposal == Proposal::Policy;
                return Verdict::Parked;
            }
            let parts: Vec<_> = block.all_stored().map(|(part, _)| part).collect();
            let gone = parts.into_iter().filter_map(|part| block.take_stored(part));
            let gone: Vec<_> = gone.inspect(|stored| self.tally.gone(stored)).collect();
            self.leave_behind(gone.into_iter().filter_map(OnSsd::of));
            self.counters.evicted_blocks.fetch_add(1, Ordering::Relaxed);
            self.counters.evicted_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.settle(&mut shard, id, Loss::Evicted)
        };
        Verdict::Evicted(parent.and_then(|parent| self.child_left(&parent, id)))
    }

    fn is_current(&self, unit: &Unit) -> bool {
        let shard = self.shard(&unit.id);
        let block = shard.get(&unit.id).filter(|block| block.tiers().has(Tier::Dram));
        let current = block.and_then(|block| block.unit.as_ref());
        current.is_some_and(|current| std::ptr::eq(&raw const **current, unit))
    }

    /// Bytes that eviction could free now: those of blocks that nobody reads or writes.
    pub fn evictable_bytes(&self) -> u64 {
        let of_shard = |shard: &Mutex<super::Blocks>| {
            let shard = shard.lock();
            let idle = shard.values().filter(|block| !block.is_in_use());
            idle.flat_map(|block| block.all_stored())
                .map(|(_, stored)| stored.dram_bytes())
                .sum::<u64>()
        };
        self.shards.iter().map(of_shard).sum()
    }
}

/// A share of a capacity in bytes.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "shares are in 0..=1 (held by the config) and capacities far below 2^52"
)]
fn bytes_of_share(capacity: u64, share: f64) -> u64 {
    (capacity as f64 * share) as u64
}
