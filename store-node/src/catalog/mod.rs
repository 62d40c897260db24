//! The catalog: a node's own table of what it holds, and the truth of it.
//!
//! 256 shards by the first byte of the block key, the same shards as in the inventory that masters see.
//! An entry is a `block::Block`; its parts go through one state machine there. Around it this module
//! takes the shard's lock, finds space, lets the eviction policy know, and appends every change to the
//! node's change log *under the same lock*, so that a snapshot of a shard knows which changes it has seen.
//!
//! Invariants
//! - A part is visible from its commit to its removal, and its bytes are immutable all that time (P1, P2).
//! - Nobody frees: space comes back when the last owner of an extent is gone. So a removal takes effect
//!   at once, and bytes that are being read stay in place (P7).
//! - Eviction takes only blocks without descendants here: no holes.
//! - Lock order: policy, then one shard. Two shards are never locked together.

mod block;
mod inventory;
mod put;
mod room;

pub use block::{Producer, WriterId};
pub use put::{Admission, CommitError, Put};
pub use room::Watermarks;

use crate::{
    eviction::{Policy, Unit, UseClock},
    inventory::{
        BlockState, Change, ChangeLog,
        command::{Evicted, Eviction},
        log::Loss,
    },
    tiers::dram::{Arena, DramCopy},
};
use block::{Block, Occupied, Stored};
use larder_proto::{
    BlockKey, Generation, LayoutFingerprint, ModelVersion, PartName, PartNumber, Tier, TierSet,
    event::{PartSet, PartSetDef, SHARDS, Shard},
    frame::PartInfo,
    ids::{Incarnation, TenantId},
    part::PartRef,
};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Names a block in the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockId {
    /// Whose.
    pub tenant: TenantId,
    /// In which layout.
    pub layout: LayoutFingerprint,
    /// The block.
    pub key: BlockKey,
}

impl std::hash::Hash for BlockId {
    /// Over enough to tell blocks apart, and no more: this is on the path of every read.
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write(self.key.as_bytes());
        state.write(&self.layout.as_bytes()[..8]);
    }
}

impl BlockId {
    /// The block of a part.
    pub fn of(name: &PartName) -> Self {
        Self { tenant: name.tenant, layout: name.part.layout, key: name.part.key }
    }

    /// The name of one of its parts.
    pub fn part(&self, part: PartNumber) -> PartName {
        let part = PartRef { key: self.key, layout: self.layout, part };
        PartName { tenant: self.tenant, part }
    }
}

/// A part that is being read: its bytes stay in place until this is dropped.
#[derive(Debug, Clone)]
pub struct PartRead {
    copy: DramCopy,
    info: Arc<PartInfo>,
}

impl PartRead {
    /// The bytes, as committed.
    pub fn bytes(&self) -> &[u8] {
        self.copy.bytes()
    }

    /// What is known of the part.
    pub fn info(&self) -> &Arc<PartInfo> {
        &self.info
    }

    /// Where the bytes lie in the arena.
    pub fn arena_offset(&self) -> u64 {
        self.copy.offset()
    }

    /// The copy itself, for tests that damage it.
    #[cfg(test)]
    pub(crate) fn copy_for_damage(&self) -> &DramCopy {
        &self.copy
    }

    /// Whether the bytes still match their sums.
    pub fn verify(&self) -> Result<(), larder_proto::checksum::Damaged> {
        self.info.sums.verify(0, self.copy.bytes())
    }
}

/// Counts since the start of the node.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "the names are those of the metrics they feed, documented there")]
pub struct Counters {
    pub commits: AtomicU64,
    pub aborts: AtomicU64,
    pub late_commits: AtomicU64,
    pub evicted_blocks: AtomicU64,
    pub evicted_bytes: AtomicU64,
    pub damaged_parts: AtomicU64,
    pub refused_full: AtomicU64,
    pub unannounced_blocks: AtomicU64,
}

/// See the module.
pub struct Catalog {
    incarnation: Incarnation,
    arena: Arc<Arena>,
    shards: Box<[Mutex<HashMap<BlockId, Block>>]>,
    policy: Mutex<Box<dyn Policy>>,
    watermarks: Watermarks,
    clock: UseClock,
    log: Arc<ChangeLog>,
    last_generation: AtomicU64,
    last_writer: AtomicU64,
    parts: AtomicU64,
    blocks: AtomicU64,
    draining: AtomicBool,
    counters: Counters,
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Catalog").field("parts", &self.part_count()).finish_non_exhaustive()
    }
}

impl Catalog {
    /// An empty catalog over `arena`. `incarnation` goes into every generation; changes go to `log`.
    pub fn new(
        incarnation: Incarnation,
        arena: Arc<Arena>,
        policy: Box<dyn Policy>,
        watermarks: Watermarks,
        log: Arc<ChangeLog>,
    ) -> Arc<Self> {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Arc::new(Self {
            incarnation,
            arena,
            shards,
            policy: Mutex::new(policy),
            watermarks,
            clock: UseClock::default(),
            log,
            last_generation: AtomicU64::new(0),
            last_writer: AtomicU64::new(0),
            parts: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            counters: Counters::default(),
        })
    }

    /// The memory below.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Where changes are told.
    pub fn log(&self) -> &Arc<ChangeLog> {
        &self.log
    }

    /// This life of the node.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Counts since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Stored parts.
    pub fn part_count(&self) -> u64 {
        self.parts.load(Ordering::Relaxed)
    }

    /// Blocks with at least one stored part.
    pub fn block_count(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// From now on the node takes nothing new.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether the node takes nothing new.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// A part for reading, which counts as a use. `None` is a miss.
    pub fn read(&self, name: &PartName) -> Option<PartRead> {
        let id = BlockId::of(name);
        let shard = self.shard(&id);
        let block = shard.get(&id)?;
        let stored = block.stored(name.part.part)?;
        if let Some(unit) = &block.unit {
            unit.touch(&self.clock);
        }
        Some(PartRead { copy: stored.copy.clone(), info: Arc::clone(&stored.info) })
    }

    /// Tiers that hold a part. An existence check renews nothing (F27).
    pub fn tiers(&self, name: &PartName) -> TierSet {
        let id = BlockId::of(name);
        let shard = self.shard(&id);
        match shard.get(&id).and_then(|block| block.stored(name.part.part)) {
            Some(_) => TierSet::of(Tier::Dram),
            None => TierSet::EMPTY,
        }
    }

    /// Withdraws a damaged copy, if it is still the one of `generation`: it is gone before the miss that
    /// follows is answered, so a recompute can replace it (P1).
    pub fn withdraw_damaged(&self, name: &PartName, generation: Generation) -> bool {
        let (id, part) = (BlockId::of(name), name.part.part);
        let taken = self.take(&id, Loss::Damaged, |block| {
            match block.stored(part).is_some_and(|s| s.info.generation == generation) {
                true => vec![part],
                false => Vec::new(),
            }
        });
        self.counters.damaged_parts.fetch_add(taken.blocks, Ordering::Relaxed);
        taken.blocks > 0
    }

    /// Removes what the filter selects. Parts that are being read are removed too; their bytes stay
    /// until the readers are done.
    pub fn remove(&self, filter: &Eviction) -> Evicted {
        let mut total = Evicted::default();
        let shards: Vec<usize> = match filter.keys.as_slice() {
            [] => (0..SHARDS).collect(),
            keys => keys.iter().map(|key| usize::from(Shard::of(key).0)).collect(),
        };
        for shard in shards.into_iter().collect::<std::collections::BTreeSet<_>>() {
            let selected: Vec<BlockId> = {
                let shard = self.shards[shard].lock();
                shard.iter().filter(|(id, b)| filter.selects(id, b)).map(|(id, _)| *id).collect()
            };
            for id in selected {
                let removal = match filter.dry_run {
                    true => self.weigh(&id, filter),
                    false => self.take(&id, Loss::Removed, |block| filter.chosen(block)),
                };
                total.blocks += removal.blocks;
                total.bytes += removal.bytes;
            }
        }
        total
    }

    /// What a removal would take of a block.
    fn weigh(&self, id: &BlockId, filter: &Eviction) -> Evicted {
        let shard = self.shard(id);
        let block = shard.get(id);
        let chosen = block.into_iter().flat_map(Block::all_stored);
        let lens = chosen.filter(|(_, s)| filter.selects_part(s)).map(|(_, s)| s.info.len);
        let bytes = lens.sum();
        Evicted { blocks: u64::from(bytes > 0), bytes }
    }

    /// Says, with a number, that a block that was asked for is not here (P5).
    pub fn announce_absent(&self, id: &BlockId, model: ModelVersion) {
        let shard = self.shard(id);
        let held = shard.get(id).is_some_and(|block| block.all_stored().next().is_some());
        if !held && let Ok(space) = self.log.sets().space(id.tenant, model) {
            self.log.append(Change::absent(id.key, space));
        }
    }

    /// Takes stored parts out of a block, tells the log, and lets a parent that has no descendants left
    /// be evicted again.
    fn take(
        &self,
        id: &BlockId,
        loss: Loss,
        choose: impl FnOnce(&Block) -> Vec<PartNumber>,
    ) -> Evicted {
        let (removal, orphaned_parent) = {
            let mut shard = self.shard(id);
            let Some(block) = shard.get_mut(id) else { return Evicted::default() };
            let chosen = choose(block);
            let taken: Vec<Stored> =
                chosen.into_iter().filter_map(|part| block.take_stored(part)).collect();
            self.parts.fetch_sub(taken.len() as u64, Ordering::Relaxed);
            let removal = Evicted {
                blocks: u64::from(!taken.is_empty()),
                bytes: taken.iter().map(|stored| stored.info.len).sum(),
            };
            (removal, self.settle(&mut shard, id, loss))
        };
        if let Some(unit) = orphaned_parent.and_then(|parent| self.child_left(&parent)) {
            self.policy.lock().admit(unit);
        }
        removal
    }

    /// After parts were added to or taken from a block: announces what the node now holds of it. Returns
    /// the parent that lost this child, if the block's last part went. Forgets an empty entry.
    fn settle(
        &self,
        shard: &mut HashMap<BlockId, Block>,
        id: &BlockId,
        loss: Loss,
    ) -> Option<BlockId> {
        let block = shard.get_mut(id)?;
        self.announce(id, block, loss);
        let mut lost_by = None;
        if block.all_stored().next().is_none() && block.unit.take().is_some() {
            block.parked = false;
            self.blocks.fetch_sub(1, Ordering::Relaxed);
            lost_by = block.parent.map(|key| BlockId { key, ..*id });
        }
        if block.is_empty() {
            shard.remove(id);
        }
        lost_by
    }

    /// Appends the difference between what masters were told of a block and what is there.
    fn announce(&self, id: &BlockId, block: &mut Block, loss: Loss) {
        let parts = PartSet::of(block.all_stored().map(|(part, _)| part)).unwrap_or_default();
        let after = if parts.is_empty() { None } else { self.state_of(id, block, parts) };
        match (block.announced, after) {
            (before, Some(after)) if before != Some(after) => {
                _ = self.log.append(Change::stored(id.key, before, after));
            }
            (Some(before), None) => _ = self.log.append(Change::lost(id.key, before, loss)),
            (_, _) => {}
        }
        block.announced = after;
    }

    fn state_of(&self, id: &BlockId, block: &Block, parts: PartSet) -> Option<BlockState> {
        let model = ModelVersion { content: block.content, layout: id.layout };
        let set = self.log.sets().intern(&PartSetDef { tenant: id.tenant, model, parts });
        let tiers = TierSet::of(Tier::Dram);
        match set {
            Ok(set) => Some(BlockState { set, tiers }),
            Err(full) => {
                // Kept and served, but unknown to masters; counted, so that it can be seen.
                if self.counters.unannounced_blocks.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::warn!(%full, "block not announced");
                }
                None
            }
        }
    }

    /// Notes that a block with this parent is here now.
    fn child_came(&self, parent: &BlockId, child: &Block) {
        let mut shard = self.shard(parent);
        let block =
            shard.entry(*parent).or_insert_with(|| Block::empty(child.content, child.root, None));
        block.children += 1;
    }

    /// Notes that a block with this parent is gone. A parent that was parked for its children and has
    /// none left comes back: the caller admits it to the policy, whose lock may not be taken here.
    fn child_left(&self, parent: &BlockId) -> Option<Arc<Unit>> {
        let mut shard = self.shard(parent);
        let block = shard.get_mut(parent)?;
        block.children = block.children.saturating_sub(1);
        if block.children > 0 {
            return None;
        }
        let parked = std::mem::take(&mut block.parked);
        let unit = block.unit.clone().filter(|_| parked);
        if block.is_empty() {
            shard.remove(parent);
        }
        unit
    }

    fn shard(&self, id: &BlockId) -> MutexGuard<'_, HashMap<BlockId, Block>> {
        self.shards[usize::from(Shard::of(&id.key).0)].lock()
    }
}

impl Eviction {
    fn selects(&self, id: &BlockId, block: &Block) -> bool {
        let Self { tenant, content, layout, keys, producer: _, dry_run: _ } = self;
        *tenant == id.tenant
            && content.is_none_or(|content| content == block.content)
            && layout.is_none_or(|layout| layout == id.layout)
            && (keys.is_empty() || keys.contains(&id.key))
            && block.all_stored().any(|(_, stored)| self.selects_part(stored))
    }

    fn chosen(&self, block: &Block) -> Vec<PartNumber> {
        let stored = block.all_stored().filter(|(_, stored)| self.selects_part(stored));
        stored.map(|(part, _)| part).collect()
    }

    fn selects_part(&self, stored: &Stored) -> bool {
        let producer = stored.info.origin.producer.as_str();
        self.producer.as_ref().is_none_or(|wanted| wanted == producer)
    }
}

#[cfg(test)]
mod tests;
