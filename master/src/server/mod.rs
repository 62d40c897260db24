//! The gRPC service around the state machines.
//!
//! Contract: every limit is checked before anything is allocated for it, and a refused call names field and
//! rule. Lookups run on the thread that received them and wait for nothing. The server stops when asked to:
//! sessions end with a status that tells nodes to come back, other calls end on their own.

mod admin;
mod desk;
mod keeper;
mod sessions;

use crate::{
    advice,
    answers::{self, BadRequest},
    cluster::{Cluster, Effect, Timing},
    config::MasterConfig,
    explain,
    hard_state::{HardState, HardStateError},
    index::{Index, IndexLimits},
    registry::Registry,
};
use desk::Desk;
use futures_util::Stream;
use larder_daemon::{Context, TaskError, Tasks, address::BindError};
use larder_proto::control::{
    self,
    master_server::{Master, MasterServer},
};
use parking_lot::Mutex;
use std::{pin::Pin, sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::Notify, task::spawn_blocking, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::TcpIncoming},
};
use tracing::info;

/// How often an idle connection is pinged, and how long the answer may take: a dead peer is found within
/// 10 s (F19).
const PING: (Duration, Duration) = (Duration::from_secs(4), Duration::from_secs(4));
/// Flow-control windows: a node rebuilding an index sends messages of 640 KiB.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;

/// Why a master does not start or ends badly.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The hard state cannot be used.
    #[error(transparent)]
    HardState(#[from] HardStateError),
    /// The control address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A task ended badly.
    #[error(transparent)]
    Run(#[from] larder_daemon::run::RunError),
    /// A thread that opens the hard state panicked.
    #[error("open the hard state")]
    Panicked(#[from] tokio::task::JoinError),
}

/// What all calls share.
#[derive(Debug)]
pub(crate) struct Shared {
    cluster: Cluster,
    hard_state: HardState,
    desk: Desk,
    /// Effects that wait for the keeper.
    durable: Mutex<Vec<Effect>>,
    unsettled: Notify,
    /// One registration at a time, so that limits hold.
    registering: tokio::sync::Mutex<()>,
    stop: CancellationToken,
    started: Instant,
    heartbeat: Duration,
    keys_limit: usize,
    command_timeout: Duration,
}

impl Shared {
    /// Acts on what membership asks for: closes sessions at once, leaves the rest to the keeper.
    fn settle(&self) {
        let (close, durable): (Vec<_>, Vec<_>) = self
            .cluster
            .take_effects()
            .into_iter()
            .partition(|effect| matches!(effect, Effect::Close(_)));
        for effect in close {
            if let Effect::Close(session) = effect {
                self.desk.close(session);
            }
        }
        if !durable.is_empty() {
            self.durable.lock().extend(durable);
            self.unsettled.notify_one();
        }
    }

    fn take_durable_effects(&self) -> Vec<Effect> {
        self.settle();
        std::mem::take(&mut self.durable.lock())
    }
}

/// Runs a master until its stop.
///
/// # Errors
/// The hard state cannot be used, the address is taken, or a task ended badly.
pub async fn run(config: MasterConfig, context: Context) -> Result<(), ServerError> {
    context.health.starting("opening the hard state");
    let (listener, _) = config.control.listen.bind("control").await?;
    let stop_grace = context.stop_grace;
    let stop = context.stop.clone();
    let limit = ConnectionLimits {
        message: config.control.message_limit.as_usize(),
        calls: config.control.calls_limit,
    };
    let shared = spawn_blocking(move || open(&config, stop)).await??;
    crate::metrics::describe(&shared.cluster);
    let mut tasks = Tasks::new(context.stop.clone());
    tasks.spawn("keeper", keeper::run(Arc::clone(&shared)));
    tasks.spawn("control", serve(Arc::clone(&shared), listener, limit));
    context.health.ok();
    Ok(tasks.run(stop_grace).await?)
}

#[derive(Debug, Clone, Copy)]
struct ConnectionLimits {
    message: usize,
    calls: u32,
}

fn open(config: &MasterConfig, stop: CancellationToken) -> Result<Arc<Shared>, HardStateError> {
    let (hard_state, life) = HardState::open(&config.state_dir)?;
    let limits = IndexLimits {
        entries: config.index.entries_limit,
        // Lives of nodes that are being swept need a location too.
        locations: config.nodes.limit.saturating_mul(4),
        ..IndexLimits::default()
    };
    let mut registry = Registry::new(config.index.models_limit as usize);
    for (version, model) in hard_state.models()? {
        registry.insert(version, model);
    }
    let timing =
        Timing { heartbeat: config.nodes.heartbeat.get(), node_ttl: config.nodes.ttl.get() };
    let nodes_limit = config.nodes.limit as usize;
    let cluster = Cluster::new(life, timing, nodes_limit, Index::new(limits), registry);
    let started = Instant::now();
    let expected = hard_state.nodes()?;
    info!(
        cluster = %life.term.cluster,
        term = life.term.number,
        incarnation = life.incarnation.0,
        nodes_expected = expected.len(),
        "hard state open"
    );
    cluster.expect(started.into_std(), expected);
    Ok(Arc::new(Shared {
        cluster,
        hard_state,
        desk: Desk::default(),
        durable: Mutex::default(),
        unsettled: Notify::new(),
        registering: tokio::sync::Mutex::default(),
        stop,
        started,
        heartbeat: timing.heartbeat,
        keys_limit: config.control.keys_limit as usize,
        command_timeout: config.control.command_timeout.get(),
    }))
}

async fn serve(
    shared: Arc<Shared>,
    listener: TcpListener,
    limits: ConnectionLimits,
) -> Result<(), TaskError> {
    let stop = shared.stop.clone();
    let service = MasterServer::new(Service { shared })
        .max_decoding_message_size(limits.message)
        .max_encoding_message_size(limits.message);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder()
        .http2_keepalive_interval(Some(PING.0))
        .http2_keepalive_timeout(Some(PING.1))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(limits.calls)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
        .await?;
    Ok(())
}

/// The gRPC service.
#[derive(Debug, Clone)]
struct Service {
    shared: Arc<Shared>,
}

impl Service {
    fn refused(&self, error: &BadRequest) -> Status {
        self.shared.cluster.counters().refused_calls.add(1);
        Status::invalid_argument(error.to_string())
    }

    fn answer<T>(&self, answer: Result<T, BadRequest>) -> Result<Response<T>, Status> {
        answer.map(Response::new).map_err(|error| self.refused(&error))
    }
}

#[tonic::async_trait]
impl Master for Service {
    type SessionStream = Pin<Box<dyn Stream<Item = Result<control::MasterMessage, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<control::NodeMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let session = sessions::run(Arc::clone(&self.shared), request.into_inner());
        Ok(Response::new(Box::pin(session)))
    }

    async fn match_prefix(
        &self,
        request: Request<control::MatchPrefixRequest>,
    ) -> Result<Response<control::MatchPrefixReply>, Status> {
        let Shared { cluster, keys_limit, .. } = &*self.shared;
        self.answer(answers::match_prefix(cluster, *keys_limit, request.get_ref()))
    }

    async fn locate(
        &self,
        request: Request<control::LocateRequest>,
    ) -> Result<Response<control::LocateReply>, Status> {
        let Shared { cluster, keys_limit, .. } = &*self.shared;
        self.answer(answers::locate(cluster, *keys_limit, request.get_ref()))
    }

    async fn advise(
        &self,
        request: Request<control::AdviseRequest>,
    ) -> Result<Response<control::AdviseReply>, Status> {
        let Shared { cluster, keys_limit, .. } = &*self.shared;
        self.answer(advice::advise(cluster, *keys_limit, request.get_ref()))
    }

    async fn register_model(
        &self,
        request: Request<control::RegisterModelRequest>,
    ) -> Result<Response<control::RegisterModelReply>, Status> {
        admin::register_model(&self.shared, request.into_inner()).await.map(Response::new)
    }

    async fn list_models(
        &self,
        _: Request<control::ListModelsRequest>,
    ) -> Result<Response<control::ListModelsReply>, Status> {
        Ok(Response::new(admin::list_models(&self.shared)))
    }

    async fn list_nodes(
        &self,
        _: Request<control::ListNodesRequest>,
    ) -> Result<Response<control::ListNodesReply>, Status> {
        Ok(Response::new(admin::list_nodes(&self.shared)))
    }

    async fn status(
        &self,
        _: Request<control::StatusRequest>,
    ) -> Result<Response<control::StatusReply>, Status> {
        Ok(Response::new(admin::status(&self.shared)))
    }

    async fn explain(
        &self,
        request: Request<control::ExplainRequest>,
    ) -> Result<Response<control::ExplainReply>, Status> {
        self.answer(explain::explain(&self.shared.cluster, request.get_ref()))
    }

    async fn evict(
        &self,
        request: Request<control::EvictRequest>,
    ) -> Result<Response<control::EvictReply>, Status> {
        let filter = admin::check_filter(&self.shared, request.into_inner());
        let (filter, node) = filter.map_err(|error| self.refused(&error))?;
        Ok(Response::new(admin::evict(&self.shared, filter, node).await))
    }
}
