//! What the cache did for one request: told to its client, counted in the metrics.

use crate::metric;
use metrics::counter;
use serde::Serialize;
use std::time::Duration;

/// Why nothing, or less than was there, was reused. A closed list: every skip has a reason (F52).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The cache is switched off, or this model's KV cannot be cut into blocks.
    Disabled,
    /// The prompt has fewer whole blocks than `cache.min_reuse_blocks`.
    PromptTooShort,
    /// No local node is connected.
    NodeUnavailable,
    /// The node did not answer the match within the request's budget.
    MatchTimedOut,
    /// The node refused the match, or the connection broke.
    MatchFailed,
    /// Nobody holds the first block.
    NoMatch,
    /// Fewer blocks are held than `cache.min_reuse_blocks`.
    BelowMinimum,
    /// Computing is expected to be faster than fetching.
    RecomputeCheaper,
    /// A fetch under way fell behind computing and was dropped.
    FetchTooSlow,
    /// A block was gone, damaged or refused while it was fetched.
    FetchFailed,
    /// A block landed, but the engine refused it.
    ImportFailed,
}

impl SkipReason {
    /// Every reason, for metrics that show zeros too.
    pub const ALL: [Self; 11] = [
        Self::Disabled,
        Self::PromptTooShort,
        Self::NodeUnavailable,
        Self::MatchTimedOut,
        Self::MatchFailed,
        Self::NoMatch,
        Self::BelowMinimum,
        Self::RecomputeCheaper,
        Self::FetchTooSlow,
        Self::FetchFailed,
        Self::ImportFailed,
    ];

    /// The name in answers and metric labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::PromptTooShort => "prompt_too_short",
            Self::NodeUnavailable => "node_unavailable",
            Self::MatchTimedOut => "match_timed_out",
            Self::MatchFailed => "match_failed",
            Self::NoMatch => "no_match",
            Self::BelowMinimum => "below_minimum",
            Self::RecomputeCheaper => "recompute_cheaper",
            Self::FetchTooSlow => "fetch_too_slow",
            Self::FetchFailed => "fetch_failed",
            Self::ImportFailed => "import_failed",
        }
    }
}

/// Where the prompt's KV came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReuseSource {
    /// Nothing was reused.
    Recomputed,
    /// All reused blocks were on this host.
    Local,
    /// All reused blocks came from other nodes.
    Peer,
    /// Some were here, some came from other nodes.
    Mixed,
}

/// What the cache did for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvReport {
    /// Reused blocks that were on this host.
    pub local_blocks: u32,
    /// Reused blocks that came from other nodes.
    pub peer_blocks: u32,
    /// From asking the node to its answer.
    pub match_time: Duration,
    /// From the plan to the last block that was waited for.
    pub fetch_time: Duration,
    /// Putting blocks into the engine's memory.
    pub import_time: Duration,
    /// Why nothing, or less than was there, was reused.
    pub skip_reason: Option<SkipReason>,
}

impl KvReport {
    /// A report that says why the cache was not asked.
    #[must_use]
    pub fn skipped(reason: SkipReason) -> Self {
        Self { skip_reason: Some(reason), ..Self::default() }
    }

    /// Counts the blocks of a prompt that is now computed by where their KV came from.
    pub fn count_blocks(&self, recomputed: u32) {
        for (source, blocks) in
            [("recomputed", recomputed), ("local", self.local_blocks), ("peer", self.peer_blocks)]
        {
            counter!(metric::PROMPT_BLOCKS_TOTAL, "source" => source).increment(blocks.into());
        }
    }

    /// Blocks that were reused.
    #[must_use]
    pub fn reused_blocks(&self) -> u32 {
        self.local_blocks + self.peer_blocks
    }

    /// Where the reused blocks came from.
    #[must_use]
    pub fn source(&self) -> ReuseSource {
        match (self.local_blocks, self.peer_blocks) {
            (0, 0) => ReuseSource::Recomputed,
            (_, 0) => ReuseSource::Local,
            (0, _) => ReuseSource::Peer,
            (_, _) => ReuseSource::Mixed,
        }
    }
}
