use super::*;
use proptest::prelude::*;

fn identity(node: u8) -> Identity {
    Identity {
        node: NodeId::from_bytes([node; 16]),
        name: format!("node-{node}"),
        data_address: "127.0.0.1:1".to_owned(),
        control_address: "127.0.0.1:2".to_owned(),
        version: "0".to_owned(),
        capacity_bytes: 1,
    }
}

fn membership() -> (Membership, Instant) {
    let limits = Limits { node_ttl: Duration::from_secs(5), nodes: 3 };
    (Membership::new(limits), tokio::time::Instant::now().into_std())
}

/// The location of a life that begins is the number of its session.
fn hello(session: u64, node: u8, incarnation: u64) -> Event {
    Event::Hello {
        session: SessionId(session),
        identity: identity(node),
        incarnation: Incarnation(incarnation),
        location: Some(Location(u32::try_from(session).unwrap())),
    }
}

fn ended(session: u64) -> Event {
    Event::Ended { session: SessionId(session) }
}

fn synced(session: u64) -> Event {
    Event::Synced { session: SessionId(session), synced: true }
}

const L1: Location = Location(1);
const L2: Location = Location(2);

#[test]
fn a_node_that_is_back_within_its_ttl_finds_its_entries_and_they_are_used_once_digests_agree() {
    let (mut members, now) = membership();
    members.step(now, hello(1, 1, 7)).unwrap();
    members.step(now, synced(1)).unwrap();
    assert_eq!(members.seen(), Seen { known: 1, synced: 1 });
    assert_eq!(members.step(now, ended(1)), Ok(vec![Action::Hide(L1)]));
    assert_eq!(members.seen(), Seen { known: 1, synced: 0 });
    let back = now + Duration::from_secs(4);
    assert_eq!(members.step(back, Event::Tick), Ok(vec![]));
    let joined = Action::Join { session: SessionId(2), location: L1 };
    assert_eq!(members.step(back, hello(2, 1, 7)), Ok(vec![joined]));
    assert_eq!(members.step(back, synced(2)), Ok(vec![Action::Show(L1)]));
}

#[test]
fn a_node_without_a_session_is_forgotten_after_its_ttl_and_not_before() {
    let (mut members, now) = membership();
    members.step(now, hello(1, 1, 7)).unwrap();
    members.step(now, ended(1)).unwrap();
    let expiry = now + Duration::from_secs(5);
    assert_eq!(members.step(expiry - Duration::from_millis(1), Event::Tick), Ok(vec![]));
    let forgotten = vec![Action::Forget(L1), Action::Dismiss(identity(1).node)];
    assert_eq!(members.step(expiry, Event::Tick), Ok(forgotten));
    let actions = members.step(expiry, hello(2, 1, 7)).unwrap();
    assert!(actions.contains(&Action::Join { session: SessionId(2), location: L2 }));
}

#[test]
fn a_new_life_supersedes_the_old_one_and_its_late_notices_are_ignored() {
    // F10: `gone` of incarnation 1 arrives after `joined` of incarnation 2.
    let (mut members, now) = membership();
    members.step(now, hello(1, 1, 1)).unwrap();
    let actions = members.step(now, hello(2, 1, 2)).unwrap();
    let joined = Action::Join { session: SessionId(2), location: L2 };
    assert_eq!(actions, [Action::Close(SessionId(1)), Action::Forget(L1), joined]);
    members.step(now, synced(2)).unwrap();
    assert_eq!(members.step(now, ended(1)), Ok(vec![]));
    assert_eq!(
        members.step(now, Event::Synced { session: SessionId(1), synced: false }),
        Ok(vec![])
    );
    assert_eq!(members.seen(), Seen { known: 1, synced: 1 });
}

#[test]
fn an_earlier_life_than_the_known_one_is_refused_with_both_incarnations() {
    let (mut members, now) = membership();
    members.step(now, hello(1, 1, 9)).unwrap();
    let error = members.step(now, hello(2, 1, 8)).unwrap_err().to_string();
    assert!(error.contains('9') && error.contains('8'), "{error}");
    assert_eq!(members.nodes().next().unwrap().life.unwrap().session, Some(SessionId(1)));
}

#[test]
fn expected_nodes_keep_answers_incomplete_until_they_come_or_their_ttl_is_over() {
    let (mut members, now) = membership();
    members.step(now, Event::Expected(identity(1))).unwrap();
    members.step(now, Event::Expected(identity(2))).unwrap();
    members.step(now, hello(1, 1, 7)).unwrap();
    members.step(now, synced(1)).unwrap();
    assert_eq!(members.seen(), Seen { known: 2, synced: 1 });
    let expiry = now + Duration::from_secs(5);
    assert_eq!(members.step(expiry, Event::Tick), Ok(vec![Action::Dismiss(identity(2).node)]));
    assert_eq!(members.seen(), Seen { known: 1, synced: 1 });
}

#[test]
fn nodes_above_the_limit_are_refused_and_known_ones_are_not() {
    let (mut members, now) = membership();
    (1..=3).for_each(|node| drop(members.step(now, hello(node.into(), node, 1)).unwrap()));
    assert_eq!(members.step(now, hello(9, 9, 1)), Err(HelloError::TooMany { limit: 3 }));
    assert!(members.step(now, hello(10, 2, 2)).is_ok());
}

proptest! {
    /// Whatever happens in whatever order: each location begins and dies once, and none is shown that no
    /// session speaks for.
    #[test]
    fn locations_are_shown_exactly_while_a_session_speaks_for_them(
        events in prop::collection::vec((0u8..5, 0u8..3, 0u64..4, 0u64..8), 0..80),
    ) {
        let (mut members, start) = membership();
        let mut shown = BTreeMap::new();
        let mut now = start;
        for (n, (kind, node, incarnation, session)) in (100u64..).zip(events) {
            let event = match kind {
                0 => hello(n, node, incarnation),
                1 => ended(100 + session),
                2 => synced(100 + session),
                3 => Event::Synced { session: SessionId(100 + session), synced: false },
                _ => {
                    now += Duration::from_secs(2);
                    Event::Tick
                }
            };
            for action in members.step(now, event).unwrap_or_default() {
                match action {
                    Action::Hide(location) => prop_assert_eq!(shown.insert(location, false), Some(true)),
                    Action::Show(location) => prop_assert_eq!(shown.insert(location, true), Some(false)),
                    Action::Forget(location) => prop_assert!(shown.remove(&location).is_some()),
                    Action::Join { session, location } if location.0 == u32::try_from(session.0).unwrap() => {
                        prop_assert!(shown.insert(location, true).is_none());
                    }
                    Action::Join { location, .. } => prop_assert!(shown.contains_key(&location)),
                    Action::Close(_) | Action::Remember(_) | Action::Dismiss(_) => {}
                }
            }
            let lives = members.nodes().filter(|node| node.life.is_some()).count();
            prop_assert_eq!(shown.len(), lives);
            for node in members.nodes() {
                if let Some(life) = node.life {
                    let in_use = shown[&life.location];
                    prop_assert!(in_use || life.session.is_none() || node.state == NodeState::Syncing);
                    prop_assert_eq!(life.session.is_none(), node.state == NodeState::Down);
                    prop_assert!(life.session.is_some() || !in_use);
                }
            }
        }
    }
}
