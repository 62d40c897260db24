//! The store of a real engine: a session with the node on this host.

use crate::store::{
    BlockSource, Connect, Delivered, Fetch, FetchFailure, KvStore, PutAttributes, PutResult, Reuse,
    StoreError,
};
use larder_client::connection::{Identity, PutOutcome};
use larder_client::local::{
    FetchRequest, FetchStream, LeaseSource, LeasedPart, LocalSession, PartAttributes,
};
use larder_client::{ClientError, TransferError};
use larder_proto::fingerprint::{ModelDescription, ModelVersion};
use larder_proto::frame::{Class, Code, KEYS_LIMIT, Match, Matched, ReuseHint};
use larder_proto::part::PartRef;
use larder_proto::{BlockKey, Incarnation, PartNumber};
use std::error::Error;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use tokio::time::Instant;

/// One rank and one layer group: a block is one part.
const PART: PartNumber = PartNumber(0);

/// Opens sessions with the node on this host.
#[derive(Debug, Clone)]
pub struct LocalNode {
    socket: PathBuf,
    identity: Identity,
}

impl LocalNode {
    /// The node that listens on `socket`. What is published is recorded as made by `producer` in
    /// its life `incarnation`.
    #[must_use]
    pub fn new(socket: PathBuf, producer: &str, incarnation: Incarnation) -> Self {
        let mut identity = Identity::client(producer);
        identity.producer_incarnation = incarnation;
        Self { socket, identity }
    }
}

impl Connect for LocalNode {
    type Store = LocalStore;

    async fn connect(&self, model: &ModelDescription) -> Result<LocalStore, StoreError> {
        let session = LocalSession::connect(&self.socket, &self.identity).await.map_err(told)?;
        session.register_model(model).await.map_err(told)?;
        Ok(LocalStore { session })
    }
}

/// A session with the node on this host.
#[derive(Debug, Clone)]
pub struct LocalStore {
    session: LocalSession,
}

impl KvStore for LocalStore {
    type Part = LeasedPart;
    type Fetch = LocalFetch;

    async fn match_prefix(
        &self,
        version: &ModelVersion,
        keys: &[BlockKey],
    ) -> Result<Vec<BlockSource>, StoreError> {
        let ask = Match { model: *version, rank: 0, keys: keys.to_vec(), peers: true };
        let matched = self.session.match_prefix(&ask).await.map_err(told)?;
        Ok(sources(&matched))
    }

    fn fetch(&self, version: &ModelVersion, keys: &[BlockKey], deadline: Instant) -> LocalFetch {
        let session = self.session.clone();
        let request = FetchRequest {
            model: *version,
            parts: keys.iter().map(|key| (*key, PART)).collect(),
            deadline: deadline.saturating_duration_since(Instant::now()),
            class: Class::Demand,
        };
        LocalFetch::Asking(Box::pin(async move { session.fetch(&request).await }))
    }

    async fn put(
        &self,
        version: &ModelVersion,
        key: &BlockKey,
        attributes: PutAttributes,
        bytes: &[u8],
    ) -> Result<PutResult, StoreError> {
        let part = PartRef { key: *key, layout: version.layout, part: PART };
        let PutAttributes { parent, root } = attributes;
        let attributes =
            PartAttributes { content: version.content, root, parent, origin_hash: None };
        match self.session.put(part, &attributes, bytes).await {
            Ok(PutOutcome::Stored(_)) => Ok(PutResult::Stored),
            Ok(PutOutcome::Exists(_) | PutOutcome::InProgress { .. }) => Ok(PutResult::Exists),
            Err(ClientError::Transfer(TransferError::Refused { code: Code::Full, .. })) => {
                Ok(PutResult::Full)
            }
            Err(error) => Err(told(error)),
        }
    }

    async fn stored(
        &self,
        version: &ModelVersion,
        keys: &[BlockKey],
    ) -> Result<Vec<bool>, StoreError> {
        let tiers = self.session.stored(version.layout, PART, keys.to_vec()).await;
        Ok(tiers.map_err(told)?.iter().map(|tiers| !tiers.is_empty()).collect())
    }

    async fn hint(
        &self,
        version: &ModelVersion,
        keys: &[BlockKey],
        reuse: Reuse,
    ) -> Result<(), StoreError> {
        let Reuse { session, priority, retention } = reuse;
        let retention_s = u32::try_from(retention.as_secs()).unwrap_or(u32::MAX);
        let keys = keys[..keys.len().min(KEYS_LIMIT)].to_vec();
        let hint = ReuseHint { layout: version.layout, keys, session, priority, retention_s };
        self.session.hint(&hint).await.map(drop).map_err(told)
    }

    async fn closed(&self) {
        self.session.closed().await;
    }
}

/// A fetch by the local node.
pub enum LocalFetch {
    /// The request is on its way.
    Asking(Pin<Box<dyn Future<Output = Result<FetchStream, ClientError>> + Send>>),
    /// Parts land.
    Landing(FetchStream),
    /// Everything was answered, or the session is gone.
    Ended,
}

impl Fetch for LocalFetch {
    type Part = LeasedPart;

    async fn next(&mut self) -> Option<Result<Delivered<LeasedPart>, FetchFailure>> {
        loop {
            match self {
                Self::Asking(asking) => {
                    // Kept in `self`, so dropping this future loses nothing.
                    let asked = asking.as_mut().await;
                    match asked {
                        Ok(stream) => *self = Self::Landing(stream),
                        Err(error) => return Some(Err(self.end(&error))),
                    }
                }
                Self::Landing(stream) => {
                    let fetched = stream.next().await?;
                    return Some(match fetched {
                        Ok((index, Ok(part))) => {
                            let source = match part.source() {
                                LeaseSource::Local => BlockSource::Local,
                                LeaseSource::Peer(node) => BlockSource::Peer(node),
                            };
                            Ok(Delivered { index, source, part })
                        }
                        Ok((index, Err(error))) => {
                            Err(FetchFailure { index, reason: error.to_string() })
                        }
                        Err(error) => Err(self.end(&error)),
                    });
                }
                Self::Ended => return None,
            }
        }
    }
}

impl LocalFetch {
    /// No part lands any more: as if the first one had failed.
    fn end(&mut self, error: &dyn Error) -> FetchFailure {
        *self = Self::Ended;
        FetchFailure { index: 0, reason: whole(error) }
    }
}

/// Block by block, the best source: this host, else the first peer that was named.
fn sources(matched: &Matched) -> Vec<BlockSource> {
    let mut sources = Vec::new();
    for run in &matched.runs {
        let local = !run.local.is_empty();
        let peer = run.peers.first().and_then(|peer| matched.peers.get(usize::from(peer.peer)));
        let source = match (local, peer) {
            (true, _) => BlockSource::Local,
            (false, Some(peer)) => BlockSource::Peer(peer.node),
            // Nobody to ask: a match ends here.
            (false, None) => break,
        };
        sources.resize(sources.len() + run.blocks as usize, source);
    }
    sources
}

fn told(error: ClientError) -> StoreError {
    StoreError(whole(&error))
}

/// An error with its causes on one line.
fn whole(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
