mod advice;
mod hints;

use super::*;
use crate::{
    eviction::Lru,
    inventory::{Inventory, PartSets, command::Eviction},
};
use larder_client::memory::PAGE;
use larder_proto::{
    ContentFingerprint, Tier,
    checksum::ChunkSums,
    event::RecordKind,
    frame::{Codec, Reserve},
    ids::TenantName,
};
use proptest::prelude::*;
use tokio::time::Instant;

fn catalog(pages: usize) -> Arc<Catalog> {
    catalog_with(pages, Box::new(Lru::default()))
}

fn catalog_with(pages: usize, policy: Box<dyn Policy>) -> Arc<Catalog> {
    let arena = Arena::new(pages * PAGE, |_| Ok(())).unwrap();
    let log = Arc::new(ChangeLog::new(Arc::new(PartSets::new(1024)), 1024));
    let watermarks = Watermarks { high: 1.0, low: 1.0 };
    Catalog::new(Incarnation(7), arena, policy, watermarks, log)
}

fn key(n: u8) -> BlockKey {
    BlockKey::from_bytes([n; 32])
}

fn name(n: u8) -> PartName {
    let layout = LayoutFingerprint::from_bytes([9; 32]);
    let part = PartRef { key: key(n), layout, part: PartNumber(0) };
    PartName { tenant: TenantName::default().id(), part }
}

fn wish(n: u8, parent: Option<u8>, len: usize) -> Reserve {
    Reserve {
        part: name(n).part,
        len: len as u64,
        codec: Codec::Raw,
        chunk_len: 4096,
        content: ContentFingerprint::from_bytes([1; 32]),
        root: key(parent.map_or(n, |_| 0)),
        parent: parent.map(key),
        origin_hash: None,
    }
}

fn producer() -> Arc<Producer> {
    Arc::new(Producer { name: "engine-a".to_owned(), incarnation: Incarnation(3) })
}

fn reserve(catalog: &Arc<Catalog>, n: u8, parent: Option<u8>, len: usize) -> Admission {
    catalog.reserve(name(n), &wish(n, parent, len), &producer(), None, Instant::now())
}

fn granted(admission: Admission) -> Put {
    match admission {
        Admission::Granted(put) => put,
        other => panic!("not granted: {other:?}"),
    }
}

fn store(catalog: &Arc<Catalog>, n: u8, parent: Option<u8>, len: usize) -> Option<Generation> {
    let Admission::Granted(mut put) = reserve(catalog, n, parent, len) else { return None };
    put.spare().fill(n);
    put.advance(len);
    Some(put.commit(None).unwrap().info().generation)
}

#[test]
fn a_part_is_invisible_until_its_commit_and_a_dropped_put_leaves_nothing() {
    let catalog = catalog(8);
    let mut put = granted(reserve(&catalog, 1, None, 5000));
    assert!(catalog.read(&name(1)).is_none());
    assert!(matches!(reserve(&catalog, 1, None, 5000), Admission::InProgress { .. }));
    put.spare()[..4000].fill(1);
    put.advance(4000);
    drop(put);
    assert_eq!(catalog.arena().used_bytes(), 0);
    assert_eq!(catalog.log().head(), 0);

    assert!(store(&catalog, 1, None, 5000).is_some());
    assert_eq!(catalog.read(&name(1)).unwrap().bytes(), [1; 5000]);
    assert!(matches!(reserve(&catalog, 1, None, 5000), Admission::Exists(_)));
}

#[test]
fn a_commit_with_missing_bytes_or_other_sums_is_refused_and_its_space_comes_back() {
    let catalog = catalog(8);
    let mut put = granted(reserve(&catalog, 1, None, 5000));
    put.spare()[..4096].fill(1);
    put.advance(4096);
    let incomplete = CommitError::Incomplete { filled: 4096, len: 5000 };
    assert_eq!(put.commit(None).unwrap_err(), incomplete);

    let mut put = granted(reserve(&catalog, 1, None, 5000));
    put.spare().fill(1);
    put.advance(5000);
    let mut of_writer = vec![1; 5000];
    of_writer[4999] ^= 1;
    let stated = ChunkSums::of(&of_writer, 4096);
    assert!(matches!(put.commit(Some(&stated)), Err(CommitError::Damaged(d)) if d.chunk == 1));
    assert_eq!((catalog.arena().used_bytes(), catalog.part_count()), (0, 0));
}

#[test]
fn a_revoked_writer_keeps_its_space_but_its_late_commit_replaces_nothing() {
    // A writer stalls past its deadline; another one puts the same part (F11).
    let catalog = catalog(8);
    let mut late = granted(reserve(&catalog, 1, None, 4096));
    catalog.revoke(&late);
    assert_eq!(catalog.arena().used_bytes(), 4096, "the late writer can still write");
    store(&catalog, 1, None, 4096).unwrap();
    late.spare().fill(99);
    late.advance(4096);
    assert_eq!(late.commit(None).unwrap_err(), CommitError::Revoked);
    assert_eq!(catalog.read(&name(1)).unwrap().bytes(), [1; 4096]);
    assert_eq!(catalog.arena().used_bytes(), 4096);
}

#[test]
fn a_part_that_is_read_is_not_evicted_and_a_full_arena_says_so() {
    let catalog = catalog(2);
    store(&catalog, 1, None, 4096).unwrap();
    store(&catalog, 2, None, 4096).unwrap();
    let readers: Vec<_> = [1, 2].map(|n| catalog.read(&name(n)).unwrap()).into();
    assert!(matches!(reserve(&catalog, 3, None, 4096), Admission::Full));
    assert!(catalog.writes_in_progress(Instant::now()).is_empty());
    drop(readers);
    assert!(store(&catalog, 3, None, 4096).is_some(), "back to normal");
}

#[test]
fn tails_go_before_heads_even_if_the_head_was_used_longer_ago() {
    let catalog = catalog(4);
    store(&catalog, 1, None, 4096).unwrap();
    store(&catalog, 2, Some(1), 4096).unwrap();
    store(&catalog, 3, Some(2), 4096).unwrap();
    catalog.read(&name(3)).unwrap();
    store(&catalog, 10, None, 2 * 4096).unwrap();
    let left: Vec<u8> =
        [1, 2, 3].into_iter().filter(|n| catalog.read(&name(*n)).is_some()).collect();
    assert_eq!(left, [1, 2]);
}

#[test]
fn a_child_that_came_before_its_parent_still_protects_it() {
    let catalog = catalog(3);
    store(&catalog, 2, Some(1), 4096).unwrap();
    store(&catalog, 1, None, 4096).unwrap();
    catalog.read(&name(2)).unwrap();
    store(&catalog, 10, None, 4096).unwrap();
    store(&catalog, 11, None, 4096).unwrap();
    assert!(catalog.read(&name(1)).is_some() && catalog.read(&name(2)).is_none());
}

#[test]
fn blocks_whose_parents_lead_back_to_themselves_are_refused_and_everything_stays_evictable() {
    let catalog = catalog(4);
    store(&catalog, 1, Some(3), 4096).unwrap();
    store(&catalog, 2, Some(1), 4096).unwrap();
    let mut put = granted(reserve(&catalog, 3, Some(2), 4096));
    put.spare().fill(3);
    put.advance(4096);
    assert_eq!(put.commit(None).unwrap_err(), CommitError::Ring);
    assert!(store(&catalog, 10, None, 4 * 4096).is_some(), "all of them could go");
}

proptest! {
    /// A fetch brings the blocks of a chain in any order, many at a time.
    #[test]
    fn a_chain_is_stored_whole_in_whatever_order_its_blocks_are_committed(
        order in Just((1u8..=12).collect::<Vec<_>>()).prop_shuffle(),
        at_a_time in 1usize..8,
    ) {
        let catalog = catalog(16);
        let mut open = std::collections::VecDeque::new();
        let commit = |put: Put| put.commit(None).map(drop);
        for n in order {
            let parent = (n > 1).then(|| n - 1);
            let mut put = granted(reserve(&catalog, n, parent, 4096));
            put.spare().fill(n);
            put.advance(4096);
            open.push_back(put);
            if open.len() > at_a_time {
                prop_assert_eq!(commit(open.pop_front().unwrap()), Ok(()));
            }
        }
        for put in open {
            prop_assert_eq!(commit(put), Ok(()));
        }
        prop_assert_eq!(catalog.block_count(), 12);
    }
}

#[test]
fn a_damaged_copy_is_withdrawn_told_and_replaceable() {
    let catalog = catalog(4);
    let generation = store(&catalog, 1, None, 4096).unwrap();
    let read = catalog.read(&name(1)).unwrap();
    assert_eq!(read.verify(), Ok(()));
    read.copy.flip_bit(17);
    assert!(read.verify().is_err());
    drop(read);
    assert!(catalog.withdraw_damaged(&name(1), generation));
    assert!(!catalog.withdraw_damaged(&name(1), generation), "only once");
    assert!(catalog.read(&name(1)).is_none());
    let mut records = Vec::new();
    catalog.log().read(0, 16, &mut records).unwrap();
    let kinds: Vec<RecordKind> = records.iter().map(|record| record.kind).collect();
    assert_eq!(kinds, [RecordKind::Stored, RecordKind::Damaged]);
    let again = store(&catalog, 1, None, 4096).unwrap();
    assert!(again > generation, "a generation is never reused");
}

#[test]
fn a_removal_takes_what_its_filter_says_and_a_dry_run_nothing() {
    let catalog = catalog(8);
    (1..=4).for_each(|n| _ = store(&catalog, n, None, 4096).unwrap());
    let mut filter = Eviction {
        tenant: TenantName::default().id(),
        content: None,
        layout: None,
        keys: vec![key(1), key(3), key(77)],
        producer: None,
        descendants: false,
        unused_for: None,
        tier: None,
        dry_run: true,
    };
    let two = Evicted { blocks: 2, bytes: 2 * 4096 };
    assert_eq!(catalog.remove(&filter), two);
    assert_eq!(catalog.part_count(), 4);
    filter.dry_run = false;
    assert_eq!(catalog.remove(&filter), two);
    assert_eq!((catalog.part_count(), catalog.block_count()), (2, 2));
    let other = Eviction { producer: Some("engine-b".into()), keys: Vec::new(), ..filter.clone() };
    assert_eq!(catalog.remove(&other), Evicted::default());
    let of_other_tenant =
        Eviction { tenant: "t2".parse::<TenantName>().unwrap().id(), keys: Vec::new(), ..filter };
    assert_eq!(catalog.remove(&of_other_tenant), Evicted::default());
}

fn everything() -> Eviction {
    Eviction {
        tenant: TenantName::default().id(),
        content: None,
        layout: None,
        keys: Vec::new(),
        producer: None,
        descendants: false,
        unused_for: None,
        tier: None,
        dry_run: false,
    }
}

#[test]
fn an_audit_counts_each_hole_once_and_no_chain_whose_beginning_is_not_here() {
    let catalog = catalog(16);
    // 1 - 2 - 3 - 4, 3 - 5, and 20 - 21, of which 20 never came.
    for (n, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(3))] {
        store(&catalog, n, parent, 4096).unwrap();
    }
    store(&catalog, 21, Some(20), 4096).unwrap();
    assert_eq!(catalog.audit(), Audit { blocks: 6, ..Audit::default() });
    catalog.remove(&Eviction { keys: vec![key(3)], ..everything() });
    assert_eq!(catalog.audit(), Audit { blocks: 5, holes: 1, ..Audit::default() });
}

#[test]
fn descendants_go_with_a_block_even_where_it_is_not_here() {
    let catalog = catalog(16);
    // 1 - 2 - 3 and 1 - 4 - 5, and 20 - 21, of which 20 never came.
    for (n, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(1)), (5, Some(4))] {
        store(&catalog, n, parent, 4096).unwrap();
    }
    store(&catalog, 21, Some(20), 4096).unwrap();
    let from = |n| Eviction { keys: vec![key(n)], descendants: true, ..everything() };
    let dry = Eviction { dry_run: true, ..from(1) };
    assert_eq!(catalog.remove(&dry).blocks, 5);
    let others = Eviction { tenant: "t2".parse::<TenantName>().unwrap().id(), ..from(1) };
    assert_eq!(catalog.remove(&others).blocks, 0);
    assert_eq!(catalog.remove(&from(4)).blocks, 2);
    let left: Vec<u8> = (1..=5).filter(|n| catalog.read(&name(*n)).is_some()).collect();
    assert_eq!(left, [1, 2, 3]);
    assert_eq!(catalog.remove(&from(20)).blocks, 1);
    assert!(catalog.read(&name(21)).is_none());
}

#[tokio::test(start_paused = true)]
async fn only_what_was_not_used_for_long_enough_is_old() {
    let catalog = catalog(8);
    (1..=3).for_each(|n| _ = store(&catalog, n, None, 4096).unwrap());
    let unused = |seconds| {
        let unused_for = Some(std::time::Duration::from_secs(seconds));
        let filter = Eviction { unused_for, dry_run: true, ..everything() };
        catalog.remove(&filter).blocks
    };
    assert_eq!(unused(1), 0);
    tokio::time::advance(std::time::Duration::from_secs(100)).await;
    catalog.tell_time();
    assert!(catalog.read(&name(2)).is_some());
    assert!(!catalog.tiers(&name(3)).is_empty(), "no use");
    tokio::time::advance(std::time::Duration::from_secs(50)).await;
    assert_eq!([unused(49), unused(51), unused(149), unused(150)], [3, 2, 2, 0]);
}

#[test]
fn existence_checks_keep_nothing_alive() {
    let catalog = catalog(2);
    store(&catalog, 1, None, 4096).unwrap();
    store(&catalog, 2, None, 4096).unwrap();
    (0..10).for_each(|_| assert!(catalog.tiers(&name(1)).has(Tier::Dram)));
    store(&catalog, 3, None, 4096).unwrap();
    assert!(catalog.tiers(&name(1)).is_empty(), "asked about, but not used");
}

#[derive(Debug, Clone)]
enum Op {
    Store { n: u8, parent: Option<u8>, pages: usize },
    Read(u8),
    Release,
    Remove(u8),
    Abort(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let n = || 0u8..24;
    prop_oneof![
        4 => (n(), prop::option::of(n()), 1usize..4)
            .prop_map(|(n, parent, pages)| Op::Store { n, parent, pages }),
        2 => n().prop_map(Op::Read),
        1 => Just(Op::Release),
        1 => n().prop_map(Op::Remove),
        1 => n().prop_map(Op::Abort),
    ]
}

proptest! {
    /// Random puts, reads, removals and evictions: bytes are always those of the name, the sums of
    /// space agree, the inventory says what is there, and eviction leaves no hole.
    #[test]
    fn the_catalog_agrees_with_itself(ops in prop::collection::vec(op(), 1..150)) {
        let catalog = catalog(16);
        let mut readers: Vec<(u8, PartRead)> = Vec::new();
        for op in ops {
            match op {
                Op::Store { n, parent, pages } => {
                    // A chain, not a ring: parents have smaller numbers.
                    let parent = parent.filter(|parent| *parent < n);
                    store(&catalog, n, parent, pages * PAGE);
                }
                Op::Read(n) => readers.extend(catalog.read(&name(n)).map(|read| (n, read))),
                Op::Release => drop(readers.pop()),
                Op::Remove(n) => {
                    let filter = Eviction {
                        tenant: TenantName::default().id(),
                        content: None,
                        layout: None,
                        keys: vec![key(n)],
                        producer: None,
                        descendants: false,
                        unused_for: None,
                        tier: None,
                        dry_run: false,
                    };
                    catalog.remove(&filter);
                }
                Op::Abort(n) => drop(reserve(&catalog, n, None, PAGE)),
            }
            for (n, read) in &readers {
                prop_assert!(read.bytes().iter().all(|byte| byte == n), "bytes of another part");
            }
        }
        readers.clear();
        let (mut bytes, mut parts) = (0, 0);
        catalog.for_each_part(|part, read| {
            bytes += read.copy.footprint_bytes();
            parts += 1;
            assert!(read.bytes().iter().all(|byte| *byte == part.part.key.as_bytes()[0]));
        });
        prop_assert_eq!(catalog.arena().used_bytes(), bytes);
        prop_assert_eq!(catalog.part_count(), parts);
        let announced: usize =
            (0..=255).map(|shard| catalog.snapshot(Shard(shard)).1.len()).sum();
        prop_assert_eq!(announced as u64, catalog.block_count());
        // Everything can go again.
        prop_assert!(store(&catalog, 200, None, 16 * PAGE).is_some());
        prop_assert_eq!(catalog.block_count(), 1);
        let entries: usize = catalog.shards.iter().map(|shard| shard.lock().len()).sum();
        prop_assert_eq!(entries, 1, "ghosts of parents stay behind");
    }
}
