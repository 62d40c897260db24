//! The bodies of answers, as OpenAI clients read them, and our own `larder` object.

use crate::llama::Token;
use crate::scheduler::PrefillReport;
use larder_engine_connector::ReuseSource;
use serde::Serialize;
use std::time::Duration;

/// A completion, or one chunk of its stream.
#[derive(Debug, Serialize)]
pub(super) struct Completion<'a> {
    /// The same in every chunk of a stream.
    pub(super) id: &'a str,
    /// Always `text_completion`.
    pub(super) object: &'static str,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// The model that answered.
    pub(super) model: &'a str,
    /// One, or none in the chunk that holds `usage` alone.
    pub(super) choices: Vec<Choice>,
    /// What was counted; in a stream only at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    /// Where the prompt's KV came from; in a stream only at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) larder: Option<Larder>,
}

/// The answer, or the part of it that is new.
#[derive(Debug, Serialize)]
pub(super) struct Choice {
    /// Always 0.
    pub(super) index: u32,
    /// The text.
    pub(super) text: String,
    /// Not supported; always null.
    pub(super) logprobs: Option<()>,
    /// `stop` or `length`; null until the end of a stream.
    pub(super) finish_reason: Option<&'static str>,
    /// The ids of the tokens, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<Token>>,
}

/// Tokens of the request.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Usage {
    /// Tokens of the prompt.
    pub(super) prompt_tokens: u32,
    /// Tokens of the answer.
    pub(super) completion_tokens: u32,
    /// Both.
    pub(super) total_tokens: u32,
    /// What was reused.
    pub(super) prompt_tokens_details: PromptDetails,
}

/// What was reused of a prompt.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct PromptDetails {
    /// Tokens whose KV was not computed for this request.
    pub(super) cached_tokens: u32,
}

/// Where the prompt's KV came from, and how long that took.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Larder {
    /// recomputed, local, peer or mixed.
    pub(super) source: ReuseSource,
    /// Whole blocks of the prompt that were computed.
    pub(super) recomputed_blocks: u32,
    /// Blocks that were on this host.
    pub(super) local_blocks: u32,
    /// Blocks that came from other nodes.
    pub(super) peer_blocks: u32,
    /// Asking who holds what.
    pub(super) match_ms: f64,
    /// Waiting for blocks.
    pub(super) fetch_ms: f64,
    /// Putting them into the engine's memory.
    pub(super) import_ms: f64,
    /// Computing the rest of the prompt.
    pub(super) prefill_ms: f64,
    /// From the request's arrival to its first token.
    pub(super) ttft_ms: f64,
    /// Blocks of this request that were handed on for publishing when this was written.
    pub(super) published_blocks: u32,
    /// Why nothing, or less than was there, was reused.
    pub(super) skip_reason: Option<&'static str>,
}

impl Larder {
    /// What the engine and the connector measured.
    #[must_use]
    pub(super) fn new(report: &PrefillReport, ttft: Duration, published_blocks: u32) -> Self {
        let kv = &report.kv;
        Self {
            source: kv.source(),
            recomputed_blocks: report.recomputed_blocks,
            local_blocks: kv.local_blocks,
            peer_blocks: kv.peer_blocks,
            match_ms: milliseconds(kv.match_time),
            fetch_ms: milliseconds(kv.fetch_time),
            import_ms: milliseconds(kv.import_time),
            prefill_ms: milliseconds(report.prefill_time),
            ttft_ms: milliseconds(ttft),
            published_blocks,
            skip_reason: kv.skip_reason.map(larder_engine_connector::SkipReason::name),
        }
    }
}

impl Usage {
    /// Counts of one request.
    #[must_use]
    pub(super) fn new(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: PromptDetails { cached_tokens },
        }
    }
}

/// With microseconds as its last digit.
fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
