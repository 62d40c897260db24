//! What the state machines of a master share: membership, the index, and who answers may name.
//!
//! No IO and no clock. Sessions run beside each other and apply records to the index without a common
//! lock; only a change of a node's state goes through the membership. What the outside has to do about it
//! ([`Effect`]) is queued and taken by whoever caused it.
//!
//! Locks, in the order in which they are taken: membership, then the progress of one source. An answer
//! takes neither: it reads the [`Roster`], an immutable table that every change of membership replaces, and
//! notices by the [epoch](Cluster::epoch) when index and roster changed under it.

use crate::{
    counters::Counters,
    hard_state::Life,
    index::{Index, IndexSetId, SpaceId},
    membership::{
        Action, Event, HelloError, Identity, Limits, Membership, Node, Seen, SessionId, Vitals,
    },
    registry::{Registered, Registry},
};
use bytes::Bytes;
use larder_proto::{
    Incarnation, Location, ModelVersion, NodeId, control,
    event::{PartSet, Record, RecordKind},
    ids::TenantId,
};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
            fence,
        },
    },
    time::{Duration, Instant},
};

/// What one session says about one location.
#[derive(Debug)]
pub struct Source {
    /// The node's place in the index.
    pub location: Location,
    /// The node.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Where others reach its data plane.
    pub data_address: String,
    node_bytes: Bytes,
    /// The last applied event, for answers.
    seq: AtomicU64,
    /// The last applied event, while the session speaks for the node. Whoever holds it is alone in
    /// changing the location's entries.
    progress: Mutex<Option<u64>>,
}

impl Source {
    /// The last applied event; `None` when the session no longer speaks for the node.
    pub(crate) fn progress(&self) -> MutexGuard<'_, Option<u64>> {
        self.progress.lock()
    }

    pub(crate) fn publish(&self, seq: u64) {
        self.seq.store(seq, Relaxed);
    }

    /// The last applied event.
    pub fn seq(&self) -> u64 {
        self.seq.load(Relaxed)
    }

    /// As it is named in answers.
    pub fn describe(&self, seq: u64) -> control::Source {
        control::Source {
            node: self.node_bytes.clone(),
            incarnation: self.incarnation.0,
            data_address: self.data_address.clone(),
            seq,
        }
    }
}

/// Who answers may name, at one moment.
#[derive(Debug, Default)]
pub struct Roster {
    sources: Vec<Arc<Source>>,
    by_location: HashMap<Location, usize>,
    by_node: HashMap<NodeId, Location>,
    seen: Seen,
}

impl Roster {
    fn new(sources: Vec<Arc<Source>>, seen: Seen) -> Self {
        let by_location = (0..).zip(&sources).map(|(at, source)| (source.location, at)).collect();
        let by_node = sources.iter().map(|source| (source.node, source.location)).collect();
        Self { sources, by_location, by_node, seen }
    }

    /// Where among [`Self::sources`] the source of a location is; `None` when it is not in session.
    pub fn position(&self, location: Location) -> Option<usize> {
        self.by_location.get(&location).copied()
    }

    /// Where a node's entries are.
    pub fn location(&self, node: &NodeId) -> Option<Location> {
        self.by_node.get(node).copied()
    }

    /// All sources.
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// How much of the cluster answers can see.
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// Whether the same session speaks for the location in both rosters.
    pub fn agrees_on(&self, location: Location, later: &Self) -> bool {
        let source = |roster: &Self| Some(Arc::as_ptr(&roster.sources[roster.position(location)?]));
        source(self).is_some_and(|now| source(later) == Some(now))
    }
}

/// What is left to do outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// End this session: another one speaks for its node.
    Close(SessionId),
    /// Make the identity durable.
    Remember(Identity),
    /// Drop the identity.
    Dismiss(NodeId),
}

#[derive(Debug)]
struct Members {
    membership: Membership,
    /// The last applied event of locations that no session speaks for.
    parked: HashMap<Location, u64>,
}

/// What the index calls a part set of a node; nothing where it had no room.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Interned {
    space: Option<SpaceId>,
    set: Option<IndexSetId>,
}

/// What nodes are told in a welcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How often a node says that it lives.
    pub heartbeat: Duration,
    /// When a node without a session is forgotten.
    pub node_ttl: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Cluster {
    life: Life,
    timing: Timing,
    index: Index,
    registry: RwLock<Registry>,
    counters: Counters,
    members: Mutex<Members>,
    roster: RwLock<Arc<Roster>>,
    /// Odd while index and roster are being changed together.
    epoch: AtomicU64,
    effects: Mutex<Vec<Effect>>,
}

impl Cluster {
    /// A cluster that has no nodes yet.
    pub fn new(
        life: Life,
        timing: Timing,
        nodes_limit: usize,
        index: Index,
        registry: Registry,
    ) -> Self {
        let limits = Limits { node_ttl: timing.node_ttl, nodes: nodes_limit };
        Self {
            life,
            timing,
            index,
            registry: RwLock::new(registry),
            counters: Counters::default(),
            members: Mutex::new(Members {
                membership: Membership::new(limits),
                parked: HashMap::new(),
            }),
            roster: RwLock::default(),
            epoch: AtomicU64::new(0),
            effects: Mutex::default(),
        }
    }

    /// Term and incarnation of this master.
    pub fn life(&self) -> Life {
        self.life
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Who answers may name now.
    pub fn roster(&self) -> Arc<Roster> {
        Arc::clone(&self.roster.read())
    }

    /// The number of the present state of membership, index visibility and roster; `None` while it changes.
    /// What was read between two equal numbers belongs together.
    pub fn epoch(&self) -> Option<u64> {
        fence(SeqCst);
        let epoch = self.epoch.load(SeqCst);
        epoch.is_multiple_of(2).then_some(epoch)
    }

    /// All nodes that are not forgotten.
    pub fn nodes(&self) -> Vec<Node> {
        self.members.lock().membership.nodes().cloned().collect()
    }

    /// How much of the cluster an answer from `roster` could see.
    pub fn coverage(&self, roster: &Roster) -> control::Coverage {
        let Seen { known, synced } = roster.seen;
        let index_limited = self.index.limited();
        let small = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        control::Coverage {
            complete: known == synced && !index_limited,
            nodes_known: small(known),
            nodes_synced: small(synced),
            index_limited,
        }
    }

    /// What is left to do outside since the last call.
    pub fn take_effects(&self) -> Vec<Effect> {
        std::mem::take(&mut self.effects.lock())
    }

    /// The registered models.
    pub fn registry(&self) -> &RwLock<Registry> {
        &self.registry
    }

    /// A model version was registered: from now on its blocks match by the rules of its layout.
    pub fn register(&self, version: ModelVersion, model: Registered) {
        let layout = model.described.clone();
        self.registry.write().insert(version, model);
        // After the insertion: a space that begins now finds the rules there.
        for space in self.index.spaces().iter().filter(|space| space.model == version) {
            self.index.set_rules(space.space, &layout);
        }
    }

    /// What the index calls a part set of a node.
    pub(crate) fn intern(
        &self,
        tenant: &TenantId,
        model: &ModelVersion,
        parts: &PartSet,
    ) -> Interned {
        let space = self.index.find_space(tenant, model).or_else(|| {
            let space = self.index.space(tenant, model)?;
            if let Some(registered) = self.registry.read().get(model) {
                self.index.set_rules(space, &registered.described);
            }
            Some(space)
        });
        Interned { space, set: space.and_then(|space| self.index.intern_set(space, parts)) }
    }

    /// Applies what a node says of a block. What does not fit is left out and counted.
    #[inline]
    pub(crate) fn apply(&self, location: Location, interned: &Interned, record: &Record) {
        match (record.kind, interned) {
            (RecordKind::Stored, Interned { set: Some(set), .. }) => {
                self.index.upsert(location, &record.key, *set, record.tiers);
            }
            (RecordKind::Stored, Interned { space, .. }) => {
                // What was held before is no longer true.
                space.map(|space| self.index.remove(location, space, &record.key, record.kind));
                self.index.leave_out(location, &record.key);
            }
            (kind, Interned { space: Some(space), .. }) => {
                self.index.remove(location, *space, &record.key, kind);
            }
            // Nothing of a space that did not fit is held.
            (_, Interned { space: None, .. }) => {}
        }
    }

    /// What a node is told at its hello; `refused` is empty unless its session ends with it.
    pub fn welcome(&self, refused: String) -> control::Welcome {
        let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        control::Welcome {
            cluster: Bytes::copy_from_slice(self.life.term.cluster.as_bytes()),
            term: self.life.term.number,
            master_incarnation: self.life.incarnation.0,
            heartbeat_ms: millis(self.timing.heartbeat),
            node_ttl_ms: millis(self.timing.node_ttl),
            refused,
        }
    }

    /// Nodes that were known before this master started: answers are incomplete until they are back or
    /// their TTL is over.
    pub fn expect(&self, now: Instant, nodes: Vec<Identity>) {
        let mut members = self.members.lock();
        for identity in nodes {
            // Above the limit it is merely not waited for.
            members.membership.step(now, Event::Expected(identity)).ok();
        }
        self.replace_roster(&members, Vec::new());
    }

    /// A node opens a session: from now on the returned source speaks for it.
    ///
    /// # Errors
    /// The node is not wanted.
    pub fn hello(
        &self,
        now: Instant,
        session: SessionId,
        identity: Identity,
        incarnation: Incarnation,
    ) -> Result<Arc<Source>, HelloError> {
        let mut members = self.members.lock();
        let begins = members.membership.admit(&identity, incarnation)?;
        let location = if begins { self.index.begin_location() } else { None };
        let (node, data_address) = (identity.node, identity.data_address.clone());
        let event = Event::Hello { session, identity, incarnation, location };
        let actions = members.membership.step(now, event)?;
        let joined = actions.iter().find_map(|action| match action {
            Action::Join { location, .. } => Some(*location),
            _ => None,
        });
        let location = joined.ok_or(HelloError::NoLocation)?;
        let mut sources = self.roster().sources.clone();
        self.retire(&mut members, &mut sources, location);
        self.retire_lost(&mut members, &actions, &mut sources);
        // Where an earlier session of this life ended.
        let seq = members.parked.remove(&location).unwrap_or(0);
        let source = Arc::new(Source {
            location,
            node,
            incarnation,
            data_address,
            node_bytes: Bytes::copy_from_slice(node.as_bytes()),
            seq: AtomicU64::new(seq),
            progress: Mutex::new(Some(seq)),
        });
        sources.push(Arc::clone(&source));
        self.change(&mut members, actions, sources);
        self.counters.sessions.add(1);
        Ok(source)
    }

    /// Whether the digests of a node agree with the index has changed.
    pub fn set_synced(&self, now: Instant, session: SessionId, synced: bool) {
        self.step(now, Event::Synced { session, synced });
    }

    /// A heartbeat came.
    pub fn beat(&self, now: Instant, session: SessionId, vitals: Vitals) {
        // Changes nothing that answers depend on.
        self.members.lock().membership.step(now, Event::Beat { session, vitals }).ok();
    }

    /// A session ended, by whichever side.
    pub fn ended(&self, now: Instant, session: SessionId) {
        self.step(now, Event::Ended { session });
    }

    /// Time passed: forgets nodes whose TTL is over.
    pub fn tick(&self, now: Instant) {
        self.step(now, Event::Tick);
    }

    fn step(&self, now: Instant, event: Event) {
        let mut members = self.members.lock();
        let before = members.membership.seen();
        let Ok(actions) = members.membership.step(now, event) else { return };
        if actions.is_empty() && members.membership.seen() == before {
            return;
        }
        let mut sources = self.roster().sources.clone();
        self.retire_lost(&mut members, &actions, &mut sources);
        self.change(&mut members, actions, sources);
    }

    /// Nobody speaks any more for locations that are hidden or forgotten. May wait for messages in hand,
    /// so it comes before the change that answers notice.
    fn retire_lost(
        &self,
        members: &mut Members,
        actions: &[Action],
        sources: &mut Vec<Arc<Source>>,
    ) {
        for action in actions {
            if let Action::Hide(location) | Action::Forget(location) = action {
                self.retire(members, sources, *location);
            }
        }
    }

    /// Changes index and roster together.
    fn change(&self, members: &mut Members, actions: Vec<Action>, sources: Vec<Arc<Source>>) {
        self.epoch.fetch_add(1, SeqCst);
        fence(SeqCst);
        self.act(members, actions);
        self.replace_roster(members, sources);
        fence(SeqCst);
        self.epoch.fetch_add(1, SeqCst);
    }

    fn act(&self, members: &mut Members, actions: Vec<Action>) {
        for action in actions {
            let effect = match action {
                Action::Hide(location) => {
                    self.index.hide(location);
                    continue;
                }
                Action::Show(location) => {
                    self.index.show(location);
                    continue;
                }
                Action::Forget(location) => {
                    members.parked.remove(&location);
                    self.index.forget(location);
                    continue;
                }
                // Its source is made by `hello`.
                Action::Join { .. } => continue,
                Action::Close(session) => {
                    self.counters.superseded_sessions.add(1);
                    Effect::Close(session)
                }
                Action::Remember(identity) => Effect::Remember(identity),
                Action::Dismiss(node) => {
                    self.counters.nodes_forgotten.add(1);
                    Effect::Dismiss(node)
                }
            };
            self.effects.lock().push(effect);
        }
    }

    /// Ends the right of whoever speaks for the location, once the message in hand is applied.
    fn retire(&self, members: &mut Members, sources: &mut Vec<Arc<Source>>, location: Location) {
        sources.retain(|source| {
            let stays = source.location != location;
            if !stays && let Some(seq) = source.progress.lock().take() {
                members.parked.insert(location, seq);
            }
            stays
        });
    }

    fn replace_roster(&self, members: &Members, sources: Vec<Arc<Source>>) {
        *self.roster.write() = Arc::new(Roster::new(sources, members.membership.seen()));
    }
}
