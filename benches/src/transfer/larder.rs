//! Our side: a real `larder-node`, and the client library over TCP, over the Unix socket, and in shared memory.

use super::client::{Client, Part, Parts, Payload};
use crate::{
    child::{self, Child},
    content,
    error::BenchError,
};
use bytes::Bytes;
use futures_util::future::try_join_all;
use larder_client::{
    connection::{Buffer, Connection, Identity, PutOutcome, Socket},
    local::{FetchRequest, LeasedPart, LocalSession, PartAttributes},
};
use larder_proto::{
    ContentFingerprint, LayoutFingerprint, ModelVersion, PartNumber,
    checksum::DEFAULT_CHUNK,
    frame::{Class, Codec, Read, Reserve},
    part::PartRef,
};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::net::UnixStream;

/// The model version of all parts of the bench.
const MODEL: ModelVersion = ModelVersion {
    content: ContentFingerprint::from_bytes([0xbe; 32]),
    layout: LayoutFingerprint::from_bytes([0x1a; 32]),
};
/// How long a batch may take: never reached, but a call has to state one.
const BATCH_DEADLINE: Duration = Duration::from_secs(30);

/// A node that is running.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) process: Child,
    tcp: String,
    socket: PathBuf,
    identity: Identity,
}

impl Node {
    /// Starts a node of `capacity_mib` without masters. Its state lies in `dir`.
    pub(super) fn start(dir: &Path, capacity_mib: usize) -> Result<Self, BenchError> {
        let socket = dir.join("node.sock");
        let args = [
            format!("--state_dir={}", dir.join("node").display()),
            "--masters=".to_owned(),
            format!("--local.socket={}", socket.display()),
            "--local.staging=16MiB".to_owned(),
            "--data.listen=127.0.0.1:0".to_owned(),
            "--control.listen=127.0.0.1:0".to_owned(),
            "--metrics.listen=127.0.0.1:0".to_owned(),
            format!("--dram.capacity={capacity_mib}MiB"),
            "--log.level=warn".to_owned(),
        ];
        let mut process = Child::start("larder-node", &child::sibling("larder-node")?, &args, dir)?;
        let tcp = process.announced("data")?;
        process.announced("local")?;
        Ok(Self { process, tcp, socket, identity: Identity::client("larder-bench") })
    }

    /// Puts parts of one length until the arena has been filled once over, so that from here on every put
    /// evicts.
    pub(super) async fn fill(&self, parts: &Parts) -> Result<(), BenchError> {
        let mut session = self.local(false).await?;
        for number in parts.first..parts.first + parts.slots as u64 {
            session.put(Part { number, slot: 0, len: parts.len }).await?;
        }
        Ok(())
    }

    pub(super) async fn tcp(&self) -> Result<OverConnection, BenchError> {
        Ok(OverConnection::new(Connection::connect(&self.tcp, &self.identity).await?))
    }

    pub(super) async fn unix(&self) -> Result<OverConnection, BenchError> {
        let stream = UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(BenchError::io("connect to the node's socket"))?;
        Ok(OverConnection::new(Connection::open(Socket::Unix(stream), &self.identity).await?))
    }

    pub(super) async fn local(&self, copying: bool) -> Result<InMemory, BenchError> {
        let session = LocalSession::connect(&self.socket, &self.identity).await?;
        let payload = Payload::default();
        Ok(InMemory { session, copying, buffers: Vec::new(), payload })
    }
}

/// A client over a stream: the data plane.
#[derive(Debug)]
pub(super) struct OverConnection {
    connection: Connection,
    buffers: Vec<Vec<u8>>,
    payload: Payload,
}

impl OverConnection {
    fn new(connection: Connection) -> Self {
        Self { connection, buffers: Vec::new(), payload: Payload::default() }
    }
}

/// Reads a part whole into `reused`; every chunk is verified by the library.
async fn read(connection: &Connection, part: Part, reused: Vec<u8>) -> Result<Vec<u8>, BenchError> {
    let read = Read {
        part: name(part),
        offset: 0,
        len: u64::MAX,
        generation: None,
        class: Class::Demand,
        verify: false,
        content: MODEL.content,
    };
    let len = part.len;
    let (landed, _) = connection.read(&read, move |_| Ok(Buffer::new(reused, len))).await?;
    let bytes = landed.into_bytes();
    content::look(part.number, &bytes)?;
    Ok(bytes)
}

impl Client for OverConnection {
    async fn get(&mut self, part: Part) -> Result<(), BenchError> {
        let reused = self.buffers.pop().unwrap_or_default();
        let bytes = read(&self.connection, part, reused).await?;
        self.buffers.push(bytes);
        Ok(())
    }

    async fn put(&mut self, part: Part) -> Result<(), BenchError> {
        let bytes: Bytes = self.payload.of(part);
        let PartAttributes { content, root, parent, origin_hash } = attributes(part);
        let reserve = Reserve {
            part: name(part),
            len: part.len as u64,
            codec: Codec::Raw,
            chunk_len: DEFAULT_CHUNK,
            content,
            root,
            parent,
            origin_hash,
        };
        stored(self.connection.put(&reserve, bytes).await?)
    }

    async fn batch_get(&mut self, parts: &[Part]) -> Result<(), BenchError> {
        self.buffers.resize_with(parts.len(), Vec::new);
        let buffers = self.buffers.drain(..);
        let reads =
            parts.iter().zip(buffers).map(|(part, buffer)| read(&self.connection, *part, buffer));
        self.buffers = try_join_all(reads.collect::<Vec<_>>()).await?;
        Ok(())
    }

    async fn check(&mut self, part: Part) -> Result<(), BenchError> {
        self.get(part).await?;
        Ok(content::check(part.number, self.buffers.last().map_or(&[], Vec::as_slice))?)
    }
}

/// A client that shares memory with the node.
#[derive(Debug)]
pub(super) struct InMemory {
    session: LocalSession,
    copying: bool,
    buffers: Vec<Vec<u8>>,
    payload: Payload,
}

impl InMemory {
    /// What a leased part is used for: looked at in place, or copied.
    fn take(&mut self, at: usize, part: Part, leased: LeasedPart) -> Result<(), BenchError> {
        if !self.copying {
            content::touch(part.number, part.len, |offset| leased[offset])?;
            return Ok(());
        }
        if self.buffers.len() <= at {
            self.buffers.resize_with(at + 1, Vec::new);
        }
        let buffer = &mut self.buffers[at];
        buffer.resize(part.len, 0);
        buffer.copy_from_slice(&leased);
        Ok(content::look(part.number, buffer)?)
    }
}

impl Client for InMemory {
    async fn get(&mut self, part: Part) -> Result<(), BenchError> {
        let leased = self.session.lease(name(part)).await?.ok_or_else(|| missing(part))?;
        self.take(0, part, leased)
    }

    async fn put(&mut self, part: Part) -> Result<(), BenchError> {
        let bytes = self.payload.of(part);
        stored(self.session.put(name(part), &attributes(part), &bytes).await?)
    }

    async fn batch_get(&mut self, parts: &[Part]) -> Result<(), BenchError> {
        let fetch = FetchRequest {
            model: MODEL,
            parts: parts.iter().map(|part| (content::key(part.number), PartNumber(0))).collect(),
            deadline: BATCH_DEADLINE,
            class: Class::Demand,
        };
        let mut answers = self.session.fetch(&fetch).await?;
        while let Some(answer) = answers.next().await {
            let (at, leased) = answer?;
            self.take(at, parts[at], leased?)?;
        }
        Ok(())
    }

    async fn check(&mut self, part: Part) -> Result<(), BenchError> {
        let leased = self.session.lease(name(part)).await?.ok_or_else(|| missing(part))?;
        Ok(content::check(part.number, &leased)?)
    }
}

fn name(part: Part) -> PartRef {
    PartRef { key: content::key(part.number), layout: MODEL.layout, part: PartNumber(0) }
}

/// Every part is a chain of its own.
fn attributes(part: Part) -> PartAttributes {
    let root = content::key(part.number);
    PartAttributes { content: MODEL.content, root, parent: None, origin_hash: None }
}

fn stored(outcome: PutOutcome) -> Result<(), BenchError> {
    match outcome {
        PutOutcome::Stored(_) => Ok(()),
        other => {
            Err(BenchError::Answer { doing: "put a fresh part", answer: format!("{other:?}") })
        }
    }
}

fn missing(part: Part) -> BenchError {
    let answer = format!("part {} of {} bytes is gone", part.number, part.len);
    BenchError::Answer { doing: "lease a part", answer }
}
