//! Removal by command: what a filter selects, counted or taken.

use super::{Block, BlockId, Catalog, OnSsd, block::Stored};
use crate::inventory::{
    command::{Evicted, Eviction},
    log::Loss,
};
use larder_proto::{
    PartNumber, Tier,
    event::{SHARDS, Shard},
};
use std::{
    collections::{BTreeSet, HashSet},
    sync::atomic::Ordering,
};

impl Catalog {
    /// Removes what the filter selects. Parts that are being read are removed too; their bytes stay
    /// until the readers are done.
    ///
    /// Copies on ssds are left behind: the removal is to be made durable before it is acknowledged
    /// ([`Self::take_left_behind`]).
    pub fn remove(&self, filter: &Eviction) -> Evicted {
        self.tell_time();
        let mut total = Evicted::default();
        if filter.descendants {
            for id in self.lineage(filter) {
                total += self.remove_one(&id, filter);
            }
            return total;
        }
        let shards: BTreeSet<usize> = match filter.keys.as_slice() {
            [] => (0..SHARDS).collect(),
            keys => keys.iter().map(|key| usize::from(Shard::of(key).0)).collect(),
        };
        for shard in shards {
            let selected: Vec<BlockId> = {
                let shard = self.shards[shard].lock();
                let named = |id: &BlockId| filter.keys.is_empty() || filter.keys.contains(&id.key);
                let selected = shard
                    .iter()
                    .filter(|(id, block)| named(id) && self.is_selected(filter, id, block));
                selected.map(|(id, _)| *id).collect()
            };
            for id in selected {
                total += self.remove_one(&id, filter);
            }
        }
        total
    }

    /// Selected blocks among those that the filter names and all that follow them here. A block that is not
    /// here is followed too, as far as its children know it.
    fn lineage(&self, filter: &Eviction) -> Vec<BlockId> {
        let mut left: Vec<BlockId> = Vec::new();
        for key in &filter.keys {
            let shard = self.shards[usize::from(Shard::of(key).0)].lock();
            let named = |id: &&BlockId| {
                id.key == *key
                    && id.tenant == filter.tenant
                    && filter.layout.is_none_or(|layout| layout == id.layout)
            };
            left.extend(shard.keys().filter(named));
        }
        let (mut seen, mut selected) = (HashSet::new(), Vec::new());
        while let Some(id) = left.pop() {
            if !seen.insert(id) {
                continue;
            }
            let shard = self.shard(&id);
            let Some(block) = shard.get(&id) else { continue };
            left.extend(block.children.to_vec().into_iter().map(|key| BlockId { key, ..id }));
            if self.is_selected(filter, &id, block) {
                selected.push(id);
            }
        }
        selected
    }

    /// Whether a block has parts that the filter selects, whatever keys it names.
    fn is_selected(&self, filter: &Eviction, id: &BlockId, block: &Block) -> bool {
        let Eviction { tenant, content, layout, unused_for, .. } = filter;
        let is_old =
            |time| block.unit.as_ref().is_some_and(|unit| unit.unused_for(time, &self.clock));
        *tenant == id.tenant
            && content.is_none_or(|content| content == block.content)
            && layout.is_none_or(|layout| layout == id.layout)
            && unused_for.is_none_or(is_old)
            && block.all_stored().any(|(_, stored)| filter.selects_part(stored))
    }

    fn remove_one(&self, id: &BlockId, filter: &Eviction) -> Evicted {
        match (filter.dry_run, filter.tier) {
            (true, _) => self.weigh(id, filter),
            (false, None) => self.take(id, Loss::Removed, |block| filter.chosen(block)),
            (false, Some(tier)) => self.take_from(tier, id, filter),
        }
    }

    /// What a removal would take of a block.
    fn weigh(&self, id: &BlockId, filter: &Eviction) -> Evicted {
        let shard = self.shard(id);
        let block = shard.get(id);
        let stored = block.into_iter().flat_map(|block| block.all_stored());
        let lens: Vec<u64> =
            stored.filter(|(_, s)| filter.selects_part(s)).map(|(_, s)| s.len).collect();
        Evicted { blocks: u64::from(!lens.is_empty()), bytes: lens.iter().sum() }
    }

    /// Takes the copies in one tier. Parts without another one go with them.
    fn take_from(&self, tier: Tier, id: &BlockId, filter: &Eviction) -> Evicted {
        let (removal, orphaned_parent) = {
            let mut shard = self.shard(id);
            let Some(block) = shard.get_mut(id) else { return Evicted::default() };
            let mut removal = Evicted::default();
            for part in filter.chosen(block) {
                let Some(stored) = block.stored_mut(part) else { continue };
                removal.bytes += stored.len;
                removal.blocks = 1;
                let dram_bytes = stored.dram_bytes();
                self.tally.gone(stored);
                self.leave_behind(drop_from(tier, stored));
                let is_gone = stored.tiers().is_empty();
                if !is_gone {
                    self.tally.came(stored);
                }
                if tier == Tier::Dram
                    && let Some(unit) = &block.unit
                {
                    unit.bytes.fetch_sub(dram_bytes, Ordering::Relaxed);
                }
                if is_gone {
                    block.take_stored(part);
                }
            }
            if tier == Tier::Dram && block.is_stored() && !block.tiers().has(Tier::Dram) {
                // Its place in the policy is stale when it comes back and gets a new one.
                block.unit = block.unit.as_ref().map(|unit| unit.again());
            }
            (removal, self.settle(&mut shard, id, Loss::Removed))
        };
        self.let_go(id, orphaned_parent);
        removal
    }
}

/// Drops the copy in a tier; what has to be noted on ssds, if anything.
fn drop_from(tier: Tier, stored: &mut Stored) -> Option<OnSsd> {
    match tier {
        Tier::Dram => {
            stored.dram = None;
            // Only in the arena, and being written: the part goes, so it must not come to be on an ssd.
            let goes = stored.ssd.is_none() && stored.offered;
            goes.then_some(OnSsd { generation: stored.generation, copy: None })
        }
        Tier::Ssd => {
            let copy = stored.ssd.take()?;
            // This generation is noted as removed: were it written again, a restart would not find it. So
            // it is not offered again for as long as it stays in the arena.
            (stored.offered, stored.uses) = (true, 0);
            Some(OnSsd { generation: stored.generation, copy: Some(copy) })
        }
        Tier::Gpu => None,
    }
}

impl Eviction {
    fn chosen(&self, block: &Block) -> Vec<PartNumber> {
        let stored = block.all_stored().filter(|(_, stored)| self.selects_part(stored));
        stored.map(|(part, _)| part).collect()
    }

    fn selects_part(&self, stored: &Stored) -> bool {
        self.producer.as_ref().is_none_or(|wanted| *wanted == stored.producer.name)
            && self.tier.is_none_or(|tier| stored.tiers().has(tier))
    }
}
