//! Asking an engine over its HTTP interface.

use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode, body::Bytes};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::{Value, json};
use std::io;

/// What an engine answered, as far as the demo needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Ids of the answer's tokens.
    pub token_ids: Vec<u64>,
    /// The answer.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Of these, tokens whose KV was not computed.
    pub cached_tokens: u64,
    /// recomputed, local, peer or mixed.
    pub source: String,
    /// Waiting for blocks.
    pub fetch_ms: f64,
    /// Until the first token.
    pub ttft_ms: f64,
}

/// Completes a prompt greedily. Without the cache everything is computed and nothing is published.
pub async fn complete(
    address: &str,
    prompt: &str,
    max_tokens: u32,
    use_cache: bool,
) -> io::Result<Answer> {
    let body = json!({
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": true,
        "use_cache": use_cache,
    });
    let answer = post(address, "/v1/completions", &body).await?;
    let number = |at: &str| answer.pointer(at).and_then(Value::as_f64).ok_or_else(|| odd(&answer));
    let count = |at: &str| answer.pointer(at).and_then(Value::as_u64).ok_or_else(|| odd(&answer));
    let text = |at: &str| {
        let text = answer.pointer(at).and_then(Value::as_str);
        text.map(str::to_owned).ok_or_else(|| odd(&answer))
    };
    let token_ids = answer.pointer("/choices/0/token_ids").and_then(Value::as_array);
    let token_ids = token_ids.ok_or_else(|| odd(&answer))?.iter().filter_map(Value::as_u64);
    Ok(Answer {
        token_ids: token_ids.collect(),
        text: text("/choices/0/text")?,
        prompt_tokens: count("/usage/prompt_tokens")?,
        cached_tokens: count("/usage/prompt_tokens_details/cached_tokens")?,
        source: text("/larder/source")?,
        fetch_ms: number("/larder/fetch_ms")?,
        ttft_ms: number("/larder/ttft_ms")?,
    })
}

/// Sessions that the engine has opened with its node since its start.
///
/// # Errors
/// The engine does not answer, or does not say.
pub async fn sessions(address: &str) -> io::Result<u64> {
    let name = "larder_connector_sessions_total";
    let request = Request::get(format!("http://{address}/metrics")).body(Full::default());
    let (status, bytes) = ask(request.map_err(io::Error::other)?).await?;
    let text = String::from_utf8_lossy(&bytes);
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.ok_or_else(|| io::Error::other(format!("the engine answered {status} without {name}")))
}

async fn post(address: &str, path: &str, body: &Value) -> io::Result<Value> {
    let request = Request::post(format!("http://{address}{path}"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .map_err(io::Error::other)?;
    let (status, bytes) = ask(request).await?;
    let value: Value = serde_json::from_slice(&bytes).map_err(io::Error::other)?;
    match status.is_success() {
        true => Ok(value),
        false => Err(io::Error::other(format!("the engine answered {status}: {value}"))),
    }
}

async fn ask(request: Request<Full<Bytes>>) -> io::Result<(StatusCode, Bytes)> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let response = client.request(request).await.map_err(io::Error::other)?;
    let status = response.status();
    let bytes = response.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
    Ok((status, bytes))
}

fn odd(answer: &Value) -> io::Error {
    io::Error::other(format!("the engine's answer lacks a field: {answer}"))
}
