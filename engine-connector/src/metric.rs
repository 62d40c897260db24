//! Names of the connector's metrics, and what they count.

use crate::report::SkipReason;
use metrics::{counter, describe_counter, describe_histogram};

/// Requests that reused nothing, or less than was there. Label: `reason`.
pub const SKIPS_TOTAL: &str = "larder_connector_skips_total";
/// Blocks of prompts by where their KV came from. Label: `source` (recomputed, local, peer).
pub const PROMPT_BLOCKS_TOTAL: &str = "larder_connector_prompt_blocks_total";
/// Blocks that were fetched and did not land, or were refused by the engine.
pub const FAILED_BLOCKS_TOTAL: &str = "larder_connector_failed_blocks_total";
/// Blocks offered for publishing. Label: `outcome`.
pub const PUBLISH_TOTAL: &str = "larder_connector_publish_blocks_total";
/// Time from asking for a match to the answer.
pub const MATCH_SECONDS: &str = "larder_connector_match_seconds";
/// Time from the plan to the last block that was waited for.
pub const FETCH_SECONDS: &str = "larder_connector_fetch_seconds";
/// Sessions opened with the local node.
pub const SESSIONS_TOTAL: &str = "larder_connector_sessions_total";

/// What became of a block that was offered for publishing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PublishOutcome {
    /// Committed by the node.
    Stored,
    /// The node had it already, and it was not exported again or not written again.
    Exists,
    /// The queue was full: the request did not wait.
    Shed,
    /// The node had no space, or had no space for a block before it.
    Full,
    /// The model's content changed since the request began.
    Outdated,
    /// No node, or the connection broke.
    Unavailable,
    /// The engine could not hand the block out.
    ExportFailed,
}

impl PublishOutcome {
    const ALL: [Self; 7] = [
        Self::Stored,
        Self::Exists,
        Self::Shed,
        Self::Full,
        Self::Outdated,
        Self::Unavailable,
        Self::ExportFailed,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Exists => "exists",
            Self::Shed => "shed",
            Self::Full => "full",
            Self::Outdated => "outdated",
            Self::Unavailable => "unavailable",
            Self::ExportFailed => "export_failed",
        }
    }

    pub(crate) fn count(self, blocks: u64) {
        counter!(PUBLISH_TOTAL, "outcome" => self.name()).increment(blocks);
    }
}

pub(crate) fn count_skip(reason: SkipReason) {
    counter!(SKIPS_TOTAL, "reason" => reason.name()).increment(1);
}

/// Describes every metric, and shows those with labels at zero from the start.
pub fn describe() {
    describe_counter!(
        SKIPS_TOTAL,
        "requests that reused nothing or less than was there, by reason"
    );
    describe_counter!(PROMPT_BLOCKS_TOTAL, "blocks of prompts by where their KV came from");
    describe_counter!(FAILED_BLOCKS_TOTAL, "blocks that did not land or were refused");
    describe_counter!(PUBLISH_TOTAL, "blocks offered for publishing, by outcome");
    describe_counter!(SESSIONS_TOTAL, "sessions opened with the local node");
    describe_histogram!(MATCH_SECONDS, "time of a match");
    describe_histogram!(FETCH_SECONDS, "time that a request waited for its blocks");
    for reason in SkipReason::ALL {
        counter!(SKIPS_TOTAL, "reason" => reason.name()).increment(0);
    }
    for outcome in PublishOutcome::ALL {
        outcome.count(0);
    }
    for source in ["recomputed", "local", "peer"] {
        counter!(PROMPT_BLOCKS_TOTAL, "source" => source).increment(0);
    }
    counter!(FAILED_BLOCKS_TOTAL).increment(0);
    counter!(SESSIONS_TOTAL).increment(0);
}
