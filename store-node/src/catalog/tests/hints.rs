//! Hints of engines change what goes next, and nothing else.

use super::*;
use crate::eviction::PolicyName;
use larder_proto::frame::{DEFAULT_RETENTION_S, Priority, ReuseHint, SessionState};
use std::time::Duration;

fn hint(catalog: &Catalog, chain: &[u8], session: SessionState, priority: Priority) -> u32 {
    let keys = chain.iter().map(|n| key(*n)).collect();
    let layout = name(0).part.layout;
    let hint = ReuseHint { layout, keys, session, priority, retention_s: 0 };
    catalog.take_hint(name(0).tenant, &hint)
}

pub(super) fn close(catalog: &Catalog, chain: &[u8]) -> u32 {
    hint(catalog, chain, SessionState::Closed, Priority::Normal)
}

fn keep(catalog: &Catalog, chain: &[u8]) -> u32 {
    hint(catalog, chain, SessionState::Alive, Priority::High)
}

/// Two sessions: 1 -> 2 -> 3 -> 4 and 1 -> 2 -> 5, and no room for more.
fn two_sessions() -> Arc<Catalog> {
    let catalog = catalog(5);
    for (n, parent) in [(1, None), (2, Some(1)), (5, Some(2)), (3, Some(2)), (4, Some(3))] {
        store(&catalog, n, parent, 4096).unwrap();
    }
    catalog
}

/// Which of the two sessions' blocks are here; asks for none.
fn left(catalog: &Catalog) -> Vec<u8> {
    (1..=5).filter(|n| catalog.peek(&name(*n)).is_some()).collect()
}

#[test]
fn the_end_of_a_closed_session_goes_first_back_to_where_another_one_leaves_it() {
    let catalog = two_sessions();
    assert_eq!(close(&catalog, &[1, 2, 3, 4]), 2, "3 and 4 are its own");
    store(&catalog, 10, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2, 3, 5], "not 5, which was stored before");
    store(&catalog, 11, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2, 5]);
    store(&catalog, 12, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2], "from here on as without hints");
}

#[test]
fn a_closed_session_whose_end_is_gone_already_goes_on_from_there() {
    let catalog = two_sessions();
    catalog.remove(&Eviction { keys: vec![key(4)], ..everything() });
    assert_eq!(close(&catalog, &[1, 2, 3, 4]), 1);
    store(&catalog, 10, None, 2 * 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2, 5]);
}

#[test]
fn a_use_after_the_hint_says_more_than_the_hint() {
    let catalog = two_sessions();
    assert_eq!(close(&catalog, &[1, 2, 3, 4]), 2);
    for n in [4, 3] {
        catalog.read(&name(n)).unwrap();
    }
    store(&catalog, 10, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2, 3, 4], "5 was used longest ago");
}

#[test]
fn a_session_that_goes_on_after_all_is_spare_no_more() {
    let catalog = two_sessions();
    close(&catalog, &[1, 2, 3, 4]);
    hint(&catalog, &[1, 2, 3, 4], SessionState::Alive, Priority::Normal);
    store(&catalog, 10, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2, 3, 4]);
}

#[test]
fn what_is_to_be_kept_goes_last_and_goes_when_nothing_else_is_left() {
    for policy in PolicyName::ALL {
        let catalog = catalog_with(6, policy.build());
        for n in 1..=6 {
            store(&catalog, n, None, 4096).unwrap();
        }
        assert_eq!(keep(&catalog, &[1, 2]), 2);
        for n in 10..=17 {
            store(&catalog, n, None, 4096).unwrap();
            assert_eq!(&left(&catalog)[..2], [1, 2], "{policy}: {n}");
        }
        assert!(store(&catalog, 20, None, 6 * 4096).is_some(), "{policy}: a wish keeps nobody out");
        assert!(left(&catalog).is_empty(), "{policy}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_wish_to_keep_ends_with_its_time() {
    let catalog = two_sessions();
    keep(&catalog, &[1, 2, 5]);
    store(&catalog, 10, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2, 3, 5]);
    tokio::time::advance(Duration::from_secs(u64::from(DEFAULT_RETENTION_S) + 1)).await;
    catalog.tell_time();
    store(&catalog, 11, None, 2 * 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2], "3, and 5 before what was stored since");
}

#[test]
fn a_hint_of_another_tenant_or_layout_or_of_nothing_changes_nothing() {
    let catalog = two_sessions();
    let layout = LayoutFingerprint::from_bytes([8; 32]);
    let (session, priority) = (SessionState::Closed, Priority::Normal);
    let keys = vec![key(1), key(2), key(3), key(4)];
    let other = ReuseHint { layout, keys: keys.clone(), session, priority, retention_s: 0 };
    assert_eq!(catalog.take_hint(name(0).tenant, &other), 0);
    let ours = ReuseHint { layout: name(0).part.layout, ..other };
    let stranger = "another".parse::<TenantName>().unwrap().id();
    assert_eq!(catalog.take_hint(stranger, &ours), 0);
    assert_eq!(close(&catalog, &[]), 0);
    store(&catalog, 10, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2, 3, 4]);
}

#[derive(Debug, Clone)]
enum Step {
    Store { n: u8, parent: u8 },
    Read(u8),
    Remove(u8),
    Close(u8),
    Keep(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let block = 1u8..40;
    prop_oneof![
        4 => (block.clone(), 0u8..40).prop_map(|(n, parent)| Step::Store { n, parent }),
        2 => block.clone().prop_map(Step::Read),
        1 => block.clone().prop_map(Step::Remove),
        2 => block.clone().prop_map(Step::Close),
        2 => block.prop_map(Step::Keep),
    ]
}

proptest! {
    /// Whatever is said of blocks: none is lost to the order, and no hole is made.
    #[test]
    fn everything_can_be_evicted_and_no_hole_is_made_whatever_was_hinted(
        steps in prop::collection::vec(step(), 1..200),
        policy in prop::sample::select(PolicyName::ALL.to_vec()),
    ) {
        let catalog = catalog_with(12, policy.build());
        // Parents have lower numbers, so the chain of a block is known without the catalog.
        let mut parents = std::collections::BTreeMap::<u8, u8>::new();
        for step in steps {
            let chain = |end: u8| {
                let next = |n: &u8| parents.get(n).copied().filter(|parent| *parent > 0);
                let mut chain: Vec<u8> = std::iter::successors(Some(end), next).collect();
                chain.reverse();
                chain
            };
            match step {
                Step::Store { n, parent } => {
                    let parent = *parents.entry(n).or_insert(parent % n);
                    let _ = store(&catalog, n, (parent > 0).then_some(parent), 4096);
                }
                Step::Read(n) => _ = catalog.read(&name(n)),
                Step::Remove(n) => {
                    // With what follows it, as `larderctl evict` does by default.
                    let filter = Eviction { keys: vec![key(n)], descendants: true, ..everything() };
                    catalog.remove(&filter);
                }
                Step::Close(n) => _ = close(&catalog, &chain(n)),
                Step::Keep(n) => _ = keep(&catalog, &chain(n)),
            }
            prop_assert_eq!(catalog.audit().holes, 0);
        }
        prop_assert!(store(&catalog, 200, None, 12 * 4096).is_some(), "all of them could go");
        prop_assert_eq!(catalog.block_count(), 1);
    }
}
