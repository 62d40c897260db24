//! From the command line to the exit code: what the `main` of every daemon does.

use std::{
    future::Future,
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};

use futures_util::FutureExt;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{
    address::{BindError, announce_on_stdout},
    config::{Command, DaemonConfig, Effective, Sources, load},
    http::{Health, HealthStatus, InstallError, Metrics, Server, router},
    log,
    run::{RunError, Signals, TaskError, Tasks, chain},
};

/// Exit code of a daemon that stopped because it was asked to.
pub const EXIT_OK: u8 = 0;
/// Exit code of a daemon that failed.
pub const EXIT_FAILED: u8 = 1;
/// Exit code of a daemon that did not start: command line or configuration.
pub const EXIT_USAGE: u8 = 2;

/// Tasks of the daemon's own sets end within the grace; the outermost set waits this much longer,
/// so that the error names the task and not the daemon.
const OUTER_GRACE: Duration = Duration::from_secs(2);

/// What a daemon gets to work with.
#[derive(Debug, Clone)]
pub struct Context {
    /// Cancelled when the daemon should stop.
    pub stop: CancellationToken,
    /// Starts as `starting`. The daemon calls `ok` when it is ready; the stop is reported for it.
    pub health: Health,
    /// For a daemon that serves `/metrics` itself.
    pub metrics: Metrics,
    /// For the daemon's own [`Tasks::run`].
    pub stop_grace: Duration,
}

/// Reads the configuration of this process and runs `daemon` until a signal, or until it ends.
///
/// ```no_run
/// use std::process::ExitCode;
/// use larder_daemon::{Context, Tasks, address::ListenAddress, config, log::LogConfig};
///
/// larder_daemon::settings! {
///     /// The configuration of a node.
///     pub struct NodeConfig {
///         /// How long a stop may take.
///         pub stop_grace: config::HumanDuration = config::HumanDuration::from_secs(10),
///         /// Logs.
///         pub log: LogConfig,
///     }
/// }
///
/// impl config::DaemonConfig for NodeConfig {
///     const KIND: config::DaemonKind = config::DaemonKind::Node;
///     const ABOUT: &'static str = "Keeps KV blocks and gives them to peers";
///
///     fn validate(&self, rules: &mut config::Rules<'_>) {
///         let NodeConfig { stop_grace, log: _ } = self;
///         rules.key("stop_grace").must(!stop_grace.get().is_zero(), "be above 0s");
///     }
///
///     fn process(&self) -> config::ProcessSettings<'_> {
///         let NodeConfig { stop_grace, log } = self;
///         config::ProcessSettings { log, metrics_listen: None, stop_grace: stop_grace.get() }
///     }
/// }
///
/// async fn serve(_config: NodeConfig, context: Context) -> Result<(), larder_daemon::TaskError> {
///     let mut tasks = Tasks::new(context.stop.clone());
///     let stop = context.stop.clone();
///     tasks.spawn("listener", async move {
///         stop.cancelled().await;
///         Ok::<(), larder_daemon::TaskError>(())
///     });
///     context.health.ok();
///     Ok(tasks.run(context.stop_grace).await?)
/// }
///
/// fn main() -> ExitCode {
///     larder_daemon::launch(serve)
/// }
/// ```
pub fn launch<C, F, E>(daemon: impl FnOnce(C, Context) -> F) -> ExitCode
where
    C: DaemonConfig,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<TaskError>,
{
    ExitCode::from(launch_with(&Sources::of_process(), daemon))
}

/// [`launch`] with other arguments and variables than those of this process. The exit code comes
/// back as a number.
pub fn launch_with<C, F, E>(sources: &Sources, daemon: impl FnOnce(C, Context) -> F) -> u8
where
    C: DaemonConfig,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<TaskError>,
{
    match load::<C>(sources) {
        Err(error) => {
            let binary = C::KIND.binary();
            eprintln!("{binary}: the configuration is refused\n{}", indented(&error.to_string()));
            EXIT_USAGE
        }
        Ok(Command::Print(text)) => print(&text),
        Ok(Command::Run(effective)) => match start(effective, daemon) {
            Ok(()) => EXIT_OK,
            Err(error) => {
                let (binary, why) = (C::KIND.binary(), chain(&error));
                // Once: the log may be off, or may be what could not be installed.
                match tracing::enabled!(tracing::Level::ERROR) {
                    true => error!("{binary} failed: {why}"),
                    false => eprintln!("{binary} failed: {why}"),
                }
                EXIT_FAILED
            }
        },
    }
}

/// Why a daemon with a right configuration did not run or ended badly.
#[derive(Debug, thiserror::Error)]
enum LaunchError {
    #[error("set up logging")]
    Log(#[from] tracing_subscriber::util::TryInitError),
    #[error(transparent)]
    Metrics(#[from] InstallError),
    #[error("start the runtime")]
    Runtime(#[source] io::Error),
    #[error("handle signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Daemon(TaskError),
}

fn start<C, F, E>(
    effective: Effective<C>,
    daemon: impl FnOnce(C, Context) -> F,
) -> Result<(), LaunchError>
where
    C: DaemonConfig,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<TaskError>,
{
    log::install(effective.config.process().log)?;
    for warning in &effective.warnings {
        warn!(%warning, "odd configuration");
    }
    announce_on_stdout();
    raise_descriptor_limit();
    let metrics = Metrics::install()?;
    let runtime = Runtime::new().map_err(LaunchError::Runtime)?;
    let outcome = runtime.block_on(run(effective.config, metrics, daemon));
    // A blocked thread must not keep the process: the tasks had their grace.
    runtime.shutdown_background();
    outcome
}

/// Every connection takes a descriptor, and the soft limit is often 1,024 for programs that use
/// `select`; ours do not, so the hard limit is the limit.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        warn!(%error, "raise the limit of open files");
    }
}

async fn run<C, F, E>(
    config: C,
    metrics: Metrics,
    daemon: impl FnOnce(C, Context) -> F,
) -> Result<(), LaunchError>
where
    C: DaemonConfig,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<TaskError>,
{
    let (stop, health) = (CancellationToken::new(), Health::new());
    let signals = Signals::listen().map_err(LaunchError::Signals)?;
    let stop_grace = config.process().stop_grace;
    // Health and metrics are served until the daemon has ended: `draining` is to be seen, too. They
    // are jobs, because their end may be booked before that of the daemon that ended them.
    let ended = CancellationToken::new();
    let mut tasks = Tasks::new(stop.clone());
    if let Some(listen) = config.process().metrics_listen {
        let server = Server::bind(listen, "metrics").await?;
        let router = router(health.clone(), metrics.clone());
        tasks.spawn_job("metrics", server.serve(router, ended.clone()));
    }
    let upkeep = metrics.upkeep(ended.clone());
    tasks.spawn_job("metrics-upkeep", upkeep.map(Ok::<(), TaskError>));

    info!(version = env!("CARGO_PKG_VERSION"), "starting {}", C::KIND.binary());
    let context = Context { stop: stop.clone(), health: health.clone(), metrics, stop_grace };
    let daemon = daemon(config, context);
    let at_end = ended.drop_guard(); // Also when it panics or is aborted.
    tasks.spawn(C::KIND.binary(), async move {
        let outcome = daemon.await;
        drop(at_end);
        outcome
    });

    tasks.spawn_job("health", follow_stop(stop.clone(), health.clone()));
    let drained = health.clone();
    let signals = signals.drive(stop, move |signal| drained.draining(signal));
    let outcome = tokio::select! {
        outcome = tasks.run(stop_grace + OUTER_GRACE) => outcome,
        never = signals => match never {},
    };
    match outcome {
        Ok(()) => {
            info!("stopped");
            Ok(())
        }
        // That the daemon itself is a task is nobody's business but ours.
        Err(RunError::Failed { task, source }) if task == C::KIND.binary() => {
            Err(LaunchError::Daemon(source))
        }
        Err(error) => Err(error.into()),
    }
}

/// Without a signal it is the end of a task that stops the others, who may take their time.
async fn follow_stop(stop: CancellationToken, health: Health) -> Result<(), TaskError> {
    stop.cancelled().await;
    if health.report().status < HealthStatus::Draining {
        health.draining("a task ended");
    }
    Ok(())
}

fn print(text: &str) -> u8 {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => EXIT_OK,
        // Whoever read it has seen enough: `larder-node --help | head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => EXIT_OK,
        Err(_) => EXIT_FAILED,
    }
}

fn indented(lines: &str) -> String {
    lines.lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}
