//! The bodies of `/v1/completions` and `/tokenize`, checked field by field.
//!
//! Contract: a field that would change the answer is honoured or refused by name, never ignored.
//! Unknown fields are refused: a misspelt `max_tokens` must not pass for the default.

use super::error::ApiError;
use crate::llama::Token;
use crate::llama::sample::SamplerOptions;
use larder_engine_connector::Reuse;
use larder_proto::frame::{Priority, RETENTION_LIMIT_S, SessionState};
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// Most stop texts of a request, as with OpenAI.
const STOP_LIMIT: usize = 4;
/// Longest stop text in bytes: held back text is searched for each of them at every token.
const STOP_BYTES: usize = 256;
/// Tokens of an answer whose request does not say, as with OpenAI.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// What to complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Prompt {
    /// To be tokenized by the model.
    Text(String),
    /// Taken as they are.
    Tokens(Vec<Token>),
}

/// A checked request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CompletionRequest {
    /// What to complete.
    pub(super) prompt: Prompt,
    /// Most tokens of the answer.
    pub(super) max_tokens: u32,
    /// How to choose; without a seed of the client's, `fresh_seed` of [`parse`].
    pub(super) sampler: SamplerOptions,
    /// Texts that end the answer and are not part of it.
    pub(super) stop: Vec<String>,
    /// Whether tokens are sent as they come.
    pub(super) stream: bool,
    /// Whether a stream ends with a chunk of its own for `usage`.
    pub(super) usage_chunk: bool,
    /// Whether the answer's token ids are wanted.
    pub(super) token_ids: bool,
    /// Whether the prompt cache may be used and filled. Ours; default true.
    pub(super) use_cache: bool,
    /// What the client says of the future of its session. Ours; by default nothing is known.
    pub(super) reuse: Reuse,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    model: Option<Value>,
    prompt: Option<Value>,
    max_tokens: Option<Value>,
    temperature: Option<Value>,
    top_p: Option<Value>,
    seed: Option<Value>,
    stop: Option<Value>,
    stream: Option<Value>,
    stream_options: Option<Value>,
    return_token_ids: Option<Value>,
    use_cache: Option<Value>,
    reuse: Option<Value>,
    user: Option<Value>,
    // Known and not supported: only the value that changes nothing passes.
    n: Option<Value>,
    best_of: Option<Value>,
    echo: Option<Value>,
    logprobs: Option<Value>,
    suffix: Option<Value>,
    presence_penalty: Option<Value>,
    frequency_penalty: Option<Value>,
    logit_bias: Option<Value>,
}

/// Reads and checks a body. `served` is the name of the model, `vocabulary` its size.
pub(super) fn parse(
    body: &[u8],
    served: &str,
    vocabulary: u32,
    fresh_seed: u64,
) -> Result<CompletionRequest, ApiError> {
    let body: Body = serde_json::from_slice(body)
        .map_err(|error| ApiError::body(format!("the body is no completion request: {error}")))?;
    refuse_unsupported(&body)?;
    check_model(&body.model, served)?;
    let number = |field, value: &Option<Value>, default: f64| match given(value) {
        None => Ok(default),
        Some(value) => value.as_f64().ok_or_else(|| ApiError::field(field, "be a number")),
    };
    let temperature = number("temperature", &body.temperature, 1.0)?;
    if !(0.0..=2.0).contains(&temperature) {
        return Err(ApiError::field("temperature", "be between 0 and 2"));
    }
    let top_p = number("top_p", &body.top_p, 1.0)?;
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(ApiError::field("top_p", "be above 0 and at most 1"));
    }
    let stream = flag("stream", &body.stream, false)?;
    Ok(CompletionRequest {
        prompt: prompt(&body.prompt, vocabulary)?,
        max_tokens: max_tokens(&body.max_tokens)?,
        sampler: SamplerOptions {
            temperature: single(temperature),
            top_p: single(top_p),
            seed: seed(&body.seed)?.unwrap_or(fresh_seed),
        },
        stop: stops(&body.stop)?,
        stream,
        usage_chunk: usage_chunk(&body.stream_options, stream)?,
        token_ids: flag("return_token_ids", &body.return_token_ids, false)?,
        use_cache: flag("use_cache", &body.use_cache, true)?,
        reuse: reuse(&body.reuse)?,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenizeBody {
    model: Option<Value>,
    prompt: Option<Value>,
}

/// Reads and checks a body of `/tokenize`: the text.
pub(super) fn text_to_tokenize(body: &[u8], served: &str) -> Result<String, ApiError> {
    let TokenizeBody { model, prompt } = serde_json::from_slice(body)
        .map_err(|error| ApiError::body(format!("the body is no tokenize request: {error}")))?;
    check_model(&model, served)?;
    match prompt {
        Some(Value::String(text)) if !text.is_empty() => Ok(text),
        _ => Err(ApiError::field("prompt", "be a text, and not empty")),
    }
}

fn check_model(model: &Option<Value>, served: &str) -> Result<(), ApiError> {
    match given(model).map(Value::as_str) {
        None => Ok(()),
        Some(Some(name)) if name == served => Ok(()),
        Some(Some(name)) => Err(ApiError::model(name, served)),
        Some(None) => Err(ApiError::field("model", "be a text")),
    }
}

/// Fields that we do not support pass with the values that mean the same as leaving them out.
fn refuse_unsupported(body: &Body) -> Result<(), ApiError> {
    let number = |value: &Option<Value>, neutral: f64| {
        given(value).is_none_or(|value| value.as_f64() == Some(neutral))
    };
    let absent = |value: &Option<Value>| given(value).is_none();
    let no_echo = given(&body.echo).is_none_or(|echo| echo == &Value::Bool(false));
    let no_bias = given(&body.logit_bias)
        .is_none_or(|bias| bias.as_object().is_some_and(serde_json::Map::is_empty));
    let rules = [
        ("n", "be 1", number(&body.n, 1.0)),
        ("best_of", "be 1", number(&body.best_of, 1.0)),
        ("echo", "be false", no_echo),
        ("logprobs", "be left out", absent(&body.logprobs)),
        ("suffix", "be left out", absent(&body.suffix)),
        ("presence_penalty", "be 0", number(&body.presence_penalty, 0.0)),
        ("frequency_penalty", "be 0", number(&body.frequency_penalty, 0.0)),
        ("logit_bias", "be empty", no_bias),
    ];
    if let Some((field, rule, _)) = rules.into_iter().find(|(_, _, holds)| !holds) {
        return Err(ApiError::field(field, format!("{rule}: nothing else is supported")));
    }
    match given(&body.user) {
        Some(user) if !user.is_string() => Err(ApiError::field("user", "be a text")),
        _ => Ok(()),
    }
}

fn prompt(value: &Option<Value>, vocabulary: u32) -> Result<Prompt, ApiError> {
    const FORM: &str = "be a text or a list of token ids (one prompt a request)";
    let rule = |rule: String| ApiError::field("prompt", rule);
    match given(value) {
        Some(Value::String(text)) if text.is_empty() => Err(rule("not be empty".into())),
        Some(Value::String(text)) => Ok(Prompt::Text(text.clone())),
        Some(Value::Array(items)) => match items.as_slice() {
            [] => Err(rule("not be empty".into())),
            [Value::String(text)] if !text.is_empty() => Ok(Prompt::Text(text.clone())),
            items => {
                let token = |item: &Value| {
                    let id = item.as_u64().ok_or_else(|| rule(FORM.into()))?;
                    let id = u32::try_from(id).ok().filter(|id| *id < vocabulary);
                    let limit = format!("hold token ids below {vocabulary}");
                    id.ok_or_else(|| rule(limit))
                };
                items.iter().map(token).collect::<Result<_, _>>().map(Prompt::Tokens)
            }
        },
        _ => Err(rule(FORM.into())),
    }
}

fn max_tokens(value: &Option<Value>) -> Result<u32, ApiError> {
    let Some(value) = given(value) else { return Ok(DEFAULT_MAX_TOKENS) };
    let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
    count
        .filter(|count| *count > 0)
        .ok_or_else(|| ApiError::field("max_tokens", "be a whole number, at least 1"))
}

fn seed(value: &Option<Value>) -> Result<Option<u64>, ApiError> {
    let Some(value) = given(value) else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| ApiError::field("seed", "be a whole number"))
}

fn stops(value: &Option<Value>) -> Result<Vec<String>, ApiError> {
    let rule = || {
        let form = format!(
            "be a text or a list of at most {STOP_LIMIT} texts, each of 1 to {STOP_BYTES} bytes"
        );
        ApiError::field("stop", form)
    };
    let texts = match given(value) {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    if texts.len() > STOP_LIMIT {
        return Err(rule());
    }
    let fits = |text: &&str| (1..=STOP_BYTES).contains(&text.len());
    let text = |value: &Value| value.as_str().filter(fits).map(str::to_owned).ok_or_else(rule);
    texts.iter().map(text).collect()
}

fn usage_chunk(value: &Option<Value>, stream: bool) -> Result<bool, ApiError> {
    let Some(value) = given(value) else { return Ok(false) };
    if !stream {
        return Err(ApiError::field("stream_options", "be left out unless stream is true"));
    }
    let known = value
        .as_object()
        .filter(|options| options.keys().all(|key| key == "include_usage"))
        .map(|options| options.get("include_usage").cloned());
    match known {
        Some(include) => flag("stream_options.include_usage", &include, false),
        None => Err(ApiError::field("stream_options", "hold include_usage alone")),
    }
}

/// `{"session": "closed"}`, `{"priority": "high", "retention_seconds": 300}` and the like.
fn reuse(value: &Option<Value>) -> Result<Reuse, ApiError> {
    let mut reuse = Reuse::default();
    let Some(value) = given(value) else { return Ok(reuse) };
    let Some(fields) = value.as_object() else {
        let form = "be an object with session, priority and retention_seconds, or some of them";
        return Err(ApiError::field("reuse", form));
    };
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        match name.as_str() {
            "session" => reuse.session = named("reuse.session", value, SessionState::ALL)?,
            "priority" => reuse.priority = named("reuse.priority", value, Priority::ALL)?,
            "retention_seconds" => {
                let limit = u64::from(RETENTION_LIMIT_S);
                let seconds = value.as_u64().filter(|seconds| *seconds <= limit);
                let rule = || format!("be a whole number of at most {limit}");
                let refused = || ApiError::field("reuse.retention_seconds", rule());
                reuse.retention = Duration::from_secs(seconds.ok_or_else(refused)?);
            }
            _ => {
                let form =
                    format!("hold session, priority and retention_seconds alone, not {name}");
                return Err(ApiError::field("reuse", form));
            }
        }
    }
    if !reuse.retention.is_zero() && !reuse.keeps() {
        let rule = "be left out where nothing is to be kept: in a closed session, at low priority";
        return Err(ApiError::field("reuse.retention_seconds", rule));
    }
    Ok(reuse)
}

/// One of a closed list of values, by its name.
fn named<T: Copy + std::fmt::Display>(
    field: &'static str,
    value: &Value,
    all: &[T],
) -> Result<T, ApiError> {
    let found = all.iter().find(|one| value.as_str() == Some(one.to_string().as_str()));
    let names = || all.iter().map(T::to_string).collect::<Vec<_>>().join(", ");
    found.copied().ok_or_else(|| ApiError::field(field, format!("be one of {}", names())))
}

fn flag(field: &'static str, value: &Option<Value>, default: bool) -> Result<bool, ApiError> {
    match given(value) {
        None => Ok(default),
        Some(Value::Bool(value)) => Ok(*value),
        Some(_) => Err(ApiError::field(field, "be true or false")),
    }
}

/// `null` is the same as nothing, as clients send both.
fn given(value: &Option<Value>) -> Option<&Value> {
    value.as_ref().filter(|value| !value.is_null())
}

#[expect(clippy::cast_possible_truncation, reason = "both values lie between 0 and 2")]
fn single(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::response::IntoResponse;

    fn read(body: &str) -> Result<CompletionRequest, ApiError> {
        parse(body.as_bytes(), "tiny", 512, 77)
    }

    #[test]
    fn defaults_are_those_of_openai() {
        let request = read(r#"{"prompt": "hello", "stop": null}"#).unwrap();
        assert_eq!(request.prompt, Prompt::Text("hello".into()));
        assert_eq!((request.max_tokens, request.sampler.seed), (16, 77));
        assert!((request.sampler.temperature - 1.0).abs() < 1e-6);
        assert!(!request.stream && !request.token_ids && request.use_cache);
        assert!(request.stop.is_empty());
    }

    #[test]
    fn prompts_are_texts_or_token_ids() {
        let tokens = |body| read(body).unwrap().prompt;
        assert_eq!(tokens(r#"{"prompt": [1, 511]}"#), Prompt::Tokens(vec![1, 511]));
        assert_eq!(tokens(r#"{"prompt": ["a"]}"#), Prompt::Text("a".into()));
    }

    #[test]
    fn each_refusal_names_the_field_and_the_rule() {
        let cases = [
            (r#"{"prompt": ""}"#, "prompt must not be empty"),
            (r#"{"max_tokens": 4}"#, "prompt must be a text or a list of token ids"),
            (r#"{"prompt": ["a", "b"]}"#, "prompt must be a text or a list of token ids"),
            (r#"{"prompt": [512]}"#, "prompt must hold token ids below 512"),
            (
                r#"{"prompt": "a", "max_tokens": 0}"#,
                "max_tokens must be a whole number, at least 1",
            ),
            (r#"{"prompt": "a", "max_tokens": "4"}"#, "max_tokens must be a whole number"),
            (r#"{"prompt": "a", "temperature": 2.5}"#, "temperature must be between 0 and 2"),
            (r#"{"prompt": "a", "top_p": 0}"#, "top_p must be above 0"),
            (r#"{"prompt": "a", "seed": 1.5}"#, "seed must be a whole number"),
            (r#"{"prompt": "a", "stop": [""]}"#, "stop must be a text or a list of at most 4"),
            (r#"{"prompt": "a", "stop": ["1","2","3","4","5"]}"#, "stop must be"),
            (r#"{"prompt": "a", "stream": 1}"#, "stream must be true or false"),
            (r#"{"prompt": "a", "stream_options": {}}"#, "stream_options must be left out"),
            (r#"{"prompt": "a", "n": 2}"#, "n must be 1"),
            (r#"{"prompt": "a", "reuse": "closed"}"#, "reuse must be an object with session"),
            (r#"{"prompt": "a", "reuse": {"sesion": "closed"}}"#, "retention_seconds alone"),
            (
                r#"{"prompt": "a", "reuse": {"session": "open"}}"#,
                "reuse.session must be one of alive, closed",
            ),
            (
                r#"{"prompt": "a", "reuse": {"priority": 1}}"#,
                "reuse.priority must be one of low, normal, high",
            ),
            (
                r#"{"prompt": "a", "reuse": {"retention_seconds": 3601}}"#,
                "reuse.retention_seconds must be a whole number of at most 3600",
            ),
            (
                r#"{"prompt": "a", "reuse": {"session": "closed", "retention_seconds": 1}}"#,
                "reuse.retention_seconds must be left out where nothing is to be kept",
            ),
            (r#"{"prompt": "a", "logprobs": 3}"#, "logprobs must be left out"),
            (r#"{"prompt": "a", "frequency_penalty": 0.5}"#, "frequency_penalty must be 0"),
            (r#"{"prompt": "a", "model": "gpt"}"#, "\"gpt\" is not served here; \"tiny\" is"),
            (r#"{"prompt": "a", "max_token": 4}"#, "unknown field `max_token`"),
            ("[]", "the body is no completion request"),
        ];
        for (body, message) in cases {
            let error = read(body).unwrap_err();
            let text = serde_json::to_string(&error.body_of()).unwrap().replace("\\\"", "\"");
            assert!(text.contains(message), "{body}: {text}");
            assert!(error.into_response().status().is_client_error());
        }
    }

    #[test]
    fn only_a_text_is_tokenized_and_a_refusal_names_the_field() {
        let read = |body: &str| text_to_tokenize(body.as_bytes(), "tiny");
        assert_eq!(read(r#"{"prompt": "a larder", "model": "tiny"}"#), Ok("a larder".to_owned()));
        let cases = [
            (r#"{"prompt": ""}"#, "prompt must be a text, and not empty"),
            (r#"{"prompt": [1, 2]}"#, "prompt must be a text"),
            ("{}", "prompt must be a text"),
            (r#"{"content": "a"}"#, "unknown field `content`, expected `model` or `prompt`"),
            (r#"{"prompt": "a", "model": "gpt"}"#, "\"gpt\" is not served here; \"tiny\" is"),
            ("a larder", "the body is no tokenize request"),
        ];
        for (body, message) in cases {
            let error = read(body).unwrap_err();
            let text = serde_json::to_string(&error.body_of()).unwrap().replace("\\\"", "\"");
            assert!(text.contains(message), "{body}: {text}");
        }
    }

    #[test]
    fn what_is_said_of_a_session_is_read() {
        let reuse =
            |text: &str| read(&format!(r#"{{"prompt": "a", "reuse": {text}}}"#)).unwrap().reuse;
        assert_eq!(reuse("null"), Reuse::default());
        assert_eq!(reuse(r#"{"session": "closed"}"#).session, SessionState::Closed);
        let kept = reuse(r#"{"priority": "high", "retention_seconds": 90, "session": null}"#);
        let retention = Duration::from_secs(90);
        assert_eq!(kept, Reuse { priority: Priority::High, retention, ..Reuse::default() });
    }

    #[test]
    fn values_that_change_nothing_pass() {
        let body = r#"{"prompt": "a", "model": "tiny", "n": 1, "best_of": 1, "echo": false,
            "logprobs": null, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {},
            "user": "me", "stream": true, "stream_options": {"include_usage": true}, "seed": -1}"#;
        let request = read(body).unwrap();
        assert!(request.usage_chunk && request.stream);
        assert_eq!(request.sampler.seed, u64::MAX);
    }
}
