//! `/v1/completions`: one request from its body to its last byte.
//!
//! Cancellation: a client that goes away drops the future or the stream here, and with it the
//! running request, which the engine ends at its next step.

use super::App;
use super::answer::{Choice, Completion, Larder, Usage};
use super::error::ApiError;
use super::request::{CompletionRequest, Prompt, parse};
use super::text::TextStream;
use crate::llama::Token;
use crate::metric;
use crate::scheduler::{Event, FinishReason, PrefillReport, Request, Running};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response, sse};
use futures_util::{Stream, stream};
use larder_proto::Incarnation;
use metrics::{counter, histogram};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How often a stream that has nothing to say says so: proxies cut silent connections.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Handles one request.
pub(super) async fn completions(State(app): State<Arc<App>>, body: Bytes) -> Response {
    match begin(app, &body).await {
        Ok((answer, true)) => answer.stream().into_response(),
        Ok((answer, false)) => match answer.collect().await {
            Ok(response) => response,
            Err(error) => error.into_response(),
        },
        Err(error) => error.into_response(),
    }
}

async fn begin(app: Arc<App>, body: &[u8]) -> Result<(Answer, bool), ApiError> {
    let arrived = Instant::now();
    let number = app.next_request();
    let parsed = parse(body, &app.name, app.model.vocabulary(), app.seed_of(number));
    let request = parsed.inspect_err(|_| {
        counter!(metric::REFUSED_TOTAL, "reason" => "invalid").increment(1);
    })?;
    let CompletionRequest { prompt, max_tokens, sampler, stop, stream, usage_chunk, .. } = request;
    let prompt = match prompt {
        Prompt::Tokens(tokens) => tokens,
        Prompt::Text(text) => app.model.tokenize(&text),
    };
    if prompt.is_empty() {
        return Err(ApiError::field("prompt", "not be empty"));
    }
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let CompletionRequest { use_cache, reuse, .. } = request;
    let wanted = Request { prompt, max_tokens, sampler, use_cache, reuse };
    let running = app.scheduler.submit(wanted).await?;
    let answer = Answer {
        id: format!("cmpl-{}-{number}", app.incarnation),
        created: Incarnation::at_start(None).0 / 1000,
        arrived,
        running,
        text: TextStream::new(stop),
        prompt_tokens,
        answer_tokens: 0,
        prefill: None,
        with_token_ids: request.token_ids,
        usage_chunk,
        ended: false,
        app,
    };
    Ok((answer, stream))
}

/// An answer in the making.
struct Answer {
    app: Arc<App>,
    id: String,
    created: u64,
    arrived: Instant,
    running: Running,
    text: TextStream,
    prompt_tokens: u32,
    answer_tokens: u32,
    prefill: Option<(PrefillReport, Duration)>,
    with_token_ids: bool,
    usage_chunk: bool,
    ended: bool,
}

/// What the next event of the engine means for the client.
struct Progress {
    text: String,
    tokens: Vec<Token>,
    finish_reason: Option<&'static str>,
}

impl Answer {
    /// The next piece of the answer. Safe to drop: an event is taken and booked without a wait in
    /// between.
    async fn next(&mut self) -> Result<Progress, ApiError> {
        loop {
            let event = self.running.events.recv().await;
            match event {
                Some(Event::Prefilled(report)) => {
                    self.prefill = Some((report, self.arrived.elapsed()));
                }
                Some(Event::Token(token)) => return Ok(self.token(token)),
                Some(Event::Finished(reason)) => return Ok(self.finish(reason)),
                Some(Event::Failed(message)) => return Err(ApiError::internal(message)),
                None => return Err(ApiError::internal("the engine has stopped".into())),
            }
        }
    }

    fn token(&mut self, token: Token) -> Progress {
        if self.answer_tokens == 0 {
            histogram!(metric::TTFT_SECONDS).record(self.arrived.elapsed().as_secs_f64());
        }
        self.answer_tokens += 1;
        let text = self.text.push(&self.app.model.piece(token));
        let finish_reason = self.text.stopped().then_some("stop");
        Progress { text, tokens: vec![token], finish_reason }
    }

    fn finish(&mut self, reason: FinishReason) -> Progress {
        let reason = match reason {
            FinishReason::EndToken => "stop",
            FinishReason::Length => "length",
        };
        Progress { text: self.text.finish(), tokens: Vec::new(), finish_reason: Some(reason) }
    }

    fn usage(&self) -> Usage {
        let cached = self.prefill.map_or(0, |(report, _)| report.cached_tokens);
        Usage::new(self.prompt_tokens, self.answer_tokens, cached)
    }

    fn larder(&self) -> Option<Larder> {
        let published = self.running.published.count();
        self.prefill.as_ref().map(|(report, ttft)| Larder::new(report, *ttft, published))
    }

    fn completion(&self, choices: Vec<Choice>, ends: bool) -> Completion<'_> {
        Completion {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.app.name,
            choices,
            usage: ends.then(|| self.usage()),
            larder: if ends { self.larder() } else { None },
        }
    }

    fn choice(&self, progress: Progress) -> Choice {
        let Progress { text, tokens, finish_reason } = progress;
        let token_ids = self.with_token_ids.then_some(tokens);
        Choice { index: 0, text, logprobs: None, finish_reason, token_ids }
    }

    /// The whole answer in one body.
    async fn collect(mut self) -> Result<Response, ApiError> {
        let mut whole = Progress { text: String::new(), tokens: Vec::new(), finish_reason: None };
        while whole.finish_reason.is_none() {
            let progress = self.next().await?;
            whole.text.push_str(&progress.text);
            whole.tokens.extend(progress.tokens);
            whole.finish_reason = progress.finish_reason;
        }
        let choice = self.choice(whole);
        Ok(Json(self.completion(vec![choice], true)).into_response())
    }

    /// The answer as server-sent events, one a token, ended by `[DONE]`.
    fn stream(self) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
        let events = stream::unfold((self, Vec::new()), |(mut answer, mut ready)| async move {
            if ready.is_empty() {
                if answer.ended {
                    return None;
                }
                ready = answer.next_events().await;
            }
            let event = ready.remove(0);
            Some((Ok(event), (answer, ready)))
        });
        Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
    }

    /// At least one event; after the last ones, `ended` is set.
    async fn next_events(&mut self) -> Vec<sse::Event> {
        let progress = match self.next().await {
            Ok(progress) => progress,
            Err(error) => {
                self.ended = true;
                return vec![json_event(&error.body_of()), done_event()];
            }
        };
        self.ended = progress.finish_reason.is_some();
        let choice = self.choice(progress);
        let mut events = vec![json_event(&self.completion(vec![choice], self.ended))];
        if self.ended {
            if self.usage_chunk {
                events.push(json_event(&self.completion(Vec::new(), true)));
            }
            events.push(done_event());
        }
        events
    }
}

fn json_event(body: &impl serde::Serialize) -> sse::Event {
    // Our own types: numbers, texts and lists, all of which have a JSON form.
    let text = serde_json::to_string(body).unwrap_or_default();
    sse::Event::default().data(text)
}

fn done_event() -> sse::Event {
    sse::Event::default().data("[DONE]")
}
