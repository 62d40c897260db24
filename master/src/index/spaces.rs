//! Spaces and part sets: small numbers for what entries have in common.
//!
//! A space is a tenant and a model version: entries of two spaces never meet (P11). A part set belongs to
//! one space, so an entry that names its set names its space. Both tables are bounded and number their
//! rows; a number is used again only when no entry names it any more, and ids carry a generation, so an
//! id kept too long names nothing.

use super::entry::{Mixer, SET_LIMIT};
use hashbrown::HashTable;
use larder_proto::{
    ModelVersion, PartNumber,
    event::{PartSet, PartSetDef, SetDigester},
    fingerprint::LayoutDescription,
    ids::TenantId,
    part::GroupRule,
};
use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// A tenant's blocks of one model version, as numbered by one index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpaceId {
    pub(super) slot: u32,
    generation: u32,
}

/// A set of parts in one space, as numbered by one index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IndexSetId {
    pub(super) slot: u32,
    generation: u32,
}

/// When a block matches: what the index needs to know of a layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rules {
    /// Of each layer group.
    pub(super) groups: Vec<GroupRule>,
    ranks: usize,
}

impl Rules {
    pub(super) fn of(layout: &LayoutDescription) -> Self {
        let groups = layout.groups.iter().map(|group| group.rule).collect();
        Self { groups, ranks: layout.ranks() }
    }

    /// For a layout that nobody described yet: one group that needs every block, where rank `r` holds
    /// part `r`. Of a layout with one group that is right for any number of ranks; of others it promises
    /// too much until they are registered, and the node's answer then corrects it.
    fn unknown() -> Self {
        Self { groups: vec![GroupRule::EveryBlock], ranks: usize::from(u16::MAX) }
    }

    /// The groups, one bit each, whose part of `rank` is in `parts`.
    pub(super) fn groups_held(&self, parts: &PartSet, rank: u32) -> u64 {
        let Some(rank) = usize::try_from(rank).ok().filter(|rank| *rank < self.ranks) else {
            return 0;
        };
        let part = |group: usize| u16::try_from(group * self.ranks + rank).ok().map(PartNumber);
        let held = |group: &usize| part(*group).is_some_and(|part| parts.has(part));
        (0..self.groups.len()).filter(held).fold(0, |bits, group| bits | 1 << group)
    }

    /// The parts of all groups with this rule, of every rank.
    pub(super) fn parts_of(&self, rule: GroupRule) -> impl Iterator<Item = PartNumber> {
        let groups = self.groups.iter().enumerate().filter(move |(_, other)| **other == rule);
        let parts = groups.flat_map(|(group, _)| group * self.ranks..(group + 1) * self.ranks);
        parts.map_while(|part| u16::try_from(part).ok().map(PartNumber))
    }

    /// Every part of a whole block.
    pub(super) fn parts(&self) -> impl Iterator<Item = PartNumber> {
        (0..self.groups.len() * self.ranks)
            .map_while(|part| u16::try_from(part).ok().map(PartNumber))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Free,
    Live,
    /// Left out of answers; freed when its last entry is swept.
    Retired,
}

#[derive(Debug)]
pub(super) struct SpaceRow {
    generation: u32,
    life: Life,
    pub(super) tenant: TenantId,
    pub(super) model: ModelVersion,
    pub(super) mixer: Mixer,
    /// `None` until the layout is described.
    pub(super) rules: Option<Arc<Rules>>,
    /// Entries that name a set of this space.
    pub(super) entries: AtomicU64,
    sets: Vec<u32>,
}

impl SpaceRow {
    pub(super) fn is_retired(&self) -> bool {
        self.life == Life::Retired
    }
}

#[derive(Debug)]
pub(super) struct SetRow {
    generation: u32,
    pub(super) space: u32,
    pub(super) parts: Arc<PartSet>,
    pub(super) digester: SetDigester,
}

/// What a lookup needs of a space, so that it holds no lock while it looks.
#[derive(Debug, Clone)]
pub(super) struct SpaceView {
    pub(super) id: SpaceId,
    pub(super) mixer: Mixer,
    pub(super) rules: Arc<Rules>,
}

/// All spaces and part sets of an index.
#[derive(Debug)]
pub(super) struct Spaces {
    space_limit: usize,
    set_limit: usize,
    seed: u64,
    /// Counts all spaces ever, so that no two have the same secrets.
    made: u64,
    unknown: Arc<Rules>,
    spaces: Vec<SpaceRow>,
    free_spaces: Vec<u32>,
    by_name: HashTable<u32>,
    sets: Vec<SetRow>,
    free_sets: Vec<u32>,
    by_parts: HashTable<u32>,
    hasher: RandomState,
}

impl Spaces {
    pub(super) fn new(space_limit: u32, set_limit: u32, seed: u64) -> Self {
        Self {
            space_limit: space_limit as usize,
            set_limit: set_limit.min(SET_LIMIT) as usize,
            seed,
            made: 0,
            unknown: Arc::new(Rules::unknown()),
            spaces: Vec::new(),
            free_spaces: Vec::new(),
            by_name: HashTable::new(),
            sets: Vec::new(),
            free_sets: Vec::new(),
            by_parts: HashTable::new(),
            hasher: RandomState::new(),
        }
    }

    /// The space of this name, if it is live.
    pub(super) fn find(&self, tenant: &TenantId, model: &ModelVersion) -> Option<SpaceId> {
        let hash = self.hasher.hash_one((tenant, model));
        let same = |slot: &u32| {
            let row = &self.spaces[*slot as usize];
            (&row.tenant, &row.model) == (tenant, model)
        };
        let slot = *self.by_name.find(hash, same)?;
        Some(SpaceId { slot, generation: self.spaces[slot as usize].generation })
    }

    /// The space of this name, made if need be. `None` at the limit.
    pub(super) fn space(&mut self, tenant: &TenantId, model: &ModelVersion) -> Option<SpaceId> {
        if let Some(found) = self.find(tenant, model) {
            return Some(found);
        }
        let fresh = SpaceRow {
            generation: 0,
            life: Life::Live,
            tenant: *tenant,
            model: *model,
            mixer: Mixer::new(self.seed, self.made),
            rules: None,
            entries: AtomicU64::new(0),
            sets: Vec::new(),
        };
        let slot = if let Some(slot) = self.free_spaces.pop() {
            let row = &mut self.spaces[slot as usize];
            *row = SpaceRow { generation: row.generation.wrapping_add(1), ..fresh };
            slot
        } else if self.spaces.len() < self.space_limit {
            self.spaces.push(fresh);
            u32::try_from(self.spaces.len() - 1).ok()?
        } else {
            return None;
        };
        self.made += 1;
        let (spaces, hasher) = (&self.spaces, &self.hasher);
        let name = |slot: &u32| {
            let row = &spaces[*slot as usize];
            hasher.hash_one((&row.tenant, &row.model))
        };
        self.by_name.insert_unique(name(&slot), slot, name);
        Some(SpaceId { slot, generation: self.spaces[slot as usize].generation })
    }

    /// The row of a live space.
    pub(super) fn row(&self, id: SpaceId) -> Option<&SpaceRow> {
        let row = self.spaces.get(id.slot as usize)?;
        (row.generation == id.generation && row.life == Life::Live).then_some(row)
    }

    /// The row of a space that is live, or retired and not swept yet.
    pub(super) fn row_until_swept(&self, id: SpaceId) -> Option<&SpaceRow> {
        let row = self.spaces.get(id.slot as usize)?;
        (row.generation == id.generation && row.life != Life::Free).then_some(row)
    }

    /// What a lookup needs of a live space.
    pub(super) fn view(&self, id: SpaceId) -> Option<SpaceView> {
        let row = self.row(id)?;
        let rules = row.rules.as_ref().unwrap_or(&self.unknown);
        Some(SpaceView { id, mixer: row.mixer, rules: Arc::clone(rules) })
    }

    /// Sets the rules of a live space. False when it is not live.
    pub(super) fn set_rules(&mut self, id: SpaceId, rules: Rules) -> bool {
        let live = self.row(id).is_some();
        if live {
            self.spaces[id.slot as usize].rules = Some(Arc::new(rules));
        }
        live
    }

    /// The number of a part set of a live space. `None` when the space is not live, and at the limit.
    pub(super) fn intern(&mut self, space: SpaceId, parts: &PartSet) -> Option<IndexSetId> {
        let SpaceRow { tenant, model, .. } = *self.row(space)?;
        let hash = self.hasher.hash_one((space.slot, parts));
        let same = |slot: &u32| {
            let row = &self.sets[*slot as usize];
            (row.space, &*row.parts) == (space.slot, parts)
        };
        if let Some(slot) = self.by_parts.find(hash, same) {
            return Some(IndexSetId {
                slot: *slot,
                generation: self.sets[*slot as usize].generation,
            });
        }
        let digester = SetDigester::new(&PartSetDef { tenant, model, parts: parts.clone() });
        let fresh =
            SetRow { generation: 0, space: space.slot, parts: Arc::new(parts.clone()), digester };
        let slot = if let Some(slot) = self.free_sets.pop() {
            let row = &mut self.sets[slot as usize];
            *row = SetRow { generation: row.generation, ..fresh };
            slot
        } else if self.sets.len() < self.set_limit {
            self.sets.push(fresh);
            u32::try_from(self.sets.len() - 1).ok()?
        } else {
            return None;
        };
        self.spaces[space.slot as usize].sets.push(slot);
        let (sets, hasher) = (&self.sets, &self.hasher);
        let name = |slot: &u32| {
            let row = &sets[*slot as usize];
            hasher.hash_one((row.space, &*row.parts))
        };
        self.by_parts.insert_unique(hash, slot, name);
        Some(IndexSetId { slot, generation: self.sets[slot as usize].generation })
    }

    /// The space of a set, if id and space are live.
    pub(super) fn space_of(&self, set: IndexSetId) -> Option<&SpaceRow> {
        let row = self.sets.get(set.slot as usize)?;
        let space = self.spaces.get(row.space as usize)?;
        (row.generation == set.generation && space.life == Life::Live).then_some(space)
    }

    /// The set and space that an entry names, whatever their life.
    pub(super) fn of_entry(&self, set: u32) -> Option<(&SetRow, &SpaceRow)> {
        let row = self.sets.get(set as usize)?;
        Some((row, self.spaces.get(row.space as usize)?))
    }

    /// The parts that an entry of `space` names; `None` if its set is of another space by now.
    pub(super) fn parts_in(&self, space: SpaceId, set: u32) -> Option<&Arc<PartSet>> {
        self.row(space)?;
        self.sets.get(set as usize).filter(|row| row.space == space.slot).map(|row| &row.parts)
    }

    /// Leaves a space out of all answers. False when it was not live.
    pub(super) fn retire(&mut self, id: SpaceId) -> bool {
        let Some(row) = self.row(id) else { return false };
        let hash = self.hasher.hash_one((&row.tenant, &row.model));
        if let Ok(name) = self.by_name.find_entry(hash, |slot| *slot == id.slot) {
            name.remove();
        }
        self.spaces[id.slot as usize].life = Life::Retired;
        true
    }

    /// Retired spaces that still have a row.
    pub(super) fn retired(&self) -> impl Iterator<Item = (u32, &SpaceRow)> {
        let numbered = (0..).zip(&self.spaces);
        numbered.filter(|(_, row)| row.life == Life::Retired)
    }

    /// Frees the rows of retired spaces without entries, and of their sets.
    pub(super) fn free_swept(&mut self) {
        let swept = |(_, row): &(u32, &SpaceRow)| row.entries.load(Relaxed) == 0;
        let slots: Vec<u32> = self.retired().filter(swept).map(|(slot, _)| slot).collect();
        for slot in slots {
            let row = &mut self.spaces[slot as usize];
            row.life = Life::Free;
            row.rules = None;
            for set in std::mem::take(&mut row.sets) {
                let hash = self.hasher.hash_one((slot, &*self.sets[set as usize].parts));
                if let Ok(name) = self.by_parts.find_entry(hash, |other| *other == set) {
                    name.remove();
                }
                // Ends the id.
                let row = &mut self.sets[set as usize];
                row.generation = row.generation.wrapping_add(1);
                row.parts = Arc::default();
                self.free_sets.push(set);
            }
            self.free_spaces.push(slot);
        }
    }

    /// All live spaces.
    pub(super) fn live(&self) -> impl Iterator<Item = (SpaceId, &SpaceRow)> {
        let numbered = (0..).zip(&self.spaces).filter(|(_, row)| row.life == Life::Live);
        numbered.map(|(slot, row)| (SpaceId { slot, generation: row.generation }, row))
    }

    /// Part sets in use.
    pub(super) fn set_count(&self) -> u64 {
        (self.sets.len() - self.free_sets.len()) as u64
    }

    /// Bytes taken from the allocator.
    pub(super) fn bytes(&self) -> u64 {
        // An `Arc` keeps two counts beside its value.
        let counted = |value: usize| value + 2 * size_of::<usize>();
        let rules = |rules: &Rules| {
            counted(size_of::<Rules>()) + rules.groups.capacity() * size_of::<GroupRule>()
        };
        let spaces: usize = self
            .spaces
            .iter()
            .map(|row| row.sets.capacity() * 4 + row.rules.as_deref().map_or(0, rules))
            .sum();
        let parts: usize = self
            .sets
            .iter()
            .map(|row| counted(size_of::<PartSet>()) + row.parts.as_bytes().len())
            .sum();
        let rows = self.spaces.capacity() * size_of::<SpaceRow>()
            + self.sets.capacity() * size_of::<SetRow>()
            + (self.free_spaces.capacity() + self.free_sets.capacity()) * 4
            + self.by_name.allocation_size()
            + self.by_parts.allocation_size();
        (spaces + parts + rows + rules(&self.unknown)) as u64
    }
}
