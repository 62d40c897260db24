//! The node's gRPC service: what larderctl asks of one node. It changes nothing.

use crate::{
    catalog::Held,
    inventory::session::LinkBoard,
    metrics,
    node::Node,
    tiering::Tiering,
    tiers::ssd::{Health, SsdPath},
};
use larder_proto::control::{
    ListPinsReply, ListPinsRequest, MasterLink, NodeStatusReply, PathStatus, Pin, StatusRequest,
    TierStatus, node_server,
};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

/// What the service shows besides the node itself.
pub struct NodeService {
    /// The node.
    pub node: Arc<Node>,
    /// How the sessions with masters stand.
    pub board: LinkBoard,
    /// What people call the node.
    pub name: String,
    /// Where others reach its data plane.
    pub data_address: String,
    /// The socket for engines of this host.
    pub socket: String,
    /// What the dram tier holds without evicting.
    pub dram_holds_bytes: u64,
    /// When the node started.
    pub started: Instant,
}

#[tonic::async_trait]
impl node_server::Node for NodeService {
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<NodeStatusReply>, Status> {
        let (node, catalog) = (&self.node, self.node.catalog());
        let held = catalog.held();
        let dram = TierStatus {
            tier: "dram".to_owned(),
            capacity_bytes: catalog.arena().capacity_bytes(),
            used_bytes: catalog.arena().used_bytes(),
            parts: held.dram_parts,
            evictable_bytes: catalog.evictable_bytes(),
            holds_bytes: self.dram_holds_bytes,
            paths: Vec::new(),
        };
        let ssd = node.tiering().map(|tiering| ssd_status(&held, tiering));
        let events = metrics::catalog_events(node);
        Ok(Response::new(NodeStatusReply {
            node: node.id().as_bytes().to_vec().into(),
            name: self.name.clone(),
            incarnation: catalog.incarnation().0,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: millis(self.started.elapsed()),
            data_address: self.data_address.clone(),
            socket: self.socket.clone(),
            tiers: [dram].into_iter().chain(ssd).collect(),
            masters: self.board.links().into_iter().map(MasterLink::from).collect(),
            leases: node.leases().count(),
            writes_in_progress: catalog.writes_in_progress(Instant::now()).len() as u64,
            quarantined_bytes: node.leases().quarantined_bytes(),
            counters: events.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        }))
    }

    async fn list_pins(
        &self,
        _: Request<ListPinsRequest>,
    ) -> Result<Response<ListPinsReply>, Status> {
        let leases = self.node.leases().list().into_iter().map(|lease| Pin {
            kind: if lease.quarantined { "quarantined" } else { "lease" }.to_owned(),
            owner: lease.reader.name.to_string(),
            pid: u64::try_from(lease.reader.pid).unwrap_or(0),
            part: lease.part.to_string(),
            bytes: lease.bytes,
            age_ms: millis(lease.age),
        });
        let writes = self.node.catalog().writes_in_progress(Instant::now());
        let writes = writes.into_iter().map(|write| Pin {
            kind: "write".to_owned(),
            owner: write.producer.name.clone(),
            pid: 0,
            part: write.part.to_string(),
            bytes: 0,
            age_ms: millis(write.age),
        });
        Ok(Response::new(ListPinsReply { pins: leases.chain(writes).collect() }))
    }
}

/// The ssd tier and its paths.
fn ssd_status(held: &Held, tiering: &Tiering) -> TierStatus {
    let of_path = |path: &Arc<SsdPath>| {
        let (healthy, fenced_because) = match path.health() {
            Health::Healthy => (true, String::new()),
            Health::Fenced(why) => (false, why.to_string()),
        };
        PathStatus {
            path: path.settings().name.display().to_string(),
            healthy,
            fenced_because,
            capacity_bytes: path.settings().capacity,
            used_bytes: path.used_bytes(),
            counters: metrics::path_events(path)
                .iter()
                .map(|(name, value)| ((*name).to_owned(), *value))
                .collect(),
        }
    };
    let paths: Vec<_> = tiering.paths().iter().map(of_path).collect();
    let sum = |bytes: fn(&PathStatus) -> u64| paths.iter().map(bytes).sum();
    TierStatus {
        tier: "ssd".to_owned(),
        capacity_bytes: sum(|path| path.capacity_bytes),
        used_bytes: sum(|path| path.used_bytes),
        parts: held.ssd_parts,
        evictable_bytes: held.ssd_bytes,
        // Parts are put into dram; what of them comes to an ssd is the admission's choice.
        holds_bytes: 0,
        paths,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
