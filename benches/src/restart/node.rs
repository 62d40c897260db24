//! A real `larder-node` with an ssd path, over several lives in the same folders.

use super::Sizes;
use crate::{
    child::{self, Child},
    error::BenchError,
};
use larder_client::connection::{Connection, Identity, Socket};
use larder_store_node::{metrics::ADOPTING_PATHS, tiers::ssd::slot_name};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    net::UnixStream,
    time::{Instant, MissedTickBehavior, interval},
};

/// Bytes of parts that may wait to be written.
pub(super) const QUEUE_MIB: u64 = 32;
/// Memory for parts: so little that nearly everything lies on the ssd alone.
const DRAM_MIB: u64 = 2 * QUEUE_MIB;
/// Segments beside those that the records fill: open, ready, and spare, so that none is reclaimed.
const MORE_SEGMENTS: u64 = 8;
/// How often a node is asked whether it is warm: so exact is the time.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// The folders of a node. They are removed when this is dropped, so it has to outlive its nodes.
#[derive(Debug)]
pub(super) struct Home {
    /// State, socket and log; the path of a socket has to be short.
    dir: TempDir,
    ssd: TempDir,
    segment_bytes: u64,
    capacity_mib: u64,
}

impl Home {
    /// Room for all records, each with a page for its header.
    pub(super) fn new(disk: &Path, sizes: Sizes) -> Result<Self, BenchError> {
        let dir =
            tempfile::tempdir().map_err(BenchError::io("make a folder for state and socket"))?;
        let disk = disk.canonicalize().map_err(BenchError::io(format!("{}", disk.display())))?;
        let ssd = tempfile::Builder::new().prefix("larder-bench-restart-").tempdir_in(&disk);
        let ssd = ssd.map_err(BenchError::io(format!("make a folder in {}", disk.display())))?;
        let record_bytes = (sizes.len as u64).next_multiple_of(4096) + 4096 + 512;
        let filled = (sizes.records * record_bytes).div_ceil(sizes.segment_bytes);
        // A hundredth for what a path keeps for itself, and for what does not fit the end of a segment.
        let bytes = (filled + filled / 10 + MORE_SEGMENTS) * sizes.segment_bytes * 101 / 100;
        Ok(Self {
            dir,
            ssd,
            segment_bytes: sizes.segment_bytes,
            capacity_mib: bytes.div_ceil(1 << 20) + 8,
        })
    }

    /// Where segments lie.
    pub(super) fn ssd(&self) -> &Path {
        self.ssd.path()
    }

    /// Removes the folders.
    pub(super) fn remove(self) -> Result<(), BenchError> {
        let removed = self.ssd.close().and_then(|()| self.dir.close());
        removed.map_err(BenchError::io("remove the folders of the bench"))
    }
}

/// One life.
#[derive(Debug)]
pub(super) struct Node {
    process: Child,
    /// When its process was started.
    started: Instant,
    metrics: String,
    socket: PathBuf,
}

impl Node {
    /// Starts a life that writes all it is given to the ssd.
    pub(super) fn start(home: &Home) -> Result<Self, BenchError> {
        let dir = home.dir.path();
        let socket = dir.join("node.sock");
        let (folder, capacity) = (home.ssd().display().to_string(), home.capacity_mib);
        let args = [
            format!("--state_dir={}", dir.join("node").display()),
            "--masters=".to_owned(),
            format!("--local.socket={}", socket.display()),
            "--data.listen=127.0.0.1:0".to_owned(),
            "--control.listen=127.0.0.1:0".to_owned(),
            "--metrics.listen=127.0.0.1:0".to_owned(),
            format!("--dram.capacity={DRAM_MIB}MiB"),
            "--log.level=warn".to_owned(),
            format!("--ssd.path=[{{dir = {folder:?}, capacity = \"{capacity}MiB\"}}]"),
            format!("--ssd.segment={}MiB", home.segment_bytes >> 20),
            "--ssd.admit=all".to_owned(),
            format!("--ssd.write_queue={QUEUE_MIB}MiB"),
        ];
        let started = Instant::now();
        let mut process = Child::start("larder-node", &child::sibling("larder-node")?, &args, dir)?;
        let metrics = process.announced("metrics")?;
        process.announced("local")?;
        Ok(Self { process, started, metrics, socket })
    }

    /// Time since its process was started.
    pub(super) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// CPU seconds that it has used.
    pub(super) fn cpu_seconds(&self) -> f64 {
        self.process.cpu_seconds()
    }

    /// A connection over its socket.
    pub(super) async fn connect(&self) -> Result<Connection, BenchError> {
        let stream = UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(BenchError::io("connect to the node's socket"))?;
        let identity = Identity::client("larder-bench");
        Ok(Connection::open(Socket::Unix(stream), &identity).await?)
    }

    /// Ends when its metrics say that all of its path is adopted: its age then. They cost a node the same
    /// whatever it holds; its status does not.
    pub(super) async fn adopted(&self) -> Result<Duration, BenchError> {
        let mut ticks = interval(ASK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let told = child::metrics(&self.metrics)
                .await
                .map_err(BenchError::io("ask the node for its metrics"))?;
            let adopting = told.lines().find_map(|line| line.strip_prefix(ADOPTING_PATHS));
            match adopting.map(|paths| paths.trim().parse::<f64>()) {
                Some(Ok(0.0)) => return Ok(self.age()),
                Some(Ok(_)) => {}
                _ => {
                    let answer = format!("there is no {ADOPTING_PATHS}");
                    return Err(BenchError::Answer {
                        doing: "ask the node for its metrics",
                        answer,
                    });
                }
            }
        }
    }

    /// Ends when it has made a segment ready in this folder.
    pub(super) async fn writes(&self, ssd: &Path) -> Result<(), BenchError> {
        let mut ticks = interval(ASK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let ready = ssd.join(slot_name(0));
        while !ready.exists() {
            ticks.tick().await;
        }
        Ok(())
    }

    /// kill -9.
    pub(super) fn kill(self) -> Result<(), BenchError> {
        self.process.kill()
    }
}
