//! Store nodes as processes, and what tests ask of them.
#![expect(clippy::unwrap_used, clippy::missing_panics_doc, reason = "what fails says where")]

use crate::{blocks, process::Daemon};
use larder_client::{
    cluster::ClusterClient,
    connection::{Buffer, Connection, Identity, PutOutcome},
    error::TransferError,
    local::LocalSession,
    masters::Masters,
};
use larder_proto::{
    BlockKey, PartNumber, Tier, TierSet,
    control::{
        EvictFilter, EvictRequest, NodeResult, NodeStatusReply, ReadmitPathRequest, StatusRequest,
        TierStatus, node_client::NodeClient,
    },
    frame::{Code, Lookup},
};
use std::{
    future::Future,
    io,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::timeout;
use tonic::{Status, transport::Channel};

/// More than anything that ends may take, loads of a busy machine included.
pub const LONG: Duration = Duration::from_secs(60);

/// A running node.
#[derive(Debug)]
pub struct Node {
    /// Its process.
    pub daemon: Daemon,
    /// Its socket for engines.
    pub socket: PathBuf,
}

impl Node {
    /// Starts a node whose state lies in `dir`, for the first time or again.
    pub async fn start(dir: &Path, name: &str, master: Option<&Daemon>, more: &[String]) -> Self {
        Self::start_by(&[], dir, name, master, more).await.unwrap()
    }

    /// As [`Self::start`], through a program that becomes the node.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start_by(
        by: &[&str],
        dir: &Path,
        name: &str,
        master: Option<&Daemon>,
        more: &[String],
    ) -> io::Result<Self> {
        let socket = dir.join(format!("{name}.sock"));
        let mut args = vec![
            format!("--name={name}"),
            format!("--state_dir={}", dir.join(name).display()),
            format!("--masters={}", master.map_or("", |master| master.address("control"))),
            format!("--local.socket={}", socket.display()),
            "--control.listen=127.0.0.1:0".to_owned(),
            "--data.listen=127.0.0.1:0".to_owned(),
            "--metrics.listen=127.0.0.1:0".to_owned(),
        ];
        for default in ["--log.level=warn", "--dram.capacity=64MiB"] {
            let (key, _) = default.split_once('=').unwrap();
            if !more.iter().any(|arg| arg.starts_with(key)) {
                args.push(default.to_owned());
            }
        }
        args.extend_from_slice(more);
        let sockets = ["data", "control", "local"];
        let daemon = Daemon::start_by(by, "larder-node", &args, &sockets).await?;
        Ok(Self { daemon, socket })
    }

    /// A connection as a remote client has it.
    pub async fn tcp(&self) -> Connection {
        let address = self.daemon.address("data");
        Connection::connect(address, &Identity::client("test")).await.unwrap()
    }

    /// A session as an engine of its host has it.
    pub async fn local(&self) -> LocalSession {
        LocalSession::connect(&self.socket, &Identity::client("engine")).await.unwrap()
    }

    /// What it says of itself.
    pub async fn status(&self) -> NodeStatusReply {
        self.control().await.status(StatusRequest {}).await.unwrap().into_inner()
    }

    /// Its service.
    pub async fn control(&self) -> NodeClient<Channel> {
        let address = format!("http://{}", self.daemon.address("control"));
        NodeClient::connect(address).await.unwrap()
    }

    /// Takes an ssd path in again.
    ///
    /// # Errors
    /// The node's answer.
    pub async fn readmit(&self, path: &Path) -> Result<(), Status> {
        let path = path.display().to_string();
        self.control().await.readmit_path(ReadmitPathRequest { path }).await.map(drop)
    }

    /// What it says of its ssd tier.
    pub async fn ssd(&self) -> TierStatus {
        tier(&self.status().await, "ssd")
    }

    /// Asks until it says so.
    pub async fn until(&self, what: impl Fn(&NodeStatusReply) -> bool) {
        until("the node comes to that state", async || what(&self.status().await)).await;
    }

    /// SIGTERM, and waits for the end.
    pub async fn stop(self) {
        let pid = self.daemon.pid().unwrap().to_string();
        let sent = std::process::Command::new("kill").arg(pid).status().unwrap();
        assert!(sent.success());
        let ended = timeout(LONG, self.daemon.wait()).await.expect("a node that is told to stops");
        assert!(ended.unwrap().success());
    }
}

/// A tier of a status.
pub fn tier(status: &NodeStatusReply, name: &str) -> TierStatus {
    status.tiers.iter().find(|tier| tier.tier == name).unwrap().clone()
}

/// Asks again and again, and fails when the answer does not come to be `true`.
pub async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let asked = async {
        while !is_so().await {
            tokio::task::yield_now().await;
        }
    };
    within(what, asked).await;
}

/// What ends, ends soon.
pub async fn within<T>(what: &str, waited_for: impl Future<Output = T>) -> T {
    match timeout(LONG, waited_for).await {
        Ok(value) => value,
        Err(_) => panic!("not within {LONG:?}: {what}"),
    }
}

/// A master whose state lies in `dir`.
pub async fn master(dir: &Path) -> Daemon {
    master_with(dir, &[]).await
}

/// As [`master`], with more flags.
pub async fn master_with(dir: &Path, more: &[&str]) -> Daemon {
    let mut args = vec![
        format!("--state_dir={}", dir.join("master").display()),
        "--control.listen=127.0.0.1:0".to_owned(),
        "--nodes.heartbeat=200ms".to_owned(),
        "--nodes.ttl=1s".to_owned(),
        "--metrics.listen=127.0.0.1:0".to_owned(),
        "--log.level=warn".to_owned(),
    ];
    args.extend(more.iter().map(ToString::to_string));
    Daemon::start("larder-master", &args, &["control"]).await.unwrap()
}

/// A client of a master.
pub fn client(master: &Daemon) -> ClusterClient {
    let masters = Masters::new(&[master.address("control").to_owned()]).unwrap();
    ClusterClient::new(masters, Identity::client("test"))
}

/// Removes blocks by command, or counts what would go. What each node answered.
///
/// # Errors
/// The master does not answer.
pub async fn evict(
    by: &ClusterClient,
    keys: &[BlockKey],
    dry_run: bool,
) -> Result<Vec<NodeResult>, String> {
    let filter = EvictFilter {
        tenant: by.tenant().to_string(),
        keys: keys.iter().map(|key| key.as_bytes().to_vec().into()).collect(),
        dry_run,
        ..EvictFilter::default()
    };
    let request = EvictRequest { filter: Some(filter), ..EvictRequest::default() };
    let reply = by.masters().ask_within(LONG, |mut master| {
        let request = request.clone();
        async move { master.evict(request).await }
    });
    Ok(reply.await.map_err(|error| error.to_string())?.nodes)
}

/// Ends when the only node obeys its master and has adopted what its earlier lives left: a removal
/// selects only what is known, so it waits for that.
pub async fn adopted(by: &ClusterClient) {
    until("the node obeys", async || {
        let answered = evict(by, &[blocks::key(u64::MAX)], true).await;
        matches!(answered.as_deref(), Ok([one]) if one.error.is_empty())
    })
    .await;
}

/// Puts the block of this key.
///
/// # Errors
/// It was refused, or the node is gone.
pub async fn put(to: &Connection, key: BlockKey, len: usize) -> Result<PutOutcome, TransferError> {
    let bytes = blocks::bytes(&key, len);
    to.put(&blocks::reserve(key, len), bytes.into()).await
}

/// Reads a block; `None` is a miss.
///
/// # Errors
/// Anything else.
pub async fn get(from: &Connection, key: BlockKey) -> Result<Option<Vec<u8>>, TransferError> {
    let land = |ok: &larder_proto::frame::ReadOk| {
        Ok(Buffer::new(Vec::new(), usize::try_from(ok.len).unwrap()))
    };
    match from.read(&blocks::read(key), land).await {
        Ok((bytes, _)) => Ok(Some(bytes.into_bytes())),
        Err(TransferError::Refused { code: Code::Miss, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Where a node holds these blocks.
///
/// # Errors
/// The node is gone.
pub async fn lookup(at: &Connection, keys: Vec<BlockKey>) -> Result<Vec<TierSet>, TransferError> {
    at.lookup(&Lookup { layout: blocks::model().layout, part: PartNumber(0), keys }).await
}

/// Ends when all of these lie on an ssd. A block that was not written when it was stored, because the
/// disk could not keep up, is offered again when it is used: so those are read.
pub async fn on_ssd(at: &Connection, keys: &[BlockKey]) {
    until("the blocks are written to an ssd", async || {
        let tiers = lookup(at, keys.to_vec()).await.unwrap();
        let missing = keys.iter().zip(tiers).filter(|(_, tiers)| !tiers.has(Tier::Ssd));
        let mut all = true;
        for (key, _) in missing {
            all = false;
            get(at, *key).await.unwrap();
        }
        all
    })
    .await;
}

/// The flags of a node that writes everything to these folders.
pub fn ssds(paths: &[(&Path, &str)], segment: &str) -> Vec<String> {
    let one = |(dir, capacity): &(&Path, &str)| {
        format!("{{dir = {:?}, capacity = {capacity:?}}}", dir.display().to_string())
    };
    let paths: Vec<_> = paths.iter().map(one).collect();
    vec![
        format!("--ssd.path=[{}]", paths.join(", ")),
        format!("--ssd.segment={segment}"),
        "--ssd.admit=all".to_owned(),
        "--ssd.write_queue=8MiB".to_owned(),
    ]
}
