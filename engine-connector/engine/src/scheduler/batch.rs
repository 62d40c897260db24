//! What one step of the model computes. Pure.
//!
//! Every request that answers gets its next token in every step: a long prompt of one delays the
//! others by one of its calls, never by all of it. Of the requests with an unfinished prompt the
//! oldest gets one call: finishing one prompt after the other gives the lower mean wait.

use super::slot::Slot;
use crate::llama::BatchToken;
use std::collections::VecDeque;
use std::ops::Range;

/// One request's share of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Share {
    /// Index of the slot.
    pub(super) slot: usize,
    /// Positions computed.
    pub(super) positions: Range<u32>,
    /// Index in the batch of the token whose logits choose the next one.
    pub(super) logits: Option<usize>,
}

/// A call to the model.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) batch: Vec<BatchToken>,
    pub(super) shares: Vec<Share>,
    /// Tokens of the batch that belong to a prompt.
    pub(super) prompt_tokens: usize,
}

/// Puts the next step together. `slots` are in order of arrival.
pub(super) fn next_step(slots: &VecDeque<Slot>) -> Step {
    let mut step = Step::default();
    let mut prompt_taken = false;
    for (index, slot) in slots.iter().enumerate() {
        let in_prompt = !slot.answers();
        if in_prompt && std::mem::replace(&mut prompt_taken, true) {
            continue;
        }
        step.add(index, slot);
        if in_prompt {
            step.prompt_tokens = slot.next_call().len();
        }
    }
    step
}

impl Step {
    fn add(&mut self, index: usize, slot: &Slot) {
        let positions = slot.next_call();
        let last = positions.end - 1;
        let wanted = slot.wants_logits(positions.end);
        for position in positions.clone() {
            self.batch.push(BatchToken {
                token: slot.tokens[position as usize],
                position,
                sequence: slot.sequence(),
                logits: wanted && position == last,
            });
        }
        let logits = wanted.then(|| self.batch.len() - 1);
        self.shares.push(Share { slot: index, positions, logits });
    }
}
