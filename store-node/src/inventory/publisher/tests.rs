use super::*;
use crate::inventory::log::{Change, Loss};
use larder_proto::{
    ContentFingerprint, LayoutFingerprint, ModelVersion,
    control::{
        Ack, Command, CommandResult, EvictFilter, Resync, Welcome, command, node_message::Message,
    },
    event::{PartSet, PartSetDef, SHARDS, records},
    ids::TenantId,
    part::{PartNumber, Tier, TierSet},
};
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

/// A catalog: changes it and the log together, as the real one does under its locks.
struct Catalog {
    log: ChangeLog,
    blocks: Mutex<BTreeMap<BlockKey, BlockState>>,
    now: Instant,
}

impl Inventory for Catalog {
    fn snapshot(&self, shard: Shard) -> (u64, Vec<(BlockKey, BlockState)>) {
        let blocks = self.blocks.lock();
        let of_shard = blocks.iter().filter(|(key, _)| Shard::of(key) == shard);
        (self.log.head(), of_shard.map(|(key, state)| (*key, *state)).collect())
    }

    fn vitals(&self) -> Vitals {
        Vitals { used_bytes: 7, blocks: self.blocks.lock().len() as u64, draining: false }
    }
}

impl Catalog {
    fn new(ring: usize) -> Self {
        let log = ChangeLog::new(Arc::new(PartSets::new(16)), ring);
        let now = tokio::time::Instant::now().into_std();
        Self { log, blocks: Mutex::default(), now }
    }

    fn store(&self, shard: u8, n: u8) -> BlockKey {
        let model = ModelVersion {
            content: ContentFingerprint::from_bytes([1; 32]),
            layout: LayoutFingerprint::from_bytes([2; 32]),
        };
        let parts = PartSet::of([PartNumber(0)]).unwrap();
        let def = PartSetDef { tenant: TenantId::from_bytes([3; 16]), model, parts };
        let set = self.log.sets().intern(&def).unwrap();
        let after = BlockState { set, tiers: TierSet::of(Tier::Dram) };
        let mut bytes = [n; 32];
        bytes[0] = shard;
        let key = BlockKey::from_bytes(bytes);
        let mut blocks = self.blocks.lock();
        let before = blocks.insert(key, after);
        self.log.append(Change::stored(key, before, after));
        key
    }

    fn store_many(&self, shards: std::ops::Range<u8>) {
        for n in shards {
            self.store(n, n);
        }
    }

    fn evict(&self, key: BlockKey) {
        let mut blocks = self.blocks.lock();
        let before = blocks.remove(&key).unwrap();
        self.log.append(Change::lost(key, before, Loss::Evicted));
    }

    fn drain(&self, publisher: &mut Publisher, now: Instant) -> Vec<Message> {
        std::iter::from_fn(|| publisher.poll(now, &self.log, self))
            .map(|message| message.message.unwrap())
            .collect()
    }
}

fn limits() -> Limits {
    Limits { window: 8, batch_records: 4, batch_sets: 1, commands: 1 }
}

fn publisher() -> Publisher {
    let identity = Identity {
        node: NodeId::from_bytes([9; 16]),
        incarnation: Incarnation(5),
        name: "n".to_owned(),
        data_address: "127.0.0.1:1".to_owned(),
        control_address: "127.0.0.1:2".to_owned(),
        capacity_bytes: 1,
        version: "0".to_owned(),
    };
    Publisher::new(identity, limits())
}

fn from_master(message: master_message::Message) -> Input {
    Input::Received(control::MasterMessage { message: Some(message) })
}

fn welcome(master: u64) -> Input {
    from_master(master_message::Message::Welcome(Welcome {
        cluster: vec![1; 16].into(),
        term: 3,
        master_incarnation: master,
        heartbeat_ms: 1000,
        node_ttl_ms: 5000,
        refused: String::new(),
    }))
}

fn ack(seq: u64) -> Input {
    from_master(master_message::Message::Ack(Ack { seq }))
}

fn resync(shards: &[u8]) -> Input {
    from_master(master_message::Message::Resync(Resync { shards: shards.to_vec().into() }))
}

fn open(catalog: &Catalog, publisher: &mut Publisher, master: u64) {
    publisher.step(catalog.now, Input::Connected { seen: None }, &catalog.log).unwrap();
    assert!(matches!(catalog.drain(publisher, catalog.now)[..], [Message::Hello(_)]));
    let greet = publisher.step(catalog.now, welcome(master), &catalog.log).unwrap();
    let term = Term { cluster: ClusterId::from_bytes([1; 16]), number: 3 };
    assert_eq!(greet, Some(Action::Greet(term)));
}

fn keys(packed: &[u8]) -> Vec<BlockKey> {
    records(packed).map(|record| record.unwrap().key).collect()
}

#[test]
fn a_new_master_gets_digests_first_and_the_shards_it_asks_for_hot_ones_first() {
    let catalog = Catalog::new(64);
    let (cold, hot) = (catalog.store(1, 1), catalog.store(2, 2));
    let mut publisher = publisher();
    open(&catalog, &mut publisher, 1);
    let sent = catalog.drain(&mut publisher, catalog.now);
    let [Message::Heartbeat(beat)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((beat.seq, beat.digests.len(), beat.blocks), (2, 8 * SHARDS, 2));

    publisher.step(catalog.now, resync(&[1, 2]), &catalog.log).unwrap();
    let sent = catalog.drain(&mut publisher, catalog.now);
    let [Message::Snapshot(first), Message::Snapshot(second), Message::Heartbeat(beat)] = &sent[..]
    else {
        panic!("{sent:?}")
    };
    assert_eq!((keys(&first.records), keys(&second.records)), (vec![hot], vec![cold]));
    assert_eq!((first.sets.len(), second.sets.len()), (1, 0), "a set is defined once");
    assert_eq!(beat.digests.len(), 8 * SHARDS, "the master can compare at once");

    let later = catalog.now + Duration::from_secs(1);
    let sent = catalog.drain(&mut publisher, later);
    assert!(matches!(&sent[..], [Message::Heartbeat(beat)] if beat.digests.is_empty()), "{sent:?}");
}

#[test]
fn a_snapshot_stands_right_after_the_event_it_names() {
    let catalog = Catalog::new(64);
    let mut publisher = publisher();
    open(&catalog, &mut publisher, 1);
    catalog.drain(&mut publisher, catalog.now);
    let gone = catalog.store(1, 1);
    catalog.store(1, 2);
    publisher.step(catalog.now, resync(&[1]), &catalog.log).unwrap();
    let events = publisher.poll(catalog.now, &catalog.log, &catalog).unwrap().message;
    assert!(matches!(events, Some(Message::Events(events)) if events.first_seq == 1));
    catalog.evict(gone);
    let sent = catalog.drain(&mut publisher, catalog.now);
    let [Message::Snapshot(snapshot), Message::Heartbeat(_) | Message::Events(_), ..] = &sent[..]
    else {
        panic!("{sent:?}")
    };
    assert_eq!((snapshot.seq, keys(&snapshot.records).len()), (2, 2), "the eviction comes later");
    let events = sent.iter().find_map(|message| match message {
        Message::Events(events) => Some((events.first_seq, keys(&events.records))),
        _ => None,
    });
    assert_eq!(events, Some((3, vec![gone])));
}

#[test]
fn a_large_shard_comes_in_pieces_that_nothing_separates() {
    let catalog = Catalog::new(64);
    for n in 0..10 {
        catalog.store(1, n);
    }
    let mut publisher = publisher();
    open(&catalog, &mut publisher, 1);
    catalog.drain(&mut publisher, catalog.now);
    publisher.step(catalog.now, resync(&[1]), &catalog.log).unwrap();
    let pieces: Vec<_> = std::iter::from_fn(|| {
        let message = publisher.poll(catalog.now, &catalog.log, &catalog)?.message?;
        // Changes in between do not get between the pieces.
        catalog.store(7, 7);
        match message {
            Message::Snapshot(s) => Some((s.piece, s.last, keys(&s.records).len(), s.seq)),
            _ => None,
        }
    })
    .collect();
    assert_eq!(pieces, [(0, false, 4, 10), (1, false, 4, 10), (2, true, 2, 10)]);
}

#[test]
fn a_slow_master_holds_back_itself_and_falls_off_the_ring_into_digests() {
    let catalog = Catalog::new(16);
    let mut publisher = publisher();
    open(&catalog, &mut publisher, 1);
    catalog.drain(&mut publisher, catalog.now);
    catalog.store_many(0..40);
    // The first event is lost already: a jump, then digests.
    let sent = catalog.drain(&mut publisher, catalog.now);
    assert!(
        matches!(&sent[..], [Message::Heartbeat(beat)] if beat.seq == 40 && !beat.digests.is_empty())
    );
    publisher.step(catalog.now, ack(40), &catalog.log).unwrap();

    catalog.store_many(100..112);
    let sent = catalog.drain(&mut publisher, catalog.now);
    let counts: Vec<_> = sent
        .iter()
        .map(|message| match message {
            Message::Events(events) => (events.first_seq, keys(&events.records).len()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(counts, [(41, 4), (45, 4)], "eight events are unacknowledged: no more now");
    let later = catalog.now + Duration::from_secs(2);
    assert_eq!(catalog.drain(&mut publisher, later), [], "a heartbeat does not overtake events");
    assert_eq!(publisher.wake_at(), None, "only an acknowledgement helps");
    publisher.step(later, ack(48), &catalog.log).unwrap();
    let sent = catalog.drain(&mut publisher, later);
    assert!(matches!(&sent[..], [Message::Events(_), Message::Heartbeat(_)]), "{sent:?}");
}

#[test]
fn after_a_break_the_same_master_gets_what_it_did_not_acknowledge_and_another_one_digests() {
    let catalog = Catalog::new(64);
    let mut publisher = publisher();
    open(&catalog, &mut publisher, 1);
    catalog.drain(&mut publisher, catalog.now);
    catalog.store_many(0..4);
    catalog.drain(&mut publisher, catalog.now);
    publisher.step(catalog.now, ack(2), &catalog.log).unwrap();
    publisher.step(catalog.now, Input::Ended, &catalog.log).unwrap();

    open(&catalog, &mut publisher, 1);
    let sent = catalog.drain(&mut publisher, catalog.now);
    let [Message::Events(events), Message::Heartbeat(_)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((events.first_seq, events.sets.len()), (3, 1), "sets are defined again");
    publisher.step(catalog.now, Input::Ended, &catalog.log).unwrap();

    open(&catalog, &mut publisher, 2);
    let sent = catalog.drain(&mut publisher, catalog.now);
    assert!(matches!(&sent[..], [Message::Heartbeat(beat)] if beat.seq == 4), "{sent:?}");
}

#[test]
fn an_acknowledgement_tells_how_long_changes_waited_a_break_included() {
    let catalog = Catalog::new(64);
    let mut publisher = publisher();
    open(&catalog, &mut publisher, 1);
    catalog.drain(&mut publisher, catalog.now);
    let key = catalog.store(1, 1);
    catalog.drain(&mut publisher, catalog.now);
    catalog.evict(key);
    catalog.drain(&mut publisher, catalog.now);
    // Changes are timed by the clock, a moment after `now` of the test.
    let wait = Duration::from_secs(60);
    let lags = |action| match action {
        Some(Action::Lags(lags)) => lags,
        other => panic!("{other:?}"),
    };
    let first = publisher.step(catalog.now + wait, ack(1), &catalog.log).unwrap();
    let again = publisher.step(catalog.now + wait, ack(1), &catalog.log).unwrap();
    assert_eq!((lags(first).len(), again), (1, None), "each is told once");
    publisher.step(catalog.now + wait, Input::Ended, &catalog.log).unwrap();
    open(&catalog, &mut publisher, 1);
    catalog.drain(&mut publisher, catalog.now + wait);
    let evicted = lags(publisher.step(catalog.now + 2 * wait, ack(2), &catalog.log).unwrap());
    assert!(evicted.len() == 1 && evicted[0].age > wait, "{evicted:?}");
}

#[test]
fn what_does_not_fit_the_session_ends_it() {
    let catalog = Catalog::new(64);
    let mut publisher = publisher();
    publisher.step(catalog.now, Input::Connected { seen: None }, &catalog.log).unwrap();
    assert!(publisher.step(catalog.now, ack(0), &catalog.log).is_err(), "before the welcome");
    let refused = Welcome { refused: "other keys".to_owned(), ..Welcome::default() };
    catalog.drain(&mut publisher, catalog.now);
    let end = publisher.step(
        catalog.now,
        from_master(master_message::Message::Welcome(refused)),
        &catalog.log,
    );
    assert_eq!(end, Err(SessionError::Refused("other keys".to_owned())));
    open(&catalog, &mut publisher, 1);
    let end = publisher.step(catalog.now, ack(1), &catalog.log);
    assert_eq!(end, Err(SessionError::BadAck { acked: 1, head: 0 }));
}

#[test]
fn commands_above_the_limit_are_refused_and_a_flood_ends_the_session() {
    let catalog = Catalog::new(64);
    let mut publisher = publisher();
    open(&catalog, &mut publisher, 1);
    catalog.drain(&mut publisher, catalog.now);
    let evict = |id| {
        let command = Some(command::Command::Evict(EvictFilter::default()));
        from_master(master_message::Message::Command(Command {
            id,
            cluster: vec![1; 16].into(),
            term: 3,
            command,
        }))
    };
    let first = publisher.step(catalog.now, evict(1), &catalog.log).unwrap();
    assert!(matches!(first, Some(Action::Obey { id: 1, .. })));
    assert_eq!(publisher.step(catalog.now, evict(2), &catalog.log), Ok(None));
    let sent = catalog.drain(&mut publisher, catalog.now);
    assert!(matches!(&sent[..], [Message::CommandResult(r)] if r.id == 2 && !r.refused.is_empty()));
    let done = CommandResult { id: 1, blocks: 3, ..Default::default() };
    publisher.step(catalog.now, Input::Finished(done), &catalog.log).unwrap();
    let sent = catalog.drain(&mut publisher, catalog.now);
    assert!(matches!(
        &sent[..],
        [Message::Heartbeat(_), Message::CommandResult(r)] if r.id == 1 && r.blocks == 3
    ));
    let flood = (10..20).map(|id| publisher.step(catalog.now, evict(id), &catalog.log));
    assert!(flood.collect::<Vec<_>>().contains(&Err(SessionError::Flooded)));
}

// After an eviction a master told for up to a heartbeat that the memory was still in use.
#[test]
fn what_an_eviction_freed_is_told_before_its_answer() {
    let catalog = Catalog::new(64);
    let keys = [catalog.store(1, 1), catalog.store(2, 2)];
    let mut publisher = publisher();
    open(&catalog, &mut publisher, 1);
    catalog.drain(&mut publisher, catalog.now);
    keys.into_iter().for_each(|key| catalog.evict(key));
    let done = CommandResult { id: 1, blocks: 2, ..Default::default() };
    publisher.step(catalog.now, Input::Finished(done), &catalog.log).unwrap();
    let sent = catalog.drain(&mut publisher, catalog.now);
    let [Message::Events(_), Message::Heartbeat(beat), Message::CommandResult(_)] = &sent[..]
    else {
        panic!("{sent:?}")
    };
    assert_eq!((beat.seq, beat.blocks), (4, 0));
}
