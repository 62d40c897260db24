//! A store and an engine without network and model, with faults of their own.
//!
//! The engine's KV of a block is its tokens, so a wrong block is seen at once. The store keeps
//! bytes by key, lands parts after a set time on the (paused) clock, and counts every part that is
//! held, so that a leak is seen too.
#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use larder_engine_connector::{
    BlockShape, BlockSource, Connect, Connector, Delivered, Fetch, FetchFailure, KvEngine, KvStore,
    Options, PrefillRate, PutAttributes, PutResult, RequestKv, Reuse, StoreError,
};
use larder_proto::block_key::keys_of;
use larder_proto::fingerprint::{
    ContentDescription, Digest, LayerGroup, LayoutDescription, ModelDescription, ModelVersion,
};
use larder_proto::part::GroupRule;
use larder_proto::{BlockKey, NodeId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

pub(crate) const BLOCK: u32 = 4;
pub(crate) const STEP_BLOCKS: u32 = 2;
/// Length of a token in the simulated KV.
const TOKEN_BYTES: usize = 4;
pub(crate) const BLOCK_BYTES: usize = BLOCK as usize * TOKEN_BYTES;

pub(crate) fn model(epoch: u64) -> ModelDescription {
    let digest = Digest::from_bytes([1; 32]);
    ModelDescription {
        display_name: "simulated".into(),
        content: ContentDescription {
            weights: digest,
            weight_epoch: epoch,
            tokenizer: digest,
            adapter: None,
            kv_dtype: "u32".into(),
            kv_scales: None,
        },
        layout: layout(),
    }
}

fn layout() -> LayoutDescription {
    LayoutDescription {
        engine_family: "simulated".into(),
        kv_format_version: 1,
        block_tokens: BLOCK,
        groups: vec![LayerGroup {
            rule: GroupRule::EveryBlock,
            layers: vec![0],
            dtype: "u32".into(),
            shape: vec![u64::from(BLOCK)],
            strides: Vec::new(),
            part_bytes: BLOCK_BYTES as u64,
        }],
        parallel: BTreeMap::new(),
        options: BTreeMap::new(),
    }
}

pub(crate) fn peer(number: u8) -> BlockSource {
    BlockSource::Peer(NodeId::from_bytes([number; 16]))
}

pub(crate) fn rate(per_token_ms: u64) -> PrefillRate {
    PrefillRate { per_token: Duration::from_millis(per_token_ms) }
}

/// Tokens `0..count`, different from those of other seeds.
pub(crate) fn prompt(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|token| seed * 10_000 + token).collect()
}

/// How a stored block behaves.
#[derive(Debug, Clone)]
pub(crate) struct StoredBlock {
    pub(crate) bytes: Vec<u8>,
    pub(crate) source: BlockSource,
    /// From the fetch's begin to its landing. `None`: never.
    pub(crate) lands_after: Option<Duration>,
    /// It fails instead of landing.
    pub(crate) fails: bool,
}

#[derive(Debug, Default)]
pub(crate) struct StoreState {
    pub(crate) blocks: HashMap<BlockKey, StoredBlock>,
    /// Parts that somebody holds.
    pub(crate) leases: usize,
    /// Fetches that have not ended.
    pub(crate) fetches: usize,
    pub(crate) puts: Vec<(BlockKey, PutAttributes)>,
    /// Keys, how many puts came before, and what was said.
    pub(crate) hints: Vec<(Vec<BlockKey>, usize, Reuse)>,
    pub(crate) asked_stored: usize,
    pub(crate) match_takes: Duration,
    pub(crate) full: bool,
    /// Puts wait until they are let through.
    pub(crate) puts_held: bool,
    pub(crate) sessions: usize,
}

/// The store; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct SimStore {
    state: Arc<Mutex<StoreState>>,
    changed: Arc<Notify>,
}

impl SimStore {
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut StoreState) -> T) -> T {
        let result = change(&mut self.state.lock());
        self.changed.notify_waiters();
        result
    }

    /// Waits until the state is as wanted.
    pub(crate) async fn until(&self, wanted: impl Fn(&StoreState) -> bool) {
        loop {
            let changed = self.changed.notified();
            if wanted(&self.state.lock()) {
                return;
            }
            changed.await;
        }
    }

    /// Holds the first `count` blocks of a prompt.
    pub(crate) fn hold(
        &self,
        tokens: &[u32],
        count: usize,
        source: BlockSource,
        lands_after: Option<Duration>,
    ) {
        let content = model(0).content.fingerprint();
        let keys = keys_of(content, BLOCK, b"", tokens);
        self.with(|state| {
            let blocks = keys.into_iter().zip(tokens.chunks_exact(BLOCK as usize)).take(count);
            for (key, tokens) in blocks {
                let bytes = kv_of(tokens);
                let block = StoredBlock { bytes, source, lands_after, fails: false };
                state.blocks.insert(key, block);
            }
        });
    }

    /// Changes the behaviour of one block of a prompt.
    pub(crate) fn change(
        &self,
        tokens: &[u32],
        block: usize,
        change: impl FnOnce(&mut StoredBlock),
    ) {
        let key = keys_of(model(0).content.fingerprint(), BLOCK, b"", tokens)[block];
        self.with(|state| change(state.blocks.get_mut(&key).unwrap()));
    }

    /// How many leading blocks of a prompt are stored, checked byte by byte.
    pub(crate) fn stored_blocks(&self, tokens: &[u32]) -> usize {
        let keys = keys_of(model(0).content.fingerprint(), BLOCK, b"", tokens);
        let state = self.state.lock();
        let blocks = keys.iter().zip(tokens.chunks_exact(BLOCK as usize));
        let held = blocks.take_while(|(key, tokens)| {
            let stored = state.blocks.get(key);
            assert!(stored.is_none_or(|stored| stored.bytes == kv_of(tokens)), "wrong bytes");
            stored.is_some()
        });
        held.count()
    }
}

fn kv_of(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// A held part.
pub(crate) struct SimPart {
    bytes: Vec<u8>,
    store: SimStore,
}

impl Deref for SimPart {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for SimPart {
    fn drop(&mut self) {
        self.store.with(|state| state.leases -= 1);
    }
}

pub(crate) struct SimFetch {
    store: SimStore,
    /// In order of landing.
    coming: VecDeque<(Option<Instant>, usize, StoredBlock)>,
}

impl Drop for SimFetch {
    fn drop(&mut self) {
        self.store.with(|state| state.fetches -= 1);
    }
}

impl Fetch for SimFetch {
    type Part = SimPart;

    async fn next(&mut self) -> Option<Result<Delivered<SimPart>, FetchFailure>> {
        let at = self.coming.front()?.0;
        match at {
            Some(at) => sleep_until(at).await,
            None => std::future::pending().await,
        }
        let (_, index, block) = self.coming.pop_front()?;
        if block.fails {
            return Some(Err(FetchFailure { index, reason: "injected".into() }));
        }
        self.store.with(|state| state.leases += 1);
        let part = SimPart { bytes: block.bytes, store: self.store.clone() };
        Some(Ok(Delivered { index, source: block.source, part }))
    }
}

impl KvStore for SimStore {
    type Part = SimPart;
    type Fetch = SimFetch;

    async fn match_prefix(
        &self,
        _version: &ModelVersion,
        keys: &[BlockKey],
    ) -> Result<Vec<BlockSource>, StoreError> {
        let takes = self.with(|state| state.match_takes);
        sleep(takes).await;
        let state = self.state.lock();
        Ok(keys.iter().map_while(|key| state.blocks.get(key).map(|block| block.source)).collect())
    }

    fn fetch(&self, _version: &ModelVersion, keys: &[BlockKey], _deadline: Instant) -> SimFetch {
        let now = Instant::now();
        let mut coming: Vec<_> = self.with(|state| {
            state.fetches += 1;
            let blocks = keys.iter().map(|key| state.blocks[key].clone()).enumerate();
            blocks
                .map(|(index, block)| (block.lands_after.map(|after| now + after), index, block))
                .collect()
        });
        coming.sort_by_key(|(at, index, _)| (at.is_none(), *at, *index));
        SimFetch { store: self.clone(), coming: coming.into() }
    }

    async fn put(
        &self,
        _version: &ModelVersion,
        key: &BlockKey,
        attributes: PutAttributes,
        bytes: &[u8],
    ) -> Result<PutResult, StoreError> {
        self.until(|state| !state.puts_held).await;
        Ok(self.with(|state| {
            if state.full {
                return PutResult::Full;
            }
            state.puts.push((*key, attributes));
            let (source, lands_after) = (BlockSource::Local, Some(Duration::ZERO));
            let block = StoredBlock { bytes: bytes.to_vec(), source, lands_after, fails: false };
            match state.blocks.insert(*key, block) {
                None => PutResult::Stored,
                Some(_) => PutResult::Exists,
            }
        }))
    }

    async fn stored(
        &self,
        _version: &ModelVersion,
        keys: &[BlockKey],
    ) -> Result<Vec<bool>, StoreError> {
        Ok(self.with(|state| {
            state.asked_stored += 1;
            keys.iter().map(|key| state.blocks.contains_key(key)).collect()
        }))
    }

    async fn hint(
        &self,
        _version: &ModelVersion,
        keys: &[BlockKey],
        reuse: Reuse,
    ) -> Result<(), StoreError> {
        self.with(|state| state.hints.push((keys.to_vec(), state.puts.len(), reuse)));
        Ok(())
    }

    async fn closed(&self) {
        std::future::pending().await
    }
}

impl Connect for SimStore {
    type Store = SimStore;

    async fn connect(&self, _model: &ModelDescription) -> Result<SimStore, StoreError> {
        self.with(|state| state.sessions += 1);
        Ok(self.clone())
    }
}

/// An engine whose KV of a token is the token itself.
pub(crate) struct SimEngine {
    layout: LayoutDescription,
    pub(crate) sequence: Vec<u32>,
    /// Import of this block is refused.
    pub(crate) refuses: Option<u32>,
    pub(crate) exports: usize,
}

#[derive(Debug, thiserror::Error)]
#[error("refused")]
pub(crate) struct Refused;

impl SimEngine {
    pub(crate) fn new() -> Self {
        Self { layout: layout(), sequence: Vec::new(), refuses: None, exports: 0 }
    }

    /// Restores, then computes `tokens` up to `end` in calls of one block, as a request would.
    pub(crate) fn run(&mut self, kv: &mut RequestKv, tokens: &[u32], end: usize) -> u32 {
        self.sequence.clear();
        let valid = kv.restore(self, ());
        self.compute(kv, tokens, end);
        valid
    }

    pub(crate) fn compute(&mut self, kv: &mut RequestKv, tokens: &[u32], end: usize) {
        while self.sequence.len() < end {
            let from = self.sequence.len();
            let to = (from + BLOCK as usize).min(end);
            self.sequence.extend_from_slice(&tokens[from..to]);
            let range = u32::try_from(from).unwrap()..u32::try_from(to).unwrap();
            kv.computed(self, (), &tokens[..end], range);
        }
    }
}

impl KvEngine for SimEngine {
    type Sequence = ();
    type Error = Refused;

    fn layout(&self) -> &LayoutDescription {
        &self.layout
    }

    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn export_block(&mut self, (): (), block: u32, into: &mut Vec<u8>) -> Result<(), Refused> {
        let first = (block * BLOCK) as usize;
        *into = kv_of(&self.sequence[first..first + BLOCK as usize]);
        self.exports += 1;
        Ok(())
    }

    fn import_block(&mut self, (): (), block: u32, bytes: &[u8]) -> Result<(), Refused> {
        assert_eq!(self.sequence.len(), (block * BLOCK) as usize, "in position order");
        if self.refuses == Some(block) {
            return Err(Refused);
        }
        let tokens =
            bytes.chunks_exact(TOKEN_BYTES).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
        self.sequence.extend(tokens);
        Ok(())
    }

    fn prefill_rate(&self) -> PrefillRate {
        rate(1)
    }
}

/// A connector with its tasks running on the test's clock.
pub(crate) struct Rig {
    pub(crate) store: SimStore,
    pub(crate) connector: Connector<SimStore>,
    pub(crate) stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Rig {
    pub(crate) async fn new(options: Options) -> Self {
        let store = SimStore::default();
        let shape = BlockShape { bytes: BLOCK_BYTES, step_blocks: STEP_BLOCKS };
        let (connector, tasks_of) = Connector::new(store.clone(), model(0), shape, options);
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(tasks_of.run(stop.clone()));
        store.until(|state| state.sessions > 0).await;
        // The session is handed out in the same step as it was counted.
        tokio::task::yield_now().await;
        Self { store, connector, stop, tasks }
    }

    pub(crate) async fn prepare(&self, tokens: &[u32]) -> RequestKv {
        self.prepare_with(tokens, Reuse::default()).await
    }

    pub(crate) async fn prepare_with(&self, tokens: &[u32], reuse: Reuse) -> RequestKv {
        self.connector.prepare(tokens, 16, rate(1), reuse).await
    }

    /// Stops the tasks; returns once what was queued is published.
    pub(crate) async fn drain(mut self) -> SimStore {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
        self.store
    }
}
