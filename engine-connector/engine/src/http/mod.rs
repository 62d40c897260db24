//! The HTTP interface: `/v1/completions`, `/v1/models`, `/tokenize`, `/health`, `/metrics`.
//!
//! Contract: errors have OpenAI's shape and name field and rule; a full engine answers 429, a
//! stopping one 503, both with `Retry-After`. Nothing here computes: handlers wait for the
//! engine's events. Bounded: bodies by [`BODY_LIMIT`], requests by admission, connections by the
//! listener.

mod answer;
mod completions;
mod error;
mod listener;
mod request;
mod text;
mod tokenize;

pub use listener::serve;

use self::error::ApiError;
use crate::llama::Model;
use crate::scheduler::Scheduler;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::Uri;
use axum::routing::{get, post};
use axum::{Json, Router};
use larder_proto::Incarnation;
use larder_proto::fingerprint::ModelVersion;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest request body in bytes: a million tokens as a list of ids.
pub const BODY_LIMIT: usize = 8 << 20;

/// What the handlers share.
pub struct App {
    /// The model, for its tokenizer.
    pub model: Arc<Model>,
    /// The name under which it is served.
    pub name: String,
    /// Its version, if its blocks can be stored.
    pub version: Option<ModelVersion>,
    /// Where requests go.
    pub scheduler: Scheduler,
    /// This life of the engine.
    pub incarnation: Incarnation,
    requests: AtomicU64,
}

impl App {
    /// The handlers' state before the first request.
    #[must_use]
    pub fn new(
        model: Arc<Model>,
        name: String,
        version: Option<ModelVersion>,
        scheduler: Scheduler,
        incarnation: Incarnation,
    ) -> Self {
        Self { model, name, version, scheduler, incarnation, requests: AtomicU64::new(0) }
    }

    fn next_request(&self) -> u64 {
        self.requests.fetch_add(1, Ordering::Relaxed)
    }

    /// A seed for a request that brings none: different for every request of every life.
    fn seed_of(&self, request: u64) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.incarnation.0.to_le_bytes()).update(&request.to_le_bytes());
        let mut seed = [0; 8];
        seed.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        u64::from_le_bytes(seed)
    }
}

/// What is served, for who asks for something else.
const PATHS: [&str; 5] = ["/v1/completions", "/v1/models", "/tokenize", "/health", "/metrics"];

/// The routes of the engine, without those of every daemon.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(models))
        .route("/tokenize", post(tokenize::tokenize))
        .fallback(|uri: Uri| async move { ApiError::path(uri.path()) })
        .with_state(app)
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
}

#[derive(Serialize)]
struct ModelList {
    object: &'static str,
    data: [ModelEntry; 1],
}

#[derive(Serialize)]
struct ModelEntry {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Content and layout fingerprint, if blocks of this model can be stored.
    larder_version: Option<String>,
}

async fn models(State(app): State<Arc<App>>) -> Json<ModelList> {
    let entry = ModelEntry {
        id: app.name.clone(),
        object: "model",
        created: app.incarnation.0 / 1000,
        owned_by: "larder",
        larder_version: app.version.map(|version| version.to_string()),
    };
    Json(ModelList { object: "list", data: [entry] })
}
