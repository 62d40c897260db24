//! Chains to ask for, and what asking took.

use crate::{
    content::{key, mix},
    figures::{Spread, quantile_us, spread},
};
use larder_proto::BlockKey;
use std::time::Duration;

/// Draws chains at random from all entries. Chain `i` of `len` keys are the blocks from `i * len` on.
#[derive(Debug, Clone)]
pub(super) struct Chains {
    entries: u64,
    len: u64,
    drawn: u64,
}

impl Chains {
    /// `seed` tells askers apart.
    pub(super) fn new(entries: u64, len: u32, seed: u64) -> Self {
        Self { entries, len: u64::from(len), drawn: mix(seed) }
    }

    /// The keys of the next chain.
    pub(super) fn draw(&mut self) -> impl Iterator<Item = BlockKey> + use<> {
        self.drawn = self.drawn.wrapping_add(1);
        let first = mix(self.drawn) % (self.entries / self.len) * self.len;
        (first..first + self.len).map(key)
    }
}

/// What was looked up in one stretch of time.
#[derive(Debug, Clone, Default)]
pub(super) struct Slice {
    pub(super) keys: u64,
    pub(super) wall: Duration,
    pub(super) cpu_seconds: f64,
    /// Of calls, or of a sample of them.
    pub(super) latencies: Vec<Duration>,
}

/// The slices of one row.
#[derive(Debug)]
pub(super) struct Lookups {
    pub(super) keys_per_call: u32,
    pub(super) connections: u32,
    pub(super) slices: Vec<Slice>,
}

#[expect(clippy::cast_precision_loss, reason = "keys of one run")]
impl Lookups {
    pub(super) fn keys_per_second(&self) -> Spread {
        spread(self.slices.iter().map(|slice| slice.keys as f64 / slice.wall.as_secs_f64()))
    }

    pub(super) fn keys_per_cpu_second(&self) -> Spread {
        spread(self.slices.iter().map(|slice| slice.keys as f64 / slice.cpu_seconds))
    }

    pub(super) fn p99_us(&self) -> f64 {
        quantile_us(self.slices.iter().flat_map(|slice| slice.latencies.iter().copied()), 0.99)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_runs_of_blocks_that_exist() {
        let mut chains = Chains::new(100, 7, 1);
        let known: Vec<BlockKey> = (0..98).map(key).collect();
        for _ in 0..50 {
            let chain: Vec<BlockKey> = chains.draw().collect();
            assert!(known.chunks(7).any(|run| run == chain));
        }
    }
}
