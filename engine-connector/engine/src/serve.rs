//! From a configuration to a served model, and to an orderly end.
//!
//! Start: load the model, digest its file, make the context, connect to the node, listen. Health
//! says how far it is. Stop: refuse new requests, let running ones end within the grace, publish
//! what they completed, then end the engine's thread.

use crate::config::EngineConfig;
use crate::http::{self, App};
use crate::llama::{LlamaError, Model};
use crate::metric;
use crate::scheduler::{self, EngineFailure, EngineHandle, EngineShape, PromptCache, Scheduler};
use larder_daemon::http::Health;
use larder_daemon::run::RunError;
use larder_daemon::{Context, Tasks};
use larder_engine_connector::{BlockShape, Connector, LocalNode};
use larder_proto::Incarnation;
use larder_proto::fingerprint::{ContentDescription, Digest, LayoutDescription, ModelDescription};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::task::{JoinError, spawn_blocking};
use tracing::{info, warn};

/// Bytes of the model file read at a time while it is digested.
const DIGEST_CHUNK: usize = 4 << 20;

/// Why an engine did not start or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model or its context.
    #[error(transparent)]
    Llama(#[from] LlamaError),
    /// The model's file cannot be read to the end.
    #[error("digest {}", path.display())]
    Digest {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A start-up job panicked.
    #[error("start the engine")]
    Start(#[from] JoinError),
    /// The engine's thread failed.
    #[error(transparent)]
    Thread(#[from] EngineFailure),
    /// The address is taken or is none of this host.
    #[error(transparent)]
    Bind(#[from] larder_daemon::address::BindError),
    /// A task failed.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// Runs an engine until the stop.
pub async fn serve(config: EngineConfig, context: Context) -> Result<(), EngineError> {
    metric::describe();
    larder_engine_connector::metric::describe();
    let model = Arc::new(load(&config, &context.health).await?);
    let step_blocks = config.prefill_step_tokens / config.block_tokens;
    let options = config.context();
    let (mut thread, engine) = scheduler::start(Arc::clone(&model), options, step_blocks).await?;
    let incarnation = Incarnation::at_start(None);
    let mut tasks = Tasks::new(context.stop.clone());

    let described = describe(&config, &model, &engine.shape, &context.health).await?;
    let version = described.as_ref().map(|(description, _)| description.version());
    let cache = described.and_then(|(description, bytes)| {
        connect(&config, description, bytes, step_blocks, incarnation, &mut tasks)
    });
    let scheduler = schedule(&config, &model, engine, cache);

    let (listener, address) = config.http.listen.bind("http").await?;
    let name = config.served_name();
    info!(model = name, %address, threads = options.threads, "serving");
    let app = App::new(model, name, version, scheduler.clone(), incarnation);
    let router = http::router(Arc::new(app))
        .merge(larder_daemon::http::router(context.health.clone(), context.metrics.clone()));
    let connections = config.http.max_connections as usize;
    tasks.spawn("http", http::serve(listener, router, connections, tasks.stop()));
    let stop = tasks.stop();
    let door = scheduler.clone();
    tasks.spawn("engine", async move {
        tokio::select! {
            () = stop.cancelled() => {
                door.close();
                Ok(())
            }
            outcome = thread.ended() => outcome,
        }
    });
    drop(scheduler);
    context.health.ok();
    Ok(tasks.run(context.stop_grace).await?)
}

async fn load(config: &EngineConfig, health: &Health) -> Result<Model, EngineError> {
    let path = config.model.path.clone();
    let health = health.clone();
    info!(path = %path.display(), "loading the model");
    let progress =
        move |share: f32| health.starting(format!("loading the model: {:.0} %", share * 100.0));
    Ok(spawn_blocking(move || Model::load(&path, progress)).await??)
}

/// The model's version and the size of its blocks, if its KV can be cut into blocks.
async fn describe(
    config: &EngineConfig,
    model: &Arc<Model>,
    shape: &EngineShape,
    health: &Health,
) -> Result<Option<(ModelDescription, usize)>, EngineError> {
    let (layout, bytes) = match &shape.blocks {
        Ok(blocks) => blocks.clone(),
        Err(reason) => {
            warn!(reason, "the KV of this model cannot be cut into blocks: everything is computed");
            return Ok(None);
        }
    };
    let (path, health, model) = (config.model.path.clone(), health.clone(), Arc::clone(model));
    let (weights, tokenizer) = spawn_blocking(move || {
        let weights = digest_file(&path, |share| {
            health.starting(format!("digesting the weights: {:.0} %", share * 100.0));
        });
        let weights = weights.map_err(|source| EngineError::Digest { path, source })?;
        Ok::<_, EngineError>((weights, model.tokenizer_digest()))
    })
    .await??;
    Ok(Some((description(config, layout, weights, tokenizer), bytes)))
}

fn description(
    config: &EngineConfig,
    layout: LayoutDescription,
    weights: Digest,
    tokenizer: Digest,
) -> ModelDescription {
    let content = ContentDescription {
        weights,
        weight_epoch: config.model.weight_epoch,
        tokenizer,
        adapter: None,
        kv_dtype: config.context().kv_type.name().to_owned(),
        kv_scales: None,
    };
    ModelDescription { display_name: config.served_name(), content, layout }
}

/// BLAKE3 over a file; `progress` hears the share that is done.
fn digest_file(path: &Path, mut progress: impl FnMut(f64)) -> io::Result<Digest> {
    let mut file = std::fs::File::open(path)?;
    let total = file.metadata()?.len().max(1);
    let (mut hasher, mut done) = (blake3::Hasher::new(), 0_u64);
    let mut chunk = vec![0; DIGEST_CHUNK];
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            return Ok(Digest::from_bytes(*hasher.finalize().as_bytes()));
        }
        hasher.update(&chunk[..read]);
        done += read as u64;
        progress(done as f64 / total as f64);
    }
}

/// The cache in front of the engine, unless it is switched off; its tasks join `tasks`.
fn connect(
    config: &EngineConfig,
    model: ModelDescription,
    bytes: usize,
    step_blocks: u32,
    incarnation: Incarnation,
    tasks: &mut Tasks,
) -> Option<Arc<dyn PromptCache>> {
    let socket = config.node.socket.clone();
    if !config.cache.enabled || socket.as_os_str().is_empty() {
        return None;
    }
    info!(version = %model.version(), block_bytes = bytes, "prompts' KV is reused and published");
    let node = LocalNode::new(socket, &config.node.producer, incarnation);
    let shape = BlockShape { bytes, step_blocks };
    let (connector, connector_tasks) = Connector::new(node, model, shape, config.connector());
    let stop = tasks.stop();
    tasks.spawn("connector", async move {
        connector_tasks.run(stop).await;
        Ok::<(), EngineError>(())
    });
    Some(Arc::new(connector))
}

fn schedule(
    config: &EngineConfig,
    model: &Model,
    engine: EngineHandle,
    cache: Option<Arc<dyn PromptCache>>,
) -> Scheduler {
    let cells = engine.shape.cells;
    engine.scheduler(config.admission(cells, model.trained_context()), cache)
}
