//! `larder-node` as a whole: opens the state, touches the memory, binds, and runs every task until one
//! ends or the node is told to stop.

mod memory;
mod removals;
mod ssds;

use self::removals::Remembering;
use crate::{
    advice,
    catalog::Catalog,
    config::NodeConfig,
    inventory::{
        ChangeLog, Inventory, PartSets,
        publisher::{Identity as NodeIdentity, Limits as SessionLimits},
        session::{self, Shared},
        terms::TermGate,
    },
    metrics,
    node::Node,
    service::NodeService,
    state::StateDir,
    tiers::ssd::Owner,
    transfer::{self, Listener},
};
use larder_client::{connection::Identity, masters::Masters, peers::Peers};
use larder_daemon::{
    Context, TaskError, Tasks,
    address::{AdvertiseAddress, announce},
};
use larder_proto::{
    control::node_server::NodeServer,
    frame::Role,
    ids::{Incarnation, NodeId},
};
use parking_lot::Mutex;
use std::{fs, io, path::Path, sync::Arc, time::Duration};
use tokio::{
    runtime::Runtime,
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// How often gauges are brought up to date.
const GAUGES: Duration = Duration::from_secs(1);
/// How often masters are told again of the model versions that run here: a master that lost its state
/// learns them within this time.
const REGISTRAR: Duration = Duration::from_secs(10);

/// Runs a node until `context.stop`.
pub async fn run(config: NodeConfig, context: Context) -> Result<(), TaskError> {
    let state = StateDir::open(&config.state_dir)
        .map_err(|error| named(error, "use the state directory", &config.state_dir, "state_dir"))?;
    let (id, incarnation) = (state.node_id()?, state.next_incarnation()?);
    let name = config.name.clone().unwrap_or_else(host_name);
    info!(node = %id, %incarnation, name, "node");

    let log = Arc::new(ChangeLog::new(
        Arc::new(PartSets::new(PartSets::DEFAULT_LIMIT)),
        ChangeLog::DEFAULT_CAPACITY,
    ));
    let Some(arena) = memory::take(&config, &context).await? else { return Ok(()) };
    info!(tier = "dram", policy = %config.dram.policy, "eviction policy");
    metrics::policy(config.dram.policy);
    let policy = config.dram.policy.build();
    let catalog = Catalog::new(incarnation, arena, policy, config.watermarks(), Arc::clone(&log));

    // Before anybody is told where to connect: a folder that was not meant for this node ends the start.
    let state = Arc::new(state);
    let (tiering, adoptions) = match config.ssd.path.as_slice() {
        [] => (None, Vec::new()),
        _ => {
            let last_removal = state.last_removal()?;
            refuse_if_later(last_removal, incarnation, &config.state_dir)?;
            let owner = Owner { node: id, life: incarnation, last_removal };
            let opening = ssds::open(&config, owner, &catalog, &state, &context);
            let Some(opened) = context.stop.run_until_cancelled(opening).await else {
                return Ok(());
            };
            let (tiering, adoptions) = opened?;
            (Some(tiering), adoptions)
        }
    };

    let (data, data_bound) = config.data.listen.bind("data").await?;
    let (control, control_bound) = config.control.listen.bind("control").await?;
    let socket = &config.local.socket;
    if let Some(parent) = socket.parent() {
        fs::create_dir_all(parent)
            .map_err(|error| named(error, "make the folder", parent, "local.socket"))?;
    }
    let local = Listener::unix(socket)
        .map_err(|error| named(error, "listen for engines on", socket, "local.socket"))?;
    announce("local", &socket.display());

    let data_address = AdvertiseAddress::for_bound(config.data.advertise.as_ref(), data_bound);
    let control_address =
        AdvertiseAddress::for_bound(config.control.advertise.as_ref(), control_bound);
    let identity = NodeIdentity {
        node: id,
        incarnation,
        name: name.clone(),
        data_address: data_address.to_string(),
        control_address: control_address.to_string(),
        capacity_bytes: catalog.arena().capacity_bytes(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let node = Node::new(
        id,
        config.limits(),
        Arc::clone(&catalog),
        tiering.clone(),
        Masters::new(&config.masters)?,
        Peers::new(peer_identity(id, incarnation)),
    );
    let shared = Shared {
        identity,
        limits: SessionLimits::default(),
        log,
        inventory: Arc::clone(&catalog) as Arc<dyn Inventory>,
        sink: Arc::new(Remembering::new(Arc::clone(&node), Arc::clone(&state), incarnation)),
        gate: Arc::new(TermGate::open(state.terms())?),
    };
    let (links, board) = session::links(Arc::new(shared), &config.masters);

    let mut tasks = Tasks::new(context.stop.clone());
    let stop = tasks.stop();
    let threads = SessionThreads::start()?;
    for link in links {
        let running = threads.spawn(link.run(stop.clone()));
        tasks.spawn("session", async move { running.await.map_err(TaskError::from) });
    }
    for listener in [Listener::Tcp(data), local] {
        let (node, stop) = (Arc::clone(&node), stop.clone());
        tasks.spawn("data plane", async move {
            transfer::serve(node, listener, stop).await;
            Ok::<(), TaskError>(())
        });
    }
    let service = NodeService {
        node: Arc::clone(&node),
        board,
        name,
        data_address: data_address.to_string(),
        socket: socket.display().to_string(),
        dram_holds_bytes: config.dram.holds_bytes(catalog.arena().capacity_bytes()),
        started: Instant::now(),
        auditing: Arc::default(),
        scrubs: Mutex::default(),
    };
    let serving = tonic::transport::Server::builder()
        .add_service(NodeServer::new(service))
        .serve_with_incoming_shutdown(
            TcpListenerStream::new(control),
            stop.clone().cancelled_owned(),
        );
    tasks.spawn("control", serving);
    if let Some(tiering) = tiering {
        let stop = stop.clone();
        tasks.spawn("ssd", async move {
            tiering.run(adoptions, stop).await;
            Ok::<(), TaskError>(())
        });
    }
    tasks.spawn("gauges", keep_gauges(Arc::clone(&node), stop.clone()));
    let (leaving, stopped) = (Arc::clone(&node), stop.clone());
    tasks.spawn("drain", async move {
        stopped.cancelled().await;
        leaving.catalog().drain(); // Nothing new is taken while what runs ends.
        Ok::<(), TaskError>(())
    });
    if let Some(options) = config.advice() {
        let (node, stop) = (Arc::clone(&node), stop.clone());
        tasks.spawn("advice", async move {
            advice::run(node, options, stop).await;
            Ok::<(), TaskError>(())
        });
    }
    tasks.spawn("registrar", keep_registered(Arc::clone(&node), stop.clone()));
    context.health.ok();
    let outcome = tasks.run(context.stop_grace).await;
    drop(state); // Locked to the very end.
    Ok(outcome?)
}

/// Threads for the sessions with masters alone. The kernel shares cores out among threads, so masters hear of
/// changes in time however many requests wait for the threads of the data plane.
struct SessionThreads(Option<Runtime>);

impl SessionThreads {
    fn start() -> io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        // Two, so that a command that takes its time does not keep a session from being served.
        builder.worker_threads(2).thread_name("larder-session").enable_all();
        Ok(Self(Some(builder.build()?)))
    }

    #[expect(clippy::expect_used, reason = "only `drop` takes the runtime")]
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.0.as_ref().expect("it is there until it is dropped").spawn(task)
    }
}

impl Drop for SessionThreads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background(); // The sessions have ended, or the process is about to.
        }
    }
}

/// Who the node is to its peers. What it stores of theirs keeps their producer.
fn peer_identity(id: NodeId, incarnation: Incarnation) -> Identity {
    Identity {
        role: Role::Node,
        producer: format!("node {id}"),
        producer_incarnation: incarnation,
        ..Identity::client("")
    }
}

async fn keep_gauges(node: Arc<Node>, stop: CancellationToken) -> Result<(), TaskError> {
    let mut ticks = interval(GAUGES);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        metrics::update(&node);
    }
    Ok(())
}

/// Tells masters of every model version again and again; registration is idempotent.
async fn keep_registered(node: Arc<Node>, stop: CancellationToken) -> Result<(), TaskError> {
    let mut ticks = interval(REGISTRAR);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let work = async {
        loop {
            ticks.tick().await;
            for model in node.models().all() {
                if let Err(error) = node.masters.register(&model).await {
                    warn!(%error, model = model.display_name, "register model version");
                }
            }
        }
    };
    stop.run_until_cancelled(work).await;
    Ok(())
}

fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// A removal in a life that is yet to come: nothing could be kept until then.
fn refuse_if_later(last: Option<Incarnation>, life: Incarnation, state: &Path) -> io::Result<()> {
    if last.is_none_or(|last| last < life) {
        return Ok(());
    }
    let file = state.join("last_removal");
    let why = format!("{} is damaged: must name a life before this one, {life}", file.display());
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// The error of a path that the configuration names, with the key that names another.
fn named(error: io::Error, doing: &str, path: &Path, key: &str) -> io::Error {
    let path = path.display();
    io::Error::new(error.kind(), format!("{doing} {path} (--{key} names another place): {error}"))
}
