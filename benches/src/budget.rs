//! The time that a bench may still take: `--quick` ends within a minute, whatever else runs on the machine.

use std::time::Duration;
use tokio::time::Instant;

/// `--quick` promises 60 s; what is left over is for stopping the servers.
const QUICK: Duration = Duration::from_secs(54);

/// When to be done; without an end, steps take the time they ask for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    ends: Option<Instant>,
}

impl Budget {
    /// From `now` on.
    pub(crate) fn start(quick: bool, now: Instant) -> Self {
        Self { ends: quick.then(|| now + QUICK) }
    }

    /// The time of the next of `steps` equal steps: `wanted`, or an even share of four fifths of what is left
    /// after `reserved`. The last fifth is for what goes on between steps.
    pub(crate) fn share(
        &self,
        now: Instant,
        steps: usize,
        reserved: Duration,
        wanted: Duration,
    ) -> Duration {
        let Some(left) = self.left(now) else { return wanted };
        let steps = u32::try_from(steps.max(1)).unwrap_or(u32::MAX);
        wanted.min(left.saturating_sub(reserved) * 4 / 5 / steps)
    }

    /// Whether something that takes `time` can still be done.
    pub(crate) fn has(&self, now: Instant, time: Duration) -> bool {
        self.left(now).is_none_or(|left| time < left)
    }

    fn left(&self, now: Instant) -> Option<Duration> {
        self.ends.map(|ends| ends.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_shrink_so_that_all_fit() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let budget = Budget::start(true, start);
        assert_eq!(budget.share(start, 10, Duration::ZERO, second), second);
        let late = start + QUICK - Duration::from_secs(5);
        assert_eq!(budget.share(late, 10, Duration::ZERO, second), second * 4 / 10);
        assert_eq!(budget.share(late, 4, second, second), second * 8 / 10);
        assert!(budget.has(late, 4 * second) && !budget.has(late, 6 * second));
        let endless = Budget::start(false, start);
        assert_eq!(endless.share(late, 1_000_000, Duration::ZERO, second), second);
    }
}
