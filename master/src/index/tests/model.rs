//! Random histories against a model that is too simple to be wrong: a map of what each node holds.

use super::*;
use crate::index::{IndexSetId, SpaceId, Upsert};
use larder_proto::{
    Location, Tier, TierSet,
    event::{PartSetDef, RecordKind, Shard, record_digest},
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const KEYS: u64 = 24;
const SPACES: u8 = 2;
const SETS: usize = 4;

/// Keys of three shards, so that each gets several.
fn crowded_key(n: u64) -> BlockKey {
    let mut bytes = *key(n).as_bytes();
    bytes[0] = [0, 1, 255][(n % 3) as usize];
    BlockKey::from_bytes(bytes)
}

#[derive(Debug, Clone)]
enum Op {
    Begin,
    Hide(usize),
    Show(usize),
    Forget(usize),
    Sweep(u64),
    Store(usize, Stored),
    Remove(usize, u8, u64),
    /// Without an end when `bool` is false: the session broke.
    Snapshot(usize, u8, Vec<Stored>, bool),
    Retire(u8),
    /// Of the space that was retired last, whose id a session may still use: stored, or removed.
    Late(usize, Stored, bool),
}

#[derive(Debug, Clone)]
struct Stored {
    space: u8,
    key: u64,
    set: usize,
    tiers: TierSet,
}

fn stored() -> impl Strategy<Value = Stored> {
    let tiers = (1u8..8).prop_map(|bits| TierSet::from_bits(bits).unwrap());
    (0..SPACES, 0..KEYS, 0..SETS, tiers).prop_map(|(space, key, set, tiers)| Stored {
        space,
        key,
        set,
        tiers,
    })
}

fn op() -> impl Strategy<Value = Op> {
    let node = 0usize..4;
    prop_oneof![
        2 => Just(Op::Begin),
        1 => node.clone().prop_map(Op::Hide),
        1 => node.clone().prop_map(Op::Show),
        1 => node.clone().prop_map(Op::Forget),
        1 => (1u64..40).prop_map(Op::Sweep),
        12 => (node.clone(), stored()).prop_map(|(node, stored)| Op::Store(node, stored)),
        6 => (node.clone(), 0..SPACES, 0..KEYS).prop_map(|(node, space, key)| Op::Remove(node, space, key)),
        2 => (node, 0u8..3, prop::collection::vec(stored(), 0..12), any::<bool>())
            .prop_map(|(node, shard, stored, ends)| Op::Snapshot(node, shard, stored, ends)),
        1 => (0..SPACES).prop_map(Op::Retire),
        2 => (0usize..4, stored(), any::<bool>())
            .prop_map(|(node, stored, stores)| Op::Late(node, stored, stores)),
    ]
}

/// One life of a node.
struct Node {
    location: Location,
    shown: bool,
    /// What it holds, whatever the index makes of it: by name of the space, since that outlives ids.
    truth: BTreeMap<(ModelVersion, BlockKey), (PartSet, TierSet)>,
    /// What the index said that it left out.
    left_out: BTreeSet<(ModelVersion, BlockKey)>,
    /// Shards of which something was left out or retired.
    partial: BTreeSet<Shard>,
    /// Shards whose last snapshot broke off: what is right of them the next one says.
    broken_off: BTreeSet<Shard>,
}

struct World {
    index: Index,
    nodes: Vec<Node>,
    /// The current model version of each space, its id, and its sets.
    spaces: Vec<(ModelVersion, SpaceId, Vec<IndexSetId>)>,
    retired: Option<(ModelVersion, SpaceId, Vec<IndexSetId>)>,
    versions: u8,
}

fn set_parts(set: usize) -> PartSet {
    // Two groups of two ranks: all, rank 0 only, group 0 only, group 1 only.
    parts([&[0, 1, 2, 3][..], &[0, 2], &[0, 1], &[2, 3]][set])
}

impl World {
    fn new(entries: u64, rules: &[GroupRule]) -> Self {
        let (index, nodes, spaces) = (small(entries), Vec::new(), Vec::new());
        let mut world = Self { index, nodes, spaces, retired: None, versions: 0 };
        (0..SPACES).for_each(|_| {
            let space = world.next_space(rules);
            world.spaces.push(space);
        });
        world
    }

    fn next_space(&mut self, rules: &[GroupRule]) -> (ModelVersion, SpaceId, Vec<IndexSetId>) {
        self.versions += 1;
        let version = model(self.versions, 1);
        let space = self.index.space(&tenant(1), &version).unwrap();
        assert!(self.index.set_rules(space, &layout(rules, 2)));
        let sets = (0..SETS).map(|set| self.index.intern_set(space, &set_parts(set)).unwrap());
        (version, space, sets.collect())
    }

    fn store(&mut self, node: usize, stored: &Stored) -> Result<(), TestCaseError> {
        let (version, _, sets) = &self.spaces[usize::from(stored.space)];
        let full = self.index.room() == 0;
        let node = &mut self.nodes[node];
        let (key, name) = (crowded_key(stored.key), (*version, crowded_key(stored.key)));
        let held = !node.left_out.contains(&name);
        let now = (set_parts(stored.set), stored.tiers);
        let before = node.truth.insert(name, now.clone()).filter(|_| held);
        let expected = match before {
            Some(before) if before == now => Upsert::Known,
            Some(_) => Upsert::Changed,
            None if full => Upsert::LeftOut,
            None => Upsert::Added,
        };
        if expected == Upsert::LeftOut {
            node.left_out.insert(name);
            node.partial.insert(Shard::of(&key));
        } else {
            node.left_out.remove(&name);
        }
        prop_assert_eq!(
            self.index.upsert(node.location, &key, sets[stored.set], stored.tiers),
            expected
        );
        Ok(())
    }

    fn apply(&mut self, op: &Op, rules: &[GroupRule]) -> Result<(), TestCaseError> {
        let count = self.nodes.len().max(1);
        match op {
            Op::Begin if self.nodes.len() < 4 => {
                let Some(location) = self.index.begin_location() else { return Ok(()) };
                let known = self.nodes.iter().any(|node| node.location == location);
                prop_assert!(!known, "{location:?} is in use");
                self.nodes.push(Node {
                    location,
                    shown: true,
                    truth: BTreeMap::new(),
                    left_out: BTreeSet::new(),
                    partial: BTreeSet::new(),
                    broken_off: BTreeSet::new(),
                });
            }
            Op::Sweep(budget) => drop(self.index.sweep(*budget)),
            Op::Retire(space) => {
                let (version, id, _) = self.spaces[usize::from(*space)].clone();
                prop_assert!(self.index.retire_space(id));
                for node in &mut self.nodes {
                    let of_space = node.truth.keys().filter(|name| name.0 == version);
                    node.partial.extend(of_space.map(|name| Shard::of(&name.1)));
                }
                let next = self.next_space(rules);
                let retired = std::mem::replace(&mut self.spaces[usize::from(*space)], next);
                self.retired = Some(retired);
            }
            _ if self.nodes.is_empty() => {}
            Op::Begin => {}
            Op::Hide(node) | Op::Show(node) => {
                let node = &mut self.nodes[node % count];
                node.shown = matches!(op, Op::Show(_));
                match node.shown {
                    true => prop_assert!(self.index.show(node.location)),
                    false => prop_assert!(self.index.hide(node.location)),
                }
            }
            Op::Forget(node) => {
                let node = self.nodes.remove(node % count);
                prop_assert!(self.index.forget(node.location));
            }
            Op::Store(node, stored) => self.store(node % count, stored)?,
            Op::Remove(node, space, key) => {
                let (version, id, _) = &self.spaces[usize::from(*space)];
                let (node, key) = (&mut self.nodes[node % count], crowded_key(*key));
                let name = (*version, key);
                let held = node.truth.remove(&name).is_some() && !node.left_out.remove(&name);
                let kind = RecordKind::Evicted;
                prop_assert_eq!(self.index.remove(node.location, *id, &key, kind), held);
                prop_assert_eq!(self.index.recall(*id, &key), Some(kind));
            }
            Op::Late(node, stored, stores) => {
                let Some((version, id, sets)) = &self.retired else { return Ok(()) };
                let (node, key) = (&mut self.nodes[node % count], crowded_key(stored.key));
                let (location, name) = (node.location, (*version, key));
                if *stores {
                    node.truth.insert(name, (set_parts(stored.set), stored.tiers));
                    node.partial.insert(Shard::of(&key));
                    let outcome = self.index.upsert(location, &key, sets[stored.set], stored.tiers);
                    prop_assert_eq!(outcome, Upsert::LeftOut);
                } else {
                    node.truth.remove(&name);
                    node.left_out.remove(&name);
                    self.index.remove(location, *id, &key, RecordKind::Removed);
                }
            }
            Op::Snapshot(node, shard, stored, ends) => {
                let (at, shard) = (node % count, Shard([0, 1, 255][usize::from(*shard)]));
                let of_shard: Vec<&Stored> =
                    stored.iter().filter(|s| Shard::of(&crowded_key(s.key)) == shard).collect();
                let node = &mut self.nodes[at];
                let location = node.location;
                self.index.begin_replace(location, shard);
                let named: BTreeSet<(ModelVersion, BlockKey)> = of_shard
                    .iter()
                    .map(|s| (self.spaces[usize::from(s.space)].0, crowded_key(s.key)))
                    .collect();
                if *ends {
                    // What is left out counts anew, and nothing that is not named remains.
                    node.partial.remove(&shard);
                    node.broken_off.remove(&shard);
                }
                for stored in of_shard {
                    self.store(at, stored)?;
                }
                let node = &mut self.nodes[at];
                if *ends {
                    self.index.end_replace(location, shard);
                    let kept = |name: &(ModelVersion, BlockKey)| {
                        Shard::of(&name.1) != shard || named.contains(name)
                    };
                    node.truth.retain(|name, _| kept(name));
                    node.left_out.retain(kept);
                } else {
                    // The index holds old and new; what it left out it has lost count of.
                    node.truth.retain(|name, _| {
                        !node.left_out.contains(name) || Shard::of(&name.1) != shard
                    });
                    node.left_out.retain(|name| Shard::of(&name.1) != shard);
                    node.broken_off.insert(shard);
                }
            }
        }
        Ok(())
    }

    /// Who holds the key in a live space, by rising location, as far as the index was let know.
    fn holders(&self, version: ModelVersion, key: BlockKey) -> Vec<(Location, PartSet, TierSet)> {
        let name = (version, key);
        let known = |node: &&Node| node.shown && !node.left_out.contains(&name);
        let held = |node: &Node| Some((node.location, node.truth.get(&name)?.clone()));
        let mut held: Vec<_> = self.nodes.iter().filter(known).filter_map(held).collect();
        held.sort_by_key(|holder| holder.0);
        held.into_iter().map(|(location, (parts, tiers))| (location, parts, tiers)).collect()
    }

    fn check_digests(&self) -> Result<(), TestCaseError> {
        for node in &self.nodes {
            let mut expected = [0u64; SHARDS];
            for ((version, key), (parts, tiers)) in &node.truth {
                let def = PartSetDef { tenant: tenant(1), model: *version, parts: parts.clone() };
                expected[usize::from(Shard::of(key).0)] ^= record_digest(&def, key, *tiers);
            }
            let digests = self.index.digests(node.location);
            for (shard, (ours, theirs)) in (0..=255).map(Shard).zip(digests.iter().zip(&expected)) {
                if !node.broken_off.contains(&shard) {
                    let may_be_none = node.partial.contains(&shard);
                    prop_assert!(ours.map_or(may_be_none, |ours| ours == *theirs), "{shard:?}");
                }
            }
            let held = node.truth.len() - node.left_out.len();
            let stats = self.index.location_stats(node.location).unwrap();
            prop_assert_eq!(stats.shown, node.shown);
            if node.partial.is_empty() && node.broken_off.is_empty() {
                prop_assert_eq!((stats.entries, stats.left_out), (held as u64, 0));
                prop_assert_eq!(self.index.differing(node.location, &expected), []);
            }
        }
        Ok(())
    }

    fn check_answers(&self, rules: &[GroupRule]) -> Result<(), TestCaseError> {
        let keys: Vec<BlockKey> = (0..KEYS).map(crowded_key).collect();
        let exclude = self.nodes.first().map(|node| node.location);
        for (version, space, _) in &self.spaces {
            let located = self.index.locate(*space, &keys);
            for (key, holders) in keys.iter().zip(located.iter()) {
                let found: Vec<_> = holders
                    .iter()
                    .map(|holder| (holder.location, (*holder.parts).clone(), holder.tiers))
                    .collect();
                prop_assert_eq!(found, self.holders(*version, *key));
            }
            for (rank, exclude) in [(0, None), (1, exclude), (2, None)] {
                let mut held: Vec<Vec<(Location, PartSet, TierSet)>> =
                    keys.iter().map(|key| self.holders(*version, *key)).collect();
                held.iter_mut().for_each(|of| of.retain(|holder| Some(holder.0) != exclude));
                self.check_match(*space, rules, rank, exclude, &keys, &held)?;
            }
        }
        Ok(())
    }

    fn check_match(
        &self,
        space: SpaceId,
        rules: &[GroupRule],
        rank: u16,
        exclude: Option<Location>,
        keys: &[BlockKey],
        held: &[Vec<(Location, PartSet, TierSet)>],
    ) -> Result<(), TestCaseError> {
        let part = |group: usize| PartNumber(u16::try_from(group).unwrap() * 2 + rank);
        let has = |parts: &PartSet, group: usize| rank < 2 && parts.has(part(group));
        let needs = |n: usize, group: usize, block: usize| rules[group].first_needed(n) <= block;
        let groups = 0..rules.len();
        let valid = |n: &usize| {
            (0..*n).all(|block| {
                groups
                    .clone()
                    .filter(|group| needs(*n, *group, block))
                    .all(|group| held[block].iter().any(|(_, parts, _)| has(parts, group)))
            })
        };
        let reach = (0..=keys.len()).rev().find(valid).unwrap();
        let answer = self.index.match_prefix(space, u32::from(rank), exclude, keys);
        prop_assert_eq!(answer.blocks, reach);
        prop_assert_eq!(answer.limited, self.index.stats().left_out > 0);
        prop_assert_eq!(answer.runs.iter().map(|run| run.blocks).sum::<usize>(), reach);
        let mut block = 0;
        for run in &answer.runs {
            let first = block;
            for _ in 0..run.blocks {
                let needed: Vec<usize> =
                    groups.clone().filter(|g| needs(reach, *g, block)).collect();
                prop_assert_eq!(run.groups, needed.iter().fold(0, |bits, group| bits | 1 << group));
                let whole = |parts: &PartSet| {
                    !needed.is_empty() && needed.iter().all(|group| has(parts, *group))
                };
                let expected: BTreeSet<Location> = held[block]
                    .iter()
                    .filter(|holder| whole(&holder.1))
                    .map(|holder| holder.0)
                    .collect();
                let sources: BTreeSet<Location> = run.sources.iter().map(|s| s.location).collect();
                prop_assert_eq!(sources, expected);
                block += 1;
            }
            let tier = |location: Location| {
                let holder = held[first].iter().find(|holder| holder.0 == location);
                holder.and_then(|holder| holder.2.fastest()).unwrap()
            };
            prop_assert!(run.sources.iter().all(|source| source.tier == tier(source.location)));
            prop_assert!(run.sources.is_sorted_by_key(|source| source.tier));
        }
        Ok(())
    }
}

fn rules() -> impl Strategy<Value = Vec<GroupRule>> {
    prop_oneof![
        Just(vec![GroupRule::EveryBlock]),
        Just(vec![GroupRule::EveryBlock, GroupRule::AtBoundary]),
        Just(vec![GroupRule::LastWindow { window_blocks: 2 }, GroupRule::EveryBlock]),
        Just(vec![GroupRule::LastWindow { window_blocks: 3 }, GroupRule::AtBoundary]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_index_is_a_copy_of_what_nodes_hold(
        ops in prop::collection::vec(op(), 1..150),
        entries in prop_oneof![Just(10u64), Just(1_000)],
        rules in rules(),
    ) {
        let mut world = World::new(entries, &rules);
        for op in &ops {
            world.apply(op, &rules)?;
            prop_assert!(world.index.stats().entries <= entries);
        }
        world.check_digests()?;
        world.check_answers(&rules)?;
        sweep_all(&world.index);
        world.check_digests()?;
        world.check_answers(&rules)?;
        for node in world.nodes.drain(..) {
            prop_assert!(world.index.forget(node.location));
        }
        sweep_all(&world.index);
        let stats = world.index.stats();
        prop_assert_eq!((stats.entries, stats.left_out, stats.to_sweep), (0, 0, 0));
        prop_assert!(world.index.spaces().iter().all(|space| space.entries == 0));
    }
}

#[test]
fn the_digests_of_a_copy_are_those_of_the_node() {
    let index = small(1_000_000);
    let space = index.space(&tenant(1), &model(1, 1)).unwrap();
    let set = index.intern_set(space, &parts(&[0])).unwrap();
    let location = index.begin_location().unwrap();
    let def = PartSetDef { tenant: tenant(1), model: model(1, 1), parts: parts(&[0]) };
    let tiers = TierSet::of(Tier::Dram);
    let mut node = [0; SHARDS];
    for n in 0..20_000 {
        index.upsert(location, &key(n), set, tiers);
        node[usize::from(Shard::of(&key(n)).0)] ^= record_digest(&def, &key(n), tiers);
    }
    assert_eq!(all_comparable(index.digests(location)), node);
    assert!(index.differing(location, &node).is_empty());
    // A removal that got lost is found in its shard.
    let lost = Shard::of(&key(77));
    node[usize::from(lost.0)] ^= record_digest(&def, &key(77), tiers);
    assert_eq!(index.differing(location, &node), [lost]);
}
