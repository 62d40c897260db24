//! Several requests on one model: who waits, who runs, what each step of the model computes.
//!
//! ```text
//! submit --> Admission (bounded; refused with a clear answer)        async tasks
//!        --> PromptCache::prepare (match, plan, fetch)
//!        --> queue to the engine thread                              one OS thread
//!              import --> prompt, one call a step --> tokens, one a step
//!              every step: all requests that answer, and one call of the oldest prompt
//!        <-- events: prefilled, token, finished
//! ```
//!
//! Invariants: the KV cells of admitted requests never exceed the context, so a step never lacks
//! cells; a request's sequence is cleared before its permits are given back. No lock is held
//! across a step. The engine thread never waits for a client: each request's event queue holds
//! all that the request can produce.
//! Cancellation: dropping [`Running`] ends the request at the next step; blocks that it completed
//! are published, so a retry resumes there (F42).

mod admission;
mod batch;
mod engine;
mod slot;
mod worker;

pub use admission::{Admission, AdmissionOptions, Admitted, Refusal};
pub use engine::{EngineShape, LlamaEngine};
pub use slot::{Event, FinishReason, PrefillReport};
pub use worker::EngineFailure;

use crate::llama::sample::SamplerOptions;
use crate::llama::{ContextOptions, LlamaError, Model, Token};
use futures_util::future::BoxFuture;
use larder_engine_connector::{
    Connect, Connector, PrefillRate, PublishedBlocks, RequestKv, Reuse, SkipReason,
};
use parking_lot::Mutex;
use slot::Start;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::sync::{mpsc, oneshot, watch};

/// What a client asks for, once it is tokens.
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt; not empty, every token in the vocabulary.
    pub prompt: Vec<Token>,
    /// Most tokens of the answer; at least 1.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Whether the cache may be used.
    pub use_cache: bool,
    /// What the client says of the future of its session.
    pub reuse: Reuse,
}

/// The cache in front of the engine, as the scheduler sees it.
pub trait PromptCache: Send + Sync + 'static {
    /// What of this prompt can be reused; the answer always comes.
    fn prepare<'a>(
        &'a self,
        prompt: &'a [Token],
        max_new_tokens: u32,
        rate: PrefillRate,
        reuse: Reuse,
    ) -> BoxFuture<'a, RequestKv>;
}

impl<C: Connect> PromptCache for Connector<C> {
    fn prepare<'a>(
        &'a self,
        prompt: &'a [Token],
        max_new_tokens: u32,
        rate: PrefillRate,
        reuse: Reuse,
    ) -> BoxFuture<'a, RequestKv> {
        Box::pin(Connector::prepare(self, prompt, max_new_tokens, rate, reuse))
    }
}

/// Takes requests for one engine. Cheap to clone.
#[derive(Clone)]
pub struct Scheduler {
    admission: Admission,
    cache: Option<Arc<dyn PromptCache>>,
    starts: mpsc::Sender<Start>,
    rate: watch::Receiver<PrefillRate>,
}

/// An accepted request under way. Dropping it cancels the request.
#[derive(Debug)]
pub struct Running {
    /// What the request produces, up to and including [`Event::Finished`] or [`Event::Failed`].
    pub events: mpsc::Receiver<Event>,
    /// How many of its blocks were handed on for publishing.
    pub published: PublishedBlocks,
}

/// The engine's thread. Ends when the last [`Scheduler`] and request are gone.
#[must_use = "the engine's failure is told here"]
pub struct EngineThread {
    handle: JoinHandle<()>,
    ended: oneshot::Receiver<Result<(), EngineFailure>>,
}

/// Starts the engine's thread and waits until its context is ready.
pub async fn start(
    model: Arc<Model>,
    context: ContextOptions,
    step_blocks: u32,
) -> Result<(EngineThread, EngineHandle), LlamaError> {
    let (ready, is_ready) = oneshot::channel();
    let (report_end, ended) = oneshot::channel();
    // One start for each sequence at most is in the queue: sending never waits.
    let (starts, queue) = mpsc::channel(usize::from(context.sequences).max(1));
    let handle = std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            let outcome = worker::run(&model, context, step_blocks, queue, ready);
            let _ = report_end.send(outcome);
        })
        .map_err(|error| LlamaError::Backend(format!("start the engine thread: {error}")))?;
    let thread = EngineThread { handle, ended };
    let (shape, rate) = is_ready
        .await
        .map_err(|_| LlamaError::Backend("the engine thread ended while it started".into()))??;
    Ok((thread, EngineHandle { shape, rate, starts }))
}

/// A running engine, before the scheduler in front of it is put together.
pub struct EngineHandle {
    /// What its blocks look like.
    pub shape: EngineShape,
    rate: watch::Receiver<PrefillRate>,
    starts: mpsc::Sender<Start>,
}

impl EngineHandle {
    /// The scheduler of this engine.
    #[must_use]
    pub fn scheduler(
        self,
        admission: AdmissionOptions,
        cache: Option<Arc<dyn PromptCache>>,
    ) -> Scheduler {
        let Self { shape: _, rate, starts } = self;
        Scheduler { admission: Admission::new(admission), cache, starts, rate }
    }
}

impl EngineThread {
    /// Waits until the thread has ended. Safe to drop and to call again.
    pub async fn ended(&mut self) -> Result<(), EngineFailure> {
        match (&mut self.ended).await {
            Ok(outcome) => outcome,
            Err(_) => Err(EngineFailure::Panicked),
        }
    }

    /// Whether the thread still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.handle.is_finished()
    }
}

impl Scheduler {
    /// Admits a request, lets the cache help, and hands it to the engine. Waits while the engine is
    /// busy with others; dropping the future gives the place up.
    pub async fn submit(&self, request: Request) -> Result<Running, Refusal> {
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let admitted = self.admission.admit(prompt_tokens, request.max_tokens).await?;
        let rate = *self.rate.borrow();
        let kv = match &self.cache {
            Some(cache) if request.use_cache => {
                cache.prepare(&request.prompt, request.max_tokens, rate, request.reuse).await
            }
            _ => RequestKv::none(SkipReason::Disabled),
        };
        let published = kv.published();
        // Every token, and the events around them: the engine never waits for a slow client.
        let (sender, events) = mpsc::channel(request.max_tokens as usize + 4);
        let start = Start { request, admitted, kv, events: sender };
        self.starts.send(start).await.map_err(|_| Refusal::EngineStopped)?;
        Ok(Running { events, published })
    }

    /// Requests that run and that wait.
    #[must_use]
    pub fn load(&self) -> (usize, usize) {
        self.admission.load()
    }

    /// Refuses all further requests, those that wait included.
    pub fn close(&self) {
        self.admission.close();
    }
}

/// Sequence numbers that are free. Requests hold one each.
type FreeSequences = Arc<Mutex<Vec<u16>>>;
