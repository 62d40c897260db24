//! Which nodes there are, which life of each counts, and whether its entries may be used.
//!
//! A state machine without IO. One node's life:
//!
//! ```text
//!            hello                  digests agree
//! (unknown) -------> syncing <---------------------> up
//!                       |         gap or difference   |
//!                       +------- session ended -------+
//!                                     v
//!                                   down --- node_ttl ---> forgotten
//! ```
//!
//! - A greater incarnation supersedes the one before at once: its location dies, its session is closed,
//!   and whatever still arrives from it is ignored (F10).
//! - A node that comes back within the TTL with the same incarnation finds its entries again. They are
//!   used once its digests agree.
//! - A node whose session ended is left out of answers at once (P5).
//! - After a start the master expects the nodes that it knew; until each came back or its TTL is over,
//!   answers say that they are incomplete.

use larder_proto::{Incarnation, Location, NodeId};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// One connection of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// What stays the same over the lives of a node, or changes with its configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The node.
    pub node: NodeId,
    /// For people.
    pub name: String,
    /// `host:port` of its data plane.
    pub data_address: String,
    /// `host:port` of its `Node` service.
    pub control_address: String,
    /// Version of the program.
    pub version: String,
    /// Capacity of all tiers.
    pub capacity_bytes: u64,
}

/// What a heartbeat says of the node besides digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Vitals {
    /// Bytes of all tiers in use.
    pub used_bytes: u64,
    /// Blocks held.
    pub blocks: u64,
    /// The node is about to leave.
    pub draining: bool,
}

/// Where a node stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    /// In session; its entries are not known to be exact.
    Syncing,
    /// In session, and its entries were exact at the last digests and contiguous since.
    Up,
    /// Not in session. Left out of answers.
    Down,
}

impl NodeState {
    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Syncing => "syncing",
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// What happens to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The node was known before this master started.
    Expected(Identity),
    /// A session opens.
    Hello {
        /// The new session.
        session: SessionId,
        /// Who speaks.
        identity: Identity,
        /// Which life of it.
        incarnation: Incarnation,
        /// A fresh location where [`Membership::admit`] says that one begins.
        location: Option<Location>,
    },
    /// The digests of the node in this session agree with the index, or no longer do.
    Synced {
        /// Whose.
        session: SessionId,
        /// Whether they agree.
        synced: bool,
    },
    /// A heartbeat came.
    Beat {
        /// Whose.
        session: SessionId,
        /// What it said.
        vitals: Vitals,
    },
    /// A session ended, by whichever side.
    Ended {
        /// Which.
        session: SessionId,
    },
    /// Time passed.
    Tick,
}

/// What the owner must do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Leave the location's entries out of answers and keep them.
    Hide(Location),
    /// Use the location's entries again.
    Show(Location),
    /// The location's entries are gone for good.
    Forget(Location),
    /// Let the session speak for this location from now on.
    Join {
        /// Which session.
        session: SessionId,
        /// For which location.
        location: Location,
    },
    /// End a session: another one speaks for the node.
    Close(SessionId),
    /// Make the identity durable.
    Remember(Identity),
    /// The node has not been heard of for its TTL; forget its identity too.
    Dismiss(NodeId),
}

/// Why a node may not open a session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// A later life of the node is known.
    #[error(
        "incarnation {ours} of node {node} has been seen, this is incarnation {theirs}: an earlier life, \
         or a second node with a copy of its state directory"
    )]
    Superseded {
        /// The node.
        node: NodeId,
        /// What is known.
        ours: Incarnation,
        /// What the session said.
        theirs: Incarnation,
    },
    /// The limit of nodes is reached.
    #[error("{limit} nodes are known, which is the limit (nodes.limit)")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// The index takes no further location now: entries of dead ones are still being swept.
    #[error("the index has no room for a further life of a node now")]
    NoLocation,
}

/// Everything that is known of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Who it is.
    pub identity: Identity,
    /// Its current life; `None` when it is only expected.
    pub life: Option<Life>,
    /// Where it stands.
    pub state: NodeState,
    /// Since when.
    pub since: Instant,
    /// What it said last.
    pub vitals: Vitals,
}

/// One life of a node, as far as this master saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// Which one.
    pub incarnation: Incarnation,
    /// Stands for it in the index.
    pub location: Location,
    /// The session that speaks for it, if one does.
    pub session: Option<SessionId>,
    /// Its entries are kept and not used.
    hidden: bool,
}

/// How much of the cluster answers can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Seen {
    /// Nodes that are not forgotten.
    pub known: usize,
    /// Nodes that are up.
    pub synced: usize,
}

/// Bounds of a membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A node without a session is forgotten after this time.
    pub node_ttl: Duration,
    /// Nodes that are known at most.
    pub nodes: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Membership {
    limits: Limits,
    nodes: BTreeMap<NodeId, Node>,
    sessions: BTreeMap<SessionId, NodeId>,
}

impl Membership {
    /// No nodes yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, nodes: BTreeMap::new(), sessions: BTreeMap::new() }
    }

    /// Applies one event. Events of sessions that no longer speak for a node change nothing.
    ///
    /// # Errors
    /// Only an expected node and a hello can be refused.
    pub fn step(&mut self, now: Instant, event: Event) -> Result<Vec<Action>, HelloError> {
        let mut actions = Vec::new();
        match event {
            Event::Expected(identity) => {
                self.node_entry(now, &identity)?;
            }
            Event::Hello { session, identity, incarnation, location } => {
                let begins = self.admit(&identity, incarnation)?;
                if begins && location.is_none() {
                    return Err(HelloError::NoLocation);
                }
                let fresh = location.filter(|_| begins);
                self.hello(now, session, identity, incarnation, fresh, &mut actions)?;
            }
            Event::Synced { session, synced } => {
                if let Some(node) = self.speaks_for(session) {
                    node.set_synced(now, synced, &mut actions);
                }
            }
            Event::Beat { session, vitals } => {
                if let Some(node) = self.speaks_for(session) {
                    node.vitals = vitals;
                }
            }
            Event::Ended { session } => {
                if let Some(node) = self.speaks_for(session) {
                    node.set_down(now, &mut actions);
                }
                self.sessions.remove(&session);
            }
            Event::Tick => self.forget_expired(now, &mut actions),
        }
        Ok(actions)
    }

    /// All nodes that are not forgotten.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// How much of the cluster answers can see.
    pub fn seen(&self) -> Seen {
        let synced = self.nodes.values().filter(|node| node.state == NodeState::Up).count();
        Seen { known: self.nodes.len(), synced }
    }

    /// Whether a session of this life begins a location, or goes on with the one that the life has.
    ///
    /// # Errors
    /// The session would be refused.
    pub fn admit(&self, identity: &Identity, incarnation: Incarnation) -> Result<bool, HelloError> {
        let limit = self.limits.nodes;
        match self.nodes.get(&identity.node) {
            None if self.nodes.len() >= limit => Err(HelloError::TooMany { limit }),
            None => Ok(true),
            Some(node) => match node.life {
                Some(life) if life.incarnation > incarnation => {
                    let (node, ours) = (identity.node, life.incarnation);
                    Err(HelloError::Superseded { node, ours, theirs: incarnation })
                }
                life => Ok(life.is_none_or(|life| life.incarnation != incarnation)),
            },
        }
    }

    /// `fresh` is the location of a life that begins; without one the life is known.
    fn hello(
        &mut self,
        now: Instant,
        session: SessionId,
        identity: Identity,
        incarnation: Incarnation,
        fresh: Option<Location>,
        actions: &mut Vec<Action>,
    ) -> Result<(), HelloError> {
        let node = self.node_entry(now, &identity)?;
        let known = node.life;
        if let Some(life) = known {
            actions.extend(life.session.map(Action::Close));
            actions.extend(fresh.map(|_| Action::Forget(life.location)));
        }
        let location = fresh.or(known.map(|life| life.location)).ok_or(HelloError::NoLocation)?;
        actions.push(Action::Join { session, location });
        let hidden = fresh.is_none() && known.is_some_and(|life| life.hidden);
        node.life = Some(Life { incarnation, location, session: Some(session), hidden });
        node.set_state(now, NodeState::Syncing);
        if node.identity != identity || known.is_none() {
            node.identity = identity.clone();
            actions.push(Action::Remember(identity.clone()));
        }
        if let Some(superseded) = known.and_then(|life| life.session) {
            self.sessions.remove(&superseded);
        }
        self.sessions.insert(session, identity.node);
        Ok(())
    }

    fn node_entry(&mut self, now: Instant, identity: &Identity) -> Result<&mut Node, HelloError> {
        let limit = self.limits.nodes;
        if self.nodes.len() >= limit && !self.nodes.contains_key(&identity.node) {
            return Err(HelloError::TooMany { limit });
        }
        Ok(self.nodes.entry(identity.node).or_insert_with(|| Node {
            identity: identity.clone(),
            life: None,
            state: NodeState::Down,
            since: now,
            vitals: Vitals::default(),
        }))
    }

    fn speaks_for(&mut self, session: SessionId) -> Option<&mut Node> {
        let node = self.nodes.get_mut(self.sessions.get(&session)?)?;
        let speaks = node.life.is_some_and(|life| life.session == Some(session));
        speaks.then_some(node)
    }

    fn forget_expired(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let ttl = self.limits.node_ttl;
        self.nodes.retain(|id, node| {
            let expired = node.state == NodeState::Down && now >= node.since + ttl;
            if expired {
                actions.extend(node.life.map(|life| Action::Forget(life.location)));
                actions.push(Action::Dismiss(*id));
            }
            !expired
        });
    }
}

impl Node {
    fn set_state(&mut self, now: Instant, state: NodeState) {
        if self.state != state {
            (self.state, self.since) = (state, now);
        }
    }

    fn set_synced(&mut self, now: Instant, synced: bool, actions: &mut Vec<Action>) {
        self.set_state(now, if synced { NodeState::Up } else { NodeState::Syncing });
        if let Some(life) = self.life.as_mut().filter(|life| synced && life.hidden) {
            life.hidden = false;
            actions.push(Action::Show(life.location));
        }
    }

    fn set_down(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.set_state(now, NodeState::Down);
        if let Some(life) = self.life.as_mut() {
            life.session = None;
            if !std::mem::replace(&mut life.hidden, true) {
                actions.push(Action::Hide(life.location));
            }
        }
    }
}

#[cfg(test)]
mod tests;
