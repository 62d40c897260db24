//! Server ends as processes of their own: started, heard, measured and stopped by pid.

use crate::error::BenchError;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, set_parent_process_death_signal},
    time::{ClockId, clock_gettime},
};
use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, BufRead, BufReader},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{ChildStdout, Command, Stdio},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// How long a child may take to stop after it was asked to.
const STOP_SECONDS: i64 = 5;
/// The hidden command of this program that starts another one and ends it when this program ends.
pub(crate) const TIED: &str = "tied-to-parent";

/// A running server. Dropping it stops the process and waits for its end.
#[derive(Debug)]
pub(crate) struct Child {
    what: &'static str,
    process: std::process::Child,
    stdout: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Child {
    /// Starts `program`. Its log goes to a file in `dir`. It is killed if this process dies.
    pub(crate) fn start(
        what: &'static str,
        program: &Path,
        args: &[String],
        dir: &Path,
    ) -> Result<Self, BenchError> {
        let log = dir.join(format!("{what}.log"));
        let start = || {
            let mut process = Command::new(std::env::current_exe()?)
                .arg(TIED)
                .arg(program)
                .args(args)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(File::create(&log)?)
                .spawn()?;
            let stdout = process.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
            Ok((process, BufReader::new(stdout)))
        };
        let (process, stdout) = start().map_err(BenchError::io(format!("start {what}")))?;
        Ok(Self { what, process, stdout, log })
    }

    /// The address that the child announces for `socket` with a line `listening: SOCKET ADDRESS`. Waits for
    /// it; lines for other sockets are passed over, so ask in the order in which they come.
    pub(crate) fn announced(&mut self, socket: &str) -> Result<String, BenchError> {
        let expected = format!("listening: {socket} ");
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.stdout.read_line(&mut line);
            if read.map_err(BenchError::io(format!("read from {}", self.what)))? == 0 {
                return Err(self.ended());
            }
            if let Some(address) = line.trim_end().strip_prefix(&expected) {
                return Ok(address.to_owned());
            }
        }
    }

    fn ended(&mut self) -> BenchError {
        let state = match self.process.wait() {
            Ok(status) => format!("ended ({status})"),
            Err(error) => format!("cannot be waited for ({error})"),
        };
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let log = lines[lines.len().saturating_sub(20)..].join("\n");
        BenchError::Child { what: self.what, state, log }
    }

    /// CPU seconds that the process has used.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        cpu_seconds_of(self.process.id())
    }

    /// Bytes of its memory that are there.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()));
        let status = status.unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }

    /// Ends it as a crash would: without a word before.
    pub(crate) fn kill(mut self) -> Result<(), BenchError> {
        let killed = self.process.kill().and_then(|()| self.process.wait());
        killed.map(drop).map_err(BenchError::io(format!("kill {}", self.what)))
    }

    /// Asks for the end, waits for a while, and kills what is left. Errors mean that it is gone already.
    fn stop(&mut self) {
        if matches!(self.process.try_wait(), Ok(Some(_))) {
            return; // Its pid may be somebody else's by now.
        }
        let Some(pid) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw) else {
            return;
        };
        if let Ok(gone) = pidfd_open(pid, PidfdFlags::empty()) {
            let _ = kill_process(pid, Signal::TERM);
            let limit = Timespec { tv_sec: STOP_SECONDS, tv_nsec: 0 };
            let _ = poll(&mut [PollFd::new(&gone, PollFlags::IN)], Some(&limit));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What a daemon serves as `/metrics`, head and all.
pub(crate) async fn metrics(address: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

/// Becomes `program`, to be killed when the process that started this one ends.
pub(crate) fn run_tied(program: &Path, args: &[OsString]) -> BenchError {
    let tied = set_parent_process_death_signal(Some(Signal::KILL));
    let failed = match tied {
        Ok(()) => Command::new(program).args(args).exec(),
        Err(error) => error.into(),
    };
    BenchError::Io { doing: format!("run {}", program.display()), source: failed }
}

/// A program of this project: it lies beside this one.
pub(crate) fn sibling(name: &str) -> Result<PathBuf, BenchError> {
    let here = std::env::current_exe().map_err(BenchError::io("find this program"))?;
    let path = here.with_file_name(name);
    match path.is_file() {
        true => Ok(path),
        false => Err(BenchError::NotBuilt(path)),
    }
}

/// CPU seconds that this process has used.
pub(crate) fn own_cpu_seconds() -> f64 {
    seconds(clock_gettime(ClockId::ProcessCPUTime))
}

/// CPU seconds that this thread has used.
pub(crate) fn thread_cpu_seconds() -> f64 {
    seconds(clock_gettime(ClockId::ThreadCPUTime))
}

#[expect(clippy::cast_precision_loss, reason = "seconds of one run, to the nanosecond")]
fn seconds(time: Timespec) -> f64 {
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The scheduler's own count of each thread, in nanoseconds; or the ticks of `stat`, where threads that ended
/// still count, if those say more.
fn cpu_seconds_of(pid: u32) -> f64 {
    by_thread(pid).unwrap_or(0.0).max(by_ticks(pid).unwrap_or(0.0))
}

#[expect(clippy::cast_precision_loss, reason = "seconds of one run, to the nanosecond")]
fn by_thread(pid: u32) -> io::Result<f64> {
    let mut total_ns = 0u64;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ends meanwhile is counted by the ticks.
        let text = fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
        let ran = text.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok());
        total_ns += ran.unwrap_or(0);
    }
    Ok(total_ns as f64 / 1e9)
}

#[expect(clippy::cast_precision_loss, reason = "a tick is 10 ms, and a run has few of them")]
fn by_ticks(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything; user and system time are fields 14 and 15.
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
    let ticks = ticks(11)? + ticks(12)?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
