//! What one master is told, and when: a state machine without IO, one for each configured master.
//!
//! ```text
//! Down --connected--> Greeting --welcome--> Open --ended--> Down
//!          (Hello)                 heartbeat at once, then events, heartbeats, asked-for snapshots
//! ```
//!
//! - Events go out in their order from a cursor into the [`ChangeLog`]; at most `window` of them are
//!   unacknowledged, so a slow master holds back itself and nothing else.
//! - A heartbeat or snapshot *as of event S* goes out after event S and before S + 1. Its pieces are
//!   never separated by events.
//! - All repair has one path: the master compares digests and asks for the shards that differ. So when
//!   the cursor falls off the log's ring it jumps to the head, and a heartbeat with digests follows.
//! - A session starts where the last one with the same life of the master was acknowledged; with any
//!   other master it starts at the head.
//! - A part set is defined once a session, in the message that first uses it.
//!
//! The owner feeds [`Publisher::step`] and sends what [`Publisher::poll`] returns; a message that was
//! returned must be sent or the session ended. Nothing here waits or keeps a queue beyond one snapshot.

use super::{
    log::{Age, ChangeLog, Digests},
    part_sets::{BlockState, PartSets, SetId},
    view::{Inventory, Vitals},
};
use bytes::Bytes;
use larder_proto::{
    ClusterId, Incarnation, NodeId, Term,
    block_key::{BlockKey, self_check},
    control::{self, master_message, node_message},
    event::{RECORD_LEN, Record, RecordKind, Shard, push_record},
    wire::DecodeError,
};
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Version of the session protocol.
pub const PROTOCOL: u32 = 1;

/// What the node says of itself in a greeting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The node, over all its lives.
    pub node: NodeId,
    /// This life.
    pub incarnation: Incarnation,
    /// For people.
    pub name: String,
    /// `host:port` where others reach the data plane.
    pub data_address: String,
    /// `host:port` of the `Node` service.
    pub control_address: String,
    /// Capacity of all tiers.
    pub capacity_bytes: u64,
    /// Version of the program.
    pub version: String,
}

/// Bounds of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most events sent and not acknowledged.
    pub window: u64,
    /// Most records in one message: 40 bytes each, well below the 4 MiB limit of control messages.
    pub batch_records: usize,
    /// Most definitions in one message: up to 250 bytes each.
    pub batch_sets: usize,
    /// Most commands in progress; more are refused.
    pub commands: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { window: 65_536, batch_records: 16_384, batch_sets: 2_048, commands: 16 }
    }
}

/// What happens to a session.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// The connection stands. `seen` is the highest term that the node has seen.
    Connected {
        /// From the gate of all sessions.
        seen: Option<Term>,
    },
    /// The master said something.
    Received(control::MasterMessage),
    /// A command was obeyed, or refused.
    Finished(control::CommandResult),
    /// The connection is gone.
    Ended,
}

/// What the owner must do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// End the session unless the gate greets this term.
    Greet(Term),
    /// Obey this command if the gate admits its term; answer with [`Input::Finished`] either way.
    Obey {
        /// Names the answer.
        id: u64,
        /// Fences the command.
        term: Term,
        /// What to evict.
        filter: control::EvictFilter,
    },
    /// Count these lags: how long timed changes waited, from being logged to the acknowledgement that covers
    /// them, those that a snapshot repaired included.
    Lags(Vec<Age>),
}

/// Why a session has to end. The owner closes the connection and steps with [`Input::Ended`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The master does not want this node.
    #[error("the master refuses the node: {0}")]
    Refused(String),
    /// The master sent something that does not fit the state of the session.
    #[error("the master sent {what} while the session was {state}")]
    Unexpected {
        /// The message.
        what: &'static str,
        /// The state.
        state: &'static str,
    },
    /// A field that breaks its rule.
    #[error("message of the master")]
    Decode(#[from] DecodeError),
    /// An acknowledgement of events that never happened.
    #[error("the master acknowledges event {acked}, the last one is {head}")]
    BadAck {
        /// What it said.
        acked: u64,
        /// The last event that there is.
        head: u64,
    },
    /// Commands come faster than answers leave.
    #[error("the master sends commands faster than it reads their answers")]
    Flooded,
}

/// Where a session stands, for status pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// `down`, `greeting`, `open`.
    pub state: &'static str,
    /// Last event sent.
    pub sent: u64,
    /// Last event acknowledged.
    pub acked: u64,
    /// Shards that the master asked for and does not have yet.
    pub shards_to_send: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Publisher {
    identity: Identity,
    limits: Limits,
    phase: Phase,
    /// The last master spoken to, and the last event it acknowledged.
    resume: Option<(Incarnation, u64)>,
}

#[derive(Debug)]
enum Phase {
    Down,
    Greeting { hello: Option<Box<control::Hello>> },
    Open(Box<Open>),
}

#[derive(Debug)]
struct Open {
    master: Incarnation,
    heartbeat: Duration,
    next_heartbeat: Instant,
    cursor: u64,
    acked: u64,
    /// The seq of the digests that the master has; `None` when it must get some.
    digests_sent: Option<u64>,
    defined: Vec<bool>,
    wanted: VecDeque<Shard>,
    barrier: Option<Barrier>,
    answers: VecDeque<control::CommandResult>,
    obeying: usize,
    scratch: Vec<Record>,
}

/// Goes out right after the event that it names.
#[derive(Debug)]
enum Barrier {
    Heartbeat(Digests),
    Snapshot(Snapshot),
}

#[derive(Debug)]
struct Snapshot {
    shard: Shard,
    seq: u64,
    blocks: Vec<(BlockKey, BlockState)>,
    sent: usize,
    piece: u32,
}

impl Barrier {
    fn seq(&self) -> u64 {
        match self {
            Self::Heartbeat(digests) => digests.seq,
            Self::Snapshot(snapshot) => snapshot.seq,
        }
    }
}

impl Publisher {
    /// No session yet.
    pub fn new(identity: Identity, limits: Limits) -> Self {
        Self { identity, limits, phase: Phase::Down, resume: None }
    }

    /// Applies one input.
    ///
    /// # Errors
    /// The session has to end.
    pub fn step(
        &mut self,
        now: Instant,
        input: Input,
        log: &ChangeLog,
    ) -> Result<Option<Action>, SessionError> {
        match input {
            Input::Connected { seen } => {
                let hello = Some(Box::new(self.hello(seen)));
                self.phase = Phase::Greeting { hello };
                Ok(None)
            }
            Input::Ended => {
                if let Phase::Open(open) = &self.phase {
                    self.resume = Some((open.master, open.acked));
                }
                self.phase = Phase::Down;
                Ok(None)
            }
            Input::Finished(result) => {
                // A session that ended meanwhile has nobody to tell.
                if let Phase::Open(open) = &mut self.phase {
                    open.obeying = open.obeying.saturating_sub(1);
                    if result.blocks > 0 {
                        // What it freed is to be seen by whoever asks after the answer.
                        open.next_heartbeat = now;
                    }
                    open.answers.push_back(result);
                }
                Ok(None)
            }
            Input::Received(message) => match message.message {
                Some(message) => self.receive(now, message, log),
                // Something that a newer master says and this node does not know.
                None => Ok(None),
            },
        }
    }

    /// The next message to send, if there is one now. Otherwise something is to happen first: an input,
    /// a change of the log, or [`Self::wake_at`].
    pub fn poll(
        &mut self,
        now: Instant,
        log: &ChangeLog,
        inventory: &dyn Inventory,
    ) -> Option<control::NodeMessage> {
        let message = match &mut self.phase {
            Phase::Down => None,
            Phase::Greeting { hello } => {
                hello.take().map(|hello| node_message::Message::Hello(*hello))
            }
            Phase::Open(open) => open.next_message(now, &self.limits, log, inventory),
        }?;
        Some(control::NodeMessage { message: Some(message) })
    }

    /// When to poll again even if nothing happens. A heartbeat that already waits for its turn waits for
    /// an acknowledgement, not for the clock.
    pub fn wake_at(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Open(open) if open.barrier.is_none() => Some(open.next_heartbeat),
            _ => None,
        }
    }

    /// Where the session stands.
    pub fn progress(&self) -> Progress {
        let acked = self.resume.map_or(0, |(_, acked)| acked);
        match &self.phase {
            Phase::Open(open) => Progress {
                state: self.state(),
                sent: open.cursor,
                acked: open.acked,
                shards_to_send: open.wanted.len(),
            },
            _ => Progress { state: self.state(), sent: acked, acked, shards_to_send: 0 },
        }
    }

    fn state(&self) -> &'static str {
        match &self.phase {
            Phase::Down => "down",
            Phase::Greeting { .. } => "greeting",
            Phase::Open(_) => "open",
        }
    }

    fn hello(&self, seen: Option<Term>) -> control::Hello {
        let Identity {
            node,
            incarnation,
            name,
            data_address,
            control_address,
            capacity_bytes,
            version,
        } = &self.identity;
        let cluster = seen.map(|term| Bytes::copy_from_slice(term.cluster.as_bytes()));
        control::Hello {
            protocol: PROTOCOL,
            node: Bytes::copy_from_slice(node.as_bytes()),
            incarnation: incarnation.0,
            name: name.clone(),
            data_address: data_address.clone(),
            control_address: control_address.clone(),
            key_check: Bytes::copy_from_slice(self_check().as_bytes()),
            cluster: cluster.unwrap_or_default(),
            term: seen.map_or(0, |term| term.number),
            capacity_bytes: *capacity_bytes,
            version: version.clone(),
        }
    }

    fn receive(
        &mut self,
        now: Instant,
        message: master_message::Message,
        log: &ChangeLog,
    ) -> Result<Option<Action>, SessionError> {
        use master_message::Message;
        let state = self.state();
        match (&mut self.phase, message) {
            (Phase::Greeting { hello: None }, Message::Welcome(welcome)) => {
                self.welcomed(now, welcome, log).map(Some)
            }
            (Phase::Open(open), Message::Ack(ack)) => {
                let head = log.head();
                if ack.seq > head {
                    return Err(SessionError::BadAck { acked: ack.seq, head });
                }
                let before = open.acked;
                // After a break the master may know more than it could acknowledge.
                open.acked = before.max(ack.seq.min(open.cursor));
                let lags = log.ages(before, open.acked, now);
                Ok((!lags.is_empty()).then_some(Action::Lags(lags)))
            }
            (Phase::Open(open), Message::Resync(resync)) => {
                if resync.shards.is_empty() {
                    open.next_heartbeat = now;
                    open.digests_sent = None;
                }
                open.want(&resync.shards, log);
                Ok(None)
            }
            (Phase::Open(open), Message::Command(command)) => {
                open.command(command, self.limits.commands)
            }
            (_, message) => {
                let what = match message {
                    Message::Welcome(_) => "a welcome",
                    Message::Ack(_) => "an acknowledgement",
                    Message::Resync(_) => "a resync",
                    Message::Command(_) => "a command",
                };
                Err(SessionError::Unexpected { what, state })
            }
        }
    }

    fn welcomed(
        &mut self,
        now: Instant,
        welcome: control::Welcome,
        log: &ChangeLog,
    ) -> Result<Action, SessionError> {
        if !welcome.refused.is_empty() {
            return Err(SessionError::Refused(welcome.refused));
        }
        let cluster: ClusterId = welcome.cluster.as_ref().try_into()?;
        let master = Incarnation(welcome.master_incarnation);
        let cursor = match self.resume {
            Some((known, acked)) if known == master => acked,
            _ => log.head(),
        };
        let heartbeat = Duration::from_millis(u64::from(welcome.heartbeat_ms.max(10)));
        self.phase = Phase::Open(Box::new(Open {
            master,
            heartbeat,
            next_heartbeat: now,
            cursor,
            acked: cursor,
            digests_sent: None,
            defined: Vec::new(),
            wanted: VecDeque::new(),
            barrier: None,
            answers: VecDeque::new(),
            obeying: 0,
            scratch: Vec::new(),
        }));
        Ok(Action::Greet(Term { cluster, number: welcome.term }))
    }
}

impl Open {
    fn next_message(
        &mut self,
        now: Instant,
        limits: &Limits,
        log: &ChangeLog,
        inventory: &dyn Inventory,
    ) -> Option<node_message::Message> {
        // A heartbeat that is due goes first.
        if now < self.next_heartbeat
            && let Some(answer) = self.answers.pop_front()
        {
            return Some(node_message::Message::CommandResult(answer));
        }
        loop {
            if self.barrier.is_none() {
                self.barrier = self.next_barrier(now, log, inventory);
            }
            let target = self.barrier.as_ref().map_or_else(|| log.head(), Barrier::seq);
            if self.cursor == target {
                break;
            }
            let room = limits.window.saturating_sub(self.cursor - self.acked);
            if room == 0 {
                return None;
            }
            if let Some(events) = self.events(target.min(self.cursor + room), limits, log) {
                return Some(node_message::Message::Events(events));
            }
            // The ring no longer has the next event: see the module on repair.
            self.cursor = target;
            self.next_heartbeat = now;
            self.digests_sent = None;
        }
        match self.barrier.take()? {
            Barrier::Heartbeat(digests) => {
                self.next_heartbeat = now + self.heartbeat;
                Some(node_message::Message::Heartbeat(self.heartbeat(&digests, inventory.vitals())))
            }
            Barrier::Snapshot(snapshot) => {
                Some(node_message::Message::Snapshot(self.piece(now, snapshot, limits, log.sets())))
            }
        }
    }

    fn next_barrier(
        &mut self,
        now: Instant,
        log: &ChangeLog,
        inventory: &dyn Inventory,
    ) -> Option<Barrier> {
        if now >= self.next_heartbeat {
            return Some(Barrier::Heartbeat(log.digests()));
        }
        let shard = self.wanted.pop_front()?;
        let (seq, blocks) = inventory.snapshot(shard);
        Some(Barrier::Snapshot(Snapshot { shard, seq, blocks, sent: 0, piece: 0 }))
    }

    /// Events after the cursor up to `last`, as many as fit; `None` when the ring lost the first.
    fn events(&mut self, last: u64, limits: &Limits, log: &ChangeLog) -> Option<control::Events> {
        let most = usize::try_from(last - self.cursor).unwrap_or(usize::MAX);
        let mut changes = std::mem::take(&mut self.scratch);
        let read = log.read(self.cursor, most.min(limits.batch_records), &mut changes);
        let mut message = control::Events { first_seq: self.cursor + 1, ..Default::default() };
        let mut packed = Vec::with_capacity(changes.len() * RECORD_LEN);
        for change in &changes {
            if !self.define(SetId(change.set), &mut message.sets, limits.batch_sets, log.sets()) {
                break;
            }
            push_record(&mut packed, change);
            self.cursor += 1;
        }
        changes.clear();
        self.scratch = changes;
        message.records = packed.into();
        read.is_ok().then_some(message)
    }

    fn heartbeat(&mut self, digests: &Digests, vitals: Vitals) -> control::Heartbeat {
        let Vitals { used_bytes, blocks, draining } = vitals;
        let known = self.digests_sent == Some(digests.seq);
        self.digests_sent = Some(digests.seq);
        let digests = match known {
            true => Bytes::new(),
            false => digests.shards.iter().flat_map(|digest| digest.to_le_bytes()).collect(),
        };
        control::Heartbeat { seq: self.cursor, digests, used_bytes, blocks, draining }
    }

    /// The next piece of a snapshot, which becomes the barrier again unless it was the last.
    fn piece(
        &mut self,
        now: Instant,
        mut snapshot: Snapshot,
        limits: &Limits,
        sets: &PartSets,
    ) -> control::Snapshot {
        let Snapshot { shard, seq, piece, .. } = snapshot;
        let (mut defs, mut packed) = (Vec::new(), Vec::new());
        for (key, state) in snapshot.blocks[snapshot.sent..].iter().take(limits.batch_records) {
            if !self.define(state.set, &mut defs, limits.batch_sets, sets) {
                break;
            }
            let (set, tiers) = (state.set.0, state.tiers);
            let record = Record { key: *key, set, tiers, kind: RecordKind::Stored, reserved: 0 };
            push_record(&mut packed, &record);
            snapshot.sent += 1;
        }
        let last = snapshot.sent == snapshot.blocks.len();
        if !last {
            snapshot.piece += 1;
            self.barrier = Some(Barrier::Snapshot(snapshot));
        } else if self.wanted.is_empty() {
            // The master can compare at once instead of at the next beat.
            self.next_heartbeat = now;
            self.digests_sent = None;
        }
        let shard = u32::from(shard.0);
        control::Snapshot { seq, shard, piece, last, sets: defs, records: packed.into() }
    }

    /// Makes sure that the master knows the set: whether a record of it may go into this message.
    fn define(
        &mut self,
        set: SetId,
        defs: &mut Vec<control::PartSetDef>,
        limit: usize,
        sets: &PartSets,
    ) -> bool {
        let at = set.0 as usize;
        if self.defined.get(at).copied().unwrap_or(false) {
            return true;
        }
        if defs.len() >= limit {
            return false;
        }
        if self.defined.len() <= at {
            self.defined.resize(at + 1, false);
        }
        self.defined[at] = true;
        let def = sets.def(set);
        defs.push(control::PartSetDef {
            set: set.0,
            tenant: Bytes::copy_from_slice(def.tenant.as_bytes()),
            content: Bytes::copy_from_slice(def.model.content.as_bytes()),
            layout: Bytes::copy_from_slice(def.model.layout.as_bytes()),
            parts: Bytes::copy_from_slice(def.parts.as_bytes()),
        });
        true
    }

    fn want(&mut self, shards: &[u8], log: &ChangeLog) {
        let mut wanted: Vec<Shard> = self.wanted.iter().copied().collect();
        wanted.extend(shards.iter().map(|shard| Shard(*shard)));
        wanted.sort();
        wanted.dedup();
        log.hottest_first(&mut wanted);
        self.wanted = wanted.into();
    }

    fn command(
        &mut self,
        command: control::Command,
        limit: usize,
    ) -> Result<Option<Action>, SessionError> {
        let control::Command { id, cluster, term, command } = command;
        let mut refuse = |reason: String| {
            if self.answers.len() >= 4 * limit {
                return Err(SessionError::Flooded);
            }
            self.answers.push_back(control::CommandResult {
                id,
                refused: reason,
                ..Default::default()
            });
            Ok(None)
        };
        let cluster: ClusterId = match cluster.as_ref().try_into() {
            Ok(cluster) => cluster,
            Err(error) => return refuse(error.to_string()),
        };
        match command {
            None => refuse("the node does not know this command".to_owned()),
            Some(_) if self.obeying >= limit => {
                refuse(format!("the node obeys {limit} commands already"))
            }
            Some(control::command::Command::Evict(filter)) => {
                self.obeying += 1;
                let term = Term { cluster, number: term };
                Ok(Some(Action::Obey { id, term, filter }))
            }
        }
    }
}

#[cfg(test)]
mod tests;
