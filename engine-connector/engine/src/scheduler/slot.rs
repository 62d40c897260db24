//! One running request on the engine's thread.
//!
//! ```text
//! Prompt --(last call of the prompt)--> Answer --(end token | max_tokens | cancelled)--> gone
//! ```

use super::Request;
use super::admission::Admitted;
use crate::llama::sample::Sampler;
use crate::llama::{SequenceId, Token};
use larder_engine_connector::{KvReport, PromptShape, RequestKv};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// What a request tells its client.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The prompt is computed; the first token follows.
    Prefilled(PrefillReport),
    /// The next token of the answer.
    Token(Token),
    /// The answer is complete.
    Finished(FinishReason),
    /// The engine could not go on with this request.
    Failed(String),
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model said so. Its end token is not part of the answer.
    EndToken,
    /// `max_tokens` tokens were made.
    Length,
}

/// How a prompt was dealt with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillReport {
    /// What the cache did.
    pub kv: KvReport,
    /// Tokens whose KV was reused.
    pub cached_tokens: u32,
    /// Whole blocks of the prompt that were computed.
    pub recomputed_blocks: u32,
    /// From the import's end to the first logits, other requests' share of the steps included.
    pub prefill_time: Duration,
}

/// An admitted request on its way to the engine's thread.
pub(super) struct Start {
    pub(super) request: Request,
    pub(super) admitted: Admitted,
    pub(super) kv: RequestKv,
    pub(super) events: mpsc::Sender<Event>,
}

/// A running request.
pub(super) struct Slot {
    pub(super) kv: RequestKv,
    pub(super) events: mpsc::Sender<Event>,
    /// Prompt and answer so far.
    pub(super) tokens: Vec<Token>,
    /// Tokens whose KV is in the sequence.
    pub(super) computed: u32,
    pub(super) shape: PromptShape,
    pub(super) sampler: Sampler,
    pub(super) max_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) prefill_began: Instant,
    /// Last, so that it is dropped last: the place is free only once the rest is gone.
    pub(super) admitted: Admitted,
}

impl Slot {
    pub(super) fn new(start: Start, mut shape: PromptShape, now: Instant) -> Self {
        let Start { request, admitted, kv, events } = start;
        shape.tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        Self {
            kv,
            events,
            tokens: request.prompt,
            computed: 0,
            shape,
            sampler: Sampler::new(request.sampler),
            max_tokens: request.max_tokens,
            cached_tokens: 0,
            prefill_began: now,
            admitted,
        }
    }

    pub(super) fn sequence(&self) -> SequenceId {
        self.admitted.sequence()
    }

    /// The client has gone away.
    pub(super) fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    pub(super) fn answers(&self) -> bool {
        self.computed >= self.shape.tokens
    }

    /// Positions of the next call for this request alone.
    pub(super) fn next_call(&self) -> std::ops::Range<u32> {
        match self.answers() {
            true => self.computed..self.computed + 1,
            false => self.computed..self.shape.call_end(self.computed),
        }
    }

    /// Whether the call that ends here is followed by a token of the answer.
    pub(super) fn wants_logits(&self, call_end: u32) -> bool {
        call_end >= self.shape.tokens
    }

    /// Tokens of the answer so far.
    pub(super) fn answered(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX) - self.shape.tokens
    }

    pub(super) fn tell(&self, event: Event) {
        // The queue has room for all a request can say; a client that has gone hears nothing.
        let _ = self.events.try_send(event);
    }

    pub(super) fn prefill_report(&self, now: Instant) -> PrefillReport {
        let whole = self.shape.tokens / self.shape.block_tokens;
        PrefillReport {
            kv: *self.kv.report(),
            cached_tokens: self.cached_tokens,
            recomputed_blocks: whole - self.cached_tokens / self.shape.block_tokens,
            prefill_time: now.duration_since(self.prefill_began),
        }
    }
}
