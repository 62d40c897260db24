//! Choosing the next token from its scores.
//!
//! Contract: the same scores, options and seed give the same tokens. At temperature 0 the token
//! with the highest score wins, the lowest id among equals.

use super::model::Token;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How to choose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerOptions {
    /// 0 chooses the best token; higher values flatten the distribution.
    pub temperature: f32,
    /// Only the likeliest tokens that together reach this probability are drawn from. 1: all.
    pub top_p: f32,
    /// Seed of the random numbers of this request.
    pub seed: u64,
}

/// Chooses the tokens of one request.
#[derive(Debug)]
pub struct Sampler {
    options: SamplerOptions,
    random: ChaCha8Rng,
}

impl Sampler {
    /// A sampler at the start of its request.
    #[must_use]
    pub fn new(options: SamplerOptions) -> Self {
        Self { options, random: ChaCha8Rng::seed_from_u64(options.seed) }
    }

    /// The next token. `logits` holds one score for each token of the vocabulary.
    pub fn choose(&mut self, logits: &[f32]) -> Token {
        if self.options.temperature <= 0.0 {
            return best(logits);
        }
        let mut weights = weights(logits, self.options.temperature);
        if self.options.top_p < 1.0 {
            keep_top(&mut weights, self.options.top_p);
        }
        let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
        let mut left = self.random.random::<f64>() * total;
        for (token, weight) in &weights {
            left -= weight;
            if left < 0.0 {
                return *token;
            }
        }
        // Rounding can leave a rest after the last weight.
        weights.last().map_or_else(|| best(logits), |(token, _)| *token)
    }
}

fn best(logits: &[f32]) -> Token {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, score) in (0..).zip(logits) {
        if *score > best.1 {
            best = (token, *score);
        }
    }
    best.0
}

/// Unnormalised probabilities, of tokens with a score that is a number.
fn weights(logits: &[f32], temperature: f32) -> Vec<(Token, f64)> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scored = (0..).zip(logits).filter(|(_, score)| score.is_finite());
    scored.map(|(token, score)| (token, f64::from((score - highest) / temperature).exp())).collect()
}

/// Keeps the heaviest tokens until their share reaches `top_p`; always at least one.
fn keep_top(weights: &mut Vec<(Token, f64)>, top_p: f32) {
    weights.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let goal = f64::from(top_p) * weights.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut reached = 0.0;
    let kept = weights.iter().position(|(_, weight)| {
        reached += weight;
        reached >= goal
    });
    weights.truncate(kept.map_or(weights.len(), |last| last + 1).max(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_p: f32, seed: u64) -> Sampler {
        Sampler::new(SamplerOptions { temperature, top_p, seed })
    }

    #[test]
    fn temperature_zero_takes_the_best_and_the_lowest_id_among_equals() {
        let mut greedy = sampler(0.0, 1.0, 1);
        assert_eq!(greedy.choose(&[0.5, 2.0, 2.0, -1.0]), 1);
        assert_eq!(greedy.choose(&[f32::NAN, -3.0, f32::NEG_INFINITY]), 1);
    }

    #[test]
    fn equal_seeds_draw_equal_tokens_and_scores_decide_how_often() {
        let logits = [0.0, 2.0_f32.ln(), f32::NEG_INFINITY, f32::NAN];
        let draw = |seed| {
            let mut sampler = sampler(1.0, 1.0, seed);
            (0..3000).map(|_| sampler.choose(&logits)).collect::<Vec<_>>()
        };
        let drawn = draw(7);
        assert_eq!(drawn, draw(7));
        assert_ne!(drawn, draw(8));
        let ones = drawn.iter().filter(|token| **token == 1).count();
        assert!((1900..2100).contains(&ones), "twice as likely: {ones} of 3000");
        assert!(drawn.iter().all(|token| *token < 2));
    }

    #[test]
    fn top_p_leaves_out_the_unlikely_tail() {
        let mut sampler = sampler(1.0, 0.5, 3);
        let logits = [0.1, 3.0, 0.2, 0.0];
        assert!((0..200).all(|_| sampler.choose(&logits) == 1));
    }
}
