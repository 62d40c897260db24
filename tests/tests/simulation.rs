//! The promises of sessions, membership and index under crashes, breaks, delays and repetitions.
//!
//! `LARDER_SIM_SEEDS=5000` runs more seeds, `LARDER_SIM_SEED=17` only one.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

use larder_tests::sim::{Met, Plan, run};

fn seeds() -> std::ops::Range<u64> {
    let variable = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    match variable("LARDER_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..variable("LARDER_SIM_SEEDS").unwrap_or(200),
    }
}

#[test]
fn after_quiet_every_index_is_the_union_of_live_catalogs_and_no_answer_lied_before() {
    let mut met = Met::default();
    for seed in seeds() {
        match run(seed, Plan::of_seed(seed)) {
            Ok(outcome) => met = met.and(outcome.met),
            Err(broken) => panic!("seed {seed}: {broken}; again with LARDER_SIM_SEED={seed}"),
        }
    }
    println!("{met:?}");
    if seeds().count() >= 200 {
        // A simulation that meets nothing proves nothing.
        let Met {
            answers,
            complete,
            gaps,
            snapshots,
            repeated,
            superseded,
            obeyed,
            fenced,
            limited,
        } = met;
        for (what, count) in [
            ("answers", answers),
            ("complete answers", complete),
            ("gaps", gaps),
            ("snapshots", snapshots),
            ("repeated events", repeated),
            ("superseded messages", superseded),
            ("commands obeyed", obeyed),
            ("commands fenced", fenced),
            ("full indexes", limited),
        ] {
            assert!(count > 0, "no {what} in all seeds");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_seed_another() {
    let trace = |seed| run(seed, Plan::of_seed(seed)).unwrap().trace;
    for seed in [1, 5, 7, 11] {
        assert_eq!(trace(seed), trace(seed), "seed {seed}");
    }
    assert_ne!(trace(1), trace(2));
}
