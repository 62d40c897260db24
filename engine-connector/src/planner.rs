//! Fetch or recompute: decided from live estimates, and watched while a fetch is under way.
//!
//! Contract: pure; time enters as an argument. A plan never fetches when the projected finish lies
//! beyond that of recomputing. A [`Watch`] drops a fetch when what is still missing is expected
//! later than computing it would take, and at the latest when waiting any longer could make the
//! request slower than [`PlannerOptions::max_slowdown`] times recomputing all of it (P8).
//!
//! Estimates: each source has a latency and a time per byte, the engine a time per token. They are
//! used with their deviation added, so that a shaky source has to be clearly faster. A source that
//! was not used for [`PlannerOptions::forget_after`] is assumed to be as good as new: the watch
//! bounds what a wrong guess costs, and without a try it would be shunned for ever.

use crate::engine::PrefillRate;
use crate::estimate::Estimate;
use crate::report::SkipReason;
use crate::store::BlockSource;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Sources whose estimates are kept. More than peers of a cluster; the longest unused goes first.
const SOURCE_LIMIT: usize = 1024;
/// Latency assumed of a source before its first sample, in seconds. A guess for one data centre.
const PRIOR_LATENCY_S: f64 = 0.002;
/// Time per byte assumed before the first sample: 1 GB/s. Hopeful on purpose, see above.
const PRIOR_S_PER_BYTE: f64 = 1e-9;
/// Time to import a byte, assumed before the first sample: 2 GB/s.
const PRIOR_IMPORT_S_PER_BYTE: f64 = 0.5e-9;

/// Limits of the planner's decisions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlannerOptions {
    /// Fewer reusable blocks than this are not worth a request to the node. At least 1.
    pub min_reuse_blocks: u32,
    /// A request with a cache in trouble takes at most this many times recomputing. Above 1.
    pub max_slowdown: f64,
    /// Estimates of a source that was not used for this long are forgotten.
    pub forget_after: Duration,
}

impl Default for PlannerOptions {
    fn default() -> Self {
        Self {
            min_reuse_blocks: 1,
            // The promise is 1.25: the rest is for what happens before and after the wait.
            max_slowdown: 1.2,
            forget_after: Duration::from_secs(30),
        }
    }
}

/// The prompt of one request, in the units that decisions are made in.
///
/// An engine computes a prompt in steps of whole blocks at fixed places, then what is left of it:
/// its whole blocks, and its last tokens (at least one, because only a computed token says what
/// comes next). It resumes only where a run without the cache has a boundary too, so that what is
/// left is computed by exactly the same calls, and a hit changes no arithmetic.
///
/// ```text
/// |   step    |   step    |   step    | blocks | last tokens |
/// 0           s          2s          3s        ^ last restore point
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptShape {
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks that the engine computes in one step.
    pub step_blocks: u32,
    /// Bytes of a block.
    pub block_bytes: usize,
}

impl PromptShape {
    /// The last restore point, in blocks.
    #[must_use]
    pub fn restorable_blocks(&self) -> u32 {
        let step_tokens = self.block_tokens * self.step_blocks;
        match self.tokens {
            0 => 0,
            // The last step is whole: it is what is left to compute.
            tokens if tokens % step_tokens == 0 => tokens / self.block_tokens - self.step_blocks,
            tokens => (tokens - 1) / self.block_tokens,
        }
    }

    /// The last restore point that needs no more than `blocks` leading blocks.
    #[must_use]
    pub fn restore_point(&self, blocks: u32) -> u32 {
        match self.restorable_blocks() {
            last if blocks >= last => last,
            _ => blocks - blocks % self.step_blocks,
        }
    }

    /// Where the call ends that computes on from `position`, in a run with the cache or without.
    ///
    /// # Panics
    /// When nothing is left to compute.
    #[must_use]
    pub fn call_end(&self, position: u32) -> u32 {
        assert!(position < self.tokens, "the prompt is computed");
        let step_tokens = self.block_tokens * self.step_blocks;
        let last = self.restorable_blocks() * self.block_tokens;
        let next_step = (position / step_tokens + 1) * step_tokens;
        match position {
            _ if next_step <= self.tokens => next_step,
            position if position < last => last,
            _ => self.tokens,
        }
    }

    /// Tokens left to compute when the first `blocks` blocks are valid.
    #[must_use]
    pub fn missing_tokens(&self, blocks: u32) -> u32 {
        self.tokens.saturating_sub(blocks.saturating_mul(self.block_tokens))
    }

    fn bytes(&self, blocks: usize) -> f64 {
        (blocks as f64) * (self.block_bytes as f64)
    }
}

/// What to do with a prompt whose leading blocks are held somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Fetch this many leading blocks and compute the rest.
    pub fetch_blocks: u32,
    /// When they are expected, import included, counted from now.
    pub expected_fetch: Duration,
    /// Why it is not all that was matched.
    pub skip_reason: Option<SkipReason>,
}

/// Estimates of one source.
#[derive(Debug, Clone, Copy)]
struct SourceEstimate {
    latency: Estimate,
    s_per_byte: Estimate,
    used: Instant,
}

impl SourceEstimate {
    fn new(now: Instant) -> Self {
        Self {
            latency: Estimate::prior(PRIOR_LATENCY_S),
            s_per_byte: Estimate::prior(PRIOR_S_PER_BYTE),
            used: now,
        }
    }
}

/// Decides, and learns from what happened.
#[derive(Debug)]
pub struct Planner {
    options: PlannerOptions,
    sources: BTreeMap<BlockSource, SourceEstimate>,
    import_s_per_byte: Estimate,
}

impl Planner {
    /// A planner that knows nothing yet.
    #[must_use]
    pub fn new(options: PlannerOptions) -> Self {
        let import_s_per_byte = Estimate::prior(PRIOR_IMPORT_S_PER_BYTE);
        Self { options, sources: BTreeMap::new(), import_s_per_byte }
    }

    /// Decides how many of the matched leading blocks to fetch. `sources` names, block by block,
    /// who would deliver it.
    #[must_use]
    pub fn plan(
        &self,
        now: Instant,
        shape: PromptShape,
        rate: PrefillRate,
        sources: &[BlockSource],
    ) -> Plan {
        let held = u32_of(sources.len());
        let usable = shape.restore_point(held) as usize;
        let nothing = |reason| Plan {
            fetch_blocks: 0,
            expected_fetch: Duration::ZERO,
            skip_reason: Some(reason),
        };
        if held == 0 {
            return nothing(SkipReason::NoMatch);
        }
        if usable == 0 || usable < self.options.min_reuse_blocks as usize {
            return nothing(SkipReason::BelowMinimum);
        }
        let compute_all = rate.time_for(shape.tokens).as_secs_f64();
        let mut best = (0, 0.0, compute_all);
        let mut bytes = BTreeMap::<BlockSource, f64>::new();
        for (index, source) in sources[..usable].iter().enumerate() {
            *bytes.entry(*source).or_default() += shape.bytes(1);
            let blocks = index + 1;
            let next = (blocks + shape.step_blocks as usize).min(usable);
            // Within a run from one source the sum is linear in the blocks, so only the last
            // restore point of a run can be best.
            let run_goes_on =
                next > blocks && sources[blocks..next].iter().all(|other| other == source);
            if shape.restore_point(u32_of(blocks)) as usize != blocks || run_goes_on {
                continue;
            }
            let fetch = self.fetch_seconds(now, &bytes)
                + shape.bytes(blocks) * self.import_s_per_byte.cautious();
            let missing = shape.missing_tokens(u32_of(blocks));
            let finish = fetch + rate.time_for(missing).as_secs_f64();
            if finish < best.2 {
                best = (blocks, fetch, finish);
            }
        }
        let (blocks, fetch, _) = best;
        Plan {
            fetch_blocks: u32_of(blocks),
            expected_fetch: Duration::try_from_secs_f64(fetch).unwrap_or(Duration::MAX),
            skip_reason: (blocks < usable).then_some(SkipReason::RecomputeCheaper),
        }
    }

    /// A source delivered its first part this long after it was asked.
    pub fn saw_latency(&mut self, now: Instant, source: BlockSource, latency: Duration) {
        self.source(now, source).latency.sample(latency.as_secs_f64());
    }

    /// A source delivered `bytes` in `time`, its latency left out.
    pub fn saw_transfer(
        &mut self,
        now: Instant,
        source: BlockSource,
        bytes: usize,
        time: Duration,
    ) {
        if bytes > 0 {
            let sample = time.as_secs_f64() / bytes as f64;
            self.source(now, source).s_per_byte.sample(sample);
        }
    }

    /// The engine took `bytes` in within `time`.
    pub fn saw_import(&mut self, bytes: usize, time: Duration) {
        if bytes > 0 {
            self.import_s_per_byte.sample(time.as_secs_f64() / bytes as f64);
        }
    }

    /// The limits in force.
    #[must_use]
    pub fn options(&self) -> &PlannerOptions {
        &self.options
    }

    /// Sources deliver side by side: the slowest decides.
    fn fetch_seconds(&self, now: Instant, bytes: &BTreeMap<BlockSource, f64>) -> f64 {
        let times = bytes.iter().map(|(source, bytes)| {
            let known = self.sources.get(source).copied();
            let known = known
                .filter(|known| now.duration_since(known.used) < self.options.forget_after)
                .unwrap_or_else(|| SourceEstimate::new(now));
            known.latency.cautious() + bytes * known.s_per_byte.cautious()
        });
        times.fold(0.0, f64::max)
    }

    fn source(&mut self, now: Instant, source: BlockSource) -> &mut SourceEstimate {
        if !self.sources.contains_key(&source) && self.sources.len() >= SOURCE_LIMIT {
            let oldest = self.sources.iter().min_by_key(|(_, estimate)| estimate.used);
            if let Some(oldest) = oldest.map(|(source, _)| *source) {
                self.sources.remove(&oldest);
            }
        }
        let known = self.sources.entry(source).or_insert_with(|| SourceEstimate::new(now));
        if now.duration_since(known.used) >= self.options.forget_after {
            *known = SourceEstimate::new(now);
        }
        known.used = now;
        known
    }
}

/// Whether to go on waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Wait for the next part, but ask again at this time if none lands before.
    WaitUntil(Instant),
    /// Take what has landed and compute the rest.
    Drop,
}

/// Watches one request wait for the cache, from its match to its last block.
#[derive(Debug, Clone)]
pub struct Watch {
    shape: PromptShape,
    rate: PrefillRate,
    started: Instant,
    budget_ends: Instant,
    fetch_began: Instant,
    expected: Duration,
    wanted: u32,
    landed: u32,
    first_landed: Option<Instant>,
    last_landed: Option<Instant>,
}

impl Watch {
    /// Starts the clock. Everything up to the first computed token counts.
    #[must_use]
    pub fn start(
        now: Instant,
        shape: PromptShape,
        rate: PrefillRate,
        options: &PlannerOptions,
    ) -> Self {
        let compute_all = rate.time_for(shape.tokens);
        let budget = compute_all.mul_f64((options.max_slowdown - 1.0).max(0.0));
        Self {
            shape,
            rate,
            started: now,
            budget_ends: now + budget,
            fetch_began: now,
            expected: Duration::ZERO,
            wanted: 0,
            landed: 0,
            first_landed: None,
            last_landed: None,
        }
    }

    /// The latest time at which an answer without any block is of use: after it, computing alone
    /// would exceed the allowed slowdown.
    #[must_use]
    pub fn budget_ends(&self) -> Instant {
        self.budget_ends
    }

    /// A fetch of `blocks` blocks begins, expected to take `expected`.
    pub fn fetch_begins(&mut self, now: Instant, blocks: u32, expected: Duration) {
        (self.fetch_began, self.wanted, self.expected) = (now, blocks, expected);
        (self.landed, self.first_landed, self.last_landed) = (0, None, None);
    }

    /// A block landed, in any order.
    pub fn block_landed(&mut self, now: Instant) {
        self.landed += 1;
        self.first_landed.get_or_insert(now);
        self.last_landed = Some(now);
    }

    /// Whether to wait on, when the first `valid` blocks have landed without a gap.
    #[must_use]
    pub fn judge(&self, now: Instant, valid: u32) -> Verdict {
        let valid = self.shape.restore_point(valid);
        let compute_missing = self.rate.time_for(self.shape.missing_tokens(valid));
        let reused = self.rate.time_for(self.shape.tokens).saturating_sub(compute_missing);
        // What has landed buys time: dropping now still finishes `reused` earlier.
        let latest = self.budget_ends + reused;
        let to_compute = self.wanted.saturating_sub(valid).saturating_mul(self.shape.block_tokens);
        let compute_wanted = self.rate.time_for(to_compute);
        if now >= latest || self.projected_wait(now) > compute_wanted {
            return Verdict::Drop;
        }
        // With nothing landing, the projection grows with the time since the last landing.
        let stalled = self.last_landed.unwrap_or(self.fetch_began) + compute_wanted;
        let tick = Duration::from_micros(1);
        Verdict::WaitUntil(latest.min(stalled + tick).max(now + tick))
    }

    /// How long the missing blocks are still expected to take.
    fn projected_wait(&self, now: Instant) -> Duration {
        let (Some(first), Some(last)) = (self.first_landed, self.last_landed) else {
            // Nothing yet: as planned, and once that has passed, as long again as already waited.
            let waited = now.duration_since(self.fetch_began);
            return self.expected.saturating_sub(waited).max(match waited > self.expected {
                true => waited,
                false => Duration::ZERO,
            });
        };
        let missing = self.wanted.saturating_sub(self.landed);
        let since_last = now.duration_since(last);
        let paced = match self.landed {
            0 | 1 => Duration::ZERO,
            landed => last.duration_since(first) / (landed - 1) * missing,
        };
        // A pause longer than the pace says that the pace is over.
        paced.saturating_sub(since_last).max(match since_last > paced {
            true => since_last,
            false => Duration::ZERO,
        })
    }

    /// When the request began to wait for the cache.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.started
    }
}

/// Blocks of a prompt: bounded by the engine's context.
fn u32_of(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
