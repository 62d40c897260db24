//! The store as the connector sees it: the seam between its decisions and the local node.
//!
//! The real one is a session with the node on this host (`session`); tests put a simulated store
//! behind the same calls, with faults of their own.

use crate::report::SkipReason;
use larder_proto::fingerprint::{ModelDescription, ModelVersion};
use larder_proto::frame::{Priority, SessionState};
use larder_proto::{BlockKey, NodeId};
use std::future::Future;
use std::ops::Deref;
use std::time::Duration;
use tokio::time::Instant;

/// Who would deliver a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockSource {
    /// The node on this host: read in place.
    Local,
    /// Another node, by way of this host's.
    Peer(NodeId),
}

/// Why the store did not answer. Details are for people; the connector only needs to know that the
/// request goes on without it.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct StoreError(pub String);

/// Why one part of a fetch did not land.
#[derive(Debug, Clone, thiserror::Error)]
#[error("block {index}: {reason}")]
pub struct FetchFailure {
    /// Its place in the list that was asked for.
    pub index: usize,
    /// What the node said.
    pub reason: String,
}

/// What a part hangs on in its chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PutAttributes {
    /// The block before it.
    pub parent: Option<BlockKey>,
    /// The first block of its chain.
    pub root: BlockKey,
}

/// What became of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutResult {
    /// Committed and readable.
    Stored,
    /// Somebody has stored it, or is storing it now.
    Exists,
    /// No space that could be freed.
    Full,
}

/// What a request's client says of the future of its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reuse {
    /// Whether more requests are to come.
    pub session: SessionState,
    /// How much is lost with its blocks.
    pub priority: Priority,
    /// For how long a living session wants its blocks kept; zero leaves that to the priority.
    pub retention: Duration,
}

impl Default for Reuse {
    /// Nothing is known.
    fn default() -> Self {
        let (session, priority) = (SessionState::Alive, Priority::Normal);
        Self { session, priority, retention: Duration::ZERO }
    }
}

impl Reuse {
    /// Whether it says anything.
    #[must_use]
    pub fn is_known(&self) -> bool {
        *self != Self::default()
    }

    /// Whether it asks for blocks to be kept.
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.is_known() && self.session == SessionState::Alive && self.priority != Priority::Low
    }
}

/// A session with a store. Cheap to clone.
pub trait KvStore: Clone + Send + Sync + 'static {
    /// A landed part: its bytes stay in place until it is dropped.
    type Part: Deref<Target = [u8]> + Send + 'static;
    /// A fetch under way.
    type Fetch: Fetch<Part = Self::Part>;

    /// For each leading block that is held somewhere, who would deliver it.
    fn match_prefix(
        &self,
        version: &ModelVersion,
        keys: &[BlockKey],
    ) -> impl Future<Output = Result<Vec<BlockSource>, StoreError>> + Send;

    /// Starts to fetch the parts of these blocks. `deadline` is the latest time that is of use.
    fn fetch(&self, version: &ModelVersion, keys: &[BlockKey], deadline: Instant) -> Self::Fetch;

    /// Stores the part of one block.
    fn put(
        &self,
        version: &ModelVersion,
        key: &BlockKey,
        attributes: PutAttributes,
        bytes: &[u8],
    ) -> impl Future<Output = Result<PutResult, StoreError>> + Send;

    /// Which of these blocks the local node holds. Keeps none of them alive.
    fn stored(
        &self,
        version: &ModelVersion,
        keys: &[BlockKey],
    ) -> impl Future<Output = Result<Vec<bool>, StoreError>> + Send;

    /// Says what is known of the future of a chain. A wish: what comes of it is the node's business.
    fn hint(
        &self,
        version: &ModelVersion,
        keys: &[BlockKey],
        reuse: Reuse,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Returns once the session cannot be used any more.
    fn closed(&self) -> impl Future<Output = ()> + Send;
}

/// A fetch under way. Dropping it cancels what has not landed.
pub trait Fetch: Send {
    /// A landed part.
    type Part;

    /// The next part that landed or failed, in any order. `None` once every part has been
    /// answered. Safe to drop.
    fn next(
        &mut self,
    ) -> impl Future<Output = Option<Result<Delivered<Self::Part>, FetchFailure>>> + Send;
}

/// A part that landed.
#[derive(Debug)]
pub struct Delivered<P> {
    /// Its place in the list that was asked for.
    pub index: usize,
    /// Who delivered it.
    pub source: BlockSource,
    /// The part.
    pub part: P,
}

/// Opens sessions; called again after a session has closed.
pub trait Connect: Send + Sync + 'static {
    /// The session.
    type Store: KvStore;

    /// Opens a session and registers the model there.
    fn connect(
        &self,
        model: &ModelDescription,
    ) -> impl Future<Output = Result<Self::Store, StoreError>> + Send;
}

impl From<StoreError> for SkipReason {
    fn from(_: StoreError) -> Self {
        Self::MatchFailed
    }
}
