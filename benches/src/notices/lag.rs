//! Lags as a node counts them: the buckets of a Prometheus histogram.

use larder_store_node::metrics::NOTICE_LAG_SECONDS;

/// Samples by bucket.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Lags {
    /// Upper bounds in seconds, rising, and the samples up to each; the last bound is infinite.
    buckets: Vec<(f64, u64)>,
}

impl Lags {
    /// From the text that `/metrics` gives, for a node with one master. Empty before the first sample.
    pub(super) fn of_metrics(text: &str) -> Self {
        let bucket = |line: &str| {
            let labels = line.strip_prefix(NOTICE_LAG_SECONDS)?.strip_prefix("_bucket{")?;
            let (labels, count) = labels.rsplit_once("} ")?;
            let (_, bound) = labels.split_once("le=\"")?;
            let bound = bound.split('"').next()?;
            Some((bound.parse().ok()?, count.trim().parse().ok()?))
        };
        Self { buckets: text.lines().filter_map(bucket).collect() }
    }

    /// What came after `before`, of the same node.
    pub(super) fn since(&self, before: &Self) -> Self {
        let earlier = |at: usize| before.buckets.get(at).map_or(0, |(_, count)| *count);
        let buckets = self.buckets.iter().enumerate();
        Self {
            buckets: buckets.map(|(at, (bound, count))| (*bound, count - earlier(at))).collect(),
        }
    }

    /// Samples.
    pub(super) fn count(&self) -> u64 {
        self.buckets.last().map_or(0, |(_, count)| *count)
    }

    /// A quantile in milliseconds: what lies within a bucket counts as spread evenly over it, and what lies
    /// above the last finite bound as that bound. `None` without samples.
    #[expect(clippy::cast_precision_loss, reason = "samples of one run")]
    pub(super) fn quantile_ms(&self, share: f64) -> Option<f64> {
        let rank = share * self.count() as f64;
        let (mut low, mut below) = (0.0, 0);
        for (bound, up_to) in &self.buckets {
            if *up_to > below && *up_to as f64 >= rank {
                let inside = (rank - below as f64) / (up_to - below) as f64;
                let high = if bound.is_finite() { *bound } else { low };
                return Some(1e3 * (low + (high - low) * inside));
            }
            (low, below) = (*bound, *up_to);
        }
        None
    }

    /// No lag was longer than this, in milliseconds.
    pub(super) fn most_ms(&self) -> Option<f64> {
        let all = self.count();
        let bucket = self.buckets.iter().find(|(_, up_to)| *up_to == all && all > 0);
        bucket.map(|(bound, _)| bound * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_come_from_the_buckets_of_the_run_alone() {
        let text = |counts: [u32; 3]| {
            let line = |(bound, count)| {
                format!("{NOTICE_LAG_SECONDS}_bucket{{master=\"a:1\",le=\"{bound}\"}} {count}\n")
            };
            let lines = ["0.01", "0.1", "+Inf"].into_iter().zip(counts).map(line);
            format!("# TYPE x histogram\n{}other 5\n", lines.collect::<String>())
        };
        let before = Lags::of_metrics(&text([10, 10, 10]));
        let lags = Lags::of_metrics(&text([100, 110, 110])).since(&before);
        assert_eq!((lags.count(), lags.most_ms()), (100, Some(100.0)));
        assert_eq!(lags.quantile_ms(0.45), Some(5.0));
        assert_eq!(lags.quantile_ms(0.95).map(f64::round), Some(55.0));
        assert_eq!(Lags::of_metrics(&text([0, 0, 1])).quantile_ms(0.5), Some(100.0));
        assert_eq!(Lags::default().quantile_ms(0.5), None);
    }
}
