//! What nodes in session are advised.

use super::*;
use crate::advice::advise;
use larder_proto::event::push_record;

const NODES: [u8; 3] = [5, 6, 7];

/// Nodes that hold what they said, in sessions that are in step with it.
struct Nodes {
    cluster: Cluster,
    now: Instant,
    sessions: Vec<Session>,
}

impl Nodes {
    /// One node for each list of blocks that it holds.
    fn holding(lists: &[&[u8]]) -> Self {
        let (cluster, now) = cluster(1000);
        let mut sessions = Vec::new();
        for (id, (node, held)) in (1..).zip(NODES.iter().zip(lists)) {
            let hello = control::Hello { node: vec![*node; 16].into(), ..hello() };
            let mut session = open_with(&cluster, now, id, hello);
            let stored: Vec<_> = held.iter().map(|n| (*n, Stored)).collect();
            session.step(now, events(1, &stored), &cluster).unwrap();
            session.step(now, beat(held.len() as u64, held), &cluster).unwrap();
            sessions.push(session);
        }
        assert!(complete(&cluster));
        Self { cluster, now, sessions }
    }

    fn ask(&self, node: u8, held: &[u8], parents: &[u8]) -> control::AdviseReply {
        let chains = held.iter().map(|n| key(*n).chain()).collect();
        self.ask_of_chains(node, held, parents, chains)
    }

    fn ask_of_chains(
        &self,
        node: u8,
        held: &[u8],
        parents: &[u8],
        chains: Vec<u64>,
    ) -> control::AdviseReply {
        let packed = |keys: &[u8]| keys.iter().flat_map(|n| [*n; 32]).collect::<Vec<u8>>().into();
        let request = control::AdviseRequest {
            node: vec![node; 16].into(),
            tenant: TENANT.as_bytes().to_vec().into(),
            content: model().content.as_bytes().to_vec().into(),
            layout: model().layout.as_bytes().to_vec().into(),
            keys: packed(held),
            parents: packed(parents),
            chains,
        };
        advise(&self.cluster, 64, &request).unwrap()
    }
}

#[test]
fn of_a_block_that_several_hold_all_but_one_may_let_go_whomever_is_asked() {
    let all: Vec<u8> = (1..=60).collect();
    let nodes = Nodes::holding(&[&all, &all, &all]);
    let mut keepers = vec![Vec::new(); all.len()];
    for node in NODES {
        let spare = nodes.ask(node, &all, &[]).spare;
        for (at, keepers) in (0..).zip(&mut keepers) {
            if !spare.contains(&at) {
                keepers.push(node);
            }
        }
    }
    assert!(keepers.iter().all(|keepers| keepers.len() == 1), "{keepers:?}");
    let of = |node| keepers.iter().filter(|keepers| keepers[0] == node).count();
    assert!(NODES.iter().all(|node| of(*node) >= 8), "each keeps its share: {:?}", NODES.map(of));
}

#[test]
fn a_chain_that_several_hold_is_kept_whole_by_one_of_them() {
    let all: Vec<u8> = (1..=60).collect();
    let nodes = Nodes::holding(&[&all, &all, &all]);
    let chain_of = |at: u32| u64::from(at / 2);
    let chains: Vec<u64> = (0..60).map(chain_of).collect();
    let kept = NODES.map(|node| {
        let spare = nodes.ask_of_chains(node, &all, &[], chains.clone()).spare;
        let kept: Vec<u32> = (0..60).filter(|at| !spare.contains(at)).collect();
        assert!(kept.chunks(2).all(|two| chain_of(two[0]) == chain_of(two[1])), "{kept:?}");
        kept.len()
    });
    assert_eq!(kept.iter().sum::<usize>(), 60);
    assert!(kept.iter().all(|kept| *kept >= 8), "each keeps its share: {kept:?}");
}

#[test]
fn a_node_that_names_no_chains_is_told_to_rely_on_nobody() {
    let nodes = Nodes::holding(&[&[1, 2], &[1, 2], &[1, 2]]);
    for node in NODES {
        let advice = nodes.ask_of_chains(node, &[1, 2], &[3], Vec::new());
        assert_eq!((advice.spare.len(), advice.gone.len()), (0, 1));
    }
}

#[test]
fn what_one_node_alone_holds_is_never_spare() {
    let nodes = Nodes::holding(&[&[1, 2, 3], &[3, 4]]);
    assert_eq!(nodes.ask(5, &[1, 2], &[]).spare, [0u32; 0]);
    // And what the index does not know that the asker holds is left to the asker.
    assert_eq!(nodes.ask(5, &[4], &[]).spare, [0u32; 0]);
}

#[test]
fn who_holds_more_parts_or_a_faster_copy_keeps_the_block() {
    let mut nodes = Nodes::holding(&[&[], &[], &[]]);
    for (session, (tiers, parts)) in nodes.sessions.iter_mut().zip([
        (TierSet::of(Tier::Ssd), 0b01u8),
        (TierSet::of(Tier::Dram), 0b01),
        (TierSet::of(Tier::Ssd), 0b11),
    ]) {
        let sets = vec![control::PartSetDef { parts: vec![parts].into(), ..def() }];
        let (key, kind) = (key(1), Stored);
        let mut records = Vec::new();
        push_record(&mut records, &Record { key, set: 0, tiers, kind, reserved: 0 });
        let events = control::Events { first_seq: 1, sets, records: records.into() };
        let events = message(node_message::Message::Events(events));
        session.step(nodes.now, events, &nodes.cluster).unwrap();
    }
    let spare = NODES.map(|node| nodes.ask(node, &[1], &[]).spare.len());
    assert_eq!(spare, [1, 0, 0], "the slow copy with one part goes; nobody else has both parts");
}

#[test]
fn a_parent_that_nobody_holds_is_gone_unless_somebody_is_out_of_sight() {
    let nodes = Nodes::holding(&[&[1], &[2]]);
    assert_eq!(nodes.ask(5, &[1], &[2, 3, 4]).gone, [1, 2]);
    // The other node loses its session: what it holds is not seen, and its blocks may be anything.
    nodes.cluster.ended(nodes.now, nodes.sessions[1].id());
    assert_eq!(nodes.ask(5, &[1], &[2, 3, 4]).gone, [0u32; 0]);
    assert_eq!(nodes.ask(5, &[1], &[2, 3, 4]).coverage.map(|c| c.complete), Some(false));
}

#[test]
fn a_node_without_a_session_or_an_unknown_space_is_advised_nothing() {
    let nodes = Nodes::holding(&[&[1], &[1]]);
    let stranger = nodes.ask(9, &[1], &[3]);
    assert_eq!((stranger.spare.len(), stranger.gone.len()), (0, 0));
}

#[test]
fn a_question_that_breaks_a_rule_is_refused_by_the_name_of_its_field() {
    let nodes = Nodes::holding(&[&[1]]);
    let good = control::AdviseRequest {
        node: vec![5; 16].into(),
        tenant: vec![3; 16].into(),
        content: vec![1; 32].into(),
        layout: vec![2; 32].into(),
        ..control::AdviseRequest::default()
    };
    let refusals = [
        ("node", control::AdviseRequest { node: vec![5; 15].into(), ..good.clone() }),
        ("tenant", control::AdviseRequest { tenant: vec![].into(), ..good.clone() }),
        ("content", control::AdviseRequest { content: vec![1; 33].into(), ..good.clone() }),
        ("layout", control::AdviseRequest { layout: vec![].into(), ..good.clone() }),
        ("keys", control::AdviseRequest { keys: vec![0; 33].into(), ..good.clone() }),
        ("chains", control::AdviseRequest { chains: vec![1], ..good.clone() }),
        ("parents", control::AdviseRequest { parents: vec![0; 65 * 32].into(), ..good.clone() }),
    ];
    assert!(advise(&nodes.cluster, 64, &good).is_ok());
    for (field, request) in refusals {
        assert_eq!(advise(&nodes.cluster, 64, &request).unwrap_err().field, field);
    }
}
