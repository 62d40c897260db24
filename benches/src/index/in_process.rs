//! The index alone, asked by one thread.

use super::{
    MODEL, Plan, Row, Where,
    lookups::{Chains, Lookups, Slice},
};
use crate::{allocator, child, content::key, error::BenchError};
use indicatif::ProgressBar;
use larder_master::index::{Index, IndexLimits, SpaceId, Upsert};
use larder_proto::{BlockKey, PartNumber, Tier, TierSet, event::PartSet, ids::TenantName};
use std::time::Duration;
use tokio::time::Instant;

/// Keys that are drawn at a time, before the clock runs: half a megabyte, so that they stay in the cache.
const DRAWN: usize = 16_384;
/// Of this many calls one is timed by itself, where calls are short.
const SAMPLE: usize = 16;
/// What storing an entry takes on a busy machine, for the plan of `--quick`.
const STORE: Duration = Duration::from_nanos(1_000);
/// Share of the time left that goes here when the wire is measured too.
const SHARE: usize = 4;

pub(super) fn measure(
    plan: &Plan<'_>,
    wire_follows: bool,
    bar: &ProgressBar,
    rows: &mut Vec<Row>,
) -> Result<(), BenchError> {
    let before = allocator::held_bytes();
    let most = plan.entries.last().copied().unwrap_or(0);
    let defaults = IndexLimits::default();
    let index = Index::new(IndexLimits { entries: defaults.entries.max(most), ..defaults });
    let refused = |doing| BenchError::Answer { doing, answer: "refused at a limit".to_owned() };
    let location = index.begin_location().ok_or_else(|| refused("begin a location"))?;
    let space = index.space(&TenantName::default().id(), &MODEL);
    let space = space.ok_or_else(|| refused("make a space"))?;
    let parts = PartSet::of([PartNumber(0)]).map_err(larder_client::TransferError::from)?;
    let set = index.intern_set(space, &parts).ok_or_else(|| refused("intern a part set"))?;
    let mut stored = 0;
    for (at, entries) in plan.entries.iter().copied().enumerate() {
        bar.set_message(format!("in process: storing {entries} entries"));
        for number in stored..entries {
            let upsert = index.upsert(location, &key(number), set, TierSet::of(Tier::Dram));
            if upsert != Upsert::Added {
                return Err(refused("store an entry"));
            }
        }
        stored = entries;
        let bytes_per_entry = per_entry(allocator::held_bytes() - before, entries);
        let sizes_left = plan.entries.len() - at;
        for (done, keys) in plan.args.keys.iter().copied().enumerate() {
            bar.set_message(format!("in process: {entries} entries, {keys} keys a call"));
            let rows_left = sizes_left * plan.rows_in_process() - done;
            let to_store = u32::try_from(most - stored).unwrap_or(u32::MAX);
            let shared = if wire_follows { SHARE } else { 1 };
            let time = plan.slice(rows_left * shared, STORE * to_store);
            let slices = (0..=plan.args.slices)
                .map(|i| {
                    slice(&index, space, &mut Chains::new(entries, keys, i.into()), keys, time)
                })
                .skip(1) // The first warms up.
                .collect::<Result<_, _>>()?;
            let lookups = Lookups { keys_per_call: keys, connections: 1, slices };
            rows.push(Row::new(Where::InProcess, entries, bytes_per_entry, &lookups));
            bar.inc(1);
        }
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "bytes of one index")]
fn per_entry(bytes: i64, entries: u64) -> f64 {
    bytes as f64 / entries as f64
}

fn slice(
    index: &Index,
    space: SpaceId,
    chains: &mut Chains,
    keys: u32,
    time: Duration,
) -> Result<Slice, BenchError> {
    let len = keys as usize;
    let sample = if keys < 64 { SAMPLE } else { 1 };
    let mut slice = Slice::default();
    let mut drawn: Vec<BlockKey> = Vec::with_capacity(DRAWN + len);
    while slice.wall < time {
        drawn.clear();
        while drawn.len() + len <= DRAWN.max(len) {
            drawn.extend(chains.draw());
        }
        let (began, cpu_before) = (Instant::now(), child::thread_cpu_seconds());
        let mut matched = 0;
        for (call, chain) in drawn.chunks_exact(len).enumerate() {
            let asked = call.is_multiple_of(sample).then(Instant::now);
            matched += index.match_prefix(space, 0, None, chain).blocks;
            if let Some(asked) = asked {
                slice.latencies.push(asked.elapsed());
            }
        }
        slice.cpu_seconds += child::thread_cpu_seconds() - cpu_before;
        slice.wall += began.elapsed();
        slice.keys += drawn.len() as u64;
        if matched != drawn.len() {
            let answer = format!("{matched} of {} keys", drawn.len());
            return Err(BenchError::Answer { doing: "match chains that are all held", answer });
        }
    }
    Ok(slice)
}
