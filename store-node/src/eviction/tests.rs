//! What holds for every policy, then what is particular to each.

use super::*;
use larder_proto::{BlockKey, LayoutFingerprint, ids::TenantName};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn id(n: u32) -> BlockId {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&n.to_le_bytes());
    BlockId {
        tenant: TenantName::default().id(),
        layout: LayoutFingerprint::from_bytes([0; 32]),
        key: BlockKey::from_bytes(key),
    }
}

fn number(unit: &Unit) -> u32 {
    let key = unit.id.key.as_bytes();
    u32::from_le_bytes([key[0], key[1], key[2], key[3]])
}

/// Blocks around a policy, judged as the catalog judges them.
struct Held {
    policy: Box<dyn Policy>,
    clock: UseClock,
    blocks: BTreeMap<u32, HeldBlock>,
    judged: usize,
}

struct HeldBlock {
    unit: Arc<Unit>,
    parent: Option<u32>,
    children: u32,
    parked: bool,
    in_use: bool,
}

impl Held {
    fn with(name: PolicyName) -> Self {
        let (clock, blocks) = (UseClock::default(), BTreeMap::new());
        Self { policy: name.build(), clock, blocks, judged: 0 }
    }

    fn put_sized(&mut self, n: u32, parent: Option<u32>, bytes: u64) {
        let parent = parent.filter(|parent| self.blocks.contains_key(parent));
        if let Some(parent) = parent {
            self.blocks.get_mut(&parent).unwrap().children += 1;
        }
        let unit = Unit::new(id(n), bytes, &self.clock);
        let block = HeldBlock {
            unit: Arc::clone(&unit),
            parent,
            children: 0,
            parked: false,
            in_use: false,
        };
        assert!(self.blocks.insert(n, block).is_none());
        self.policy.admit(unit);
    }

    fn put(&mut self, n: u32) {
        self.put_sized(n, None, 1);
    }

    fn read(&self, n: u32) {
        self.blocks[&n].unit.touch(&self.clock);
    }

    fn use_it(&mut self, n: u32, in_use: bool) {
        self.blocks.get_mut(&n).unwrap().in_use = in_use;
    }

    /// Evicts up to `count` blocks in one round; which.
    fn evict(&mut self, count: usize) -> Vec<u32> {
        let Self { policy, blocks, judged, .. } = self;
        let gone = std::cell::RefCell::new(Vec::new());
        let mut judge = |unit: &Unit| {
            *judged += 1;
            let n = number(unit);
            let Some(block) = blocks.get_mut(&n) else { return Verdict::Gone };
            if block.in_use {
                return Verdict::InUse;
            }
            if block.children > 0 {
                block.parked = true;
                return Verdict::Parked;
            }
            let parent = blocks.remove(&n).unwrap().parent;
            gone.borrow_mut().push(n);
            Verdict::Evicted(parent.and_then(|parent| {
                let parent = blocks.get_mut(&parent)?;
                parent.children -= 1;
                let back = parent.children == 0 && std::mem::take(&mut parent.parked);
                back.then(|| Released { unit: Arc::clone(&parent.unit), parked: true })
            }))
        };
        let is_enough = policy.evict(&mut judge, &mut || gone.borrow().len() >= count);
        let gone = gone.into_inner();
        assert_eq!(is_enough, gone.len() >= count);
        gone
    }

    fn evict_all(&mut self) -> Vec<u32> {
        self.evict(usize::MAX)
    }
}

fn each(test: impl Fn(Held)) {
    PolicyName::ALL.into_iter().for_each(|name| test(Held::with(name)));
}

#[test]
fn blocks_that_nobody_used_go_in_the_order_in_which_they_came() {
    each(|mut held| {
        (1..=5).for_each(|n| held.put(n));
        assert_eq!(held.evict_all(), [1, 2, 3, 4, 5]);
    });
}

#[test]
fn a_block_that_was_read_outlives_those_that_were_not() {
    each(|mut held| {
        (1..=4).for_each(|n| held.put(n));
        held.read(2);
        assert_eq!(held.evict_all(), [1, 3, 4, 2]);
    });
}

#[test]
fn a_block_in_use_is_passed_over_and_stays_in_the_order() {
    each(|mut held| {
        (1..=2).for_each(|n| held.put(n));
        held.use_it(1, true);
        assert_eq!(held.evict(1), [2]);
        assert_eq!(held.evict(1), [0; 0], "one round, then a clear no");
        held.use_it(1, false);
        assert_eq!(held.evict(1), [1]);
    });
}

/// Rounds once looked at every block in use at the cold end, again and again.
#[test]
fn blocks_in_use_or_parked_at_the_cold_end_are_looked_at_once_and_not_in_every_round() {
    each(|mut held| {
        (0..1000).for_each(|n| held.put(n));
        (0..500).for_each(|n| held.use_it(n, true));
        (500..1000).for_each(|n| held.put_sized(n + 1000, Some(n), 1));
        (3000..4000).for_each(|n| held.put(n));
        (0..100).for_each(|_| assert_eq!(held.evict(1).len(), 1));
        assert!(held.judged < 1500, "{} verdicts for 100 blocks", held.judged);
    });
}

#[test]
fn a_chain_that_nobody_uses_goes_at_a_stretch_and_tail_first() {
    each(|mut held| {
        held.put(1);
        held.put_sized(2, Some(1), 1);
        held.put_sized(3, Some(2), 1);
        held.put(10);
        assert_eq!(held.evict_all(), [3, 2, 1, 10]);
    });
}

#[test]
fn a_parent_that_was_read_while_it_was_parked_outlives_what_was_not() {
    each(|mut held| {
        held.put(1);
        held.put_sized(2, Some(1), 1);
        held.put_sized(3, Some(1), 1);
        assert_eq!(held.evict(1), [2], "the parent is parked on the way");
        held.put(10);
        held.read(1);
        assert_eq!(held.evict_all(), [3, 10, 1]);
    });
}

#[test]
fn places_of_blocks_that_are_gone_are_given_up() {
    each(|mut held| {
        (1..=4).for_each(|n| held.put(n));
        held.blocks.remove(&2);
        held.policy.retain(&mut |unit| number(unit) != 2);
        assert_eq!(held.policy.places(), 3);
        assert_eq!((held.evict_all(), held.judged), (vec![1, 3, 4], 3));
    });
}

#[derive(Debug, Clone)]
enum Op {
    Put { n: u32, parent: Option<u32>, bytes: u64 },
    Read(u32),
    InUse(u32, bool),
    Remove(u32),
    Evict(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let n = || 0u32..40;
    prop_oneof![
        6 => (n(), prop::option::of(n()), 1u64..9)
            .prop_map(|(n, parent, bytes)| Op::Put { n, parent, bytes }),
        4 => n().prop_map(Op::Read),
        1 => (n(), any::<bool>()).prop_map(|(n, in_use)| Op::InUse(n, in_use)),
        1 => n().prop_map(Op::Remove),
        2 => (1usize..6).prop_map(Op::Evict),
    ]
}

proptest! {
    /// Random puts, reads, uses, removals and rounds. No block is lost: a last round takes all that are
    /// here, each of them once, children before parents. Nothing is kept of what is gone.
    #[test]
    fn every_block_is_proposed_in_the_end(
        name in prop::sample::select(&PolicyName::ALL[..]),
        ops in prop::collection::vec(op(), 1..300),
    ) {
        let mut held = Held::with(name);
        for op in ops {
            match op {
                Op::Put { n, parent, bytes } if !held.blocks.contains_key(&n) => {
                    held.put_sized(n, parent.filter(|parent| *parent < n), bytes);
                }
                Op::Read(n) if held.blocks.contains_key(&n) => held.read(n),
                Op::InUse(n, in_use) if held.blocks.contains_key(&n) => held.use_it(n, in_use),
                // A block without children, so that the model stays simple.
                Op::Remove(n) if held.blocks.get(&n).is_some_and(|b| b.children == 0) => {
                    let parent = held.blocks.remove(&n).and_then(|block| block.parent);
                    if let Some(parent) = parent.and_then(|parent| held.blocks.get_mut(&parent)) {
                        parent.children -= 1;
                        if parent.children == 0 && std::mem::take(&mut parent.parked) {
                            held.policy.admit(Arc::clone(&parent.unit));
                        }
                    }
                }
                Op::Evict(count) => {
                    let (before, judged) = (held.policy.places(), held.judged);
                    let gone = held.evict(count).len();
                    // Each place once, and a parent that comes back once more.
                    prop_assert!(held.judged - judged <= before + gone);
                }
                _ => {}
            }
        }
        held.blocks.values_mut().for_each(|block| block.in_use = false);
        let parents: BTreeMap<u32, Option<u32>> =
            held.blocks.iter().map(|(n, block)| (*n, block.parent)).collect();
        let order = held.evict_all();
        let all: BTreeSet<u32> = order.iter().copied().collect();
        prop_assert_eq!(all.len(), order.len(), "no block twice");
        prop_assert_eq!(all, parents.keys().copied().collect::<BTreeSet<_>>());
        let at = |n: &u32| order.iter().position(|other| other == n);
        for (n, parent) in &parents {
            prop_assert!(parent.is_none_or(|parent| at(n) < at(&parent)), "{} after its parent", n);
        }
        prop_assert_eq!(held.policy.places(), 0);
    }
}

/// F28: blocks used once pushed out the hot common prefix.
#[test]
fn one_off_traffic_does_not_flush_what_is_used_again() {
    let mut held = Held::with(PolicyName::S3Fifo);
    let hot = 0..50;
    hot.clone().for_each(|n| held.put(n));
    hot.clone().for_each(|n| held.read(n));
    for n in 1000..21_000 {
        held.put(n);
        if held.blocks.len() > 100 {
            held.evict(1);
        }
    }
    assert!(hot.clone().all(|n| held.blocks.contains_key(&n)), "200 times the cache went through");

    let mut lru = Held::with(PolicyName::Lru);
    hot.clone().for_each(|n| lru.put(n));
    hot.clone().for_each(|n| lru.read(n));
    for n in 1000..1100 {
        lru.put(n);
        lru.evict(usize::from(lru.blocks.len() > 100));
    }
    assert!(!hot.into_iter().any(|n| lru.blocks.contains_key(&n)), "which lru does not withstand");
}

#[test]
fn a_block_that_comes_back_soon_after_it_went_is_kept_over_new_ones() {
    let mut held = Held::with(PolicyName::S3Fifo);
    (1..=4).for_each(|n| held.put(n));
    assert_eq!(held.evict(1), [1]);
    held.put(1);
    (5..=8).for_each(|n| held.put(n));
    assert_eq!(held.evict(6), [2, 3, 4, 5, 6, 7]);
}

#[test]
fn a_block_that_is_often_used_goes_after_one_that_was_used_last() {
    let mut held = Held::with(PolicyName::Gdsf);
    (1..=2).for_each(|n| held.put(n));
    (0..5).for_each(|_| held.read(1));
    held.read(2);
    assert_eq!(held.evict(1), [2]);
}

#[test]
fn of_equally_used_blocks_the_larger_goes_first() {
    let mut held = Held::with(PolicyName::Gdsf);
    held.put_sized(1, None, 10);
    held.put_sized(2, None, 1000);
    held.put_sized(3, None, 100);
    assert_eq!(held.evict_all(), [2, 3, 1]);
}

#[test]
fn what_was_popular_once_does_not_stay_for_good() {
    let mut held = Held::with(PolicyName::Gdsf);
    held.put(0);
    (0..20).for_each(|_| held.read(0));
    let turns = (1..2000).take_while(|n| {
        held.put(*n);
        held.evict(usize::from(held.blocks.len() > 10));
        held.blocks.contains_key(&0)
    });
    assert!((100..1900).contains(&turns.count()), "neither at once nor never");
}
