//! The engine as a process, spoken to over HTTP.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// A running engine; killed when dropped.
struct Engine {
    process: Child,
    address: String,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Engine {
    fn start(arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_larder-engine"))
            .args(["--model.path", support::tiny_model().to_str().unwrap()])
            .args(["--model.name", "tiny", "--http.listen", "127.0.0.1:0", "--node.socket", ""])
            .args(["--threads", "1", "--log.level", "warn"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = lines
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("listening: http ").map(str::to_owned))
            .expect("the engine says where it listens");
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { process, address, client }
    }

    async fn send(&self, method: Method, path: &str, body: String) -> Response<Incoming> {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .body(Full::from(body))
            .unwrap();
        self.client.request(request).await.unwrap()
    }

    async fn complete(&self, body: &Value) -> (u16, Value) {
        let response = self.send(Method::POST, "/v1/completions", body.to_string()).await;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    async fn get(&self, path: &str) -> String {
        let response = self.send(Method::GET, path, String::new()).await;
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await;
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or("0 0").to_owned();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The JSON of each event of a stream, without `[DONE]`.
fn events(body: &str) -> Vec<Value> {
    let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[tokio::test]
async fn a_completion_says_what_it_is_and_what_it_cost() {
    let engine = Engine::start(&[]);
    let prompt: Vec<u32> = (0..70).collect();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0,
        "return_token_ids": true});
    let (status, answer) = engine.complete(&body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["usage"]["prompt_tokens"], 70);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let ids = answer["choices"][0]["token_ids"].as_array().unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], ids.len());
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["larder"]["source"], "recomputed");
    assert_eq!(answer["larder"]["skip_reason"], "disabled");
    assert_eq!(answer["larder"]["recomputed_blocks"], 2);
    assert!(answer["larder"]["ttft_ms"].as_f64() >= answer["larder"]["prefill_ms"].as_f64());

    let (_, again) = engine.complete(&body).await;
    assert_eq!(again["choices"], answer["choices"], "temperature 0");

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let response = engine.send(Method::POST, "/v1/completions", streamed.to_string()).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    let events = events(&text);
    let joined: String =
        events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, answer["choices"][0]["text"].as_str().unwrap());
    let streamed_ids: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["token_ids"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed_ids, ids);
    let usage = events.last().unwrap();
    assert_eq!(
        (usage["choices"].as_array().unwrap().len(), &usage["usage"]["prompt_tokens"]),
        (0, &json!(70))
    );
    assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
}

#[tokio::test]
async fn a_stop_text_ends_the_answer_before_it() {
    let engine = Engine::start(&[]);
    let body = json!({"prompt": "the larder", "max_tokens": 40, "temperature": 0});
    let (_, whole) = engine.complete(&body).await;
    let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    let middle = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stop: String = text[middle..].chars().take(3).collect();
    let mut stopped = body;
    stopped["stop"] = json!([stop]);
    let (_, answer) = engine.complete(&stopped).await;
    let cut = text.find(&stop).unwrap();
    assert_eq!(answer["choices"][0]["text"].as_str().unwrap(), &text[..cut]);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn errors_have_the_shape_of_openai() {
    let engine = Engine::start(&["--context_tokens", "512"]);
    let (status, answer) = engine.complete(&json!({"prompt": "a", "max_tokens": 0})).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("max_tokens")));
    let (status, answer) = engine.complete(&json!({"prompt": "a", "max_tokens": 600})).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")));
    assert!(answer["error"]["message"].as_str().unwrap().contains("context_tokens"));
    let (status, answer) = engine.complete(&json!({"prompt": "a", "model": "other"})).await;
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")));
    let other: Value = serde_json::from_str(&engine.get("/v1/chat/completions").await).unwrap();
    assert_eq!(other["error"]["code"], "unknown_path");
    assert!(other["error"]["message"].as_str().unwrap().contains("/v1/completions"), "{other}");
    let long: Vec<u32> = vec![1; 3_000_000];
    let response =
        engine.send(Method::POST, "/v1/completions", json!({"prompt": long}).to_string()).await;
    assert!(response.status().is_client_error());
    assert!(engine.metric("larder_engine_refused_requests_total{reason=\"invalid\"}").await >= 2.0);
}

#[tokio::test]
async fn a_text_has_the_same_tokens_alone_as_in_a_prompt() {
    let engine = Engine::start(&[]);
    let text = "the larder keeps the honey";
    let ask = async |body: &Value| {
        let response = engine.send(Method::POST, "/tokenize", body.to_string()).await;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice::<Value>(&bytes).unwrap())
    };
    let (status, tokenized) = ask(&json!({"prompt": text})).await;
    assert_eq!(status, 200, "{tokenized}");
    let tokens = tokenized["tokens"].as_array().unwrap();
    assert!(tokens.len() > 1);
    assert_eq!(tokenized["count"], tokens.len());
    let complete = |prompt: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0});
        let engine = &engine;
        async move { engine.complete(&body).await.1 }
    };
    let (by_text, by_tokens) = (complete(json!(text)).await, complete(json!(tokens)).await);
    assert_eq!(by_text["usage"]["prompt_tokens"], tokens.len());
    assert_eq!(by_text["choices"], by_tokens["choices"]);

    let (status, refusal) = ask(&json!({"prompt": [1, 2]})).await;
    assert_eq!((status, &refusal["error"]["param"]), (400, &json!("prompt")));
}

#[tokio::test]
async fn models_health_and_metrics_are_served() {
    let engine = Engine::start(&[]);
    let models: Value = serde_json::from_str(&engine.get("/v1/models").await).unwrap();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["larder_version"].as_str().unwrap().len(), 129);
    let health: Value = serde_json::from_str(&engine.get("/health").await).unwrap();
    assert_eq!(health["status"], "ok");
    let metrics = engine.get("/metrics").await;
    for name in ["larder_engine_running_requests", "larder_connector_skips_total"] {
        assert!(metrics.contains(name), "{name}");
    }
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_place_and_a_full_house_says_so() {
    let engine = Engine::start(&["--max_requests", "1", "--max_waiting", "0"]);
    let long = json!({"prompt": "a", "max_tokens": 8000, "temperature": 0, "stream": true});
    let mut running = engine.send(Method::POST, "/v1/completions", long.to_string()).await;
    running.body_mut().frame().await.unwrap().unwrap();
    let busy =
        engine.send(Method::POST, "/v1/completions", json!({"prompt": "b"}).to_string()).await;
    assert_eq!(busy.status().as_u16(), 429);
    assert_eq!(busy.headers()["retry-after"], "1");
    drop(running);
    loop {
        let (status, answer) = engine.complete(&json!({"prompt": "b", "max_tokens": 2})).await;
        match status {
            200 => break,
            429 => tokio::task::yield_now().await,
            _ => panic!("{answer}"),
        }
    }
    assert!(engine.metric("larder_engine_cancelled_requests_total").await >= 1.0);
}

#[tokio::test]
async fn a_stop_lets_running_requests_end() {
    let mut engine = Engine::start(&[]);
    let body = json!({"prompt": "a", "max_tokens": 500, "temperature": 0, "stream": true});
    let mut running = engine.send(Method::POST, "/v1/completions", body.to_string()).await;
    running.body_mut().frame().await.unwrap().unwrap();
    let pid = rustix::process::Pid::from_child(&engine.process);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let bytes = running.into_body().collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&bytes).contains("[DONE]"));
    let status = tokio::task::spawn_blocking(move || engine.process.wait().map(|s| (s, engine)));
    let (status, _engine) = status.await.unwrap().unwrap();
    assert!(status.success(), "{status}");
}
