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
//! - Lock order: the eviction order, then one shard. Two shards are never locked together.

mod advice;
mod block;
mod children;
mod hints;
mod inventory;
mod put;
mod removal;
mod room;
mod tiers;

pub use advice::{Advice, Question};
pub use block::{Producer, WriterId};
pub use put::{Admission, CommitError, Put};
pub use room::Watermarks;
pub use tiers::{Admit, Audit, Offer};

use crate::{
    eviction::{Order, Policy, Released, UseClock},
    inventory::{BlockState, Change, ChangeLog, command::Evicted, log::Loss},
    sync::{Mutex, MutexGuard},
    tiers::{
        dram::{Arena, DramCopy},
        ssd::SsdCopy,
    },
};
use block::{Block, InDram, Occupied, Stored};
use larder_proto::{
    BlockKey, ContentFingerprint, Generation, LayoutFingerprint, ModelVersion, PartName,
    PartNumber, TierSet,
    event::{PartSet, PartSetDef, SHARDS, Shard},
    frame::PartInfo,
    ids::{Incarnation, TenantId},
    part::PartRef,
};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use tokio::time::Instant;

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

/// Where a part was found.
#[derive(Debug, Clone)]
pub enum Found {
    /// In the arena, for reading.
    Here(PartRead),
    /// On an ssd alone: it has to be brought up first.
    OnSsd(SsdCopy),
}

impl Found {
    fn of(stored: &Stored) -> Option<Self> {
        match (&stored.dram, &stored.ssd) {
            (Some(InDram { copy, info }), _) => {
                Some(Self::Here(PartRead { copy: copy.clone(), info: Arc::clone(info) }))
            }
            (None, Some(copy)) => Some(Self::OnSsd(copy.clone())),
            (None, None) => None,
        }
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

/// A copy on an ssd that the catalog knows no more. Before a removal by command is acknowledged it must be
/// sure not to come back with a restart.
#[derive(Debug, Clone)]
pub struct OnSsd {
    /// Which stored copy.
    pub generation: Generation,
    /// Where it is; `None` when it was being written at that moment.
    pub copy: Option<SsdCopy>,
}

impl OnSsd {
    fn of(stored: Stored) -> Option<Self> {
        let Stored { generation, ssd, offered, .. } = stored;
        (ssd.is_some() || offered).then_some(Self { generation, copy: ssd })
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
    pub demoted_blocks: AtomicU64,
    pub demoted_bytes: AtomicU64,
    pub promoted_parts: AtomicU64,
    pub descendants_dropped: AtomicU64,
    pub damaged_parts: AtomicU64,
    pub refused_full: AtomicU64,
    pub unannounced_blocks: AtomicU64,
    pub found_parts: AtomicU64,
    pub missed_parts: AtomicU64,
    pub hints: AtomicU64,
    pub hinted_blocks: AtomicU64,
    pub advised_blocks: AtomicU64,
}

/// How many parts there are, and where. Each part counts from when it is stored; a change of its copies is
/// a part that goes and one that comes.
#[derive(Debug, Default)]
struct Tally {
    parts: AtomicU64,
    in_dram: AtomicU64,
    on_ssd: AtomicU64,
    ssd_bytes: AtomicU64,
}

impl Tally {
    fn came(&self, stored: &Stored) {
        self.change(stored, |counter, by| _ = counter.fetch_add(by, Ordering::Relaxed));
    }

    fn gone(&self, stored: &Stored) {
        self.change(stored, |counter, by| _ = counter.fetch_sub(by, Ordering::Relaxed));
    }

    fn change(&self, stored: &Stored, change: impl Fn(&AtomicU64, u64)) {
        change(&self.parts, 1);
        change(&self.in_dram, u64::from(stored.dram.is_some()));
        if let Some(copy) = &stored.ssd {
            change(&self.on_ssd, 1);
            change(&self.ssd_bytes, copy.footprint_bytes());
        }
    }
}

/// The blocks of a shard. In boxes: a block is several cache lines, and a table of bare blocks would touch all of
/// them at a random place for each new block, and move them whenever it grows.
type Blocks = HashMap<BlockId, Box<Block>>;

/// See the module.
pub struct Catalog {
    incarnation: Incarnation,
    arena: Arc<Arena>,
    shards: Box<[Mutex<Blocks>]>,
    order: Mutex<Order>,
    watermarks: Watermarks,
    clock: UseClock,
    began: Instant,
    log: Arc<ChangeLog>,
    last_generation: AtomicU64,
    last_writer: AtomicU64,
    tally: Tally,
    blocks: AtomicU64,
    draining: AtomicBool,
    counters: Counters,
    offers: tiers::Offers,
    /// Copies that lie on ssds, belong to no part any more, and would be found by a restart. A copy comes here under
    /// the lock of the shard that it leaves, so that at any moment one of the two names it.
    left_behind: Mutex<Vec<OnSsd>>,
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
            order: Mutex::new(Order::new(policy)),
            watermarks,
            clock: UseClock::default(),
            began: Instant::now(),
            log,
            last_generation: AtomicU64::new(0),
            last_writer: AtomicU64::new(0),
            tally: Tally::default(),
            blocks: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            counters: Counters::default(),
            offers: tiers::Offers::default(),
            left_behind: Mutex::default(),
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

    /// Stored parts, whatever their tiers.
    pub fn part_count(&self) -> u64 {
        self.tally.parts.load(Ordering::Relaxed)
    }

    /// Parts in the arena.
    pub fn parts_in_dram(&self) -> u64 {
        self.tally.in_dram.load(Ordering::Relaxed)
    }

    /// Parts on ssds, and the bytes that these copies take there.
    pub fn parts_on_ssd(&self) -> (u64, u64) {
        let Tally { on_ssd, ssd_bytes, .. } = &self.tally;
        (on_ssd.load(Ordering::Relaxed), ssd_bytes.load(Ordering::Relaxed))
    }

    /// Blocks with at least one stored part.
    pub fn block_count(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Sets the clock of uses. To be called about every second: that is how exact it is.
    pub fn tell_time(&self) {
        self.clock.set(self.began.elapsed());
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
    pub fn find(&self, name: &PartName) -> Option<Found> {
        let found = self.use_part(name);
        let Counters { found_parts, missed_parts, .. } = &self.counters;
        let count = if found.is_some() { found_parts } else { missed_parts };
        count.fetch_add(1, Ordering::Relaxed);
        found
    }

    fn use_part(&self, name: &PartName) -> Option<Found> {
        let id = BlockId::of(name);
        let mut shard = self.shard(&id);
        let block = shard.get_mut(&id)?;
        if let Some(unit) = &block.unit {
            unit.touch(&self.clock);
        }
        let stored = block.stored_mut(name.part.part)?;
        stored.uses = stored.uses.saturating_add(1);
        self.offer_used(name, stored);
        Found::of(stored)
    }

    /// The same, without counting as a use.
    pub fn peek(&self, name: &PartName) -> Option<Found> {
        let id = BlockId::of(name);
        let shard = self.shard(&id);
        Found::of(shard.get(&id)?.stored(name.part.part)?)
    }

    /// A part that lies in the arena, for reading. Counts as a use.
    pub fn read(&self, name: &PartName) -> Option<PartRead> {
        match self.find(name)? {
            Found::Here(read) => Some(read),
            Found::OnSsd(_) => None,
        }
    }

    /// Tiers that hold a part. An existence check renews nothing (F27).
    pub fn tiers(&self, name: &PartName) -> TierSet {
        let id = BlockId::of(name);
        let shard = self.shard(&id);
        let stored = shard.get(&id).and_then(|block| block.stored(name.part.part));
        stored.map_or(TierSet::EMPTY, Stored::tiers)
    }

    /// Withdraws a damaged copy from the arena, if it is still the one of `generation`: it is gone before
    /// the miss that follows is answered, so a recompute can replace it (P1). A copy on an ssd stays: it is
    /// verified whenever it is read.
    pub fn withdraw_damaged(&self, name: &PartName, generation: Generation) -> bool {
        let is_it = |stored: &Stored| stored.generation == generation && stored.dram.is_some();
        let withdrawn = self.drop_copy(name, Loss::Damaged, is_it, |stored| stored.dram = None);
        self.counters.damaged_parts.fetch_add(u64::from(withdrawn), Ordering::Relaxed);
        withdrawn
    }

    /// Says, with a number, that a block that was asked for is not here (P5).
    pub fn announce_absent(&self, id: &BlockId, model: ModelVersion) {
        let shard = self.shard(id);
        let held = shard.get(id).is_some_and(|block| block.is_stored());
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
            taken.iter().for_each(|stored| self.tally.gone(stored));
            let removal = Evicted {
                blocks: u64::from(!taken.is_empty()),
                bytes: taken.iter().map(|stored| stored.len).sum(),
            };
            self.leave_behind(taken.into_iter().filter_map(OnSsd::of));
            (removal, self.settle(&mut shard, id, loss))
        };
        self.let_go(id, orphaned_parent);
        removal
    }

    /// A parent lost this child: if it was its last one, it may be evicted again.
    fn let_go(&self, child: &BlockId, orphaned_parent: Option<BlockId>) {
        if let Some(released) = orphaned_parent.and_then(|parent| self.child_left(&parent, child)) {
            self.order.lock().release(released, &self.clock);
        }
    }

    /// Drops one copy of a part, if it is the one meant, and the part with its last copy. Whether it was.
    fn drop_copy(
        &self,
        name: &PartName,
        loss: Loss,
        is_it: impl FnOnce(&Stored) -> bool,
        drop_it: impl FnOnce(&mut Stored),
    ) -> bool {
        let (id, part) = (BlockId::of(name), name.part.part);
        let orphaned_parent = {
            let mut shard = self.shard(&id);
            let Some(block) = shard.get_mut(&id) else { return false };
            let Some(stored) = block.stored_mut(part).filter(|stored| is_it(stored)) else {
                return false;
            };
            self.tally.gone(stored);
            drop_it(stored);
            if stored.tiers().is_empty() {
                block.take_stored(part);
            } else {
                self.tally.came(stored);
            }
            self.settle(&mut shard, &id, loss)
        };
        self.let_go(&id, orphaned_parent);
        true
    }

    /// After parts were added to or taken from a block: announces what the node now holds of it. Returns
    /// the parent that lost this child, if the block's last part went. Forgets an empty entry.
    fn settle(&self, shard: &mut Blocks, id: &BlockId, loss: Loss) -> Option<BlockId> {
        let block = shard.get_mut(id)?;
        self.announce(id, block, loss);
        let mut lost_by = None;
        if !block.is_stored() && block.unit.take().is_some() {
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
        let tiers = block.tiers();
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
    fn child_came(
        &self,
        parent: &BlockId,
        child: &BlockId,
        content: ContentFingerprint,
        root: BlockKey,
    ) {
        let mut shard = self.shard(parent);
        let block =
            shard.entry(*parent).or_insert_with(|| Block::empty(content, root, None).into());
        block.children.insert(child.key);
    }

    /// Notes that a block with this parent is gone. A parent that has none left is released, if its turn has
    /// come before: the caller tells the order, whose lock may not be taken here.
    fn child_left(&self, parent: &BlockId, child: &BlockId) -> Option<Released> {
        let mut shard = self.shard(parent);
        let block = shard.get_mut(parent)?;
        block.children.remove(&child.key);
        if !block.children.is_empty() {
            return None;
        }
        let parked = std::mem::take(&mut block.parked);
        let unit = block.unit.clone().filter(|unit| parked || unit.is_spare(&self.clock));
        if block.is_empty() {
            shard.remove(parent);
        }
        unit.map(|unit| Released { unit, parked })
    }

    fn shard(&self, id: &BlockId) -> MutexGuard<'_, Blocks> {
        self.shards[usize::from(Shard::of(&id.key).0)].lock()
    }
}

#[cfg(test)]
mod tests;
