//! The connector of one engine: one for all its requests.

use crate::engine::PrefillRate;
use crate::metric;
use crate::planner::{Planner, PlannerOptions, PromptShape, Watch};
use crate::publish::{self, Job, Publication, PublicationStart};
use crate::report::{KvReport, SkipReason};
use crate::request::{LandedPart, RequestKv};
use crate::store::{BlockSource, Connect, KvStore, Reuse};
use crate::{fetch, session};
use larder_proto::BlockKey;
use larder_proto::block_key::KeyChain;
use larder_proto::fingerprint::{ContentFingerprint, ModelDescription, ModelVersion};
use metrics::histogram;
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

/// How a connector behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// Limits of fetch-or-recompute.
    pub planner: PlannerOptions,
    /// Whether computed blocks are published at all.
    pub publish: bool,
    /// Whether blocks that hold tokens of answers are published too.
    pub publish_generated: bool,
    /// Bytes of blocks that may wait for the node; at least one block.
    pub publish_queue_bytes: usize,
    /// Keeps apart engines of one tenant that must not share. Empty: all share.
    pub root_salt: Vec<u8>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            planner: PlannerOptions::default(),
            publish: true,
            publish_generated: true,
            publish_queue_bytes: 64 << 20,
            root_salt: Vec::new(),
        }
    }
}

/// What the connector must know of its engine's blocks, besides their layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// Bytes of every block.
    pub bytes: usize,
    /// Blocks of a prompt that the engine computes in one step; see [`PromptShape`].
    pub step_blocks: u32,
}

/// Prepares requests: match, plan, fetch. Cheap to clone.
pub struct Connector<C: Connect> {
    shared: Arc<Shared<C>>,
}

impl<C: Connect> Clone for Connector<C> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

struct Shared<C: Connect> {
    options: Options,
    blocks: BlockShape,
    block_tokens: u32,
    planner: Arc<Mutex<Planner>>,
    store: watch::Receiver<Option<C::Store>>,
    model: watch::Sender<ModelDescription>,
    content: watch::Sender<ContentFingerprint>,
    queue: mpsc::Sender<Job>,
}

/// The connector's tasks: its session with the node, and its publisher.
#[must_use = "without its tasks a connector finds and publishes nothing"]
pub struct ConnectorTasks<C: Connect> {
    connect: C,
    model: watch::Receiver<ModelDescription>,
    store: watch::Sender<Option<C::Store>>,
    jobs: mpsc::Receiver<Job>,
    content: watch::Receiver<ContentFingerprint>,
}

impl<C: Connect> Connector<C> {
    /// A connector for the blocks of one engine, and the tasks that keep it going.
    pub fn new(
        connect: C,
        model: ModelDescription,
        blocks: BlockShape,
        options: Options,
    ) -> (Self, ConnectorTasks<C>) {
        let places = (options.publish_queue_bytes / blocks.bytes.max(1)).max(1);
        let (queue, jobs) = mpsc::channel(places);
        let (store_sender, store) = watch::channel(None);
        let (content_sender, content) = watch::channel(model.content.fingerprint());
        let block_tokens = model.layout.block_tokens;
        let (model_sender, model) = watch::channel(model);
        let shared = Shared {
            planner: Arc::new(Mutex::new(Planner::new(options.planner))),
            options,
            blocks,
            block_tokens,
            store,
            model: model_sender,
            content: content_sender,
            queue,
        };
        let tasks = ConnectorTasks { connect, model, store: store_sender, jobs, content };
        (Self { shared: Arc::new(shared) }, tasks)
    }

    /// The engine's weights have changed in place. Requests that began before publish nothing any
    /// more; the layout must be the one that the connector was made for.
    ///
    /// # Panics
    /// When the layout differs: blocks of another layout need another connector.
    pub fn set_model(&self, model: ModelDescription) {
        let same_layout = self.shared.model.borrow().layout == model.layout;
        assert!(same_layout, "a connector serves one layout");
        self.shared.content.send_replace(model.content.fingerprint());
        self.shared.model.send_replace(model);
    }

    /// Matches a prompt, decides what to fetch and waits for it, within the request's budget. The
    /// answer always comes; without help from the cache it says why. `max_new_tokens` is the most
    /// that the answer can add; `reuse` goes to the node with the prompt's blocks, if they are to be
    /// kept or nothing is published, and otherwise with all when the request ends. Dropping the future releases everything.
    pub async fn prepare(
        &self,
        prompt: &[u32],
        max_new_tokens: u32,
        rate: PrefillRate,
        reuse: Reuse,
    ) -> RequestKv {
        let shared = &*self.shared;
        let version = shared.model.borrow().version();
        let shape = PromptShape {
            tokens: u32::try_from(prompt.len()).unwrap_or(u32::MAX),
            block_tokens: shared.block_tokens,
            step_blocks: shared.blocks.step_blocks,
            block_bytes: shared.blocks.bytes,
        };
        let mut watch = Watch::start(Instant::now(), shape, rate, &shared.options.planner);
        let mut chain =
            KeyChain::new(version.content, shared.block_tokens, &shared.options.root_salt);
        let whole = prompt.chunks_exact(shared.block_tokens as usize);
        let keys: Vec<BlockKey> = whole.map(|tokens| chain.next(tokens, &[], None)).collect();
        let (blocks, report) = self.reuse(&version, shape, &keys, rate, &mut watch).await;
        if let Some(reason) = report.skip_reason {
            metric::count_skip(reason);
        }
        if reuse.keeps() || (reuse.is_known() && !shared.options.publish) {
            let hint = Job::Hint { version, keys: keys.clone(), reuse };
            let _ = shared.queue.try_send(hint); // A wish.
        }
        let publication = shared.options.publish.then(|| {
            let generated = match shared.options.publish_generated {
                true => max_new_tokens,
                false => 0,
            };
            let longest = shape.tokens.saturating_add(generated);
            Publication::new(PublicationStart {
                version,
                content_now: shared.content.subscribe(),
                queue: shared.queue.clone(),
                chain,
                keys,
                block_tokens: shared.block_tokens,
                limit: longest / shared.block_tokens,
                reuse,
            })
        });
        let planner = Some(Arc::clone(&shared.planner));
        RequestKv { blocks, publication, planner, report }
    }

    async fn reuse(
        &self,
        version: &ModelVersion,
        shape: PromptShape,
        keys: &[BlockKey],
        rate: PrefillRate,
        watch: &mut Watch,
    ) -> (Vec<(BlockSource, LandedPart)>, KvReport) {
        let shared = &*self.shared;
        let none = |report| (Vec::new(), report);
        let restorable = shape.restorable_blocks();
        if restorable < shared.options.planner.min_reuse_blocks.max(1) {
            return none(KvReport::skipped(SkipReason::PromptTooShort));
        }
        let Some(store) = shared.store.borrow().clone() else {
            return none(KvReport::skipped(SkipReason::NodeUnavailable));
        };
        let keys = &keys[..restorable as usize];
        let asked = Instant::now();
        let answer = timeout_at(watch.budget_ends(), store.match_prefix(version, keys)).await;
        let match_time = asked.elapsed();
        histogram!(metric::MATCH_SECONDS).record(match_time.as_secs_f64());
        let mut report = KvReport { match_time, ..KvReport::default() };
        let sources = match answer {
            Ok(Ok(sources)) => sources,
            Ok(Err(error)) => {
                tracing::debug!(%error, "match refused");
                return none(KvReport { skip_reason: Some(error.into()), ..report });
            }
            Err(_) => {
                return none(KvReport { skip_reason: Some(SkipReason::MatchTimedOut), ..report });
            }
        };
        let now = Instant::now();
        let plan = shared.planner.lock().plan(now, shape, rate, &sources);
        report.skip_reason = plan.skip_reason;
        if plan.fetch_blocks == 0 {
            return none(report);
        }
        let wanted = plan.fetch_blocks as usize;
        // Beyond this even a complete delivery is later than computing.
        let useless_after = now + rate.time_for(shape.tokens).min(session::LONGEST_FETCH);
        let parts = store.fetch(version, &keys[..wanted], useless_after);
        let landed = fetch::leading_blocks(
            parts,
            &sources[..wanted],
            shape.block_bytes,
            plan.expected_fetch,
            watch,
            &shared.planner,
        )
        .await;
        report.fetch_time = now.elapsed();
        histogram!(metric::FETCH_SECONDS).record(report.fetch_time.as_secs_f64());
        report.skip_reason = landed.skip_reason.or(report.skip_reason);
        let landed_blocks = u32::try_from(landed.blocks.len()).unwrap_or(u32::MAX);
        let resume_at = shape.restore_point(landed_blocks) as usize;
        let erased = landed.blocks.into_iter().take(resume_at);
        let erased = erased.map(|(source, part)| (source, Box::new(part) as LandedPart));
        (erased.collect(), report)
    }
}

impl<C: Connect> ConnectorTasks<C> {
    /// Keeps a session with the node and publishes, until `stop` is cancelled and what the queue
    /// then holds has been dealt with.
    pub async fn run(self, stop: CancellationToken) {
        let Self { connect, model, store, jobs, content } = self;
        let sessions = store.subscribe();
        tokio::select! {
            () = publish::run(jobs, sessions, content, stop) => {}
            () = session::keep(connect, model, store) => {}
        }
    }
}
