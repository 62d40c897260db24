//! From measured legs to the figures of a row.
//!
//! A *leg* is a stretch of one side doing one thing; a *pair* is a leg of ours and one of the reference, one
//! right after the other. Ratios are taken within pairs, so that what else runs on the machine falls on both;
//! a row states the median of the pairs and their middle half.

use std::time::Duration;

/// What one side did in one stretch of time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leg {
    /// Bytes moved or made available.
    pub(crate) bytes: u64,
    /// From the first call to the end of the last one.
    pub(crate) wall: Duration,
    /// CPU seconds of clients and servers together.
    pub(crate) cpu_seconds: f64,
    /// Of each call.
    pub(crate) latencies: Vec<Duration>,
}

#[expect(clippy::cast_precision_loss, reason = "gigabytes of one run")]
impl Leg {
    /// Gigabytes (10^9 bytes) a second.
    pub(crate) fn gb_per_second(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.wall.as_secs_f64()
    }

    /// CPU seconds a gigabyte.
    pub(crate) fn cpu_seconds_per_gb(&self) -> f64 {
        self.cpu_seconds / (self.bytes as f64 / 1e9)
    }
}

/// The legs of one row.
#[derive(Debug, Default)]
pub(crate) struct Pairs {
    pairs: Vec<(Leg, Leg)>,
}

/// A median with its middle half.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    /// A quarter is below.
    pub(crate) low: f64,
    /// The median.
    pub(crate) median: f64,
    /// A quarter is above.
    pub(crate) high: f64,
}

impl Spread {
    /// Of one value.
    pub(crate) const fn exactly(value: f64) -> Self {
        Self { low: value, median: value, high: value }
    }
}

/// Calls that take this many times their median on average: most of the time went into a few stalls.
const DISTURBED: f64 = 3.0;

impl Pairs {
    /// How many times the median call the mean call took, on the side where that is more, if that is so much
    /// that the row measures stalls and not transfers.
    pub(crate) fn disturbed(&self) -> Option<f64> {
        let (p50_ours, p50_reference) = self.p50_us();
        let ours = mean_us(self.pairs.iter().map(|(ours, _)| ours)) / p50_ours;
        let reference = mean_us(self.pairs.iter().map(|(_, reference)| reference)) / p50_reference;
        Some(ours.max(reference)).filter(|times| *times > DISTURBED)
    }

    /// Adds a pair.
    pub(crate) fn push(&mut self, ours: Leg, reference: Leg) {
        self.pairs.push((ours, reference));
    }

    /// The spread of a value of our side.
    pub(crate) fn ours(&self, value: impl Fn(&Leg) -> f64) -> Spread {
        spread(self.pairs.iter().map(|(ours, _)| value(ours)))
    }

    /// The spread of a value of the reference.
    pub(crate) fn reference(&self, value: impl Fn(&Leg) -> f64) -> Spread {
        spread(self.pairs.iter().map(|(_, reference)| value(reference)))
    }

    /// The spread of ours / reference over the pairs.
    pub(crate) fn ratio(&self, value: impl Fn(&Leg) -> f64) -> Spread {
        spread(self.pairs.iter().map(|(ours, reference)| value(ours) / value(reference)))
    }

    /// Median latency over all calls, in microseconds: ours, the reference.
    pub(crate) fn p50_us(&self) -> (f64, f64) {
        let ours = self.pairs.iter().flat_map(|(ours, _)| &ours.latencies);
        let reference = self.pairs.iter().flat_map(|(_, reference)| &reference.latencies);
        (quantile_us(ours.copied(), 0.5), quantile_us(reference.copied(), 0.5))
    }
}

/// Mean latency over all calls, in microseconds.
#[expect(clippy::cast_precision_loss, reason = "calls of one run")]
fn mean_us<'a>(legs: impl Iterator<Item = &'a Leg>) -> f64 {
    let (mut total, mut calls) = (Duration::ZERO, 0);
    for leg in legs {
        total += leg.latencies.iter().sum::<Duration>();
        calls += leg.latencies.len();
    }
    total.as_secs_f64() * 1e6 / calls as f64
}

/// Median and quartiles.
pub(crate) fn spread(values: impl Iterator<Item = f64>) -> Spread {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    Spread {
        low: between(&values, 0.25),
        median: between(&values, 0.5),
        high: between(&values, 0.75),
    }
}

/// A quantile of sorted values, interpolated: there are only a few of them.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rank below the number of values"
)]
fn between(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let rank = last as f64 * share;
    let (below, above) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
    below + (above - below) * rank.fract()
}

/// A quantile of latencies, in microseconds.
pub(crate) fn quantile_us(latencies: impl Iterator<Item = Duration>, share: f64) -> f64 {
    let mut latencies: Vec<Duration> = latencies.collect();
    if latencies.is_empty() {
        return f64::NAN;
    }
    let rank = rank(latencies.len(), share);
    latencies.select_nth_unstable(rank).1.as_secs_f64() * 1e6
}

/// The nearest rank of a quantile.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rank below the number of samples"
)]
fn rank(len: usize, share: f64) -> usize {
    let last = len.saturating_sub(1);
    ((last as f64 * share).round() as usize).min(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_the_median_and_its_middle_half() {
        let of_five = spread([5.0, 1.0, 4.0, 2.0, 3.0].into_iter());
        assert_eq!(of_five, Spread { low: 2.0, median: 3.0, high: 4.0 });
        let of_two = spread([2.0, 1.0].into_iter());
        assert_eq!(of_two, Spread { low: 1.25, median: 1.5, high: 1.75 });
        assert!(spread(std::iter::empty()).median.is_nan());
    }

    #[test]
    fn ratios_are_taken_within_pairs() {
        let leg = |bytes| Leg { bytes, wall: Duration::from_secs(1), ..Leg::default() };
        let mut pairs = Pairs::default();
        // A slow minute halves both sides: the ratio does not move.
        pairs.push(leg(1_000), leg(2_000));
        pairs.push(leg(500), leg(1_000));
        assert_eq!(pairs.ratio(Leg::gb_per_second).median, 0.5);
    }

    /// Stalls on either side, ours or the reference's, are told alike.
    #[test]
    fn a_row_of_stalls_is_disturbed_whichever_side_has_them() {
        let leg = |slow_us| {
            let calls = [20, 20, 20, 20, slow_us].map(Duration::from_micros);
            Leg { latencies: calls.to_vec(), ..Leg::default() }
        };
        let disturbed = |ours, reference| {
            let mut pairs = Pairs::default();
            pairs.push(leg(ours), leg(reference));
            pairs.disturbed().is_some()
        };
        assert!(!disturbed(60, 60));
        assert!(disturbed(2_000, 20) && disturbed(20, 2_000));
    }

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let latencies = (1..=100).map(Duration::from_micros);
        assert_eq!(quantile_us(latencies.clone(), 0.99), 99.0);
        assert!(quantile_us(std::iter::empty(), 0.5).is_nan());
    }
}
