//! A live estimate of a noisy quantity: mean and deviation, both exponentially weighted, as TCP
//! estimates its round trips.

/// Weight of a new sample. Chosen by eye: about the last eight samples count.
const GAIN: f64 = 1.0 / 8.0;

/// Mean and mean deviation of a quantity that changes over time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    mean: f64,
    deviation: f64,
    samples: u64,
}

impl Estimate {
    /// An estimate before its first sample, which will replace it.
    #[must_use]
    pub const fn prior(mean: f64) -> Self {
        Self { mean, deviation: 0.0, samples: 0 }
    }

    /// Takes a sample in. What is not a positive number is left out: a clock can stand still.
    pub fn sample(&mut self, value: f64) {
        if !value.is_finite() || value < 0.0 {
            return;
        }
        if self.samples == 0 {
            (self.mean, self.deviation) = (value, value / 2.0);
        } else {
            let error = value - self.mean;
            self.mean += GAIN * error;
            self.deviation += GAIN * (error.abs() - self.deviation);
        }
        self.samples += 1;
    }

    /// The expected value.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// A value that is seldom exceeded: plans that must not disappoint use this one.
    #[must_use]
    pub fn cautious(&self) -> f64 {
        self.mean + self.deviation
    }

    /// Samples taken in so far.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sample_replaces_the_prior_and_later_ones_pull() {
        let mut estimate = Estimate::prior(100.0);
        assert!((estimate.cautious() - 100.0).abs() < 1e-9);
        estimate.sample(8.0);
        assert!((estimate.mean() - 8.0).abs() < 1e-9);
        estimate.sample(16.0);
        assert!((estimate.mean() - 9.0).abs() < 1e-9);
        for _ in 0..200 {
            estimate.sample(32.0);
        }
        assert!((estimate.mean() - 32.0).abs() < 0.01);
        assert!(estimate.cautious() - 32.0 < 0.01, "no spread, no caution");
    }

    #[test]
    fn what_is_not_a_quantity_changes_nothing() {
        let mut estimate = Estimate::prior(5.0);
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            estimate.sample(bad);
        }
        assert_eq!(estimate, Estimate::prior(5.0));
    }
}
