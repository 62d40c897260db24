mod advice;

use super::*;
use crate::{
    cluster::Timing,
    hard_state::Life,
    index::{Index, IndexLimits},
    registry::Registry,
};
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, Term, Tier, TierSet,
    event::{PartSetDef, Record, SetDigester, push_record},
    part::PartNumber,
};

const TENANT: TenantId = TenantId::from_bytes([3; 16]);

fn model() -> ModelVersion {
    ModelVersion {
        content: ContentFingerprint::from_bytes([1; 32]),
        layout: LayoutFingerprint::from_bytes([2; 32]),
    }
}

fn cluster(entries: u64) -> (Cluster, Instant) {
    let cluster = ClusterId::from_bytes([9; 16]);
    let life = Life { term: Term { cluster, number: 1 }, incarnation: Incarnation(1) };
    let timing = Timing { heartbeat: Duration::from_secs(1), node_ttl: Duration::from_secs(5) };
    let index = Index::new(IndexLimits { entries, locations: 8, ..IndexLimits::default() });
    let cluster = Cluster::new(life, timing, 8, index, Registry::new(1));
    (cluster, tokio::time::Instant::now().into_std())
}

fn hello() -> control::Hello {
    control::Hello {
        protocol: PROTOCOL,
        node: vec![5; 16].into(),
        incarnation: 1,
        name: "n".to_owned(),
        data_address: "127.0.0.1:1".to_owned(),
        control_address: "127.0.0.1:2".to_owned(),
        key_check: self_check().as_bytes().to_vec().into(),
        version: "0".to_owned(),
        ..control::Hello::default()
    }
}

fn message(message: node_message::Message) -> control::NodeMessage {
    control::NodeMessage { message: Some(message) }
}

fn open(cluster: &Cluster, now: Instant, id: u64) -> Session {
    open_with(cluster, now, id, hello())
}

fn open_with(cluster: &Cluster, now: Instant, id: u64, hello: control::Hello) -> Session {
    let mut session = Session::new(SessionId(id));
    let output = session.step(now, message(node_message::Message::Hello(hello)), cluster).unwrap();
    assert!(matches!(
        &output.replies[0].message,
        Some(master_message::Message::Welcome(welcome)) if welcome.refused.is_empty()
    ));
    session
}

fn key(n: u8) -> BlockKey {
    BlockKey::from_bytes([n; 32])
}

fn def() -> control::PartSetDef {
    control::PartSetDef {
        set: 0,
        tenant: TENANT.as_bytes().to_vec().into(),
        content: model().content.as_bytes().to_vec().into(),
        layout: model().layout.as_bytes().to_vec().into(),
        parts: vec![1].into(),
    }
}

fn packed(keys: &[(u8, RecordKind)]) -> bytes::Bytes {
    let mut out = Vec::new();
    for (n, kind) in keys {
        let held = *kind == RecordKind::Stored;
        let tiers = if held { TierSet::of(Tier::Dram) } else { TierSet::EMPTY };
        push_record(&mut out, &Record { key: key(*n), set: 0, tiers, kind: *kind, reserved: 0 });
    }
    out.into()
}

fn events(first_seq: u64, keys: &[(u8, RecordKind)]) -> control::NodeMessage {
    let (sets, records) = (vec![def()], packed(keys));
    message(node_message::Message::Events(control::Events { first_seq, sets, records }))
}

fn snapshot(seq: u64, shard: u32, piece: u32, last: bool, keys: &[u8]) -> control::NodeMessage {
    let keys: Vec<_> = keys.iter().map(|n| (*n, RecordKind::Stored)).collect();
    let (sets, records) = (vec![def()], packed(&keys));
    let snapshot = control::Snapshot { seq, shard, piece, last, sets, records };
    message(node_message::Message::Snapshot(snapshot))
}

/// A heartbeat with the digests of a node that holds these blocks.
fn beat(seq: u64, held: &[u8]) -> control::NodeMessage {
    let parts = PartSet::of([PartNumber(0)]).unwrap();
    let digester = SetDigester::new(&PartSetDef { tenant: TENANT, model: model(), parts });
    let mut digests = [0u64; SHARDS];
    for n in held {
        digests[usize::from(*n)] ^= digester.digest(&key(*n), TierSet::of(Tier::Dram));
    }
    let digests = digests.iter().flat_map(|digest| digest.to_le_bytes()).collect();
    let beat = control::Heartbeat { seq, digests, ..control::Heartbeat::default() };
    message(node_message::Message::Heartbeat(beat))
}

fn acked(output: &Output) -> u64 {
    match &output.replies[0].message {
        Some(master_message::Message::Ack(ack)) => ack.seq,
        other => panic!("{other:?}"),
    }
}

fn asked(output: &Output) -> Vec<u8> {
    let resync = output.replies.iter().find_map(|reply| match &reply.message {
        Some(master_message::Message::Resync(resync)) => Some(resync.shards.to_vec()),
        _ => None,
    });
    resync.unwrap_or_default()
}

fn held(cluster: &Cluster) -> Vec<u8> {
    let Some(space) = cluster.index().find_space(&TENANT, &model()) else { return Vec::new() };
    let keys: Vec<BlockKey> = (0..=u8::MAX).map(key).collect();
    let located = cluster.index().locate(space, &keys);
    (0..=u8::MAX).zip(located.iter()).filter(|(_, h)| !h.is_empty()).map(|(n, _)| n).collect()
}

fn complete(cluster: &Cluster) -> bool {
    cluster.coverage(&cluster.roster()).complete
}

use RecordKind::{Evicted, Stored};

#[test]
fn events_are_applied_once_whatever_comes_again() {
    let (cluster, now) = cluster(100);
    let mut session = open(&cluster, now, 1);
    let mut step = |message| session.step(now, message, &cluster).unwrap();
    assert_eq!(acked(&step(events(1, &[(1, Stored), (2, Stored)]))), 2);
    assert_eq!(acked(&step(events(3, &[(1, Evicted)]))), 3);
    // F09: the same events again, and again with a new one behind them.
    assert_eq!(acked(&step(events(1, &[(1, Stored), (2, Stored)]))), 3);
    assert_eq!(acked(&step(events(2, &[(2, Stored), (1, Evicted), (4, Stored)]))), 4);
    assert_eq!(held(&cluster), [2, 4]);
    assert_eq!(cluster.counters().repeated_events.get(), 4);
    assert_eq!(cluster.counters().gaps.get(), 0);
}

#[test]
fn a_gap_makes_answers_incomplete_until_the_shards_that_differ_are_replaced() {
    let (cluster, now) = cluster(100);
    let mut session = open(&cluster, now, 1);
    let mut step = |message| session.step(now, message, &cluster).unwrap();
    step(events(1, &[(1, Stored), (2, Stored)]));
    assert!(!complete(&cluster), "no digests yet");
    assert_eq!(asked(&step(beat(2, &[1, 2]))), [0u8; 0]);
    assert!(complete(&cluster));
    // Events 3 (2 evicted) and 4 (3 stored) are lost.
    step(events(5, &[(4, Stored)]));
    assert!(!complete(&cluster));
    assert_eq!(cluster.counters().gaps.get(), 1);
    assert_eq!(asked(&step(beat(5, &[1, 3, 4]))), [2, 3], "only what differs");
    step(snapshot(5, 2, 0, true, &[]));
    step(snapshot(5, 3, 0, true, &[3]));
    assert!(!complete(&cluster));
    assert_eq!(asked(&step(beat(5, &[1, 3, 4]))), [0u8; 0]);
    assert!(complete(&cluster));
    assert_eq!(held(&cluster), [1, 3, 4]);
}

#[test]
fn a_shard_that_goes_on_differing_is_asked_for_ever_more_rarely() {
    let (cluster, now) = cluster(100);
    let mut session = open(&cluster, now, 1);
    let mut requests = Vec::new();
    for second in 0..200 {
        let now = now + Duration::from_secs(second);
        let output = session.step(now, beat(0, &[1]), &cluster).unwrap();
        if !asked(&output).is_empty() {
            requests.push(second);
            session.step(now, snapshot(0, 1, 0, true, &[]), &cluster).unwrap();
        }
    }
    assert_eq!(requests, [0, 1, 3, 7, 15, 31, 63, 123, 183]);
}

#[test]
fn at_the_limit_of_the_index_nothing_is_asked_for_in_vain_and_answers_say_so() {
    let (cluster, now) = cluster(2);
    let mut session = open(&cluster, now, 1);
    let mut step = |message| session.step(now, message, &cluster).unwrap();
    step(beat(0, &[]));
    step(events(1, &[(1, Stored), (2, Stored), (3, Stored)]));
    assert_eq!(asked(&step(beat(3, &[1, 2, 3]))), [0u8; 0]);
    let coverage = cluster.coverage(&cluster.roster());
    assert!(coverage.index_limited && !coverage.complete);
    assert_eq!(coverage.nodes_synced, 1);
    // After a gap a shard that cannot be compared may be wrong: asked for, once.
    assert_eq!(asked(&step(beat(4, &[1, 2, 3]))), [3]);
    step(snapshot(4, 3, 0, true, &[3]));
    assert_eq!(asked(&step(beat(4, &[1, 2, 3]))), [0u8; 0]);
    // Room again: what is missing is asked for.
    step(events(5, &[(1, Evicted)]));
    assert_eq!(asked(&step(beat(5, &[2, 3]))), [3]);
    step(snapshot(5, 3, 0, true, &[3]));
    step(beat(5, &[2, 3]));
    assert!(complete(&cluster));
    assert_eq!(held(&cluster), [2, 3]);
}

#[test]
fn a_heartbeat_without_digests_is_no_proof_and_asks_for_them() {
    let (cluster, now) = cluster(100);
    let mut session = open(&cluster, now, 1);
    let beat = control::Heartbeat::default();
    let beat = message(node_message::Message::Heartbeat(beat));
    let output = session.step(now, beat, &cluster).unwrap();
    assert!(matches!(
        &output.replies[1].message,
        Some(master_message::Message::Resync(resync)) if resync.shards.is_empty()
    ));
    assert!(!complete(&cluster));
}

#[test]
fn pieces_of_a_snapshot_come_in_order_or_the_session_ends() {
    let (cluster, now) = cluster(100);
    let mut session = open(&cluster, now, 1);
    session.step(now, snapshot(0, 1, 0, false, &[1]), &cluster).unwrap();
    // Again: ignored.
    session.step(now, snapshot(0, 1, 0, false, &[1]), &cluster).unwrap();
    let error = session.step(now, snapshot(0, 1, 2, true, &[]), &cluster).unwrap_err();
    assert!(error.to_string().contains("out of order"), "{error}");
    let mut session = open(&cluster, now, 2);
    session.step(now, snapshot(0, 1, 0, false, &[]), &cluster).unwrap();
    let error = session.step(now, events(1, &[(1, Stored)]), &cluster).unwrap_err();
    assert!(error.to_string().contains("between the pieces"), "{error}");
    let mut session = open(&cluster, now, 3);
    let error = session.step(now, snapshot(0, 1, 0, true, &[2]), &cluster).unwrap_err();
    assert!(error.to_string().contains("not of its shard"), "{error}");
}

#[test]
fn a_session_whose_place_was_taken_changes_nothing() {
    let (cluster, now) = cluster(100);
    let mut old = open(&cluster, now, 1);
    old.step(now, events(1, &[(1, Stored), (2, Stored)]), &cluster).unwrap();
    let mut new = open(&cluster, now, 2);
    assert_eq!(cluster.take_effects().len(), 2, "remember the node, close the old session");
    // What the same life said before is known.
    let output = new.step(now, events(3, &[(3, Stored)]), &cluster).unwrap();
    assert_eq!(acked(&output), 3);
    let late = old.step(now, events(3, &[(2, Evicted)]), &cluster).unwrap();
    assert_eq!(late, Output::default());
    cluster.ended(now, SessionId(1));
    assert_eq!(held(&cluster), [1, 2, 3]);
    assert_eq!(cluster.counters().superseded_messages.get(), 1);
    cluster.ended(now, SessionId(2));
    assert_eq!(held(&cluster), [0u8; 0], "nobody speaks for it");
}

#[test]
fn a_node_that_could_not_share_is_refused_with_the_reason() {
    let (cluster, now) = cluster(100);
    let refused = |hello: control::Hello| {
        let mut session = Session::new(SessionId(1));
        let hello = message(node_message::Message::Hello(hello));
        let error = session.step(now, hello, &cluster).unwrap_err();
        assert!(session.source().is_none());
        error
    };
    let cases = [
        // F34
        (control::Hello { key_check: vec![0; 16].into(), ..hello() }, "block keys"),
        (control::Hello { protocol: 2, ..hello() }, "protocol 2"),
        (control::Hello { cluster: vec![8; 16].into(), ..hello() }, "cluster"),
    ];
    for (hello, reason) in cases {
        let error = refused(hello);
        assert!(matches!(error, SessionError::Refused(_)), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    for hello in [
        control::Hello { node: vec![1; 15].into(), ..hello() },
        control::Hello { name: "x".repeat(257), ..hello() },
        control::Hello { data_address: "a\nb".to_owned(), ..hello() },
    ] {
        assert!(matches!(refused(hello), SessionError::Decode(_)));
    }
}

#[test]
fn numbers_that_lie_end_the_session_before_anything_is_allocated() {
    let (cluster, now) = cluster(100);
    let end = |wrong: control::NodeMessage| {
        open(&cluster, now, 1).step(now, wrong, &cluster).unwrap_err().to_string()
    };
    let sets = vec![control::PartSetDef { set: u32::MAX, ..def() }];
    let huge = control::Events { first_seq: 1, sets, ..control::Events::default() };
    end(message(node_message::Message::Events(huge)));
    assert!(end(events(u64::MAX, &[(1, Stored), (2, Stored)])).contains("64 bits"));
    let undefined = control::Events { first_seq: 1, sets: vec![], records: packed(&[(1, Stored)]) };
    assert!(end(message(node_message::Message::Events(undefined))).contains("did not define"));
    let cut = control::Events { first_seq: 1, sets: vec![def()], records: vec![0; 41].into() };
    end(message(node_message::Message::Events(cut)));
    let short = control::Heartbeat { digests: vec![0; 8].into(), ..control::Heartbeat::default() };
    end(message(node_message::Message::Heartbeat(short)));
    end(snapshot(0, 256, 0, true, &[]));
    let mut silent = Session::new(SessionId(7));
    assert!(silent.step(now, beat(0, &[]), &cluster).is_err(), "before its hello");
}
