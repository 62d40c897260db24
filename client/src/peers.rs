//! Connections to the data planes of nodes: a small bounded pool for each, and a memory of bad ones.
//!
//! A node that cannot be reached is not tried again before its back-off is over, by anybody who shares the
//! pool, so one dead node does not slow everybody (F20).

use crate::{
    connection::{Connection, Identity},
    error::TransferError,
};
use larder_proto::ids::{Incarnation, NodeId, TenantName};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio::{sync::Mutex as TurnLock, time::Instant};

/// Connections to one node.
pub const PER_NODE: usize = 4;
/// Nodes whose connections are kept; the one that was not used for longest goes first.
pub const NODES: usize = 1024;
/// The first pause after a failure; doubles up to the second.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// A node, one of its lives, and where to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NodeAddress {
    /// The node.
    pub node: NodeId,
    /// The life that is meant: another one holds other parts (F05).
    pub incarnation: Incarnation,
    /// `host:port` of its data plane.
    pub address: String,
}

/// A connection belongs to one tenant: its hello decides whose parts it reads (P11).
type Key = (TenantName, NodeAddress);

/// A pool of connections to nodes; clones share it.
#[derive(Debug, Clone)]
pub struct Peers {
    identity: Arc<Identity>,
    nodes: Arc<Mutex<HashMap<Key, Arc<Peer>>>>,
}

#[derive(Debug)]
struct Peer {
    slots: Vec<Slot>,
    state: Mutex<PeerState>,
}

#[derive(Debug, Default)]
struct Slot {
    connection: TurnLock<Option<Connection>>,
}

#[derive(Debug)]
struct PeerState {
    next_slot: usize,
    used: Instant,
    failures: u32,
    not_before: Option<(Instant, TransferError)>,
}

impl Peers {
    /// A pool whose connections say hello as `identity`, each for the tenant it is asked for.
    pub fn new(identity: Identity) -> Self {
        Self { identity: Arc::new(identity), nodes: Arc::default() }
    }

    /// A connection of `tenant` to that life of the node. Fails at once while the node is in its
    /// back-off.
    pub async fn connection(
        &self,
        tenant: &TenantName,
        to: &NodeAddress,
    ) -> Result<Connection, TransferError> {
        let peer = self.peer(tenant, to);
        let slot = peer.choose_slot()?;
        let mut held = peer.slots[slot].connection.lock().await;
        if let Some(open) = held.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(open.clone());
        }
        // Others may have found the node dead while this one waited for its turn.
        peer.check_back_off()?;
        let opened = self.open(tenant, to).await;
        peer.note(&opened);
        let opened = opened?;
        *held = Some(opened.clone());
        Ok(opened)
    }

    async fn open(
        &self,
        tenant: &TenantName,
        to: &NodeAddress,
    ) -> Result<Connection, TransferError> {
        let identity = Identity { tenant: tenant.clone(), ..(*self.identity).clone() };
        let opened = Connection::connect(&to.address, &identity).await?;
        if (opened.node(), opened.incarnation()) != (to.node, to.incarnation) {
            return Err(TransferError::OtherPeer(format!(
                "{} is node {} in life {}, not node {} in life {}",
                to.address,
                opened.node(),
                opened.incarnation(),
                to.node,
                to.incarnation
            )));
        }
        Ok(opened)
    }

    fn peer(&self, tenant: &TenantName, to: &NodeAddress) -> Arc<Peer> {
        let now = Instant::now();
        let key = (tenant.clone(), to.clone());
        let mut nodes = self.nodes.lock();
        if nodes.len() >= NODES && !nodes.contains_key(&key) {
            let oldest = nodes.iter().min_by_key(|(_, peer)| peer.state.lock().used);
            let oldest = oldest.map(|(address, _)| address.clone());
            oldest.and_then(|address| nodes.remove(&address));
        }
        let peer = nodes.entry(key).or_insert_with(|| {
            let slots = (0..PER_NODE).map(|_| Slot::default()).collect();
            let state = PeerState { next_slot: 0, used: now, failures: 0, not_before: None };
            Arc::new(Peer { slots, state: Mutex::new(state) })
        });
        peer.state.lock().used = now;
        Arc::clone(peer)
    }
}

impl Peer {
    /// The slots take turns.
    fn choose_slot(&self) -> Result<usize, TransferError> {
        self.check_back_off()?;
        let mut state = self.state.lock();
        state.next_slot = (state.next_slot + 1) % self.slots.len();
        Ok(state.next_slot)
    }

    fn check_back_off(&self) -> Result<(), TransferError> {
        match &self.state.lock().not_before {
            Some((until, error)) if Instant::now() < *until => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn note(&self, opened: &Result<Connection, TransferError>) {
        let mut state = self.state.lock();
        match opened {
            Ok(_) => (state.failures, state.not_before) = (0, None),
            Err(error) => {
                let pause = BACK_OFF.0 * 2u32.saturating_pow(state.failures.min(8));
                let until = Instant::now() + pause.min(BACK_OFF.1);
                state.failures += 1;
                state.not_before = Some((until, error.clone()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_node_is_not_tried_again_before_its_back_off_is_over() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let peers = Peers::new(Identity::client("test"));
        let node = NodeId::from_bytes([1; 16]);
        let to = NodeAddress { node, incarnation: Incarnation(1), address };
        let tenant = TenantName::default();
        let first = peers.connection(&tenant, &to).await.unwrap_err();
        let (_, remembered) = peers.peer(&tenant, &to).state.lock().not_before.clone().unwrap();
        assert_eq!(first, remembered);
        for _ in 0..10 {
            assert_eq!(peers.connection(&tenant, &to).await.unwrap_err(), first);
        }
        assert_eq!(peers.peer(&tenant, &to).state.lock().failures, 1, "one attempt in all");
    }
}
