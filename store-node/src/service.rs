//! The node's gRPC service: what larderctl asks of one node, and the operation of its ssd paths.

use crate::{
    catalog::{Audit, Catalog},
    inventory::session::LinkBoard,
    metrics,
    node::Node,
    tiering::{Member, PathError, ScrubCounts, Tiering},
    tiers::ssd::{Health, PathCounters, io::DriverInUse},
};
use larder_proto::control::{
    AuditReply, AuditRequest, FencePathReply, FencePathRequest, ListPinsReply, ListPinsRequest,
    MasterLink, NodeStatusReply, PathStatus, Pin, ReadmitPathReply, ReadmitPathRequest,
    ScrubProgress, ScrubRequest, StatusRequest, TierStatus, node_server,
};
use parking_lot::Mutex;
use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, interval},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// How often a scrub says how far it is.
const PROGRESS: Duration = Duration::from_millis(500);
/// Bytes of the reason of a fence.
const REASON_LIMIT: usize = 512;

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
    /// Held by an audit: it visits every block, so there is one at a time.
    pub auditing: Arc<tokio::sync::Mutex<()>>,
    /// Scrubs on demand; they end with the service.
    pub scrubs: Mutex<JoinSet<()>>,
}

#[tonic::async_trait]
impl node_server::Node for NodeService {
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<NodeStatusReply>, Status> {
        let (node, catalog) = (&self.node, self.node.catalog());
        let dram = TierStatus {
            tier: "dram".to_owned(),
            capacity_bytes: catalog.arena().capacity_bytes(),
            used_bytes: catalog.arena().used_bytes(),
            parts: catalog.parts_in_dram(),
            evictable_bytes: catalog.evictable_bytes(),
            holds_bytes: self.dram_holds_bytes,
            paths: Vec::new(),
            queued_bytes: 0,
        };
        let ssd = node.tiering().map(|tiering| ssd_status(catalog, tiering));
        let (events, traffic) = (metrics::catalog_events(node), node.traffic());
        let traffic = [
            ("sent_bytes", &traffic.sent_bytes),
            ("received_bytes", &traffic.received_bytes),
            ("leased", &traffic.leases),
        ];
        let traffic = traffic.map(|(name, value)| (name, value.load(Ordering::Relaxed)));
        let of_ssds = node.tiering().into_iter().flat_map(|tiering| {
            metrics::tiering_events(tiering).map(|(name, value)| (format!("ssd_{name}"), value))
        });
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
            counters: named(events.into_iter().chain(traffic)).chain(of_ssds).collect(),
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

    async fn audit(&self, _: Request<AuditRequest>) -> Result<Response<AuditReply>, Status> {
        let turn = Arc::clone(&self.auditing).lock_owned().await;
        let catalog = Arc::clone(self.node.catalog());
        let audit = move || {
            let audit = catalog.audit();
            drop(turn); // Here, because the thread goes on when the caller goes.
            audit
        };
        let audit = tokio::task::spawn_blocking(audit).await;
        let Audit { blocks, holes, empty_parts, miscounted } =
            audit.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(AuditReply { blocks, holes, empty_parts, miscounted }))
    }

    type ScrubStream = ReceiverStream<Result<ScrubProgress, Status>>;

    async fn scrub(
        &self,
        request: Request<ScrubRequest>,
    ) -> Result<Response<Self::ScrubStream>, Status> {
        let ScrubRequest { path, bytes_per_second } = request.into_inner();
        let tiering = Arc::clone(self.ssds()?);
        let members = match path.as_str() {
            "" => tiering.members().to_vec(),
            path => vec![Arc::clone(tiering.member(Path::new(path)).map_err(refused)?)],
        };
        let rate = (bytes_per_second > 0).then_some(bytes_per_second);
        let (progress, answers) = mpsc::channel(4);
        let mut scrubs = self.scrubs.lock();
        while scrubs.try_join_next().is_some() {}
        scrubs.spawn(async move {
            let gone = progress.clone();
            let work = async {
                for member in members {
                    scrub_one(&tiering, &member, rate, &progress).await;
                }
            };
            tokio::select! {
                () = work => {}
                () = gone.closed() => {} // Nobody waits for it any more.
            }
        });
        Ok(Response::new(ReceiverStream::new(answers)))
    }

    async fn fence_path(
        &self,
        request: Request<FencePathRequest>,
    ) -> Result<Response<FencePathReply>, Status> {
        let FencePathRequest { path, reason } = request.into_inner();
        if reason.trim().is_empty() || reason.len() > REASON_LIMIT {
            let rule = format!("reason: must be given, and be at most {REASON_LIMIT} bytes long");
            return Err(Status::invalid_argument(rule));
        }
        let (tiering, path) = (self.ssds()?, Path::new(&path));
        let withdrawn = tiering.fence(path, &reason).map_err(refused)?;
        let fenced_because = match tiering.member(path).map_err(refused)?.health() {
            Health::Fenced(why) => why.to_string(),
            Health::Healthy => return Err(Status::aborted("it was taken in again meanwhile")),
        };
        Ok(Response::new(FencePathReply { withdrawn, fenced_because }))
    }

    async fn readmit_path(
        &self,
        request: Request<ReadmitPathRequest>,
    ) -> Result<Response<ReadmitPathReply>, Status> {
        let path = request.into_inner().path;
        self.ssds()?.readmit(Path::new(&path)).await.map_err(refused)?;
        Ok(Response::new(ReadmitPathReply {}))
    }
}

impl NodeService {
    fn ssds(&self) -> Result<&Arc<Tiering>, Status> {
        let none = || Status::not_found("the node has no ssd path (ssd.path in its configuration)");
        self.node.tiering().ok_or_else(none)
    }
}

/// Scrubs a path, and tells how far it is.
async fn scrub_one(
    tiering: &Tiering,
    member: &Member,
    rate: Option<u64>,
    to: &mpsc::Sender<Result<ScrubProgress, Status>>,
) {
    let so_far = Mutex::new(ScrubCounts::default());
    let describe = |counts: ScrubCounts| ScrubProgress {
        path: member.settings().name.display().to_string(),
        segments: counts.segments,
        segments_total: counts.segments_total,
        records: counts.records,
        bytes: counts.bytes,
        damaged_records: counts.damaged_records,
        damaged_segments: counts.damaged_segments,
        done: false,
        error: String::new(),
    };
    let work = tiering.scrub(member, rate, |counts| *so_far.lock() = *counts);
    tokio::pin!(work);
    let mut ticks = interval(PROGRESS);
    let ended = loop {
        tokio::select! {
            ended = &mut work => break ended,
            _ = ticks.tick() => {
                let now = describe(*so_far.lock());
                let _ = to.try_send(Ok(now)); // A slow reader gets the next one.
            }
        }
    };
    let error = ended.err().map(|error| error.to_string()).unwrap_or_default();
    let last = ScrubProgress { done: true, error, ..describe(*so_far.lock()) };
    let _ = to.send(Ok(last)).await;
}

fn refused(error: PathError) -> Status {
    let text = error.to_string();
    match error {
        PathError::Unknown { .. } => Status::not_found(text),
        PathError::NotFenced(_) | PathError::Open { .. } | PathError::InUse(_) => {
            Status::failed_precondition(text)
        }
        PathError::InProgress(_) | PathError::NotEnded(_) | PathError::Silent(_) => {
            Status::aborted(text)
        }
        PathError::NotRemembered { .. } => Status::internal(text),
    }
}

fn named(
    counters: impl Iterator<Item = (&'static str, u64)>,
) -> impl Iterator<Item = (String, u64)> {
    counters.map(|(name, value)| (name.to_owned(), value))
}

/// Bytes that a path moved.
fn bytes(path: &Member) -> [(&'static str, u64); 3] {
    let PathCounters { read_bytes, written_bytes, scrubbed_bytes, .. } = path.counters();
    let bytes = [
        ("read_bytes", read_bytes),
        ("written_bytes", written_bytes),
        ("scrubbed_bytes", scrubbed_bytes),
    ];
    bytes.map(|(name, value)| (name, value.load(Ordering::Relaxed)))
}

/// The ssd tier and its paths.
fn ssd_status(catalog: &Catalog, tiering: &Tiering) -> TierStatus {
    let of_path = |path: &Arc<Member>| {
        let (healthy, fenced_because) = match path.health() {
            Health::Healthy => (true, String::new()),
            Health::Fenced(why) => (false, why.to_string()),
        };
        let (driver, adoption) = (path.driver(), path.adoption());
        let left = adoption.segments.saturating_sub(adoption.counts.segments);
        PathStatus {
            path: path.settings().name.display().to_string(),
            healthy,
            fenced_because,
            capacity_bytes: path.settings().capacity,
            used_bytes: path.used_bytes(),
            counters: named(metrics::path_events(path).into_iter().chain(bytes(path))).collect(),
            driver: driver.as_ref().map(ToString::to_string).unwrap_or_default(),
            driver_because: driver.as_ref().map(DriverInUse::why_not_better).unwrap_or_default(),
            segments_to_adopt: if adoption.goes_on { left } else { 0 },
            adopted_segments: adoption.counts.segments,
            disk_full: path.disk_is_full(),
        }
    };
    let paths: Vec<_> = tiering.members().iter().map(of_path).collect();
    let sum = |bytes: fn(&PathStatus) -> u64| paths.iter().map(bytes).sum();
    let (parts, live) = catalog.parts_on_ssd();
    TierStatus {
        tier: "ssd".to_owned(),
        capacity_bytes: sum(|path| path.capacity_bytes),
        used_bytes: sum(|path| path.used_bytes),
        parts,
        evictable_bytes: live,
        // Parts are put into dram; what of them comes to an ssd is the admission's choice.
        holds_bytes: 0,
        paths,
        queued_bytes: tiering.queued_bytes(),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
