//! The node judges what masters advise.

use super::*;
use std::time::Duration;

const IDLE: Duration = Duration::from_secs(60);
const TIME: Duration = Duration::from_secs(600);

/// Nothing is used for so long.
async fn pass(catalog: &Catalog, seconds: u64) {
    tokio::time::advance(Duration::from_secs(seconds)).await;
    catalog.tell_time();
}

/// All that would be asked about now: blocks, and parents that are not here.
fn asked(catalog: &Catalog) -> Vec<Question> {
    let shards = (0..=u8::MAX).map(Shard);
    shards.flat_map(|shard| catalog.questions(shard, IDLE, 100)).collect()
}

/// The question about one block.
fn about(catalog: &Catalog, n: u8) -> Question {
    let all = asked(catalog);
    all.into_iter().find(|question| question.held == [key(n)]).unwrap()
}

fn says(gone: &[u32], broken: &[u32], spare: &[u32]) -> Advice {
    Advice { gone: gone.to_vec(), broken: broken.to_vec(), spare: spare.to_vec() }
}

fn left(catalog: &Catalog) -> Vec<u8> {
    (1..=9).filter(|n| catalog.peek(&name(*n)).is_some()).collect()
}

#[tokio::test(start_paused = true)]
async fn only_what_is_idle_is_asked_about_with_the_parents_that_are_not_here() {
    let catalog = catalog(8);
    store(&catalog, 2, Some(1), 4096).unwrap();
    store(&catalog, 3, Some(2), 4096).unwrap();
    store(&catalog, 4, None, 4096).unwrap();
    assert!(asked(&catalog).is_empty(), "all are young");
    pass(&catalog, 61).await;
    catalog.read(&name(4)).unwrap();
    let held: Vec<_> = asked(&catalog).iter().map(|question| question.held.clone()).collect();
    assert_eq!(held, [[key(2)], [key(3)]], "4 was just used");
    assert_eq!(about(&catalog, 2).parents, [key(1)]);
    assert!(about(&catalog, 3).parents.is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_reached_goes_first_with_all_that_follows_it_tail_first() {
    let catalog = catalog(4);
    store(&catalog, 9, None, 4096).unwrap();
    for (n, parent) in [(2, 1), (3, 2), (4, 3)] {
        store(&catalog, n, Some(parent), 4096).unwrap();
    }
    pass(&catalog, 61).await;
    // A round: blocks that follow are asked about too, and nothing is said of them.
    let said = asked(&catalog).into_iter().map(|question| {
        let orphan = question.parents == [key(1)];
        let advice = if orphan { says(&[0], &[], &[]) } else { Advice::default() };
        catalog.take_advice(&question, &advice, IDLE, TIME)
    });
    assert_eq!(said.sum::<u64>(), 3);
    for left_over in [vec![2, 3, 9], vec![2, 9], vec![9]] {
        store(&catalog, 100 + u8::try_from(left_over.len()).unwrap(), None, 4096).unwrap();
        assert_eq!(left(&catalog), left_over);
    }
}

#[tokio::test(start_paused = true)]
async fn advice_that_has_become_wrong_changes_nothing() {
    let catalog = catalog(4);
    for n in [9, 8] {
        store(&catalog, n, None, 4096).unwrap();
    }
    store(&catalog, 2, Some(1), 4096).unwrap();
    pass(&catalog, 61).await;
    let (orphan, spare) = (about(&catalog, 2), about(&catalog, 8));
    // The parent comes, and the spare one is used, before the answer is there.
    store(&catalog, 1, None, 4096).unwrap();
    catalog.read(&name(8)).unwrap();
    assert_eq!(catalog.take_advice(&orphan, &says(&[0], &[], &[]), IDLE, TIME), 0);
    assert_eq!(catalog.take_advice(&spare, &says(&[], &[], &[0]), IDLE, TIME), 0);
    // Places that the question does not have are an answer to another one.
    assert_eq!(catalog.take_advice(&spare, &says(&[7], &[7], &[7]), IDLE, TIME), 0);
    store(&catalog, 10, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2, 8], "9 was used longest ago");
}

#[tokio::test(start_paused = true)]
async fn a_keeper_that_is_named_no_more_ends_its_advice_and_no_hint() {
    let catalog = catalog(3);
    for n in [1, 2, 3] {
        store(&catalog, n, None, 4096).unwrap();
    }
    pass(&catalog, 61).await;
    let questions = [2, 3].map(|n| about(&catalog, n));
    for question in &questions {
        catalog.take_advice(question, &says(&[], &[], &[0]), IDLE, TIME);
    }
    super::hints::close(&catalog, &[3]);
    for question in &questions {
        catalog.take_advice(question, &Advice::default(), IDLE, TIME);
    }
    store(&catalog, 10, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2], "the session of 3 is over, whatever masters say");
    store(&catalog, 11, None, 4096).unwrap();
    assert_eq!(left(&catalog), [2], "2 is spare no more: 1 was stored before");
}

#[tokio::test(start_paused = true)]
async fn advice_is_followed_for_its_time_and_a_use_ends_it() {
    let catalog = catalog(3);
    for n in [1, 2, 3] {
        store(&catalog, n, None, 4096).unwrap();
    }
    pass(&catalog, 61).await;
    for n in [2, 3] {
        catalog.take_advice(&about(&catalog, n), &says(&[], &[], &[0]), IDLE, TIME);
    }
    catalog.read(&name(2)).unwrap();
    store(&catalog, 10, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1, 2], "3 is spare still");

    catalog.read(&name(1)).unwrap();
    pass(&catalog, 61).await;
    catalog.take_advice(&about(&catalog, 1), &says(&[], &[], &[0]), IDLE, TIME);
    pass(&catalog, TIME.as_secs()).await;
    store(&catalog, 11, None, 4096).unwrap();
    assert_eq!(left(&catalog), [1], "what was said is too old: 2 was used longest ago");
}

#[tokio::test(start_paused = true)]
async fn all_of_a_chain_that_another_node_keeps_may_go_in_whatever_order_that_is_said() {
    for order in [[1, 2, 3], [3, 2, 1], [2, 3, 1], [2, 1, 3]] {
        let catalog = catalog(4);
        for (n, parent) in [(9, None), (1, None), (2, Some(1)), (3, Some(2))] {
            store(&catalog, n, parent, 4096).unwrap();
        }
        pass(&catalog, 61).await;
        for n in order {
            let question = about(&catalog, n);
            assert_eq!(catalog.take_advice(&question, &says(&[], &[], &[0]), IDLE, TIME), 1);
        }
        for n in 11..14 {
            store(&catalog, n, None, 4096).unwrap();
        }
        assert_eq!(left(&catalog), [9], "said in the order {order:?}");
    }
}
