//! Errors in the shape that OpenAI clients read: what was wrong, with which field, by which rule.

use crate::metric;
use crate::scheduler::Refusal;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use metrics::counter;
use serde::Serialize;

/// An answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    field: Option<&'static str>,
    message: String,
}

/// The body of an error.
#[derive(Debug, Serialize)]
pub(super) struct ErrorBody<'a> {
    error: ErrorDetail<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'static str>,
    code: &'static str,
}

impl ApiError {
    /// A field has a value that its rule forbids. `rule` completes "must ...".
    pub(super) fn field(field: &'static str, rule: impl std::fmt::Display) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "invalid_request_error",
            code: "invalid_value",
            field: Some(field),
            message: format!("{field} must {rule}"),
        }
    }

    /// The body is not a request at all.
    #[must_use]
    pub(super) fn body(message: String) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "invalid_request_error",
            code: "invalid_body",
            field: None,
            message,
        }
    }

    /// The request names a model that is not served here.
    #[must_use]
    pub(super) fn model(asked: &str, served: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "invalid_request_error",
            code: "model_not_found",
            field: Some("model"),
            message: format!("model {asked:?} is not served here; {served:?} is"),
        }
    }

    /// Nothing is served under this path.
    #[must_use]
    pub(super) fn path(asked: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "invalid_request_error",
            code: "unknown_path",
            field: None,
            message: format!(
                "{asked:?} is not served here; these are: {}",
                super::PATHS.join(", ")
            ),
        }
    }

    /// The engine could not go on.
    #[must_use]
    pub(super) fn internal(message: String) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "server_error",
            code: "engine_failed",
            field: None,
            message,
        }
    }

    /// The body, for a stream whose status line is long gone.
    #[must_use]
    pub(super) fn body_of(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorDetail {
                message: &self.message,
                r#type: self.kind,
                param: self.field,
                code: self.code,
            },
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let (status, kind, code, field, reason) = match refusal {
            Refusal::TooLong { prompt_tokens, limit, .. } => {
                let field = if prompt_tokens >= limit { "prompt" } else { "max_tokens" };
                let kind = "invalid_request_error";
                let code = "context_length_exceeded";
                (StatusCode::BAD_REQUEST, kind, code, Some(field), "too_long")
            }
            Refusal::Busy { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", None, "busy")
            }
            Refusal::EngineStopped => {
                (StatusCode::SERVICE_UNAVAILABLE, "server_error", "stopping", None, "stopping")
            }
        };
        counter!(metric::REFUSED_TOTAL, "reason" => reason).increment(1);
        Self { status, kind, code, field, message }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body_of())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            // A place is free as soon as one answer is complete.
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
