//! Readers beside writers, sweeps and growth.

use super::*;
use crate::index::Upsert;
use larder_proto::{Tier, TierSet};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::SeqCst};

const LIVES: u16 = 400;

#[test]
fn readers_never_see_a_forgotten_life_and_never_miss_a_steady_one() {
    let index = small(1_000_000);
    let space = index.space(&tenant(1), &model(1, 1)).unwrap();
    let dram = TierSet::of(Tier::Dram);
    let shared: Vec<BlockKey> = (0..300).map(key).collect();
    // One location that stays, and grows all the time.
    let steady = index.begin_location().unwrap();
    let steady_set = index.intern_set(space, &parts(&[0])).unwrap();
    shared
        .iter()
        .for_each(|key| assert_eq!(index.upsert(steady, key, steady_set, dram), Upsert::Added));

    // A life of the other location is told by its part number, since locations are numbered anew.
    let oldest = AtomicU16::new(1);
    let (done, looked) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for life in 1..LIVES {
                let location = index.begin_location().unwrap();
                let set = index.intern_set(space, &parts(&[0, life])).unwrap();
                shared.iter().for_each(|key| {
                    assert_eq!(index.upsert(location, key, set, dram), Upsert::Added)
                });
                assert!(index.forget(location));
                oldest.store(life + 1, SeqCst);
                sweep_all(&index);
            }
            done.store(true, SeqCst);
        });
        scope.spawn(|| {
            for n in (1_000..400_000).take_while(|_| !done.load(SeqCst)) {
                index.upsert(steady, &key(n), steady_set, dram);
            }
        });
        scope.spawn(|| {
            while !done.load(SeqCst) {
                let from = oldest.load(SeqCst);
                let located = index.locate(space, &shared);
                for holders in located.iter() {
                    assert_eq!(holders[0].location, steady);
                    for holder in &holders[1..] {
                        let life = (1..LIVES).find(|life| holder.parts.has(PartNumber(*life)));
                        assert!(life.unwrap() >= from, "life {life:?} after {from} began");
                    }
                }
                let answer = index.match_prefix(space, 0, None, &shared);
                assert_eq!(answer.blocks, shared.len());
                looked.fetch_add(1, SeqCst);
            }
        });
    });
    assert!(looked.load(SeqCst) > 0);
    sweep_all(&index);
    let stats = index.stats();
    assert_eq!(stats.to_sweep, 0);
    assert_eq!(index.location_stats(steady).unwrap().entries, stats.entries);
}
