//! Match, plan, fetch, restore, publish: with a store that fails, stalls and fills up.

mod support;

use larder_engine_connector::{
    BlockShape, BlockSource, Connect, Connector, Options, PlannerOptions, Reuse, ReuseSource,
    SkipReason, StoreError,
};
use larder_proto::fingerprint::ModelDescription;
use larder_proto::frame::{Priority, SessionState};
use std::time::Duration;
use support::{
    BLOCK, BLOCK_BYTES, Rig, STEP_BLOCKS, SimEngine, SimStore, model, peer, prompt, rate,
};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

#[tokio::test(start_paused = true)]
async fn a_prompt_is_published_and_its_repetition_restored() {
    let rig = Rig::new(Options::default()).await;
    let tokens = prompt(1, 30);
    let mut engine = SimEngine::new();
    let mut kv = rig.prepare(&tokens).await;
    assert_eq!(kv.report().skip_reason, Some(SkipReason::NoMatch));
    assert_eq!(engine.run(&mut kv, &tokens, 30), 0);
    kv.finish(&mut engine, ());
    rig.store.until(|state| state.puts.len() == 7).await;
    assert_eq!(rig.store.stored_blocks(&tokens), 7);
    rig.store.with(|state| {
        let (root, _) = state.puts[0];
        assert_eq!(state.puts[0].1.parent, None);
        assert!(state.puts.windows(2).all(|pair| pair[1].1.parent == Some(pair[0].0)));
        assert!(state.puts.iter().all(|(_, attributes)| attributes.root == root));
    });

    let mut kv = rig.prepare(&tokens).await;
    assert_eq!(engine.run(&mut kv, &tokens, 30), 7);
    assert_eq!(engine.sequence, tokens, "imported and computed KV is that of the prompt");
    assert_eq!((kv.report().source(), kv.report().local_blocks), (ReuseSource::Local, 7));
    kv.finish(&mut engine, ());
    assert_eq!((engine.exports, kv.published().count()), (7, 0), "nothing is exported twice");
    drop(kv);
    rig.store.with(|state| assert_eq!((state.leases, state.fetches), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn what_is_known_of_a_session_is_said_once_its_blocks_are_there() {
    let closed = Reuse { session: SessionState::Closed, ..Reuse::default() };
    let kept = Reuse { priority: Priority::High, ..Reuse::default() };
    for (reuse, times) in [(Reuse::default(), 0), (closed, 1), (kept, 2)] {
        let rig = Rig::new(Options::default()).await;
        let tokens = prompt(1, 30);
        let mut engine = SimEngine::new();
        let mut kv = rig.prepare_with(&tokens, reuse).await;
        engine.run(&mut kv, &tokens, 30);
        kv.finish(&mut engine, ());
        drop(kv);
        let store = rig.drain().await;
        store.with(|state| {
            assert_eq!(state.hints.len(), times, "{reuse:?}: {:?}", state.hints);
            let put: Vec<_> = state.puts.iter().map(|(key, _)| *key).collect();
            // One that keeps comes with the lookup too, before anything is computed.
            let expected = [(put.clone(), 0, reuse), (put, 7, reuse)];
            assert_eq!(state.hints, expected[2 - times..]);
        });
    }
}

#[tokio::test(start_paused = true)]
async fn sources_are_told_apart() {
    let rig = Rig::new(Options::default()).await;
    let tokens = prompt(1, 33);
    rig.store.hold(&tokens, 8, peer(1), Some(ms(1)));
    let mut engine = SimEngine::new();
    let mut kv = rig.prepare(&tokens).await;
    assert_eq!(engine.run(&mut kv, &tokens, 33), 8);
    assert_eq!((kv.report().source(), kv.report().peer_blocks), (ReuseSource::Peer, 8));

    rig.store.hold(&tokens, 4, BlockSource::Local, AT_ONCE);
    let mut kv = rig.prepare(&tokens).await;
    engine.run(&mut kv, &tokens, 33);
    let report = kv.report();
    assert_eq!(
        (report.source(), report.local_blocks, report.peer_blocks),
        (ReuseSource::Mixed, 4, 4)
    );
}

/// F03: a failed load was counted as a finished load.
#[tokio::test(start_paused = true)]
async fn only_the_blocks_before_a_failed_one_are_valid() {
    for failing in [0, 3, 5, 7] {
        let rig = Rig::new(Options::default()).await;
        let tokens = prompt(1, 33);
        rig.store.hold(&tokens, 8, BlockSource::Local, AT_ONCE);
        rig.store.change(&tokens, failing, |block| block.fails = true);
        let mut engine = SimEngine::new();
        let mut kv = rig.prepare(&tokens).await;
        assert_eq!(kv.report().skip_reason, Some(SkipReason::FetchFailed));
        let valid = engine.run(&mut kv, &tokens, 33);
        // Steps of two blocks: resumed where a run without the cache has a boundary.
        assert_eq!(valid as usize, failing - failing % 2);
        assert_eq!(engine.sequence, tokens);
        assert_eq!(kv.report().local_blocks, valid);
        rig.store.with(|state| assert_eq!((state.leases, state.fetches), (0, 0)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_that_the_engine_refuses_ends_the_restored_prefix() {
    let rig = Rig::new(Options::default()).await;
    let tokens = prompt(1, 33);
    rig.store.hold(&tokens, 8, peer(1), AT_ONCE);
    let mut engine = SimEngine::new();
    engine.refuses = Some(5);
    let mut kv = rig.prepare(&tokens).await;
    assert_eq!(engine.run(&mut kv, &tokens, 33), 5);
    assert_eq!(kv.report().skip_reason, Some(SkipReason::ImportFailed));
    assert_eq!(kv.report().peer_blocks, 5);
    assert_eq!(engine.sequence, tokens);
    rig.store.with(|state| assert_eq!(state.leases, 0));
}

/// F17: looked up but never loaded, pinned for ever.
#[tokio::test(start_paused = true)]
async fn a_prepared_request_that_is_never_run_holds_nothing() {
    let rig = Rig::new(Options::default()).await;
    for seed in 0..50 {
        let tokens = prompt(seed, 33);
        rig.store.hold(&tokens, 8, BlockSource::Local, AT_ONCE);
        let kv = rig.prepare(&tokens).await;
        rig.store.with(|state| assert_eq!(state.leases, 8));
        drop(kv);
    }
    rig.store.with(|state| assert_eq!((state.leases, state.fetches), (0, 0)));
}

/// F40, F41: cancelled between lookup and load, or at any other moment.
#[tokio::test(start_paused = true)]
async fn a_request_dropped_at_any_moment_holds_nothing() {
    let rig = Rig::new(Options::default()).await;
    let tokens = prompt(1, 33);
    rig.store.hold(&tokens, 8, peer(1), Some(ms(1)));
    for block in 0..8 {
        rig.store.change(&tokens, block, |stored| {
            stored.lands_after = Some(ms(1 + u64::try_from(block).unwrap()));
        });
    }
    rig.store.with(|state| state.match_takes = ms(2));
    for microseconds in (0..14_000).step_by(500) {
        let prepared = rig.connector.prepare(&tokens, 16, rate(10), Reuse::default());
        let _ = tokio::time::timeout(Duration::from_micros(microseconds), prepared).await;
        rig.store.with(|state| {
            assert_eq!((state.leases, state.fetches), (0, 0), "dropped after {microseconds} us");
        });
    }
}

/// F42: a cancelled long prefill threw its work away.
#[tokio::test(start_paused = true)]
async fn each_retry_of_a_cancelled_prompt_resumes_where_the_last_one_was() {
    let rig = Rig::new(Options::default()).await;
    let tokens = prompt(1, 40 * BLOCK + 1);
    let mut engine = SimEngine::new();
    let mut resumed_at = Vec::new();
    for _ in 0..4 {
        let mut kv = rig.prepare(&tokens).await;
        engine.sequence.clear();
        let valid = kv.restore(&mut engine, ());
        resumed_at.push(valid);
        // The client gives up 15 blocks, and half of one, later.
        let given_up = ((valid + 15) * BLOCK + BLOCK / 2).min(40 * BLOCK + 1) as usize;
        engine.compute(&mut kv, &tokens, given_up);
        kv.finish(&mut engine, ());
        drop(kv);
        let whole = given_up / BLOCK as usize;
        rig.store.until(|state| state.blocks.len() == whole).await;
        assert_eq!(rig.store.stored_blocks(&tokens), whole, "no incomplete block");
    }
    assert_eq!(resumed_at, [0, 14, 28, 40]);
}

/// F52: zero reuse with no reason given.
#[tokio::test(start_paused = true)]
async fn every_skip_has_its_reason() {
    let planner = PlannerOptions { min_reuse_blocks: 2, ..Default::default() };
    let rig = Rig::new(Options { planner, ..Options::default() }).await;
    let short = prompt(1, 2 * BLOCK);
    assert_eq!(rig.prepare(&short).await.report().skip_reason, Some(SkipReason::PromptTooShort));
    let tokens = prompt(2, 8 * BLOCK + 1);
    assert_eq!(rig.prepare(&tokens).await.report().skip_reason, Some(SkipReason::NoMatch));
    rig.store.hold(&tokens, 1, BlockSource::Local, AT_ONCE);
    assert_eq!(rig.prepare(&tokens).await.report().skip_reason, Some(SkipReason::BelowMinimum));
    rig.store.hold(&tokens, 8, peer(1), AT_ONCE);
    assert_eq!(rig.prepare(&tokens).await.report().skip_reason, None);
    let free = rig.connector.prepare(&tokens, 16, rate(0), Reuse::default()).await;
    assert_eq!(free.report().skip_reason, Some(SkipReason::RecomputeCheaper));
    rig.store.with(|state| state.match_takes = ms(1000));
    assert_eq!(rig.prepare(&tokens).await.report().skip_reason, Some(SkipReason::MatchTimedOut));
}

/// F39, P8: loading was slower than computing.
#[tokio::test(start_paused = true)]
async fn a_slow_or_stalled_store_costs_a_fifth_at_most() {
    let tokens = prompt(1, 2001);
    let landings: [fn(u64) -> Option<Duration>; 4] = [
        |_| None,
        |block| Some(ms(6 * block)),
        |block| (block < 100).then(|| ms(block)),
        |block| Some(ms(block * block / 20)),
    ];
    for landing in landings {
        let rig = Rig::new(Options::default()).await;
        rig.store.hold(&tokens, 500, peer(1), None);
        for block in 0..500 {
            let lands_after = landing(u64::try_from(block).unwrap());
            rig.store.change(&tokens, block, |stored| stored.lands_after = lands_after);
        }
        let began = Instant::now();
        let mut kv = rig.prepare(&tokens).await;
        let waited = began.elapsed();
        let mut engine = SimEngine::new();
        let valid = engine.run(&mut kv, &tokens, 2001);
        let computing = rate(1).time_for(2001 - valid * BLOCK);
        let total = waited + computing;
        assert!(total <= rate(1).time_for(2001).mul_f64(1.2) + ms(1), "{total:?}");
        rig.store.with(|state| assert_eq!((state.leases, state.fetches), (0, 0)));
    }
}

/// There is no node on this host.
struct NoNode;

impl Connect for NoNode {
    type Store = SimStore;

    async fn connect(&self, _model: &ModelDescription) -> Result<SimStore, StoreError> {
        Err(StoreError("connection refused".into()))
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_node_requests_go_on_at_once() {
    let shape = BlockShape { bytes: BLOCK_BYTES, step_blocks: STEP_BLOCKS };
    let (connector, of) = Connector::new(NoNode, model(0), shape, Options::default());
    let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
    tasks.spawn(of.run(stop.clone()));
    let tokens = prompt(1, 33);
    let began = Instant::now();
    let mut kv = connector.prepare(&tokens, 16, rate(1), Reuse::default()).await;
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert_eq!(kv.report().skip_reason, Some(SkipReason::NodeUnavailable));
    let mut engine = SimEngine::new();
    assert_eq!(engine.run(&mut kv, &tokens, 33), 0);
    kv.finish(&mut engine, ());
    assert_eq!(engine.sequence, tokens);
    drop(kv);
    stop.cancel();
    tasks.join_next().await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn blocks_of_other_weights_than_at_the_start_are_not_published() {
    let rig = Rig::new(Options::default()).await;
    let tokens = prompt(1, 33);
    let mut engine = SimEngine::new();
    let mut kv = rig.prepare(&tokens).await;
    kv.restore(&mut engine, ());
    engine.compute(&mut kv, &tokens, 16);
    rig.connector.set_model(model(1));
    engine.compute(&mut kv, &tokens, 33);
    kv.finish(&mut engine, ());
    drop(kv);
    let store = rig.drain().await;
    // The blocks offered before were still queued when the weights changed.
    store.with(|state| assert!(state.puts.is_empty(), "{:?}", state.puts));
}

#[tokio::test(start_paused = true)]
async fn what_was_computed_on_a_failed_load_is_not_published_until_recomputed() {
    let rig = Rig::new(Options::default()).await;
    let tokens = prompt(1, 33);
    let mut engine = SimEngine::new();
    let mut kv = rig.prepare(&tokens).await;
    kv.restore(&mut engine, ());
    engine.compute(&mut kv, &tokens, 8);
    // The engine learns that blocks from 2 on, which it believed loaded, were not: what the same
    // step computed behind them is wrong, however whole it looks.
    kv.failed_from(2);
    engine.sequence.extend([99; 12]);
    kv.computed(&mut engine, (), &tokens, 12..20);
    kv.finish(&mut engine, ());
    engine.sequence.truncate(8);
    engine.compute(&mut kv, &tokens, 33);
    kv.finish(&mut engine, ());
    drop(kv);
    let store = rig.drain().await;
    assert_eq!(
        store.stored_blocks(&tokens),
        8,
        "recomputed blocks are published, the wrong were not"
    );
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_sheds_and_never_makes_the_engine_wait() {
    let options = Options { publish_queue_bytes: 4 * support::BLOCK_BYTES, ..Options::default() };
    let rig = Rig::new(options).await;
    rig.store.with(|state| state.puts_held = true);
    let tokens = prompt(1, 101);
    let mut engine = SimEngine::new();
    let mut kv = rig.prepare(&tokens).await;
    // No await between the steps: the publisher cannot run, as if it were stuck.
    engine.run(&mut kv, &tokens, 101);
    kv.finish(&mut engine, ());
    assert!(kv.published().count() < 25, "{}", kv.published().count());
    assert!(engine.exports <= 4, "what is shed is not copied");
    drop(kv);
    rig.store.with(|state| state.puts_held = false);
    let store = rig.drain().await;
    assert_eq!(store.stored_blocks(&tokens), store.with(|state| state.puts.len()), "no holes");
}

#[tokio::test(start_paused = true)]
async fn a_full_node_ends_the_publishing_of_a_request_not_of_the_next() {
    let rig = Rig::new(Options::default()).await;
    rig.store.with(|state| state.full = true);
    let tokens = prompt(1, 33);
    let mut engine = SimEngine::new();
    let mut kv = rig.prepare(&tokens).await;
    engine.run(&mut kv, &tokens, 33);
    kv.finish(&mut engine, ());
    drop(kv);
    rig.store.with(|state| state.full = false);
    let tokens = prompt(2, 33);
    let mut kv = rig.prepare(&tokens).await;
    engine.run(&mut kv, &tokens, 33);
    kv.finish(&mut engine, ());
    drop(kv);
    let store = rig.drain().await;
    assert_eq!(store.stored_blocks(&tokens), 8);
}

#[tokio::test(start_paused = true)]
async fn answers_are_published_too_unless_told_otherwise() {
    for publish_generated in [true, false] {
        let rig = Rig::new(Options { publish_generated, ..Options::default() }).await;
        let whole = prompt(1, 26);
        let mut engine = SimEngine::new();
        let mut kv = rig.prepare(&whole[..10]).await;
        engine.run(&mut kv, &whole, 10);
        for end in 11..=26 {
            engine.compute(&mut kv, &whole, end);
        }
        kv.finish(&mut engine, ());
        drop(kv);
        let store = rig.drain().await;
        assert_eq!(store.stored_blocks(&whole), if publish_generated { 6 } else { 2 });
    }
}
