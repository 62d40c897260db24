//! `/tokenize`: the token ids of a text, as the model of this engine counts them.
//!
//! For whoever has to name a prompt by its tokens, as `larderctl explain` does: these are the very ids
//! that the same text has as a prompt of `/v1/completions`.

use super::App;
use super::error::ApiError;
use super::request::text_to_tokenize;
use crate::llama::Token;
use crate::metric;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use metrics::counter;
use serde::Serialize;
use std::sync::Arc;

/// The answer.
#[derive(Debug, Serialize)]
pub(super) struct Tokenized {
    /// How many.
    count: usize,
    /// The ids, with those that the model wants at the start of a prompt.
    tokens: Vec<Token>,
}

/// Handles one request.
pub(super) async fn tokenize(
    State(app): State<Arc<App>>,
    body: Bytes,
) -> Result<Json<Tokenized>, ApiError> {
    let text = text_to_tokenize(&body, &app.name).inspect_err(|_| {
        counter!(metric::REFUSED_TOTAL, "reason" => "invalid").increment(1);
    })?;
    let tokens = app.model.tokenize(&text);
    Ok(Json(Tokenized { count: tokens.len(), tokens }))
}
