//! `/metrics` and `/health` of a daemon.
//!
//! Contract: two routes, both GET, neither changes any state. `/health` answers 200 only while the
//! daemon is fit for work, so a load balancer needs to read nothing else; `/metrics` is Prometheus
//! text. Bounds: bodies of [`MAX_BODY_BYTES`], [`MAX_CONNECTIONS`] connections at a time (more wait
//! in the backlog of the socket), and a connection that moves no byte for [`IDLE_LIMIT`] is closed,
//! so stuck clients cannot keep the health check out.

mod health;
mod limited;
mod metrics;

use std::{io, net::SocketAddr, time::Duration};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::limited::LimitedListener;
pub use self::{
    health::{Health, HealthReport, HealthStatus},
    metrics::{BUILD_INFO, InstallError, Metrics},
};
use crate::address::{BindError, ListenAddress};

/// Longest request body in bytes. No route reads one.
pub const MAX_BODY_BYTES: usize = 16 * 1024;

/// Connections served at a time: a few scrapers and probes, with room to spare.
pub const MAX_CONNECTIONS: usize = 64;

/// A connection that moves no byte for this long is closed. Longer than the usual scrape interval
/// of Prometheus (15 s to 60 s), so that its connections stay open.
pub const IDLE_LIMIT: Duration = Duration::from_secs(90);

/// The two routes, to be served alone or merged into a daemon's own router.
pub fn router(health: Health, metrics: Metrics) -> Router {
    Router::new()
        .route("/metrics", get(serve_metrics))
        .with_state(metrics)
        .route("/health", get(serve_health))
        .with_state(health)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
}

async fn serve_metrics(State(metrics): State<Metrics>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], metrics.render())
}

async fn serve_health(State(health): State<Health>) -> impl IntoResponse {
    let report = health.report();
    let code = match report.status {
        HealthStatus::Ok => StatusCode::OK,
        HealthStatus::Starting | HealthStatus::Draining | HealthStatus::Failed => {
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    (code, [(header::CACHE_CONTROL, "no-store")], Json(report))
}

/// A bound socket on which a router can be served.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
}

impl Server {
    /// Binds, and announces the address under the name `what`.
    ///
    /// # Errors
    /// The address does not resolve or cannot be listened on.
    pub async fn bind(listen: &ListenAddress, what: &'static str) -> Result<Self, BindError> {
        let (listener, address) = listen.bind(what).await?;
        Ok(Self { listener, address })
    }

    /// The bound address: the chosen port, where port 0 was configured.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`, then lets the requests in progress end.
    ///
    /// # Errors
    /// None that the system is known to give: refused connections are retried.
    pub async fn serve(self, router: Router, stop: CancellationToken) -> io::Result<()> {
        let listener = LimitedListener::new(self.listener, MAX_CONNECTIONS, IDLE_LIMIT);
        axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
    }
}

#[cfg(test)]
mod tests;
