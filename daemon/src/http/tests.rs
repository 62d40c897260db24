use axum::{body::Body, http::Request};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::*;
use crate::run::{TaskError, Tasks};

/// A server over a real socket, and a client of it.
struct Served {
    address: SocketAddr,
    health: Health,
    recorder: metrics_exporter_prometheus::PrometheusRecorder,
    tasks: Tasks,
    client: Client<HttpConnector, Body>,
}

impl Served {
    async fn start() -> Self {
        let (health, (metrics, recorder)) = (Health::new(), Metrics::of_test());
        let server = Server::bind(&ListenAddress::loopback(0), "metrics").await.unwrap();
        let address = server.address();
        let mut tasks = Tasks::new(CancellationToken::new());
        tasks.spawn("metrics", server.serve(router(health.clone(), metrics), tasks.stop()));
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { address, health, recorder, tasks, client }
    }

    async fn ask(&self, method: &str, path: &str, body: Body) -> (StatusCode, String) {
        let uri = format!("http://{}{path}", self.address);
        let request = Request::builder().method(method).uri(uri).body(body).unwrap();
        let response = self.client.request(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn health(&self) -> (StatusCode, serde_json::Value) {
        let (status, body) = self.ask("GET", "/health", Body::empty()).await;
        (status, serde_json::from_str(&body).unwrap())
    }

    async fn stop(self) {
        drop(self.client);
        self.tasks.stop().cancel();
        self.tasks.run(Duration::from_secs(30)).await.unwrap();
    }
}

#[tokio::test]
async fn health_is_200_only_while_the_daemon_is_fit_for_work() {
    let served = Served::start().await;
    assert_ne!(served.address.port(), 0);
    served.health.starting("touching memory: 40 %");
    let (status, body) = served.health().await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(body["status"], "starting");
    assert_eq!(body["detail"], "touching memory: 40 %");
    assert!(body["uptime_seconds"].as_f64().unwrap() >= 0.0);

    served.health.ok();
    let (status, body) = served.health().await;
    assert_eq!((status, &body["status"]), (StatusCode::OK, &"ok".into()));
    served.health.draining("SIGTERM");
    let (status, body) = served.health().await;
    assert_eq!((status, &body["status"]), (StatusCode::SERVICE_UNAVAILABLE, &"draining".into()));
    served.health.failed("disk full");
    let (status, body) = served.health().await;
    assert_eq!((status, &body["status"]), (StatusCode::SERVICE_UNAVAILABLE, &"failed".into()));
    served.stop().await;
}

#[tokio::test]
async fn metrics_are_prometheus_text_with_buckets_for_seconds() {
    let served = Served::start().await;
    ::metrics::with_local_recorder(&served.recorder, || {
        ::metrics::counter!("larder_node_transfer_bytes_total", "direction" => "in").increment(7);
        ::metrics::histogram!("larder_node_get_seconds").record(0.0003);
    });
    let (status, body) = served.ask("GET", "/metrics", Body::empty()).await;
    assert_eq!(status, StatusCode::OK);
    assert!(body.contains("larder_node_transfer_bytes_total{direction=\"in\"} 7\n"), "{body}");
    assert!(body.contains("larder_node_get_seconds_bucket{le=\"0.0005\"} 1\n"), "{body}");
    served.stop().await;
}

#[tokio::test]
async fn nothing_but_get_is_answered() {
    let served = Served::start().await;
    for path in ["/metrics", "/health"] {
        for method in ["POST", "PUT", "DELETE"] {
            let (status, _) = served.ask(method, path, Body::from("x")).await;
            assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
        }
    }
    assert_eq!(served.ask("GET", "/", Body::empty()).await.0, StatusCode::NOT_FOUND);
    served.stop().await;
}

#[tokio::test]
async fn a_stop_ends_the_server_and_frees_the_port() {
    let served = Served::start().await;
    assert_eq!(served.health().await.0, StatusCode::SERVICE_UNAVAILABLE);
    let address = served.address;
    served.stop().await;
    let error = TcpStream::connect(address).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn a_port_in_use_is_named_with_its_purpose() {
    let served = Served::start().await;
    let taken = ListenAddress::loopback(served.address.port());
    let error = Server::bind(&taken, "metrics").await.unwrap_err();
    let told = format!(
        "listen on {taken} for metrics (--metrics.listen takes another address, or port 0)"
    );
    assert_eq!(error.to_string(), told);
    served.stop().await;
}

#[tokio::test]
async fn silent_connections_are_closed_and_leave_room_for_others() {
    const MAX: usize = 2;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let listener = LimitedListener::new(listener, MAX, Duration::from_millis(50));
    let (metrics, _recorder) = Metrics::of_test();
    let serve = axum::serve(listener, router(Health::new(), metrics));
    let mut tasks = Tasks::new(CancellationToken::new());
    let stop = tasks.stop();
    tasks.spawn("server", async move {
        serve.with_graceful_shutdown(stop.cancelled_owned()).await.map_err(TaskError::from)
    });

    let mut silent = Vec::new();
    for _ in 0..MAX {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    // Waits in the backlog until a silent one was closed.
    let mut late = TcpStream::connect(address).await.unwrap();
    late.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    late.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    for mut silent in silent {
        assert_eq!(silent.read(&mut [0; 1]).await.unwrap(), 0, "closed without a word");
    }
    tasks.stop().cancel();
    tasks.run(Duration::from_secs(30)).await.unwrap();
}
