//! Several requests on one real (tiny) model, with and without a store in front of it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../../tests/support/mod.rs"]
mod sim;
mod support;

use futures_util::future::BoxFuture;
use larder_engine::llama::sample::SamplerOptions;
use larder_engine::llama::{ContextOptions, KvType, Model, Token};
use larder_engine::scheduler::{
    self, AdmissionOptions, EngineThread, Event, FinishReason, PrefillReport, PromptCache, Refusal,
    Request, Running, Scheduler,
};
use larder_engine_connector::{
    BlockShape, Connector, Options, PrefillRate, RequestKv, Reuse, ReuseSource, SkipReason,
};
use larder_proto::fingerprint::{ContentDescription, Digest, ModelDescription};
use sim::SimStore;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

const BLOCK: u32 = 32;

/// The tiny model computes faster than any clock that a test could rely on: to the connector it
/// says that it is slow, so that reuse always pays.
struct Patient(Connector<SimStore>);

impl PromptCache for Patient {
    fn prepare<'a>(
        &'a self,
        prompt: &'a [Token],
        max_new_tokens: u32,
        _measured: PrefillRate,
        reuse: Reuse,
    ) -> BoxFuture<'a, RequestKv> {
        let rate = PrefillRate { per_token: Duration::from_millis(100) };
        Box::pin(self.0.prepare(prompt, max_new_tokens, rate, reuse))
    }
}

/// An engine with its thread, and with a connector if it was given a store.
struct Rig {
    scheduler: Scheduler,
    thread: EngineThread,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Rig {
    async fn new(model: &Path, store: Option<&SimStore>) -> Self {
        Self::with_limits(model, store, 4, 4).await
    }

    async fn with_limits(
        model: &Path,
        store: Option<&SimStore>,
        max_requests: u16,
        max_waiting: u16,
    ) -> Self {
        let model = Arc::new(Model::load(model, |_| ()).unwrap());
        let options = ContextOptions {
            cells: 4096,
            sequences: max_requests,
            batch_tokens: 2 * BLOCK + u32::from(max_requests),
            threads: 1,
            kv_type: KvType::F16,
            flash_attention: true,
            block_tokens: BLOCK,
        };
        let (thread, engine) = scheduler::start(model, options, 2).await.unwrap();
        let admission = AdmissionOptions {
            max_requests,
            max_waiting,
            cells: engine.shape.cells,
            sequence_tokens: 8192,
        };
        let (layout, bytes) = engine.shape.blocks.clone().unwrap();
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        let mut cache = None;
        if let Some(store) = store {
            let digest = Digest::from_bytes([3; 32]);
            let content = ContentDescription {
                weights: digest,
                weight_epoch: 0,
                tokenizer: digest,
                adapter: None,
                kv_dtype: "f16".into(),
                kv_scales: None,
            };
            let model = ModelDescription { display_name: "tiny".into(), content, layout };
            let shape = BlockShape { bytes, step_blocks: 2 };
            let sessions = store.with(|state| state.sessions);
            let (connector, of) = Connector::new(store.clone(), model, shape, Options::default());
            tasks.spawn(of.run(stop.clone()));
            store.until(|state| state.sessions > sessions).await;
            tokio::task::yield_now().await;
            cache = Some(Arc::new(Patient(connector)) as Arc<dyn PromptCache>);
        }
        Self { scheduler: engine.scheduler(admission, cache), thread, stop, tasks }
    }

    async fn answer(&self, prompt: &[Token]) -> Answer {
        let running = self.scheduler.submit(request(prompt, 24)).await.unwrap();
        collect(running).await
    }

    /// Ends everything; what was queued for publishing is published.
    async fn end(self) {
        let Self { scheduler, mut thread, stop, mut tasks } = self;
        drop(scheduler);
        thread.ended().await.unwrap();
        stop.cancel();
        while let Some(joined) = tasks.join_next().await {
            joined.unwrap();
        }
    }
}

#[derive(Debug)]
struct Answer {
    tokens: Vec<Token>,
    prefill: PrefillReport,
    reason: FinishReason,
}

fn request(prompt: &[Token], max_tokens: u32) -> Request {
    let sampler = SamplerOptions { temperature: 0.0, top_p: 1.0, seed: 0 };
    Request {
        prompt: prompt.to_vec(),
        max_tokens,
        sampler,
        use_cache: true,
        reuse: Reuse::default(),
    }
}

async fn collect(mut running: Running) -> Answer {
    let (mut tokens, mut prefill) = (Vec::new(), None);
    loop {
        match running.events.recv().await.expect("the engine goes on") {
            Event::Prefilled(report) => prefill = Some(report),
            Event::Token(token) => tokens.push(token),
            Event::Finished(reason) => {
                return Answer { tokens, prefill: prefill.unwrap(), reason };
            }
            Event::Failed(message) => panic!("{message}"),
        }
    }
}

fn prompt(seed: u32, count: u32) -> Vec<Token> {
    (0..count).map(|i| (i * 7919 + i * i * 31 + seed * 101 + 13) % 256).collect()
}

async fn hits_compute_what_misses_compute(model: &Path, document: Vec<Token>) {
    let store = SimStore::default();
    let (a, b) = (Rig::new(model, Some(&store)).await, Rig::new(model, Some(&store)).await);
    let alone = Rig::new(model, None).await;
    let count = u32::try_from(document.len()).unwrap();

    let cold = a.answer(&document).await;
    assert_eq!(cold.prefill.kv.skip_reason, Some(SkipReason::NoMatch));
    assert_eq!(cold.prefill.cached_tokens, 0);
    store.until(|state| state.blocks.len() >= (count / BLOCK) as usize).await;

    let warm = a.answer(&document).await;
    let elsewhere = b.answer(&document).await;
    for hit in [&warm, &elsewhere] {
        assert_eq!(hit.tokens, cold.tokens);
        assert_eq!(hit.prefill.kv.source(), ReuseSource::Local);
        assert!(count - hit.prefill.cached_tokens <= 2 * BLOCK);
    }

    // The same document, other questions: resumed in the middle.
    for (length, question) in [(count / 2, 11), (count - 7, 70), (count / 3, 5)] {
        let mut other = document[..length as usize].to_vec();
        other.extend(prompt(9, question));
        let hit = b.answer(&other).await;
        assert!(length - hit.prefill.cached_tokens < 2 * BLOCK, "{:?}", hit.prefill);
        let miss = alone.answer(&other).await;
        assert_eq!(miss.prefill.kv.skip_reason, Some(SkipReason::Disabled));
        assert_eq!(hit.tokens, miss.tokens, "{length} tokens of the document");
    }
    for rig in [a, b, alone] {
        rig.end().await;
    }
    store.with(|state| assert_eq!((state.leases, state.fetches), (0, 0)));
}

#[tokio::test]
async fn token_ids_with_a_hit_are_those_without() {
    for length in [300, 320, 330, 370] {
        hits_compute_what_misses_compute(&support::tiny_model(), prompt(1, length)).await;
    }
}

#[tokio::test]
async fn token_ids_with_a_hit_are_those_without_on_the_real_model() {
    let Some(path) = support::real_model() else {
        eprintln!("skipped: the real model is not here; scripts/fetch-model.sh brings it");
        return;
    };
    let text = "The larder is a cool room where food is kept. A good cook looks there first, then \
        asks the neighbours, and only then goes to the market. ";
    let document = Model::load(&path, |_| ()).unwrap().tokenize(&text.repeat(8));
    hits_compute_what_misses_compute(&path, document).await;
}

#[tokio::test]
async fn several_requests_share_the_engine_and_all_are_answered() {
    let rig = Rig::new(&support::tiny_model(), None).await;
    let alone = rig.answer(&prompt(5, 200)).await;
    assert_eq!((alone.tokens.len(), alone.reason), (24, FinishReason::Length));
    let mut answers = JoinSet::new();
    for seed in 0..8 {
        let scheduler = rig.scheduler.clone();
        answers.spawn(async move {
            let request = request(&prompt(seed, 60 + 40 * seed), 24);
            collect(scheduler.submit(request).await.unwrap()).await
        });
    }
    while let Some(answer) = answers.join_next().await {
        let answer = answer.unwrap();
        assert!(answer.tokens.len() == 24 || answer.reason == FinishReason::EndToken);
    }
    assert_eq!(rig.scheduler.load(), (0, 0));
    // An engine that has served many is as good as a new one.
    assert_eq!(rig.answer(&prompt(5, 200)).await.tokens, alone.tokens);
    rig.end().await;
}

#[tokio::test]
async fn beyond_the_queue_and_the_context_requests_are_refused() {
    let rig = Rig::with_limits(&support::tiny_model(), None, 1, 0).await;
    let running = rig.scheduler.submit(request(&prompt(1, 100), 3000)).await.unwrap();
    let busy = rig.scheduler.submit(request(&prompt(2, 10), 4)).await.unwrap_err();
    assert_eq!(busy, Refusal::Busy { running: 1, waiting: 0 });
    let long = rig.scheduler.submit(request(&prompt(2, 4000), 200)).await.unwrap_err();
    assert!(matches!(long, Refusal::TooLong { limit: 4096, name: "context_tokens", .. }));
    drop(running);
    // The place is free at the next step.
    while rig.scheduler.load() != (0, 0) {
        tokio::task::yield_now().await;
    }
    assert_eq!(rig.answer(&prompt(2, 10)).await.tokens.len(), 24);
    rig.end().await;
}

/// F42: a client gives up during the prompt; what was computed is there for the next try.
#[tokio::test]
async fn a_cancelled_prompt_leaves_its_whole_blocks_and_the_retry_resumes_there() {
    let store = SimStore::default();
    let rig = Rig::new(&support::tiny_model(), Some(&store)).await;
    let long = prompt(1, 3500);
    let running = rig.scheduler.submit(request(&long, 4)).await.unwrap();
    store.until(|state| state.blocks.len() >= 4).await;
    drop(running);
    while rig.scheduler.load() != (0, 0) {
        tokio::task::yield_now().await;
    }
    let left = store.with(|state| state.blocks.len());
    assert!(left >= 4, "{left}");
    let again = &long[..left * 32 + 1];
    let retry = rig.answer(again).await;
    assert_eq!(retry.prefill.cached_tokens as usize, left * 32, "{:?}", retry.prefill);
    rig.end().await;
    let alone = Rig::new(&support::tiny_model(), None).await;
    assert_eq!(alone.answer(again).await.tokens, retry.tokens);
    alone.end().await;
}

#[tokio::test]
async fn a_block_of_the_wrong_structure_is_recomputed() {
    let store = SimStore::default();
    let rig = Rig::new(&support::tiny_model(), Some(&store)).await;
    let document = prompt(1, 300);
    let cold = rig.answer(&document).await;
    store.until(|state| state.blocks.len() >= 9).await;
    store.with(|state| {
        let (key, _) = state.puts[4];
        state.blocks.get_mut(&key).unwrap().bytes.truncate(50);
    });
    let hit = rig.answer(&document).await;
    assert_eq!(hit.prefill.kv.skip_reason, Some(SkipReason::ImportFailed));
    assert_eq!(hit.prefill.cached_tokens, 4 * BLOCK);
    assert_eq!(hit.tokens, cold.tokens);
    rig.end().await;
}

#[tokio::test]
async fn a_request_may_decline_the_cache() {
    let store = SimStore::default();
    let rig = Rig::new(&support::tiny_model(), Some(&store)).await;
    let declined = Request { use_cache: false, ..request(&prompt(1, 100), 4) };
    let answer = collect(rig.scheduler.submit(declined).await.unwrap()).await;
    assert_eq!(answer.prefill.kv.skip_reason, Some(SkipReason::Disabled));
    rig.end().await;
    store.with(|state| assert!(state.blocks.is_empty() && state.asked_stored == 0));
}
