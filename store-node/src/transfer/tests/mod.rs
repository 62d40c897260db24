//! Nodes with real sockets, by what is tested: [`parts`] put and read, [`local`] readers in place,
//! [`peers`] of one another, and [`wire`] where frames and connections go wrong.

mod local;
mod parts;
mod peers;
mod raw;
mod wire;

use super::*;
use crate::{
    catalog::{Catalog, PartRead, Watermarks},
    eviction::Lru,
    inventory::{ChangeLog, PartSets},
    tiers::dram::Arena,
};
use larder_client::{
    connection::{Buffer, Connection, Identity, PutOutcome},
    error::TransferError,
    local::{FetchRequest, LeaseSource, LocalSession, PartAttributes},
    masters::Masters,
    peers::{NodeAddress, Peers},
};
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, ModelVersion, PartName, PartNumber,
    checksum::{ChunkSums, DEFAULT_CHUNK},
    frame::{Class, Code, Codec, Lookup, Read, Reserve, Role},
    ids::{Incarnation, NodeId, TenantName},
    part::PartRef,
};
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const LONG: Duration = Duration::from_secs(20);

/// A node with real sockets, without masters; everything ends when it is dropped.
struct TestNode {
    node: Arc<Node>,
    address: SocketAddr,
    socket: PathBuf,
    stop: CancellationToken,
    tasks: JoinSet<()>,
    _dir: tempfile::TempDir,
}

impl TestNode {
    async fn start(id: u8, arena_bytes: usize) -> Self {
        Self::with_limits(id, 1, arena_bytes, Limits::default()).await
    }

    async fn with_limits(id: u8, life: u64, arena_bytes: usize, limits: Limits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("node.sock");
        let arena = Arena::new(arena_bytes, |_| Ok(())).unwrap();
        let log = Arc::new(ChangeLog::new(Arc::new(PartSets::new(64)), 1024));
        let watermarks = Watermarks { high: 1.0, low: 0.9 };
        let incarnation = Incarnation(life);
        let catalog = Catalog::new(incarnation, arena, Box::new(Lru::default()), watermarks, log);
        let identity = Identity { role: Role::Node, ..Identity::client("peer") };
        let (masters, peers) = (Masters::new(&[]).unwrap(), Peers::new(identity));
        let id = NodeId::from_bytes([id; 16]);
        let node = Node::new(id, limits, catalog, None, masters, peers);
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        for listener in [Listener::Tcp(tcp), Listener::unix(&socket).unwrap()] {
            tasks.spawn(serve(Arc::clone(&node), listener, stop.clone()));
        }
        Self { node, address, socket, stop, tasks, _dir: dir }
    }

    async fn tcp(&self) -> Connection {
        Connection::connect(&self.address.to_string(), &Identity::client("test")).await.unwrap()
    }

    async fn local(&self) -> LocalSession {
        LocalSession::connect(&self.socket, &Identity::client("engine")).await.unwrap()
    }

    fn held(&self, n: u8) -> Option<PartRead> {
        self.node.catalog().read(&name(n))
    }

    async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

fn content() -> ContentFingerprint {
    ContentFingerprint::from_bytes([5; 32])
}

fn model() -> ModelVersion {
    ModelVersion { content: content(), layout: LayoutFingerprint::from_bytes([6; 32]) }
}

fn part(n: u8) -> PartRef {
    let key = BlockKey::from_bytes([n; 32]);
    PartRef { key, layout: model().layout, part: PartNumber(0) }
}

fn name(n: u8) -> PartName {
    PartName { tenant: TenantName::default().id(), part: part(n) }
}

/// Bytes made from key and offset, so that foreign, old or cut bytes are recognised.
fn bytes(n: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| n ^ i.to_le_bytes()[0] ^ i.to_le_bytes()[1]).collect()
}

fn reserve(n: u8, len: usize) -> Reserve {
    Reserve {
        part: part(n),
        len: len as u64,
        codec: Codec::Raw,
        chunk_len: DEFAULT_CHUNK,
        content: content(),
        root: part(n).key,
        parent: None,
        origin_hash: None,
    }
}

async fn put(connection: &Connection, n: u8, len: usize) -> Result<PutOutcome, TransferError> {
    connection.put(&reserve(n, len), bytes(n, len).into()).await
}

fn whole(n: u8) -> Read {
    Read {
        part: part(n),
        offset: 0,
        len: u64::MAX,
        generation: None,
        class: Class::Demand,
        verify: false,
        content: content(),
    }
}

async fn get(connection: &Connection, read: &Read) -> Result<Vec<u8>, TransferError> {
    let land =
        |ok: &larder_proto::frame::ReadOk| Ok(Buffer::new(Vec::new(), ok.len.try_into().unwrap()));
    Ok(connection.read(read, land).await?.0.into_bytes())
}

fn code(error: &TransferError) -> Option<Code> {
    match error {
        TransferError::Refused { code, .. } => Some(*code),
        _ => None,
    }
}

/// Polls a condition that other tasks bring about; fails after long.
async fn wait_until(condition: impl Fn() -> bool) {
    let poll = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, poll).await.expect("the condition never came true");
}
