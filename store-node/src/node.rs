//! The node: what all of its connections, sessions and tasks share.

use crate::{
    catalog::{Catalog, Found, PartRead},
    inventory::command::{CommandSink, Evicted, Eviction},
    metrics,
    models::Models,
    pull::Turns,
    tiering::{LoadError, Tiering},
    transfer::{Leases, Limits, Process, Reader},
};
use ::metrics::Counter;
use larder_client::{locations::Locations, masters::Masters, peers::Peers};
use larder_proto::{
    PartName,
    frame::{Code, Leased, Source},
    ids::NodeId,
};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{task::JoinSet, time::Instant};

/// Notices of absence in one second: enough to correct an index, too few to flood it.
const ABSENT_PER_SECOND: u32 = 256;
/// What an eviction by command waits for the adoption of ssd paths: masters wait for its answer twice as long
/// (`control.command_timeout`).
const ADOPTION_PATIENCE: Duration = Duration::from_secs(5);

/// See the module.
pub struct Node {
    id: NodeId,
    limits: Limits,
    /// Handles of what is counted at every request.
    sent: Counter,
    received: Counter,
    leased: Counter,
    traffic: Traffic,
    catalog: Arc<Catalog>,
    tiering: Option<Arc<Tiering>>,
    leases: Arc<Leases>,
    pub(crate) masters: Masters,
    pub(crate) peers: Peers,
    pub(crate) locations: Locations,
    pub(crate) models: Models,
    pub(crate) turns: Turns,
    connections: AtomicU64,
    absent: Mutex<(Instant, u32)>,
    /// Memory of all staging areas.
    pub(crate) staging_bytes: AtomicU64,
    /// Waits for processes whose socket is gone and whose leases are kept.
    quarantine: Mutex<JoinSet<()>>,
}

/// Bytes over the data plane and leases, since the start.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) received_bytes: AtomicU64,
    pub(crate) leases: AtomicU64,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Node {
    /// A node over its catalog and ssds, if it has any, that asks these masters and peers.
    pub fn new(
        id: NodeId,
        limits: Limits,
        catalog: Arc<Catalog>,
        tiering: Option<Arc<Tiering>>,
        masters: Masters,
        peers: Peers,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            limits,
            sent: metrics::transfer_bytes(metrics::Direction::Out),
            received: metrics::transfer_bytes(metrics::Direction::In),
            leased: metrics::leases_granted(),
            traffic: Traffic::default(),
            catalog,
            tiering,
            leases: Arc::default(),
            masters,
            peers,
            locations: Locations::default(),
            models: Models::default(),
            turns: Turns::default(),
            connections: AtomicU64::new(0),
            absent: Mutex::new((Instant::now(), 0)),
            staging_bytes: AtomicU64::new(0),
            quarantine: Mutex::default(),
        })
    }

    /// The node's stable id.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// What it holds.
    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.catalog
    }

    /// Its ssd tier, if it has one.
    pub fn tiering(&self) -> Option<&Arc<Tiering>> {
        self.tiering.as_ref()
    }

    /// A part of this node, brought up from an ssd if it has to be. `None` is a miss. The caller has
    /// counted the use, and holds the part's turn.
    pub(crate) async fn bring_up(&self, name: &PartName) -> Option<PartRead> {
        let copy = match self.catalog.peek(name)? {
            Found::Here(read) => return Some(read),
            Found::OnSsd(copy) => copy,
        };
        match self.tiering.as_ref()?.load(name, &copy).await {
            Ok(read) => Some(read),
            Err(error @ LoadError::NoRoom(_)) => {
                tracing::debug!(%error, part = %name, "bring up");
                None
            }
            Err(LoadError::Ssd(_)) => None, // Said where it happened.
        }
    }

    /// The same, one reader of a part at a time: those who come later find it where the first one put it.
    pub(crate) async fn bring_up_in_turn(&self, name: &PartName) -> Option<PartRead> {
        let turn = self.turns.of(name);
        let _turn = turn.lock().await;
        self.bring_up(name).await
    }

    /// Bounds of its serving side.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Who reads in place.
    pub fn leases(&self) -> &Arc<Leases> {
        &self.leases
    }

    /// Model versions that engines of this host told of.
    pub fn models(&self) -> &Models {
        &self.models
    }

    /// A number for a new connection.
    pub(crate) fn next_connection(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Leases a part to a local reader; `None` when it has as many leases as it may.
    pub(crate) fn lease(
        &self,
        reader: &Reader,
        name: PartName,
        part: PartRead,
        item: u32,
        source: Source,
        from: NodeId,
    ) -> Option<Leased> {
        let info = (**part.info()).clone();
        let offset = part.arena_offset();
        let lease = self.leases.lease(reader, name, part)?;
        self.leased.increment(1);
        self.traffic.leases.fetch_add(1, Ordering::Relaxed);
        Some(Leased { item, lease, offset, source, node: from, info })
    }

    /// The socket of a local reader closed: its leases are kept until its process is gone.
    pub(crate) fn keep_until_gone(&self, reader: &Reader, process: Process) {
        let ended = Arc::clone(&self.leases).closed(reader.connection, process);
        let mut quarantine = self.quarantine.lock();
        while quarantine.try_join_next().is_some() {}
        quarantine.spawn(ended);
    }

    /// Whether another notice of absence may go out now.
    pub(crate) fn may_announce_absent(&self) -> bool {
        let mut absent = self.absent.lock();
        let now = Instant::now();
        if now.duration_since(absent.0) >= Duration::from_secs(1) {
            *absent = (now, 0);
        }
        absent.1 += 1;
        absent.1 <= ABSENT_PER_SECOND
    }

    /// What it moved and lent since the start.
    pub(crate) fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    pub(crate) fn count_refusal(&self, code: Code) {
        metrics::refusals(code).increment(1);
    }

    pub(crate) fn count_sent(&self, bytes: u64) {
        self.sent.increment(bytes);
        self.traffic.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_received(&self, bytes: u64) {
        self.received.increment(bytes);
        self.traffic.received_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl CommandSink for Node {
    async fn evict(&self, eviction: Eviction) -> Result<Evicted, String> {
        if let Some(tiering) = &self.tiering {
            // Only what is known can be selected.
            tiering.adopted_within(ADOPTION_PATIENCE).await.map_err(|error| {
                format!("nothing was removed: {error}. Try again when it is done (larderctl stats)")
            })?;
        }
        let catalog = Arc::clone(&self.catalog);
        // It visits every block, so it is not done on a thread of the sessions.
        let dry_run = eviction.dry_run;
        let remove = move || catalog.remove(&eviction);
        let evicted =
            tokio::task::spawn_blocking(remove).await.map_err(|panicked| panicked.to_string())?;
        if let Some(tiering) = self.tiering.as_ref().filter(|_| !dry_run) {
            tiering.forget().await.map_err(|error| {
                format!("removed, but a restart would bring copies on an ssd back: {error}")
            })?;
        }
        Ok(evicted)
    }
}
