//! What happens at each limit, and to what outlives its space or location.

use super::*;
use crate::index::Upsert;
use larder_proto::{
    Location, Tier, TierSet,
    event::{RecordKind, Shard},
};

const DRAM: TierSet = TierSet::of(Tier::Dram);

#[test]
fn memory_stays_flat_when_two_million_blocks_pass_through_a_small_index() {
    // F18: the index grew without end under random prompts, and evicted keys still cost memory.
    for capacity in [1_000, u64::MAX] {
        let index = Index::new(IndexLimits { entries: 100_000, ..IndexLimits::default() });
        let space = index.space(&tenant(1), &model(1, 1)).unwrap();
        let set = index.intern_set(space, &parts(&[0])).unwrap();
        let location = index.begin_location().unwrap();
        let mut samples = Vec::new();
        for n in 0..2_000_000u64 {
            let outcome = index.upsert(location, &key(n), set, DRAM);
            let held = capacity < 100_000 || n < 100_000;
            assert_eq!(outcome, if held { Upsert::Added } else { Upsert::LeftOut });
            if let Some(oldest) = n.checked_sub(capacity) {
                assert!(index.remove(location, space, &key(oldest), RecordKind::Evicted));
            }
            if (n + 1) % 500_000 == 0 {
                samples.push(index.stats().bytes);
            }
        }
        let (least, most) = (samples.iter().min().unwrap(), samples.iter().max().unwrap());
        assert!(most - least <= least / 20, "{samples:?}");
        let stats = index.stats();
        assert_eq!(stats.entries, capacity.min(100_000));
        assert_eq!(stats.left_out, if capacity < 100_000 { 0 } else { 1_900_000 });
        assert!(stats.bytes < 9_000_000, "{stats:?}");
        let answer = index.match_prefix(space, 0, None, &[key(0)]);
        let whole = capacity < 100_000;
        assert_eq!((answer.limited, answer.blocks), (!whole, usize::from(!whole)));
        let reason = whole.then_some(RecordKind::Evicted);
        assert_eq!(index.recall(space, &key(1_998_999)), reason);
    }
}

#[test]
fn a_shard_with_entries_left_out_is_not_comparable_until_a_whole_snapshot() {
    let index = small(10);
    let space = index.space(&tenant(1), &model(1, 1)).unwrap();
    let set = index.intern_set(space, &parts(&[0])).unwrap();
    let (full, other) = (index.begin_location().unwrap(), index.begin_location().unwrap());
    (0..10).for_each(|n| assert_eq!(index.upsert(full, &key(n), set, DRAM), Upsert::Added));
    let shard = Shard::of(&key(10));
    assert_eq!(index.upsert(other, &key(10), set, DRAM), Upsert::LeftOut);
    assert_eq!(index.digests(other)[usize::from(shard.0)], None);
    assert_eq!(index.left_out_shards(other), [shard]);
    assert!(index.limited() && index.left_out_shards(full).is_empty());

    // Nothing of it is held, so nothing of it hides what differs elsewhere.
    let mut theirs = [0; SHARDS];
    theirs[usize::from(shard.0)] = 7;
    theirs[usize::from(shard.0 ^ 1)] = 8;
    assert_eq!(index.differing(other, &theirs), [Shard(shard.0 ^ 1)]);

    assert!(index.forget(full));
    assert_eq!(index.room(), 0, "entries count until they are swept");
    sweep_all(&index);
    assert_eq!(index.room(), 10);
    index.replace_shard(other, shard, [(key(10), set, DRAM)]);
    assert!(index.digests(other)[usize::from(shard.0)].is_some());
    assert!(!index.limited());
    assert_eq!(index.stats().left_out_total, 1);
}

#[test]
fn spaces_sets_and_locations_have_limits_and_their_numbers_come_back() {
    let limits = IndexLimits { spaces: 2, part_sets: 2, locations: 2, ..IndexLimits::default() };
    let index = Index::with_seed(limits, 1);
    let first = index.space(&tenant(1), &model(1, 1)).unwrap();
    assert_eq!(index.find_space(&tenant(2), &model(1, 1)), None);
    assert!(index.space(&tenant(2), &model(1, 1)).is_some());
    assert_eq!(index.space(&tenant(3), &model(1, 1)), None);
    let set = index.intern_set(first, &parts(&[0])).unwrap();
    assert_eq!(index.intern_set(first, &parts(&[0])), Some(set));
    assert!(index.intern_set(first, &parts(&[1])).is_some());
    assert_eq!(index.intern_set(first, &parts(&[2])), None);
    let (a, b) = (index.begin_location().unwrap(), index.begin_location().unwrap());
    assert_eq!(index.begin_location(), None);

    index.upsert(a, &key(1), set, DRAM);
    assert!(index.forget(a) && !index.forget(a) && !index.show(a));
    assert_eq!(index.begin_location(), None, "its entry is still there");
    assert_eq!(index.upsert(a, &key(2), set, DRAM), Upsert::Ignored);
    assert_eq!(index.stats().to_sweep, 1);
    sweep_all(&index);
    assert_eq!(index.begin_location(), Some(a));
    assert!(index.locate(first, &[key(1)]).into_holders().is_empty());

    index.upsert(b, &key(1), set, DRAM);
    assert!(index.retire_space(first) && !index.retire_space(first));
    assert_eq!(index.space(&tenant(3), &model(1, 1)), None, "its entry is still there");
    sweep_all(&index);
    let third = index.space(&tenant(3), &model(1, 1)).unwrap();
    let again = index.intern_set(third, &parts(&[0])).unwrap();
    assert_ne!((first, set), (third, again), "an id kept too long names nothing");
    assert_eq!(index.upsert(b, &key(3), set, DRAM), Upsert::LeftOut);
    assert_eq!(index.match_prefix(first, 0, None, &[key(1)]).blocks, 0);
    assert_eq!(index.upsert(b, &key(3), again, DRAM), Upsert::Added);
    assert!(!index.limited(), "what a retired space lacks is not missed");
}

#[test]
fn explain_has_its_facts() {
    let index = small(1_000);
    let space = index.space(&tenant(1), &model(1, 1)).unwrap();
    let other = index.space(&tenant(1), &model(1, 2)).unwrap();
    let foreign = index.space(&tenant(2), &model(1, 2)).unwrap();
    let rules = [GroupRule::EveryBlock, GroupRule::AtBoundary];
    assert_eq!(index.missing_parts(space, &key(1)), None, "nobody described the layout");
    assert!(index.set_rules(space, &layout(&rules, 2)));
    let location = index.begin_location().unwrap();
    let record = |space, parts: &[u16], n| {
        let set = index.intern_set(space, &super::parts(parts)).unwrap();
        index.upsert(location, &key(n), set, DRAM);
    };
    record(space, &[0, 3], 1);
    record(other, &[0], 1);
    record(foreign, &[0], 1);
    assert_eq!(index.missing_parts(space, &key(1)), Some(vec![PartNumber(1), PartNumber(2)]));
    let elsewhere = index.holders_in_other_layouts(&tenant(1), &model(1, 1), &key(1));
    assert_eq!(elsewhere.len(), 1);
    assert_eq!((elsewhere[0].0, elsewhere[0].1[0].location), (model(1, 2), location));
    index.hide(location);
    assert!(index.locate(space, &[key(1)]).into_holders().is_empty());
    assert_eq!(index.holders_hidden(space, &key(1))[0].location, location);
    for (kind, recalled) in [
        (RecordKind::Damaged, RecordKind::Damaged),
        (RecordKind::Absent, RecordKind::Damaged),
        (RecordKind::Evicted, RecordKind::Evicted),
        (RecordKind::Removed, RecordKind::Removed),
    ] {
        index.remove(location, space, &key(1), kind);
        assert_eq!(index.recall(space, &key(1)), Some(recalled));
    }
    assert_eq!(index.recall(other, &key(1)), None, "another space has its own memory");
    assert!(index.spaces().iter().all(|stats| stats.described == (stats.space == space)));
}

#[test]
fn a_snapshot_that_broke_off_does_not_hide_what_is_stale() {
    let index = small(1_000);
    let space = index.space(&tenant(1), &model(1, 1)).unwrap();
    let set = index.intern_set(space, &parts(&[0])).unwrap();
    let location = index.begin_location().unwrap();
    let of_shard: Vec<BlockKey> =
        (0..).map(key).filter(|key| Shard::of(key) == Shard(3)).take(3).collect();
    let [a, b, c] = [0, 1, 2].map(|at| (of_shard[at], set, DRAM));
    assert_eq!(index.replace_shard(location, Shard(3), [a, b]), 0);
    index.begin_replace(location, Shard(3));
    index.upsert(location, &a.0, a.1, a.2); // and the session ends
    assert_eq!(index.replace_shard(location, Shard(3), [b, c]), 1, "a is gone from the node");
    let held = index.locate(space, &of_shard);
    let held: Vec<usize> = held.iter().map(<[_]>::len).collect();
    assert_eq!(held, [0, 1, 1]);
    assert_eq!(index.location_stats(location).unwrap().entries, 2);
    assert_eq!(index.end_replace(location, Shard(3)), 0, "without a beginning nothing ends");
}

#[test]
fn a_prompt_that_every_node_holds_is_answered_with_the_best_sources() {
    let limits = IndexLimits { locations: 600, ..IndexLimits::default() };
    let index = Index::with_seed(limits, 1);
    let space = index.space(&tenant(1), &model(1, 1)).unwrap();
    let set = index.intern_set(space, &parts(&[0])).unwrap();
    let keys: Vec<BlockKey> = (0..200).map(key).collect();
    let locations: Vec<Location> = (0..600).map(|_| index.begin_location().unwrap()).collect();
    for location in &locations {
        for key in &keys {
            assert_eq!(index.upsert(*location, key, set, TierSet::of(Tier::Ssd)), Upsert::Added);
        }
    }
    index.upsert(locations[9], &keys[0], set, DRAM.with(Tier::Ssd));
    let best = |asker| {
        let answer = index.match_prefix(space, 0, asker, &keys);
        assert_eq!((answer.blocks, answer.runs.len()), (200, 1));
        let sources = &answer.runs[0].sources;
        assert_eq!(sources.len(), crate::index::SOURCE_LIMIT);
        assert_eq!((sources[0].location, sources[0].tier), (locations[9], Tier::Dram));
        sources[1].location
    };
    let seconds: std::collections::BTreeSet<Location> =
        locations[20..60].iter().map(|asker| best(Some(*asker))).collect();
    assert!(seconds.len() > 10, "askers spread over equal sources: {seconds:?}");
    locations.iter().for_each(|location| assert!(index.forget(*location)));
    assert_eq!(index.match_prefix(space, 0, None, &keys).blocks, 0);
    sweep_all(&index);
    assert_eq!((index.stats().entries, index.stats().to_sweep), (0, 0));
}
