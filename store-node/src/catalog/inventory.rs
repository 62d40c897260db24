//! What the inventory stream reads of the catalog.

use super::{BlockId, Catalog, InDram, PartRead, Producer};
use crate::inventory::{BlockState, Inventory, Vitals};
use larder_proto::{BlockKey, PartName, PartNumber, Tier, event::Shard};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

impl Inventory for Catalog {
    fn snapshot(&self, shard: Shard) -> (u64, Vec<(BlockKey, BlockState)>) {
        let shard = self.shards[usize::from(shard.0)].lock();
        let blocks =
            shard.iter().filter_map(|(id, block)| Some((id.key, block.announced?))).collect();
        // Under the shard's lock: every change of this shard has been appended.
        (self.log.head(), blocks)
    }

    fn vitals(&self) -> Vitals {
        Vitals {
            used_bytes: self.arena.used_bytes(),
            blocks: self.block_count(),
            draining: self.is_draining(),
        }
    }
}

/// A part that is being written, for people.
#[derive(Debug, Clone)]
pub struct WriteInProgress {
    /// Which part.
    pub part: PartName,
    /// Who writes it.
    pub producer: Arc<Producer>,
    /// For how long.
    pub age: Duration,
}

impl Catalog {
    /// All puts that have not ended.
    pub fn writes_in_progress(&self, now: Instant) -> Vec<WriteInProgress> {
        let mut writes = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            for (id, block) in shard.iter() {
                writes.extend(block.all_writing().map(|(part, writing)| WriteInProgress {
                    part: id.part(part),
                    producer: Arc::clone(&writing.producer),
                    age: writing.age(now),
                }));
            }
        }
        writes
    }

    /// For each block of a chain whether all of `parts` are here, without counting as a use.
    pub fn holds(&self, id: &BlockId, parts: &[PartNumber]) -> bool {
        let shard = self.shard(id);
        let block = shard.get(id);
        block.is_some_and(|block| parts.iter().all(|part| block.stored(*part).is_some()))
    }

    /// Whether those of `parts` that are here are all in `tier`.
    pub fn holds_in(&self, id: &BlockId, parts: &[PartNumber], tier: Tier) -> bool {
        let shard = self.shard(id);
        let block = shard.get(id);
        let mut stored = parts.iter().filter_map(|part| block?.stored(*part));
        stored.all(|stored| stored.tiers().has(tier))
    }

    /// Every part in the arena with its bytes, shard by shard: for scrubbing and for audits.
    pub fn for_each_part(&self, mut visit: impl FnMut(PartName, PartRead)) {
        for shard in &self.shards {
            let parts: Vec<(PartName, PartRead)> = {
                let shard = shard.lock();
                let of_block = |(id, block): (&BlockId, &super::Block)| {
                    let id = *id;
                    let reads = block.all_stored().filter_map(move |(part, stored)| {
                        let InDram { copy, info } = stored.dram.clone()?;
                        Some((id.part(part), PartRead { copy, info }))
                    });
                    reads.collect::<Vec<_>>()
                };
                shard.iter().map(|(id, block)| (id, &**block)).flat_map(of_block).collect()
            };
            parts.into_iter().for_each(|(name, read)| visit(name, read));
        }
    }
}
