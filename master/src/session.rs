//! One session of one node: from its greeting to its end. A state machine without IO.
//!
//! Contract: messages of one session come in their order. The session applies them to the index, keeps
//! the number of the last applied event, and compares the digests of each heartbeat with the index's own.
//! Shards that differ are asked for; until all agree the node is *syncing* and answers that could need it
//! say that they are incomplete.
//!
//! - A gap (a first number above the next expected one) is noticed, counted, and repaired by digests.
//! - What was applied already does nothing: events are skipped by number, old heartbeats and snapshots
//!   are ignored and counted.
//! - A session that no longer speaks for its node changes nothing (F10): another session of the same life
//!   took over, or a later life. Its messages are ignored and counted.
//! - A shard that still differs after its snapshot (entries were left out at the index's limit) is asked
//!   for again ever more rarely, so that a full index is no storm.
//!
//! A message that breaks a rule ends the session with an error that names field and rule.

use crate::{
    cluster::{Cluster, Interned, Source},
    membership::{HelloError, Identity, SessionId, Vitals},
};
use larder_proto::{
    ClusterId, Incarnation, ModelVersion, NodeId,
    block_key::self_check,
    control::{self, master_message, node_message},
    event::{PartSet, RECORD_LEN, RecordKind, SHARDS, Shard, records},
    ids::TenantId,
    wire::DecodeError,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Version of the session protocol.
pub const PROTOCOL: u32 = 1;
/// Bytes of a node's name and of each of its addresses.
const TEXT_LIMIT: usize = 256;
/// Part sets that one session may define.
const SETS_LIMIT: usize = 65_536;
/// Pauses between requests for a shard that goes on differing: doubles from the first to the last.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The node is not wanted; it is told why.
    #[error("{0}")]
    Refused(String),
    /// A field that breaks its rule.
    #[error("message of the node")]
    Decode(#[from] DecodeError),
    /// Something that does not fit the state of the session.
    #[error("the node sent {what} {rule}")]
    Order {
        /// The message.
        what: &'static str,
        /// The broken rule.
        rule: &'static str,
    },
    /// A record of a part set that the session did not define.
    #[error("record of part set {set}, which the session did not define")]
    UnknownSet {
        /// Its number.
        set: u32,
    },
}

impl From<HelloError> for SessionError {
    fn from(error: HelloError) -> Self {
        Self::Refused(error.to_string())
    }
}

/// What a message leads to.
#[derive(Debug, Default, PartialEq)]
pub struct Output {
    /// To send to the node, in this order.
    pub replies: Vec<control::MasterMessage>,
    /// An answer to a command, for whoever gave it.
    pub result: Option<control::CommandResult>,
}

impl Output {
    fn reply(message: master_message::Message) -> Self {
        Self { replies: vec![control::MasterMessage { message: Some(message) }], result: None }
    }

    fn ack(seq: u64) -> Self {
        Self::reply(master_message::Message::Ack(control::Ack { seq }))
    }
}

/// See the module.
#[derive(Debug)]
pub struct Session {
    id: SessionId,
    open: Option<Box<Open>>,
}

#[derive(Debug)]
struct Open {
    source: Arc<Source>,
    /// By the session's number of the set.
    sets: Vec<Option<Interned>>,
    synced: bool,
    /// There was a gap since digests were compared, so shards that cannot be compared may be wrong.
    gap: bool,
    asked: Box<[Asked; SHARDS]>,
    snapshot: Option<SnapshotInProgress>,
}

/// What was asked of one shard.
#[derive(Debug, Clone, Copy, Default)]
struct Asked {
    /// Asked for, and not come yet.
    outstanding: bool,
    /// One more than the requests since it last agreed; zero while it agrees.
    times: u32,
    /// The last request.
    last: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct SnapshotInProgress {
    shard: Shard,
    seq: u64,
    next_piece: u32,
}

impl Session {
    /// A connection that has not said anything.
    pub fn new(id: SessionId) -> Self {
        Self { id, open: None }
    }

    /// Its id.
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// The node that it speaks for, once it has said so.
    pub fn source(&self) -> Option<&Arc<Source>> {
        self.open.as_ref().map(|open| &open.source)
    }

    /// Applies one message.
    ///
    /// # Errors
    /// The session has to end. A refused node is to be told by [`refusal`] first.
    pub fn step(
        &mut self,
        now: Instant,
        message: control::NodeMessage,
        cluster: &Cluster,
    ) -> Result<Output, SessionError> {
        use node_message::Message;
        let Some(message) = message.message else {
            // Something that a newer node says and this master does not know.
            return Ok(Output::default());
        };
        let open = match (&mut self.open, message) {
            (None, Message::Hello(hello)) => return self.hello(now, hello, cluster),
            (None, _) => return Err(order("a message", "before its hello")),
            (Some(_), Message::Hello(_)) => return Err(order("a hello", "twice")),
            (Some(_), Message::CommandResult(result)) => {
                return Ok(Output { result: Some(result), ..Output::default() });
            }
            (Some(open), message) => (open, message),
        };
        let (open, message) = open;
        let source = Arc::clone(&open.source);
        let was_synced = open.synced;
        let beat = match &message {
            Message::Heartbeat(beat) => Some(vitals(beat)),
            _ => None,
        };
        // Nothing else changes this location's entries while one message is applied. Given back before
        // the membership hears of it, whose lock comes first.
        let output = {
            let mut progress = source.progress();
            let Some(applied) = progress.as_mut() else {
                cluster.counters().superseded_messages.add(1);
                return Ok(Output::default());
            };
            let output = match message {
                Message::Events(events) => open.events(applied, &events, cluster),
                Message::Snapshot(snapshot) => open.snapshot(applied, &snapshot, cluster),
                Message::Heartbeat(beat) => open.heartbeat(now, applied, &beat, cluster),
                Message::Hello(_) | Message::CommandResult(_) => unreachable!("taken above"),
            };
            source.publish(*applied);
            output?
        };
        if let Some(vitals) = beat {
            cluster.beat(now, self.id, vitals);
        }
        if open.synced != was_synced {
            cluster.set_synced(now, self.id, open.synced);
        }
        Ok(output)
    }

    fn hello(
        &mut self,
        now: Instant,
        hello: control::Hello,
        cluster: &Cluster,
    ) -> Result<Output, SessionError> {
        let (identity, incarnation) = check_hello(hello, cluster.life().term.cluster)?;
        let source = cluster.hello(now, self.id, identity, incarnation)?;
        self.open = Some(Box::new(Open {
            source,
            sets: Vec::new(),
            synced: false,
            // The session before may have ended between a gap and its repair.
            gap: true,
            asked: Box::new([Asked::default(); SHARDS]),
            snapshot: None,
        }));
        Ok(Output::reply(master_message::Message::Welcome(cluster.welcome(String::new()))))
    }
}

/// What a refused node is told.
pub fn refusal(cluster: &Cluster, reason: String) -> control::MasterMessage {
    let welcome = master_message::Message::Welcome(cluster.welcome(reason));
    control::MasterMessage { message: Some(welcome) }
}

impl Open {
    fn events(
        &mut self,
        applied: &mut u64,
        events: &control::Events,
        cluster: &Cluster,
    ) -> Result<Output, SessionError> {
        if self.snapshot.is_some() {
            return Err(order("events", "between the pieces of a snapshot"));
        }
        self.define(&events.sets, cluster)?;
        let left = events.records.len() % RECORD_LEN;
        if left != 0 {
            return Err(DecodeError::Trailing { what: "packed records", left }.into());
        }
        let count = (events.records.len() / RECORD_LEN) as u64;
        let expected = applied.saturating_add(1);
        let last = events.first_seq.checked_add(count).and_then(|end| end.checked_sub(1));
        let last = last.ok_or(order("events", "whose numbers do not fit 64 bits"))?;
        if events.first_seq > expected {
            self.note_gap(cluster);
        }
        let known = expected.saturating_sub(events.first_seq).min(count);
        if known > 0 {
            cluster.counters().repeated_events.add(known);
        }
        for record in records(&events.records).skip(usize::try_from(known).unwrap_or(usize::MAX)) {
            let record = record?;
            cluster.apply(self.source.location, self.set(record.set)?, &record);
        }
        cluster.counters().events.add(count - known);
        *applied = (*applied).max(last);
        Ok(Output::ack(*applied))
    }

    fn snapshot(
        &mut self,
        applied: &mut u64,
        snapshot: &control::Snapshot,
        cluster: &Cluster,
    ) -> Result<Output, SessionError> {
        self.define(&snapshot.sets, cluster)?;
        let shard = u8::try_from(snapshot.shard)
            .map(Shard)
            .map_err(|_| order("a snapshot", "of a shard above 255"))?;
        let (seq, piece) = (snapshot.seq, snapshot.piece);
        match self.snapshot {
            Some(at) if (at.shard, at.seq) != (shard, seq) || piece > at.next_piece => {
                return Err(order("a snapshot", "out of order"));
            }
            Some(at) if piece < at.next_piece => return Ok(repeated(cluster, *applied)),
            None if piece > 0 || seq < *applied => return Ok(repeated(cluster, *applied)),
            Some(_) => {}
            None => {
                if seq > *applied {
                    self.note_gap(cluster);
                    *applied = seq;
                }
                cluster.index().begin_replace(self.source.location, shard);
            }
        }
        let in_progress = SnapshotInProgress { shard, seq, next_piece: piece + 1 };
        self.snapshot = Some(in_progress);
        for record in records(&snapshot.records) {
            let record = record?;
            let held = record.kind == RecordKind::Stored && !record.tiers.is_empty();
            if Shard::of(&record.key) != shard || !held {
                return Err(order(
                    "a snapshot",
                    "with a record that is not of its shard or not held",
                ));
            }
            cluster.apply(self.source.location, self.set(record.set)?, &record);
        }
        cluster.counters().snapshot_records.add((snapshot.records.len() / RECORD_LEN) as u64);
        if snapshot.last {
            cluster.index().end_replace(self.source.location, shard);
            self.snapshot = None;
            self.asked[usize::from(shard.0)].outstanding = false;
            cluster.counters().snapshots.add(1);
        }
        Ok(Output::ack(*applied))
    }

    fn heartbeat(
        &mut self,
        now: Instant,
        applied: &mut u64,
        beat: &control::Heartbeat,
        cluster: &Cluster,
    ) -> Result<Output, SessionError> {
        if self.snapshot.is_some() {
            return Err(order("a heartbeat", "between the pieces of a snapshot"));
        }
        if beat.seq < *applied {
            return Ok(repeated(cluster, *applied));
        }
        if beat.seq > *applied {
            self.note_gap(cluster);
            *applied = beat.seq;
        }
        let mut output = Output::ack(*applied);
        if !beat.digests.is_empty() {
            let differing =
                cluster.index().differing(self.source.location, &digests(&beat.digests)?);
            self.synced = differing.is_empty();
            self.note_differing(&differing, cluster);
        }
        let shards = self.due(now);
        // Without shards it asks for digests: they were left out as known, and they are not.
        let wants_digests = beat.digests.is_empty() && !self.synced;
        if !shards.is_empty() || wants_digests {
            cluster.counters().resync_shards.add(shards.len() as u64);
            let resync = control::Resync { shards: shards.into() };
            let message = Some(master_message::Message::Resync(resync));
            output.replies.push(control::MasterMessage { message });
        }
        Ok(output)
    }

    fn note_gap(&mut self, cluster: &Cluster) {
        cluster.counters().gaps.add(1);
        self.synced = false;
        self.gap = true;
    }

    /// Shards stay noted until they agree, so that an unchanged node is asked again in time. Those that
    /// miss entries cannot be compared: they are asked for after a gap, and once there is room for them.
    fn note_differing(&mut self, differing: &[Shard], cluster: &Cluster) {
        let (index, location) = (cluster.index(), self.source.location);
        let left_out = index.location_stats(location).map_or(0, |stats| stats.left_out);
        let gap = std::mem::take(&mut self.gap);
        let missing = match left_out > 0 && (gap || index.room() >= left_out) {
            true => index.left_out_shards(location),
            false => Vec::new(),
        };
        let mut noted = [false; SHARDS];
        differing.iter().chain(&missing).for_each(|shard| noted[usize::from(shard.0)] = true);
        for (asked, noted) in self.asked.iter_mut().zip(noted) {
            match noted {
                true => asked.times = asked.times.max(1),
                false if asked.outstanding => {}
                false => *asked = Asked::default(),
            }
        }
    }

    /// The noted shards to ask for now.
    fn due(&mut self, now: Instant) -> Vec<u8> {
        let mut due = Vec::new();
        for (shard, asked) in (0..=u8::MAX).zip(self.asked.iter_mut()) {
            // What was asked for and has not come may wait behind many others.
            let pause = match asked.outstanding {
                true => ASK_AGAIN.1,
                false => ASK_AGAIN.0 * 2u32.saturating_pow(asked.times.saturating_sub(2).min(16)),
            };
            let waits = asked.last.is_some_and(|last| now < last + pause.min(ASK_AGAIN.1));
            if asked.times == 0 || waits {
                continue;
            }
            asked.outstanding = true;
            asked.times += 1;
            asked.last = Some(now);
            due.push(shard);
        }
        due
    }

    fn define(
        &mut self,
        defs: &[control::PartSetDef],
        cluster: &Cluster,
    ) -> Result<(), SessionError> {
        for def in defs {
            let at = def.set as usize;
            if at >= SETS_LIMIT {
                let (value, limit) = (u64::from(def.set), SETS_LIMIT as u64);
                return Err(
                    DecodeError::Limit { what: "number of a part set", value, limit }.into()
                );
            }
            let tenant: TenantId = def.tenant.as_ref().try_into()?;
            let model = ModelVersion {
                content: def.content.as_ref().try_into()?,
                layout: def.layout.as_ref().try_into()?,
            };
            let parts = PartSet::from_bytes(&def.parts)?;
            if self.sets.len() <= at {
                self.sets.resize(at + 1, None);
            }
            self.sets[at] = Some(cluster.intern(&tenant, &model, &parts));
        }
        Ok(())
    }

    #[inline]
    fn set(&self, set: u32) -> Result<&Interned, SessionError> {
        let known = self.sets.get(set as usize).and_then(Option::as_ref);
        known.ok_or(SessionError::UnknownSet { set })
    }
}

fn order(what: &'static str, rule: &'static str) -> SessionError {
    SessionError::Order { what, rule }
}

fn repeated(cluster: &Cluster, applied: u64) -> Output {
    cluster.counters().repeated_messages.add(1);
    Output::ack(applied)
}

fn vitals(beat: &control::Heartbeat) -> Vitals {
    Vitals { used_bytes: beat.used_bytes, blocks: beat.blocks, draining: beat.draining }
}

fn digests(packed: &[u8]) -> Result<[u64; SHARDS], DecodeError> {
    let mut digests = [0; SHARDS];
    let needed = 8 * SHARDS;
    if packed.len() != needed {
        return Err(DecodeError::Short { what: "digests", needed, left: packed.len() });
    }
    for (digest, bytes) in digests.iter_mut().zip(packed.chunks_exact(8)) {
        *digest = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    Ok(digests)
}

/// Holds everything that a node says of itself to its rules.
fn check_hello(
    hello: control::Hello,
    own: ClusterId,
) -> Result<(Identity, Incarnation), SessionError> {
    let refuse = |reason: String| Err(SessionError::Refused(reason));
    if hello.protocol != PROTOCOL {
        let theirs = hello.protocol;
        return refuse(format!(
            "the node speaks session protocol {theirs}, this master {PROTOCOL}"
        ));
    }
    let ours = self_check();
    if hello.key_check.as_ref() != ours.as_bytes() {
        return refuse(format!(
            "the node computes other block keys than this master (its check value is not {ours}), so \
             nothing that it holds would be found"
        ));
    }
    if !hello.cluster.is_empty() {
        let theirs: ClusterId = hello.cluster.as_ref().try_into()?;
        if theirs != own {
            return refuse(format!("the node belongs to cluster {theirs}, this master to {own}"));
        }
    }
    let texts = [
        ("name of a node", &hello.name),
        ("data address of a node", &hello.data_address),
        ("control address of a node", &hello.control_address),
        ("version of a node", &hello.version),
    ];
    for (what, text) in texts {
        if text.len() > TEXT_LIMIT || text.chars().any(char::is_control) {
            let rule = "must be at most 256 bytes without control characters";
            return Err(DecodeError::Text { what, rule }.into());
        }
    }
    let node: NodeId = hello.node.as_ref().try_into()?;
    let identity = Identity {
        node,
        name: hello.name,
        data_address: hello.data_address,
        control_address: hello.control_address,
        version: hello.version,
        capacity_bytes: hello.capacity_bytes,
    };
    Ok((identity, Incarnation(hello.incarnation)))
}

#[cfg(test)]
mod tests;
