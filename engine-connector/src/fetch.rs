//! One fetch, watched: which leading blocks have landed when waiting for more stops to pay.
//!
//! Contract: returns the longest landed prefix, never a block behind a gap. A failed block ends
//! the prefix before it and is counted; what lies behind is given back at once. Dropping the
//! future cancels the transfer and releases every lease.

use crate::metric;
use crate::planner::{Planner, Verdict, Watch};
use crate::report::SkipReason;
use crate::store::{BlockSource, Delivered, Fetch, FetchFailure};
use metrics::counter;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

/// The landed prefix of a fetch.
#[derive(Debug)]
pub(crate) struct Landed<P> {
    /// In position order, without a gap.
    pub(crate) blocks: Vec<(BlockSource, P)>,
    /// Why it is not all that was asked for.
    pub(crate) skip_reason: Option<SkipReason>,
}

/// Waits for the parts of `sources.len()` blocks, whose expected sources are given.
pub(crate) async fn leading_blocks<F: Fetch>(
    mut fetch: F,
    sources: &[BlockSource],
    block_bytes: usize,
    expected: Duration,
    watch: &mut Watch,
    planner: &Mutex<Planner>,
) -> Landed<F::Part> {
    let began = Instant::now();
    watch.fetch_begins(began, u32::try_from(sources.len()).unwrap_or(u32::MAX), expected);
    let mut prefix = Prefix::new(sources.len());
    let mut deliveries = Deliveries::new(sources, began);
    let mut skip_reason = None;
    while !prefix.is_complete() {
        let Verdict::WaitUntil(check_at) = watch.judge(Instant::now(), prefix.valid()) else {
            skip_reason = Some(SkipReason::FetchTooSlow);
            break;
        };
        // Safe to time out: `next` may be dropped between two parts.
        let Ok(answer) = timeout_at(check_at, fetch.next()).await else { continue };
        match answer {
            Some(Ok(Delivered { index, source, part })) => {
                let now = Instant::now();
                watch.block_landed(now);
                deliveries.landed(source, now);
                prefix.landed(index, source, part);
            }
            Some(Err(FetchFailure { index, reason })) => {
                counter!(metric::FAILED_BLOCKS_TOTAL).increment(1);
                debug!(block = index, reason, "block not fetched");
                skip_reason = Some(SkipReason::FetchFailed);
                prefix.failed(index);
            }
            None => {
                // Every part has been answered, or the connection is gone.
                skip_reason = Some(SkipReason::FetchFailed);
                break;
            }
        }
    }
    deliveries.teach(&mut planner.lock(), block_bytes, Instant::now());
    Landed { blocks: prefix.into_blocks(), skip_reason }
}

/// Blocks that land in any order, and how many lead without a gap.
struct Prefix<P> {
    slots: Vec<Option<(BlockSource, P)>>,
    valid: usize,
}

impl<P> Prefix<P> {
    fn new(len: usize) -> Self {
        Self { slots: (0..len).map(|_| None).collect(), valid: 0 }
    }

    fn landed(&mut self, index: usize, source: BlockSource, part: P) {
        // Behind a failed block there are no slots any more: the part is released here.
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Some((source, part));
        }
        while self.slots.get(self.valid).is_some_and(Option::is_some) {
            self.valid += 1;
        }
    }

    fn failed(&mut self, index: usize) {
        self.slots.truncate(index);
        self.valid = self.valid.min(index);
    }

    fn is_complete(&self) -> bool {
        self.valid == self.slots.len()
    }

    fn valid(&self) -> u32 {
        u32::try_from(self.valid).unwrap_or(u32::MAX)
    }

    fn into_blocks(self) -> Vec<(BlockSource, P)> {
        self.slots.into_iter().take(self.valid).flatten().collect()
    }
}

/// When each source delivered, so that the planner learns from this fetch.
struct Deliveries {
    began: Instant,
    sources: BTreeMap<BlockSource, Delivery>,
}

#[derive(Default)]
struct Delivery {
    parts: usize,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Deliveries {
    fn new(expected: &[BlockSource], began: Instant) -> Self {
        let sources = expected.iter().map(|source| (*source, Delivery::default())).collect();
        Self { began, sources }
    }

    fn landed(&mut self, source: BlockSource, now: Instant) {
        let delivery = self.sources.entry(source).or_default();
        delivery.parts += 1;
        delivery.first.get_or_insert(now);
        delivery.last = Some(now);
    }

    fn teach(self, planner: &mut Planner, block_bytes: usize, now: Instant) {
        for (source, delivery) in self.sources {
            // A source that stayed silent has at least this latency.
            let first = delivery.first.unwrap_or(now);
            planner.saw_latency(now, source, first.duration_since(self.began));
            if let Some(last) = delivery.last
                && delivery.parts > 1
            {
                let bytes = (delivery.parts - 1) * block_bytes;
                planner.saw_transfer(now, source, bytes, last.duration_since(first));
            }
        }
    }
}
