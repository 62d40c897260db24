//! Real daemons as child processes of a test.
//!
//! A daemon listens on port 0 and tells its addresses on standard output (`listening: control
//! 127.0.0.1:41234`). It is killed when its handle is dropped, so a failing test leaves nothing behind.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

/// How long a daemon may take until it listens.
const START_LIMIT: Duration = Duration::from_secs(30);

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    addresses: BTreeMap<String, String>,
    /// Kept open, so that the daemon can go on writing.
    _stdout: Lines<BufReader<ChildStdout>>,
}

impl Daemon {
    /// Starts `name` and waits until it listens for all of `sockets`.
    ///
    /// # Errors
    /// The binary is missing, or the daemon ends or says nothing for too long.
    pub async fn start(name: &str, args: &[String], sockets: &[&str]) -> io::Result<Self> {
        let mut command = Command::new(binary(name)?);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        // Nothing of the surroundings configures a daemon under test.
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("LARDER_") {
                command.env_remove(variable);
            }
        }
        let mut child = command.spawn()?;
        let stdout = child.stdout.take().ok_or_else(|| io::Error::other("no standard output"))?;
        let mut lines = BufReader::new(stdout).lines();
        let mut addresses = BTreeMap::new();
        let listening = async {
            while sockets.iter().any(|socket| !addresses.contains_key(*socket)) {
                let Some(line) = lines.next_line().await? else {
                    return Err(io::Error::other(format!("{name} ended before it listened")));
                };
                if let Some(rest) = line.strip_prefix("listening: ")
                    && let Some((what, address)) = rest.split_once(' ')
                {
                    addresses.insert(what.to_owned(), address.to_owned());
                }
            }
            Ok(())
        };
        timeout(START_LIMIT, listening)
            .await
            .map_err(|_| io::Error::other(format!("{name} does not listen")))??;
        Ok(Self { child, addresses, _stdout: lines })
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
