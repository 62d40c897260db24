//! A simulated master: the real cluster, sessions and index, and a disk that keeps what is remembered.

use super::world::Universe;
use larder_master::{
    cluster::{Cluster, Effect, Timing},
    hard_state::Life,
    index::{Index, IndexLimits},
    membership::{Identity, SessionId},
    registry::Registry,
    session::{Session, SessionError, refusal},
};
use larder_proto::{
    ClusterId, Incarnation, NodeId, Term,
    control::{Command, EvictFilter, MasterMessage, NodeMessage, command, master_message},
};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// A master over its lives.
pub(super) struct Master {
    number: usize,
    pub(super) cluster: Cluster,
    sessions: BTreeMap<SessionId, Session>,
    /// What its disk keeps.
    remembered: BTreeMap<NodeId, Identity>,
    /// Whom it let in: the session that speaks for each node, and of which life.
    pub(super) believed: BTreeMap<NodeId, (Incarnation, SessionId)>,
    closed: Vec<SessionId>,
    up_from: u64,
    last_command: u64,
    /// Of lives before this one.
    counted: [u64; 4],
}

/// A session ended: why, and what the node is told.
pub(super) type End = (SessionEnd, Option<Box<MasterMessage>>);

#[derive(Debug, thiserror::Error)]
pub(super) enum SessionEnd {
    #[error(transparent)]
    Error(#[from] SessionError),
    #[error("no such session")]
    Unknown,
}

impl SessionEnd {
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Error(SessionError::Refused(_)) | Self::Unknown)
    }
}

impl Master {
    pub(super) fn new(number: usize, term: u64, universe: &Universe, entries: u64) -> Self {
        Self {
            number,
            cluster: new_cluster(number, term, universe, entries),
            sessions: BTreeMap::new(),
            remembered: BTreeMap::new(),
            believed: BTreeMap::new(),
            closed: Vec::new(),
            up_from: 0,
            last_command: 0,
            counted: [0; 4],
        }
    }

    /// A crash and a new life: everything but the disk is gone.
    pub(super) fn restart(
        &mut self,
        term: u64,
        universe: &Universe,
        up_from: u64,
        now: Instant,
        entries: u64,
    ) {
        self.counted = self.counts();
        self.cluster = new_cluster(self.number, term, universe, entries);
        self.cluster.expect(now, self.remembered.values().cloned().collect());
        self.sessions.clear();
        self.believed.clear();
        self.closed.clear();
        self.up_from = up_from;
    }

    /// Gaps, snapshots, repeated events, superseded messages: over all lives.
    pub(super) fn counts(&self) -> [u64; 4] {
        let counters = self.cluster.counters();
        let now = [
            counters.gaps.get(),
            counters.snapshots.get(),
            counters.repeated_events.get(),
            counters.superseded_messages.get(),
        ];
        std::array::from_fn(|at| self.counted[at] + now[at])
    }

    pub(super) fn is_up(&self, now: u64) -> bool {
        now >= self.up_from
    }

    pub(super) fn open(&mut self, id: SessionId) {
        self.sessions.insert(id, Session::new(id));
    }

    pub(super) fn has(&self, id: SessionId) -> bool {
        self.sessions.contains_key(&id)
    }

    /// Whether the node of this session was let in.
    pub(super) fn in_session(&self, id: u64) -> bool {
        self.sessions.get(&SessionId(id)).is_some_and(|session| session.source().is_some())
    }

    pub(super) fn command(&mut self, filter: EvictFilter) -> MasterMessage {
        self.last_command += 1;
        let Term { cluster, number } = self.cluster.life().term;
        let command = Command {
            id: self.last_command,
            cluster: cluster.as_bytes().to_vec().into(),
            term: number,
            command: Some(command::Command::Evict(filter)),
        };
        MasterMessage { message: Some(master_message::Message::Command(command)) }
    }

    pub(super) fn receive(
        &mut self,
        now: Instant,
        id: u64,
        message: NodeMessage,
    ) -> Result<Vec<MasterMessage>, End> {
        let session = self.sessions.get_mut(&SessionId(id)).ok_or((SessionEnd::Unknown, None))?;
        let greeting = session.source().is_none();
        let outcome = session.step(now, message, &self.cluster);
        if let Some(source) = session.source().filter(|_| greeting) {
            self.believed.insert(source.node, (source.incarnation, SessionId(id)));
        }
        self.settle();
        outcome.map(|output| output.replies).map_err(|error| {
            let farewell = match &error {
                SessionError::Refused(reason) => {
                    Some(Box::new(refusal(&self.cluster, reason.clone())))
                }
                _ => None,
            };
            (error.into(), farewell)
        })
    }

    /// The session is over, whoever ended it.
    pub(super) fn ended(&mut self, now: Instant, id: SessionId) {
        if self.sessions.remove(&id).is_some() {
            self.cluster.ended(now, id);
            self.believed.retain(|_, (_, session)| *session != id);
            self.settle();
        }
    }

    pub(super) fn tick(&mut self, now: Instant) {
        self.cluster.tick(now);
        self.cluster.index().sweep(64);
        self.settle();
    }

    /// Sessions that the cluster asked to end.
    pub(super) fn take_closed(&mut self) -> Vec<SessionId> {
        std::mem::take(&mut self.closed)
    }

    fn settle(&mut self) {
        for effect in self.cluster.take_effects() {
            match effect {
                Effect::Close(session) => self.closed.push(session),
                Effect::Remember(identity) => {
                    self.remembered.insert(identity.node, identity);
                }
                Effect::Dismiss(node) => {
                    self.remembered.remove(&node);
                }
            }
        }
    }
}

fn new_cluster(number: usize, term: u64, universe: &Universe, entries: u64) -> Cluster {
    let cluster = ClusterId::from_bytes([1; 16]);
    let life = Life { term: Term { cluster, number: term }, incarnation: Incarnation(term) };
    let timing = Timing { heartbeat: Duration::from_secs(1), node_ttl: Duration::from_secs(5) };
    let limits = IndexLimits { entries, spaces: 16, part_sets: 64, locations: 32, removals: 256 };
    let mut registry = Registry::new(8);
    for (version, model) in &universe.models {
        registry.insert(*version, model.clone());
    }
    Cluster::new(life, timing, 16, Index::with_seed(limits, number as u64), registry)
}
