//! Names of the engine's metrics, and what they count.

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};

/// Requests that run now.
pub const RUNNING: &str = "larder_engine_running_requests";
/// Requests that were refused. Label: `reason` (busy, too_long, stopping, invalid).
pub const REFUSED_TOTAL: &str = "larder_engine_refused_requests_total";
/// Requests whose client went away before the end.
pub const CANCELLED_TOTAL: &str = "larder_engine_cancelled_requests_total";
/// Requests that the engine could not finish.
pub const FAILED_TOTAL: &str = "larder_engine_failed_requests_total";
/// Prompt tokens computed; reused ones are not among them.
pub const PROMPT_TOKENS_TOTAL: &str = "larder_engine_prompt_tokens_total";
/// Tokens of answers.
pub const ANSWER_TOKENS_TOTAL: &str = "larder_engine_answer_tokens_total";
/// Time of one step of the model.
pub const STEP_SECONDS: &str = "larder_engine_step_seconds";
/// Time from the import's end to a request's first logits.
pub const PREFILL_SECONDS: &str = "larder_engine_prefill_seconds";
/// Time from a request's arrival to its first token.
pub const TTFT_SECONDS: &str = "larder_engine_time_to_first_token_seconds";

/// Describes every metric, and shows counters at zero from the start.
pub fn describe() {
    describe_gauge!(RUNNING, "requests that run now");
    describe_counter!(REFUSED_TOTAL, "requests that were refused, by reason");
    describe_counter!(CANCELLED_TOTAL, "requests whose client went away before the end");
    describe_counter!(FAILED_TOTAL, "requests that the engine could not finish");
    describe_counter!(PROMPT_TOKENS_TOTAL, "prompt tokens computed");
    describe_counter!(ANSWER_TOKENS_TOTAL, "tokens of answers");
    describe_histogram!(STEP_SECONDS, "time of one step of the model");
    describe_histogram!(PREFILL_SECONDS, "time from the import's end to the first logits");
    describe_histogram!(TTFT_SECONDS, "time from arrival to the first token");
    gauge!(RUNNING).set(0.0);
    for name in [CANCELLED_TOTAL, FAILED_TOTAL, PROMPT_TOKENS_TOTAL, ANSWER_TOKENS_TOTAL] {
        counter!(name).increment(0);
    }
}
