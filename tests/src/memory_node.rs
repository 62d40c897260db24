//! The control plane of a node without its data plane: the real change log, publisher, session tasks and
//! gate of terms, over a catalog that keeps names only. For tests and benches of masters, where millions
//! of blocks are held and no byte of them matters.

use larder_proto::{
    BlockKey, Incarnation, ModelVersion, NodeId, Term, Tier, TierSet,
    event::{PartSet, PartSetDef, SHARDS, Shard},
    ids::TenantId,
    part::PartNumber,
};
use larder_store_node::inventory::{
    BlockState, Change, ChangeLog, CommandSink, Evicted, Eviction, Identity, Inventory, LinkBoard,
    Loss, PartSets, SetId, Shared, TermGate, TermStore, Vitals, links, publisher::Limits,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A catalog of names.
#[derive(Debug)]
pub struct Names {
    log: Arc<ChangeLog>,
    set: SetId,
    shards: Vec<Mutex<HashMap<BlockKey, BlockState>>>,
    blocks: AtomicU64,
}

impl Names {
    /// Every block has part 0 of one space, in memory.
    pub fn new(tenant: TenantId, model: ModelVersion, ring: usize) -> Self {
        let sets = Arc::new(PartSets::new(PartSets::DEFAULT_LIMIT));
        let parts = PartSet::of([PartNumber(0)]).expect("part 0 is a part");
        let set = sets.intern(&PartSetDef { tenant, model, parts }).expect("there is room for one");
        Self {
            log: Arc::new(ChangeLog::new(sets, ring)),
            set,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            blocks: AtomicU64::new(0),
        }
    }

    /// Holds the block from now on: what a node acknowledges.
    pub fn put(&self, key: BlockKey) {
        let after = BlockState { set: self.set, tiers: TierSet::of(Tier::Dram) };
        let mut shard = self.shards[usize::from(Shard::of(&key).0)].lock();
        let before = shard.insert(key, after);
        self.log.append(Change::stored(key, before, after));
        self.blocks.fetch_add(u64::from(before.is_none()), Relaxed);
    }

    /// Holds the block no longer; whether it did.
    pub fn lose(&self, key: &BlockKey, loss: Loss) -> bool {
        let mut shard = self.shards[usize::from(Shard::of(key).0)].lock();
        let Some(before) = shard.remove(key) else { return false };
        self.log.append(Change::lost(*key, before, loss));
        self.blocks.fetch_sub(1, Relaxed);
        true
    }

    /// The number of the last change.
    pub fn head(&self) -> u64 {
        self.log.head()
    }
}

impl Inventory for Names {
    fn snapshot(&self, shard: Shard) -> (u64, Vec<(BlockKey, BlockState)>) {
        let shard = self.shards[usize::from(shard.0)].lock();
        (self.log.head(), shard.iter().map(|(key, state)| (*key, *state)).collect())
    }

    fn vitals(&self) -> Vitals {
        Vitals { blocks: self.blocks.load(Relaxed), ..Vitals::default() }
    }
}

impl CommandSink for Names {
    async fn evict(&self, eviction: Eviction) -> Result<Evicted, String> {
        if eviction.keys.is_empty() {
            return Err("this node evicts by key only".to_owned());
        }
        let gone = eviction.keys.iter().filter(|key| self.lose(key, Loss::Removed)).count();
        Ok(Evicted { blocks: gone as u64, bytes: 0 })
    }
}

/// A node that is in session, or tries to be, until it is dropped.
#[derive(Debug)]
pub struct MemoryNode {
    /// What it holds.
    pub names: Arc<Names>,
    /// How its sessions stand.
    pub board: LinkBoard,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl MemoryNode {
    /// Starts the sessions of a node with these masters (`host:port`).
    ///
    /// # Panics
    /// Never: its disk is in memory.
    pub fn start(number: u8, incarnation: u64, names: Arc<Names>, masters: &[String]) -> Self {
        let identity = Identity {
            node: NodeId::from_bytes([number; 16]),
            incarnation: Incarnation(incarnation),
            name: format!("memory-{number}"),
            data_address: format!("127.0.0.1:{}", 10_000 + u16::from(number)),
            control_address: "127.0.0.1:1".to_owned(),
            capacity_bytes: 0,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let gate = TermGate::open(Box::new(Disk::default())).expect("the disk is in memory");
        let shared = Arc::new(Shared {
            identity,
            limits: Limits::default(),
            log: Arc::clone(&names.log),
            inventory: Arc::clone(&names) as Arc<dyn Inventory>,
            sink: Arc::clone(&names),
            gate: Arc::new(gate),
        });
        let (all, board) = links(shared, masters);
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        for link in all {
            tasks.spawn(link.run(stop.clone()));
        }
        Self { names, board, stop, tasks }
    }

    /// Ends its sessions as a stop does.
    pub async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

#[derive(Debug, Default)]
struct Disk(Mutex<Option<Term>>);

impl TermStore for Disk {
    fn load(&self) -> io::Result<Option<Term>> {
        Ok(*self.0.lock())
    }

    fn save(&self, term: Term) -> io::Result<()> {
        *self.0.lock() = Some(term);
        Ok(())
    }
}
