//! Parts between the tiers: offered to an ssd, there, carried on, gone from there, and back in the arena.
//!
//! A part is one entry whatever its copies; each change of its copies is made here under the entry's
//! lock, and told to masters in the same step.

use super::{BlockId, Catalog, InDram, OnSsd, PartRead, Producer, block::Block, block::Stored};
use crate::{
    eviction::{Released, Unit},
    inventory::{command::Evicted, log::Loss},
    tiers::{
        dram::DramCopy,
        ssd::{FooterEntry, SsdCopy},
    },
};
use larder_proto::{Generation, PartName, Tier, frame::PartInfo};
use std::{
    collections::HashSet,
    sync::{Arc, OnceLock, atomic::Ordering},
};

/// Which parts are written to an ssd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admit {
    /// Each as soon as it is stored.
    All,
    /// Each as soon as it is used after it was stored: what is never asked for again costs no writing
    /// (F28).
    SecondTouch,
    /// None.
    None,
}

/// A part to be written to an ssd.
#[derive(Debug)]
pub struct Offer {
    /// Which part.
    pub name: PartName,
    /// Its bytes; they stay in place meanwhile.
    pub copy: DramCopy,
    /// What is known of it.
    pub info: Arc<PartInfo>,
}

/// Where offers go; whether one was taken.
type Sink = Box<dyn Fn(Offer) -> bool + Send + Sync>;

/// What is offered, and to whom.
#[derive(Default)]
pub(super) struct Offers(OnceLock<(Admit, Sink)>);

/// What an audit of the catalog found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Audit {
    /// Blocks with stored parts.
    pub blocks: u64,
    /// Blocks without parts between a stored one and a stored descendant of it. A row of several that were
    /// removed from head to tail is not seen: the catalog no longer knows where it hung.
    pub holes: u64,
    /// Stored parts without a copy.
    pub empty_parts: u64,
    /// Parts that the counts of tiers have too many or too few.
    pub miscounted: u64,
}

impl Catalog {
    /// From now on parts are offered to `sink`, which must not wait.
    pub fn offer_to(&self, admit: Admit, sink: impl Fn(Offer) -> bool + Send + Sync + 'static) {
        let _ = self.offers.0.set((admit, Box::new(sink))); // Once a life.
    }

    /// After a commit.
    pub(super) fn offer_new(&self, name: &PartName, stored: &mut Stored) {
        if let Some((Admit::All, sink)) = self.offers.0.get() {
            offer(name, stored, sink);
        }
    }

    /// After a use.
    pub(super) fn offer_used(&self, name: &PartName, stored: &mut Stored) {
        if let Some((Admit::All | Admit::SecondTouch, sink)) = self.offers.0.get() {
            offer(name, stored, sink);
        }
    }

    /// An offered part was written, or was not. `false`: nobody wants the copy any more.
    pub fn written_to_ssd(
        &self,
        name: &PartName,
        generation: Generation,
        copy: Option<SsdCopy>,
    ) -> bool {
        let id = BlockId::of(name);
        let released = {
            let mut shard = self.shard(&id);
            let Some(block) = shard.get_mut(&id) else { return false };
            let Some(stored) =
                block.stored_mut(name.part.part).filter(|stored| stored.generation == generation)
            else {
                return false;
            };
            stored.offered = false;
            let Some(copy) = copy else { return true };
            self.tally.gone(stored);
            (stored.ssd, stored.uses) = (Some(copy), 0);
            self.tally.came(stored);
            self.announce(&id, block, Loss::Removed);
            let may_go = block.all_stored().all(|(_, stored)| stored.ssd.is_some());
            let parked = may_go && std::mem::take(&mut block.parked);
            let goes = |unit: &Arc<Unit>| parked || (may_go && unit.is_spare(&self.clock));
            block.unit.clone().filter(goes).map(|unit| Released { unit, parked })
        };
        if let Some(released) = released {
            self.order.lock().release(released, &self.clock);
        }
        true
    }

    /// Whether a copy is still the one of its part, and whether it was used since it was written or is to be
    /// kept, and nobody called it spare.
    pub fn ssd_use(&self, name: &PartName, copy: &SsdCopy) -> Option<bool> {
        let id = BlockId::of(name);
        let shard = self.shard(&id);
        let block = shard.get(&id)?;
        let stored = block.stored(name.part.part)?;
        stored.ssd.as_ref().filter(|current| current.is_same(copy))?;
        let (mut wanted, mut spare) = (stored.uses > 0, false);
        if let Some(unit) = &block.unit {
            wanted |= unit.is_kept(&self.clock);
            spare = unit.is_spare(&self.clock);
        }
        Some(wanted && !spare)
    }

    /// The bytes of a copy lie somewhere else now. `false`: the copy was not the current one any more.
    pub fn moved_on_ssd(&self, name: &PartName, from: &SsdCopy, to: SsdCopy) -> bool {
        let id = BlockId::of(name);
        let mut shard = self.shard(&id);
        let stored = shard.get_mut(&id).and_then(|block| block.stored_mut(name.part.part));
        match stored {
            Some(stored) if stored.ssd.as_ref().is_some_and(|current| current.is_same(from)) => {
                self.tally.gone(stored);
                (stored.ssd, stored.uses) = (Some(to), 0);
                self.tally.came(stored);
                true
            }
            _ => false,
        }
    }

    /// A copy on an ssd is damaged: withdrawn, if it is still the current one.
    pub fn withdraw_damaged_on_ssd(&self, name: &PartName, copy: &SsdCopy) -> bool {
        let withdrawn = self.drop_ssd(name, copy, Loss::Damaged);
        self.counters.damaged_parts.fetch_add(u64::from(withdrawn), Ordering::Relaxed);
        withdrawn
    }

    /// A copy on an ssd makes room. If its block is gone from here with it, so are the block's
    /// descendants: nobody could reach them.
    pub fn evict_from_ssd(&self, name: &PartName, copy: &SsdCopy) {
        if !self.drop_ssd(name, copy, Loss::Evicted) {
            return;
        }
        let id = BlockId::of(name);
        let is_whole = |id: &BlockId| self.shard(id).get(id).is_some_and(|block| block.is_stored());
        if !is_whole(&id) {
            self.counters.evicted_blocks.fetch_add(1, Ordering::Relaxed);
            self.counters.evicted_bytes.fetch_add(copy.footprint_bytes(), Ordering::Relaxed);
            self.drop_descendants(&id);
        }
    }

    fn drop_ssd(&self, name: &PartName, copy: &SsdCopy, loss: Loss) -> bool {
        let is_it =
            |stored: &Stored| stored.ssd.as_ref().is_some_and(|current| current.is_same(copy));
        self.drop_copy(name, loss, is_it, |stored| (stored.ssd, stored.uses) = (None, 0))
    }

    /// Takes what follows a block that is not here. Bytes that are being read stay until the readers are
    /// done.
    fn drop_descendants(&self, id: &BlockId) {
        let children = |id: &BlockId| {
            let shard = self.shard(id);
            shard.get(id).map(|block| block.children.to_vec()).unwrap_or_default()
        };
        let mut left = children(id);
        while let Some(key) = left.pop() {
            let child = BlockId { key, ..*id };
            left.extend(children(&child));
            let all = |block: &Block| block.all_stored().map(|(part, _)| part).collect();
            let Evicted { blocks, bytes: _ } = self.take(&child, Loss::Evicted, all);
            self.counters.descendants_dropped.fetch_add(blocks, Ordering::Relaxed);
        }
    }

    /// Copies that lie on ssds and that the catalog knows no more: those of removals by command, and others
    /// that one could not name any more. They are to be noted as removed before one is acknowledged; whoever
    /// cannot note them puts them back ([`Self::leave_behind`]).
    pub fn take_left_behind(&self) -> Vec<OnSsd> {
        std::mem::take(&mut self.left_behind.lock())
    }

    /// A path is given up, and what lies there with it: it keeps no file of the path open.
    pub fn drop_left_behind(&self, is_of: impl Fn(&SsdCopy) -> bool) {
        self.left_behind.lock().retain(|gone| !gone.copy.as_ref().is_some_and(&is_of));
    }

    /// See [`Self::take_left_behind`].
    pub fn leave_behind(&self, copies: impl IntoIterator<Item = OnSsd>) {
        let mut copies = copies.into_iter().peekable();
        if copies.peek().is_some() {
            self.left_behind.lock().extend(copies);
        }
    }

    /// Everything of a path that is out of use: withdrawn. How many copies that were.
    pub fn withdraw_from_ssd(&self, is_of: impl Fn(&SsdCopy) -> bool) -> u64 {
        let mut withdrawn = 0;
        for shard in &self.shards {
            let copies: Vec<(PartName, SsdCopy)> = {
                let shard = shard.lock();
                let of_block = |(id, block): (&BlockId, &Block)| {
                    let copies = block.all_stored().filter_map(|(part, stored)| {
                        let copy = stored.ssd.clone().filter(|copy| is_of(copy))?;
                        Some((id.part(part), copy))
                    });
                    copies.collect::<Vec<_>>()
                };
                shard.iter().map(|(id, block)| (id, &**block)).flat_map(of_block).collect()
            };
            for (name, copy) in copies {
                withdrawn += u64::from(self.drop_ssd(&name, &copy, Loss::Removed));
            }
        }
        withdrawn
    }

    /// Takes in a copy that an earlier life left on an ssd. `false`: the part is here already, or is being
    /// written.
    pub fn adopt(&self, entry: &FooterEntry, producer: &Arc<Producer>, copy: SsdCopy) -> bool {
        let id = BlockId::of(&entry.name);
        let parent = entry.parent.map(|key| BlockId { key, ..id }).filter(|parent| *parent != id);
        if let Some(parent) = &parent {
            // First, so that the parent cannot be evicted between the two.
            self.child_came(parent, &id, entry.content, entry.root);
        }
        let (adopted, is_first) = {
            let mut shard = self.shard(&id);
            let block = shard
                .entry(id)
                .or_insert_with(|| Block::empty(entry.content, entry.root, None).into());
            let free = block.occupied(entry.name.part.part).is_none();
            // A copy that was carried on may lie in its old segment too: it is one copy, and it stays.
            let generation = entry.generation;
            let is_same = |stored: &Stored| stored.generation == generation;
            if !free && !block.stored(entry.name.part.part).is_some_and(is_same) {
                self.leave_behind([OnSsd { generation, copy: Some(copy.clone()) }]);
            }
            if free {
                if !block.is_stored() {
                    (block.content, block.root) = (entry.content, entry.root);
                }
                let stored = Stored {
                    generation: entry.generation,
                    len: entry.len,
                    producer: Arc::clone(producer),
                    dram: None,
                    ssd: Some(copy),
                    offered: false,
                    uses: 0,
                };
                self.tally.came(&stored);
                block.adopt(entry.name.part.part, stored);
            }
            let is_first = free && block.unit.is_none();
            if is_first {
                block.unit = Some(Unit::new(id, 0, &self.clock));
                block.parent = parent.map(|parent| parent.key);
                self.blocks.fetch_add(1, Ordering::Relaxed);
            }
            if free {
                self.announce(&id, block, Loss::Removed);
            }
            (free, is_first)
        };
        if !is_first && let Some(parent) = &parent {
            // The block was counted with its first part.
            self.let_go(&id, Some(*parent));
        }
        adopted
    }

    /// Keeps a part that was brought up for a reader in the arena. `false`: it is there already, or gone.
    pub fn promote(&self, name: &PartName, read: &PartRead) -> bool {
        let id = BlockId::of(name);
        let unit = {
            let mut shard = self.shard(&id);
            let Some(block) = shard.get_mut(&id) else { return false };
            let was_in_dram = block.tiers().has(Tier::Dram);
            let Some(stored) = block.stored_mut(name.part.part).filter(|stored| {
                stored.generation == read.info.generation && stored.dram.is_none()
            }) else {
                return false;
            };
            let PartRead { copy, info } = read.clone();
            let bytes = copy.footprint_bytes();
            self.tally.gone(stored);
            stored.dram = Some(InDram { copy, info });
            self.tally.came(stored);
            self.counters.promoted_parts.fetch_add(1, Ordering::Relaxed);
            if let Some(unit) = &block.unit {
                unit.bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            self.announce(&id, block, Loss::Removed);
            block.unit.clone().filter(|_| !was_in_dram)
        };
        if let Some(unit) = unit {
            self.admit(unit);
        }
        true
    }

    /// Uses of a part since it was stored, or written to an ssd.
    pub fn uses(&self, name: &PartName) -> u8 {
        let id = BlockId::of(name);
        let shard = self.shard(&id);
        let stored = shard.get(&id).and_then(|block| block.stored(name.part.part));
        stored.map_or(0, |stored| stored.uses)
    }

    /// Space in the arena for a part that is brought up.
    pub fn make_room_for(&self, len: u64) -> Option<crate::tiers::dram::WritableExtent> {
        self.make_room(usize::try_from(len).ok()?)
    }

    /// A part that was brought up and proved.
    pub fn brought_up(&self, copy: DramCopy, info: PartInfo) -> PartRead {
        PartRead { copy, info: Arc::new(info) }
    }

    /// Looks for what must not be. Exact while nothing changes.
    pub fn audit(&self) -> Audit {
        let mut audit = Audit::default();
        let mut holes = HashSet::new();
        let counted = super::Tally::default();
        for shard in &self.shards {
            // Of one shard at a time: a catalog may be large.
            let mut parents = Vec::new();
            for (id, block) in shard.lock().iter() {
                let parts = block.all_stored();
                for (_, stored) in parts {
                    audit.empty_parts += u64::from(stored.tiers().is_empty());
                    counted.came(stored);
                }
                if block.is_stored() {
                    audit.blocks += 1;
                    parents.extend(block.parent.map(|key| BlockId { key, ..*id }));
                }
            }
            parents.sort_unstable();
            parents.dedup();
            parents.into_iter().for_each(|id| self.missing_from(id, &mut holes));
        }
        audit.holes = holes.len() as u64;
        let differ = |a: &std::sync::atomic::AtomicU64, b: &std::sync::atomic::AtomicU64| {
            a.load(Ordering::Relaxed).abs_diff(b.load(Ordering::Relaxed))
        };
        audit.miscounted = differ(&counted.parts, &self.tally.parts)
            + differ(&counted.in_dram, &self.tally.in_dram)
            + differ(&counted.on_ssd, &self.tally.on_ssd)
            + differ(&counted.ssd_bytes, &self.tally.ssd_bytes);
        audit
    }

    /// Blocks without parts from this one, the parent of a stored block, up to the next stored one. None
    /// when there is no stored one: then it is the chain's beginning that is not here.
    fn missing_from(&self, parent: BlockId, holes: &mut HashSet<BlockId>) {
        let mut at = Some(parent);
        let mut missing = Vec::new();
        while let Some(id) = at {
            let shard = self.shard(&id);
            let Some(block) = shard.get(&id) else { return };
            if block.is_stored() || holes.contains(&id) {
                return holes.extend(missing);
            }
            missing.push(id);
            at = block.parent.map(|key| BlockId { key, ..id });
        }
    }
}

/// Hands a part out, once at a time.
fn offer(name: &PartName, stored: &mut Stored, sink: &Sink) {
    if stored.ssd.is_some() || stored.offered {
        return;
    }
    if let Some(InDram { copy, info }) = stored.dram.clone() {
        stored.offered = sink(Offer { name: *name, copy, info });
    }
}
