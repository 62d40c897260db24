//! A master and a node of its own, and what they are asked.

use super::{Args, MODEL, lag::Lags};
use crate::{
    child::{self, Child},
    error::BenchError,
};
use larder_client::{
    cluster::ClusterClient,
    connection::{Connection, Identity, Socket},
    masters::{Masters, channel},
};
use larder_proto::{
    BlockKey, PartNumber, TierSet,
    control::{AuditReply, AuditRequest, StatusRequest, node_client::NodeClient},
    frame::Lookup,
};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    net::UnixStream,
    time::{Instant, sleep},
};
use tonic::transport::Channel;

/// How long the node may take to open its session.
const SESSION_LIMIT: Duration = Duration::from_secs(20);
/// MiB of a segment, and of the ssd tier: it reclaims segments from early on.
const SSD_MIB: (u32, u32) = (16, 256);

/// See the module. Both processes end, and their folder goes, when it is dropped.
#[derive(Debug)]
pub(super) struct Cluster {
    node: Child,
    master: Child,
    client: ClusterClient,
    control: NodeClient<Channel>,
    metrics: String,
    socket: PathBuf,
    _dir: TempDir,
}

/// What the node has done since it started, and what it cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Figures {
    /// Blocks that are gone from the node.
    pub(super) evicted: u64,
    /// Blocks that left its memory and stayed on the ssd.
    pub(super) demoted: u64,
    /// CPU seconds of the node.
    pub(super) node_cpu_s: f64,
    /// CPU seconds of the master.
    pub(super) master_cpu_s: f64,
}

impl Figures {
    /// Blocks that left the dram tier.
    pub(super) fn evictions(&self) -> u64 {
        self.evicted + self.demoted
    }

    /// From `before` to this.
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            evicted: self.evicted - before.evicted,
            demoted: self.demoted - before.demoted,
            node_cpu_s: self.node_cpu_s - before.node_cpu_s,
            master_cpu_s: self.master_cpu_s - before.master_cpu_s,
        }
    }
}

impl Cluster {
    /// Starts both; returns when their session is open.
    pub(super) async fn start(args: &Args) -> Result<Self, BenchError> {
        let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let doing = format!("make a folder in {}", dir.display());
        let dir = tempfile::Builder::new().prefix("larder-bench-notices-").tempdir_in(dir);
        let dir = dir.map_err(BenchError::io(doing))?;
        let (master, address) = start_master(dir.path())?;
        // A name in the folder may be longer than the name of a socket can be, so its own is short.
        let socket = dir.path().join("s");
        let mut node = start_node(args, dir.path(), &address, &socket)?;
        let metrics = node.announced("metrics")?;
        let control = NodeClient::new(channel(&node.announced("control")?)?);
        node.announced("local")?;
        let masters = Masters::new(&[address])?;
        let client = ClusterClient::new(masters, Identity::client("larder-bench"));
        let mut this = Self { node, master, client, control, metrics, socket, _dir: dir };
        this.await_session().await?;
        Ok(this)
    }

    async fn await_session(&mut self) -> Result<(), BenchError> {
        let limit = Instant::now() + SESSION_LIMIT;
        loop {
            let status = self.status().await?;
            let state = status.masters.first().map(|link| link.state.clone()).unwrap_or_default();
            if state == "open" {
                return Ok(());
            }
            if Instant::now() > limit {
                return Err(BenchError::Answer { doing: "await the session", answer: state });
            }
            sleep(super::ASK_EVERY).await;
        }
    }

    /// The node's socket for clients of its host.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// What the node has done so far.
    pub(super) async fn figures(&mut self) -> Result<Figures, BenchError> {
        let counters = self.status().await?.counters;
        let counter = |name: &str| counters.get(name).copied().unwrap_or(0);
        Ok(Figures {
            evicted: counter("evicted"),
            demoted: counter("demoted"),
            node_cpu_s: self.node.cpu_seconds(),
            master_cpu_s: self.master.cpu_seconds(),
        })
    }

    async fn status(&mut self) -> Result<larder_proto::control::NodeStatusReply, BenchError> {
        let reply = self.control.status(StatusRequest {}).await;
        Ok(reply.map_err(failed("ask the node for its status"))?.into_inner())
    }

    /// What the node finds when it looks through its catalog.
    pub(super) async fn audit(&mut self) -> Result<AuditReply, BenchError> {
        let reply = self.control.audit(AuditRequest {}).await;
        Ok(reply.map_err(failed("have the node audit its catalog"))?.into_inner())
    }

    /// The lags that the node has counted so far.
    pub(super) async fn lag(&self) -> Result<Lags, BenchError> {
        let text = child::metrics(&self.metrics).await;
        Ok(Lags::of_metrics(&text.map_err(BenchError::io("read the node's metrics"))?))
    }

    /// Whether the index knows each of these blocks on the node.
    pub(super) async fn located(&self, keys: &[BlockKey]) -> Result<Vec<bool>, BenchError> {
        let located = self.client.locate(MODEL, keys).await?;
        if !located.coverage.complete {
            let answer = format!("an incomplete answer: {:?}", located.coverage);
            return Err(BenchError::Answer { doing: "locate blocks", answer });
        }
        Ok(located.blocks.iter().map(|holders| !holders.is_empty()).collect())
    }

    /// Whether the node holds each of these blocks, by its own word.
    pub(super) async fn held(&self, keys: &[BlockKey]) -> Result<Vec<bool>, BenchError> {
        let stream = UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(BenchError::io("connect to the node's socket"))?;
        let identity = Identity::client("larder-bench");
        let connection = Connection::open(Socket::Unix(stream), &identity).await?;
        let lookup = Lookup { layout: MODEL.layout, part: PartNumber(0), keys: keys.to_vec() };
        let tiers = connection.lookup(&lookup).await?;
        Ok(tiers.into_iter().map(|tiers| tiers != TierSet::EMPTY).collect())
    }
}

fn start_master(dir: &Path) -> Result<(Child, String), BenchError> {
    let args = [
        format!("--state_dir={}", dir.join("master").display()),
        "--control.listen=127.0.0.1:0".to_owned(),
        "--metrics.listen=127.0.0.1:0".to_owned(),
        "--log.level=warn".to_owned(),
    ];
    let mut master = Child::start("larder-master", &child::sibling("larder-master")?, &args, dir)?;
    let address = master.announced("control")?;
    Ok((master, address))
}

fn start_node(args: &Args, dir: &Path, master: &str, socket: &Path) -> Result<Child, BenchError> {
    let mut flags = vec![
        format!("--state_dir={}", dir.join("node").display()),
        format!("--masters={master}"),
        format!("--local.socket={}", socket.display()),
        "--local.staging=4MiB".to_owned(),
        "--data.listen=127.0.0.1:0".to_owned(),
        "--control.listen=127.0.0.1:0".to_owned(),
        "--metrics.listen=127.0.0.1:0".to_owned(),
        format!("--dram.capacity={}MiB", args.dram_mib),
        "--log.level=warn".to_owned(),
    ];
    if args.ssd {
        let (segment, capacity) = SSD_MIB;
        let path = dir.join("ssd").display().to_string();
        flags.extend([
            format!("--ssd.path=[{{dir = {path:?}, capacity = \"{capacity}MiB\"}}]"),
            format!("--ssd.segment={segment}MiB"),
            "--ssd.admit=all".to_owned(),
            format!("--ssd.write_queue={}MiB", args.dram_mib.div_ceil(8)),
        ]);
    }
    Child::start("larder-node", &child::sibling("larder-node")?, &flags, dir)
}

fn failed(doing: &'static str) -> impl FnOnce(tonic::Status) -> BenchError {
    move |status| BenchError::Master { doing, status: Box::new(status) }
}
