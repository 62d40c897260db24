//! Real daemons as child processes of a test.
//!
//! A daemon listens on port 0 and tells its addresses on standard output (`listening: control
//! 127.0.0.1:41234`). It is killed when its handle is dropped, so a failing test leaves nothing behind.
//! What it logs is passed on, and the end of it is part of the error when it does not start.

use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, BufRead, PipeReader},
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

/// How long a daemon may take until it listens: loads of a busy machine included.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How many of the last lines of a log an error shows.
const LAST_LINES: usize = 8;
/// How many of the last lines of a log are kept.
const KEPT_LINES: usize = 1000;

/// What becomes of a daemon's log, besides its last lines in the error of a failed start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logs {
    /// It goes to standard error.
    PassedOn,
    /// Nothing: somebody else speaks there.
    Kept,
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    addresses: BTreeMap<String, String>,
    log: Log,
    /// Kept open, so that the daemon can go on writing.
    _stdout: Lines<BufReader<ChildStdout>>,
}

impl Daemon {
    /// Starts `name` and waits until it listens for all of `sockets`.
    ///
    /// # Errors
    /// The binary is missing, or the daemon ends or says nothing for too long.
    pub async fn start(name: &str, args: &[String], sockets: &[&str]) -> io::Result<Self> {
        Self::start_with(Logs::PassedOn, name, args, sockets).await
    }

    /// As [`Self::start`], with a choice of what becomes of its log.
    ///
    /// # Errors
    /// The binary is missing, or the daemon ends or says nothing for too long.
    pub async fn start_with(
        logs: Logs,
        name: &str,
        args: &[String],
        sockets: &[&str],
    ) -> io::Result<Self> {
        Self::spawn(logs, Command::new(binary(name)?), name, args, sockets).await
    }

    /// As [`Self::start`], through a program that becomes the daemon: `by` is its command line, behind
    /// which the daemon's own is put.
    ///
    /// # Errors
    /// Either is missing, or the daemon ends or says nothing for too long.
    pub async fn start_by(
        by: &[&str],
        name: &str,
        args: &[String],
        sockets: &[&str],
    ) -> io::Result<Self> {
        let [program, before @ ..] = by else {
            return Self::start(name, args, sockets).await;
        };
        let mut command = Command::new(program);
        command.args(before).arg(binary(name)?);
        Self::spawn(Logs::PassedOn, command, name, args, sockets).await
    }

    async fn spawn(
        logs: Logs,
        mut command: Command,
        name: &str,
        args: &[String],
        sockets: &[&str],
    ) -> io::Result<Self> {
        let (errors, to_errors) = io::pipe()?;
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(to_errors);
        command.kill_on_drop(true);
        // Nothing of the surroundings configures a daemon under test.
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("LARDER_") {
                command.env_remove(variable);
            }
        }
        let mut child = command.spawn()?;
        drop(command); // And with it our end of the pipe, so that it ends with the daemon.
        let log = Log::follow(errors, logs);
        let stdout = child.stdout.take().ok_or_else(|| io::Error::other("no standard output"))?;
        let mut lines = BufReader::new(stdout).lines();
        let mut addresses = BTreeMap::new();
        let listening = async {
            while let Some(missing) = sockets.iter().find(|it| !addresses.contains_key(**it)) {
                let Some(line) = lines.next_line().await? else {
                    return Ok(Some(*missing));
                };
                if let Some(rest) = line.strip_prefix("listening: ")
                    && let Some((what, address)) = rest.split_once(' ')
                {
                    addresses.insert(what.to_owned(), address.to_owned());
                }
            }
            Ok::<_, io::Error>(None)
        };
        let why = match timeout(START_LIMIT, listening).await {
            Ok(outcome) => match outcome? {
                None => return Ok(Self { child, addresses, log, _stdout: lines }),
                Some(missing) => {
                    let status = child.wait().await?;
                    format!("it ended ({status}) before it listened for {missing}")
                }
            },
            Err(_) => {
                child.kill().await?;
                format!("it did not listen for {} within {START_LIMIT:?}", sockets.join(", "))
            }
        };
        Err(io::Error::other(format!("{name} did not start: {why}; {}", log.last_words())))
    }

    /// Where it listens for `socket`.
    ///
    /// # Panics
    /// When it was not waited for at the start.
    pub fn address(&self, socket: &str) -> &str {
        &self.addresses[socket]
    }

    /// Its process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// The last lines of what it has logged so far.
    pub fn logged(&self) -> Vec<String> {
        self.log.last.lock().iter().cloned().collect()
    }

    /// SIGKILL, and waits for the end.
    ///
    /// # Errors
    /// The process cannot be waited for.
    pub async fn kill(mut self) -> io::Result<()> {
        self.child.kill().await
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The process cannot be waited for.
    pub async fn wait(mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }
}

/// Reads the log of a daemon line by line. On a thread of its own, so that a daemon never waits for
/// a test that blocks its runtime.
#[derive(Debug)]
struct Log {
    last: Arc<Mutex<VecDeque<String>>>,
    reader: JoinHandle<()>,
}

impl Log {
    fn follow(errors: PipeReader, logs: Logs) -> Self {
        let last: Arc<Mutex<VecDeque<String>>> = Arc::default();
        let kept = Arc::clone(&last);
        let reader = thread::spawn(move || {
            for line in io::BufReader::new(errors).lines().map_while(Result::ok) {
                if logs == Logs::PassedOn {
                    eprintln!("{line}");
                }
                let mut kept = kept.lock();
                if kept.len() == KEPT_LINES {
                    kept.pop_front();
                }
                kept.push_back(line);
            }
        });
        Self { last, reader }
    }

    /// The end of the log of a daemon that has ended.
    fn last_words(self) -> String {
        // It ends with the pipe. Nothing to tell if it panicked.
        let _ = self.reader.join();
        let last = self.last.lock();
        match last.is_empty() {
            true => "it logged nothing".to_owned(),
            false => {
                let from = last.len().saturating_sub(LAST_LINES);
                let lines: Vec<_> = last.range(from..).cloned().collect();
                format!("the last it logged:\n  {}", lines.join("\n  "))
            }
        }
    }
}

/// The binary that the same build made: beside this program, or, for a test, one directory above it.
///
/// # Errors
/// It is not there.
pub fn binary(name: &str) -> io::Result<PathBuf> {
    let this = std::env::current_exe()?;
    let mut beside = this.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    beside.find(|path| path.is_file()).ok_or_else(|| {
        let text = format!("{name} is missing beside {}: build all binaries first", this.display());
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}
