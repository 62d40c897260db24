use super::*;
use larder_proto::NodeId;
use proptest::prelude::*;

const BLOCK: u32 = 32;
const BLOCK_BYTES: usize = 1 << 20;

fn shape(tokens: u32) -> PromptShape {
    PromptShape { tokens, block_tokens: BLOCK, step_blocks: 2, block_bytes: BLOCK_BYTES }
}

fn peer(number: u8) -> BlockSource {
    BlockSource::Peer(NodeId::from_bytes([number; 16]))
}

fn per_token(milliseconds: u64) -> PrefillRate {
    PrefillRate { per_token: Duration::from_millis(milliseconds) }
}

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Teaches the planner that a source needs this long for a block.
fn teach(planner: &mut Planner, now: Instant, source: BlockSource, block: Duration) {
    planner.saw_latency(now, source, ms(1));
    planner.saw_transfer(now, source, BLOCK_BYTES, block);
}

#[test]
fn restore_points_are_steps_and_the_last_whole_block() {
    let points = |tokens: u32| {
        let shape = shape(tokens);
        (0..=tokens / BLOCK).map(|blocks| shape.restore_point(blocks)).collect::<Vec<_>>()
    };
    assert_eq!(points(32), [0, 0], "one token is always left to compute");
    assert_eq!(points(33), [0, 1]);
    assert_eq!(points(65), [0, 0, 2]);
    assert_eq!(points(97), [0, 0, 2, 3]);
    assert_eq!(points(128), [0, 0, 2, 2, 2], "the last step is whole: it is what is left");
    assert_eq!(points(170), [0, 0, 2, 2, 4, 5]);
}

proptest! {
    #[test]
    fn a_hit_computes_the_same_calls_as_a_run_without_the_cache(
        tokens in 1_u32..700, held in 0_u32..30, step_blocks in 1_u32..5,
    ) {
        let shape = PromptShape { step_blocks, ..shape(tokens) };
        let calls_from = |mut at: u32| {
            let mut calls = Vec::new();
            while at < tokens {
                let end = shape.call_end(at);
                prop_assert!(end > at && end <= tokens);
                prop_assert!(end - at <= step_blocks * BLOCK, "one step at most");
                calls.push(at..end);
                at = end;
            }
            Ok(calls)
        };
        let cold = calls_from(0)?;
        let start = shape.restore_point(held) * BLOCK;
        prop_assert!(shape.restore_point(held) <= held && start < tokens);
        let hit = calls_from(start)?;
        prop_assert!(cold.ends_with(&hit), "{cold:?} {hit:?}");
        // Nothing that is held is left out without need.
        prop_assert!(held - shape.restore_point(held) < step_blocks || held >= tokens / BLOCK);
    }

    #[test]
    fn a_plan_never_finishes_later_than_recomputing(
        tokens in 1_u32..4000,
        runs in prop::collection::vec((0_u8..4, 1_usize..40), 0..6),
        block_ms in prop::collection::vec(0_u64..200, 4),
        token_us in 1_u64..5000,
    ) {
        let now = Instant::now();
        let mut planner = Planner::new(PlannerOptions::default());
        for (number, time) in (0..).zip(&block_ms) {
            teach(&mut planner, now, peer(number), ms(*time));
        }
        let sources: Vec<BlockSource> =
            runs.iter().flat_map(|(number, len)| vec![peer(*number); *len]).collect();
        let rate = PrefillRate { per_token: Duration::from_micros(token_us) };
        let shape = shape(tokens);
        let plan = planner.plan(now, shape, rate, &sources);
        let all = rate.time_for(tokens);
        let planned = plan.expected_fetch + rate.time_for(shape.missing_tokens(plan.fetch_blocks));
        prop_assert!(planned <= all);
        prop_assert_eq!(shape.restore_point(plan.fetch_blocks), plan.fetch_blocks);
        let reachable = shape.restore_point(u32_of(sources.len()));
        prop_assert_eq!(plan.skip_reason.is_none(), plan.fetch_blocks == reachable && reachable > 0);
    }

    #[test]
    fn whatever_lands_when_the_request_ends_within_the_allowed_slowdown(
        tokens in 100_u32..2000,
        waits in prop::collection::vec(prop_oneof![0_u64..10, 0_u64..300, Just(1_000_000)], 70),
        match_ms in 0_u64..20,
    ) {
        let rate = per_token(1);
        let shape = shape(tokens);
        let options = PlannerOptions::default();
        let started = Instant::now();
        let mut watch = Watch::start(started, shape, rate, &options);
        let all = rate.time_for(tokens);
        let mut now = (started + ms(match_ms)).min(watch.budget_ends());
        let wanted = shape.restorable_blocks();
        watch.fetch_begins(now, wanted, all / 10);
        let (mut valid, mut next_landing) = (0, now + ms(waits[0]));
        while valid < wanted {
            let Verdict::WaitUntil(check) = watch.judge(now, valid) else { break };
            prop_assert!(check > now, "time moves");
            now = check.min(next_landing);
            if now == next_landing {
                valid += 1;
                watch.block_landed(now);
                next_landing += ms(waits[valid as usize % waits.len()]);
            }
        }
        let missing = shape.missing_tokens(shape.restore_point(valid));
        let total = now - started + rate.time_for(missing);
        prop_assert!(total <= all.mul_f64(options.max_slowdown) + ms(1), "{total:?} of {all:?}");
    }
}

#[test]
fn a_slow_peer_behind_a_fast_one_is_left_out() {
    let now = Instant::now();
    let mut planner = Planner::new(PlannerOptions::default());
    teach(&mut planner, now, peer(1), ms(1));
    teach(&mut planner, now, peer(2), ms(100));
    // 32 ms to compute a block: 10 from the fast peer, then 10 that would take a second.
    let sources = [vec![peer(1); 10], vec![peer(2); 10]].concat();
    let plan = planner.plan(now, shape(1000), per_token(1), &sources);
    assert_eq!((plan.fetch_blocks, plan.skip_reason), (10, Some(SkipReason::RecomputeCheaper)));
    // The other way round nothing of the fast peer can be used without the slow one's blocks.
    let sources = [vec![peer(2); 10], vec![peer(1); 10]].concat();
    let plan = planner.plan(now, shape(1000), per_token(1), &sources);
    assert_eq!((plan.fetch_blocks, plan.skip_reason), (0, Some(SkipReason::RecomputeCheaper)));
}

#[test]
fn skips_have_reasons() {
    let now = Instant::now();
    let planner = Planner::new(PlannerOptions { min_reuse_blocks: 4, ..Default::default() });
    let reason = |blocks: usize| {
        planner.plan(now, shape(1000), per_token(1), &vec![BlockSource::Local; blocks]).skip_reason
    };
    assert_eq!(reason(0), Some(SkipReason::NoMatch));
    assert_eq!(reason(3), Some(SkipReason::BelowMinimum));
    assert_eq!(reason(4), None);
    let plan = planner.plan(
        now,
        shape(1000),
        PrefillRate { per_token: Duration::ZERO },
        &[BlockSource::Local; 8],
    );
    assert_eq!(plan.skip_reason, Some(SkipReason::RecomputeCheaper));
}

#[test]
fn a_source_that_was_slow_is_tried_again_after_a_while() {
    let now = Instant::now();
    let options = PlannerOptions::default();
    let mut planner = Planner::new(options);
    teach(&mut planner, now, peer(1), ms(500));
    let sources = vec![peer(1); 20];
    assert_eq!(planner.plan(now, shape(1000), per_token(1), &sources).fetch_blocks, 0);
    let later = now + options.forget_after;
    assert_eq!(planner.plan(later, shape(1000), per_token(1), &sources).fetch_blocks, 20);
}

#[test]
fn a_trickle_is_dropped_long_before_the_deadline_and_keeps_what_landed() {
    let started = Instant::now();
    let shape = shape(8001);
    let mut watch = Watch::start(started, shape, per_token(1), &PlannerOptions::default());
    watch.fetch_begins(started, 250, ms(100));
    // 50 ms a block against 32 ms to compute one.
    watch.block_landed(started + ms(50));
    assert!(matches!(watch.judge(started + ms(50), 1), Verdict::WaitUntil(_)));
    watch.block_landed(started + ms(100));
    assert_eq!(watch.judge(started + ms(100), 2), Verdict::Drop);
}

#[test]
fn a_stall_ends_when_the_budget_does() {
    let started = Instant::now();
    let mut watch = Watch::start(started, shape(1000), per_token(1), &PlannerOptions::default());
    watch.fetch_begins(started, 30, ms(10));
    let Verdict::WaitUntil(check) = watch.judge(started, 0) else { panic!("begun") };
    assert_eq!(check, started + ms(200), "a fifth of computing all 1000 tokens");
    assert_eq!(watch.judge(check, 0), Verdict::Drop);
    // What has landed buys time.
    for _ in 0..10 {
        watch.block_landed(started + ms(150));
    }
    let Verdict::WaitUntil(check) = watch.judge(started + ms(199), 10) else { panic!("landing") };
    assert!(check > started + ms(300), "{:?}", check - started);
}

#[test]
fn no_more_sources_are_remembered_than_allowed() {
    let now = Instant::now();
    let mut planner = Planner::new(PlannerOptions::default());
    for number in 0..SOURCE_LIMIT as u128 + 10 {
        let source = BlockSource::Peer(NodeId::from_bytes(number.to_le_bytes()));
        planner.saw_latency(
            now + Duration::from_nanos(u64::try_from(number).unwrap()),
            source,
            ms(1),
        );
    }
    assert_eq!(planner.sources.len(), SOURCE_LIMIT);
}
