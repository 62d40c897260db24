//! A daemon as a process: exit codes, signals, announced ports, health over its whole life.
//!
//! The daemon is this very test program, started again with the test `daemon` selected and its own
//! command line in a variable: a binary for this purpose alone would have to be shipped.

#![expect(clippy::unwrap_used, reason = "a test fails by panic, in its helpers too")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, ChildStderr, ChildStdout, Command, Stdio},
    thread,
};

use larder_daemon::{
    Context, TaskError, Tasks,
    address::{ListenAddress, check_listen},
    config::{DaemonConfig, DaemonKind, HumanDuration, ProcessSettings, Rules, Sources},
    launch_with,
    log::LogConfig,
};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

const ARGS: &str = "LARDER_DAEMON_TEST_ARGS";

larder_daemon::choices! {
    /// How the daemon behaves.
    enum Behaviour {
        /// Stops when asked to, after a client told it to on its own port.
        Polite = "polite",
        /// Never stops.
        Deaf = "deaf",
        /// Has a task that fails at once.
        Failing = "failing",
        /// Has a task that fails at once, and a polite one.
        Straggling = "straggling",
        /// Blocks a thread for ever.
        Blocked = "blocked",
        /// Panics at once.
        Panicking = "panicking",
    }
}

larder_daemon::settings! {
    /// A daemon for tests.
    struct TestConfig {
        /// How to behave.
        behaviour: Behaviour = Behaviour::Polite,
        /// How long a stop may take.
        stop_grace: HumanDuration = HumanDuration::from_secs(30),
        /// Health and metrics.
        metrics: MetricsConfig,
        /// Logs.
        log: LogConfig,
    }
}

larder_daemon::settings! {
    /// Health and metrics.
    struct MetricsConfig {
        /// Where to listen.
        listen: ListenAddress = ListenAddress::loopback(0),
    }
}

impl DaemonConfig for TestConfig {
    const KIND: DaemonKind = DaemonKind::Node;
    const ABOUT: &'static str = "A daemon for tests";

    fn validate(&self, rules: &mut Rules<'_>) {
        check_listen(rules, "metrics.listen", &self.metrics.listen, false, false);
    }

    fn process(&self) -> ProcessSettings<'_> {
        ProcessSettings {
            log: &self.log,
            metrics_listen: Some(&self.metrics.listen),
            stop_grace: self.stop_grace.get(),
        }
    }
}

async fn behave(config: TestConfig, context: Context) -> Result<(), TaskError> {
    let mut tasks = Tasks::new(context.stop.clone());
    let stop = context.stop.clone();
    // Holds up the stop until somebody connects, so that a test can look at it.
    let (gate, _) = ListenAddress::loopback(0).bind("gate").await?;
    match config.behaviour {
        Behaviour::Polite | Behaviour::Straggling => tasks.spawn("worker", async move {
            stop.cancelled().await;
            gate.accept().await.map(drop)
        }),
        Behaviour::Deaf => tasks.spawn("worker", std::future::pending::<Result<(), TaskError>>()),
        Behaviour::Failing => {
            tasks.spawn("worker", async { Err::<(), TaskError>("disk full".into()) });
        }
        Behaviour::Blocked => tasks.spawn("worker", async {
            loop {
                thread::park();
            }
            #[expect(unreachable_code, reason = "gives the block its type")]
            Ok::<(), TaskError>(())
        }),
        Behaviour::Panicking => panic!("counted twice"),
    }
    if config.behaviour == Behaviour::Straggling {
        tasks.spawn("other", async { Err::<(), TaskError>("disk full".into()) });
    }
    context.health.ok();
    Ok(tasks.run(context.stop_grace).await?)
}

/// The daemon itself. Does nothing in an ordinary run of the tests.
#[test]
fn daemon() {
    let Ok(args) = std::env::var(ARGS) else { return };
    // Also when the tests are killed: nothing is left running.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let args = args.split(' ').filter(|arg| !arg.is_empty());
    let args = std::iter::once("larder-node").chain(args).map(Into::into).collect();
    let code = launch_with(&Sources { args, environment: Vec::new() }, behave);
    std::process::exit(code.into());
}

/// A running daemon. Dropping it kills it.
struct Daemon {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
}

impl Daemon {
    fn start(args: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "daemon", "--nocapture", "--test-threads=1"])
            .env(ARGS, args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Self { child, stdout, stderr }
    }

    /// The address that it announces for `what`.
    fn announced(&mut self, what: &str) -> String {
        let line = line_with(&mut self.stdout, &format!("listening: {what} "));
        line.split(' ').next_back().unwrap().to_owned()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Its exit code, and what it said since on standard output and standard error.
    fn end(mut self) -> (i32, String, String) {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.stdout.read_to_string(&mut stdout).unwrap();
        self.stderr.read_to_string(&mut stderr).unwrap();
        (self.child.wait().unwrap().code().unwrap(), stdout, stderr)
    }
}

/// Reads on until a line holds `text`.
fn line_with(from: &mut impl BufRead, text: &str) -> String {
    let mut line = String::new();
    while from.read_line(&mut line).unwrap() > 0 {
        if line.contains(text) {
            return line.trim_end().to_owned();
        }
        line.clear();
    }
    panic!("no line with {text:?}");
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Asks until the answer holds `text`. The test runner bounds it: no clock decides here.
fn wait_for_health(address: &str, text: &str) {
    while !get(address, "/health").contains(text) {
        thread::yield_now();
    }
}

#[test]
fn a_daemon_announces_its_ports_and_tells_its_health_until_it_has_stopped() {
    let mut daemon = Daemon::start("--log.level info");
    let metrics = daemon.announced("metrics");
    let gate = daemon.announced("gate");
    wait_for_health(&metrics, "\"status\":\"ok\"");
    assert!(get(&metrics, "/metrics").contains("larder_daemon_build_info{version="));

    daemon.signal(Signal::TERM);
    line_with(&mut daemon.stderr, "stopping");
    wait_for_health(&metrics, "\"status\":\"draining\",\"detail\":\"SIGTERM\"");
    TcpStream::connect(gate).unwrap();
    let (code, _, stderr) = daemon.end();
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("stopped"), "{stderr}");
}

#[test]
fn a_second_signal_ends_a_daemon_that_does_not_stop() {
    let mut daemon = Daemon::start("--behaviour deaf");
    daemon.announced("gate");
    daemon.signal(Signal::INT);
    line_with(&mut daemon.stderr, "stopping");
    daemon.signal(Signal::TERM);
    let (code, _, stderr) = daemon.end();
    assert_eq!(code, 1);
    assert!(stderr.contains("SIGTERM after SIGINT: ending at once"), "{stderr}");
}

#[test]
fn a_stop_is_bounded_by_its_grace_even_when_a_thread_is_blocked() {
    for behaviour in ["deaf", "blocked"] {
        let mut daemon = Daemon::start(&format!("--behaviour {behaviour} --stop_grace 50ms"));
        daemon.announced("gate");
        daemon.signal(Signal::TERM);
        let (code, _, stderr) = daemon.end();
        assert_eq!(code, 1);
        assert!(stderr.contains("did not stop within 50ms: worker"), "{stderr}");
    }
}

#[test]
fn a_task_that_fails_or_panics_ends_the_daemon_with_code_1_and_the_cause() {
    for log in ["off", "error", "info"] {
        let (code, _, stderr) =
            Daemon::start(&format!("--behaviour failing --log.level {log}")).end();
        assert_eq!(code, 1);
        assert!(stderr.contains("larder-node failed: task worker failed: disk full"), "{stderr}");
        assert_eq!(stderr.matches("disk full").count(), 1, "told once: {stderr}");
    }

    let (code, _, stderr) = Daemon::start("--behaviour panicking --log.format json").end();
    assert_eq!(code, 1);
    assert!(stderr.contains("task larder-node panicked: counted twice"), "{stderr}");
    assert!(stderr.contains("\"message\":\"counted twice\""), "the panic is logged: {stderr}");
}

#[test]
fn a_daemon_with_a_failed_task_is_unfit_while_the_others_still_end() {
    let mut daemon = Daemon::start("--behaviour straggling");
    let metrics = daemon.announced("metrics");
    let gate = daemon.announced("gate");
    wait_for_health(&metrics, "\"status\":\"draining\",\"detail\":\"a task ended\"");
    TcpStream::connect(gate).unwrap();
    let (code, _, stderr) = daemon.end();
    assert_eq!(code, 1);
    assert!(stderr.contains("task other failed: disk full"), "{stderr}");
}

#[test]
fn a_refused_configuration_is_code_2_and_a_checked_one_starts_nothing() {
    for args in ["--stop_grace 5", "--stop_grace 5 --check-config"] {
        let (code, stdout, stderr) = Daemon::start(args).end();
        assert_eq!(code, 2);
        assert!(!stdout.contains("listening"), "{stdout}");
        assert!(stderr.contains("stop_grace = \"5\" (from --stop_grace): must be"), "{stderr}");
    }
    let (code, stdout, _) = Daemon::start("--check-config").end();
    assert_eq!(code, 0);
    assert!(stdout.contains("the configuration is right") && !stdout.contains("listening"));
    assert_eq!(Daemon::start("--metrics.listen 10.0.0.1:0").end().0, 2);
}

#[test]
fn a_taken_port_is_code_1_and_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let (code, _, stderr) = Daemon::start(&format!("--metrics.listen {address}")).end();
    assert_eq!(code, 1);
    let told = format!(
        "larder-node failed: listen on {address} for metrics (--metrics.listen takes another \
         address, or port 0): Address already in use"
    );
    assert!(stderr.contains(&told), "{stderr}");
    assert_eq!(stderr.matches("Address already in use").count(), 1, "told once: {stderr}");
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
