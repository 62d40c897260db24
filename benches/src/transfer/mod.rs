//! Question: what does moving a part cost, beside the least that any verified service could do?
//!
//! A real `larder-node` and the client library against the `reference`, in interleaved pairs of legs: ours and
//! the reference's, in alternating order, on the same machine in the same second. CPU seconds are those of both
//! ends. Every byte of a stream is verified by its receiver; the bytes themselves are checked too, a stamp a
//! chunk inside the measured loop and all of a part of each client after each row. Wrong bytes end the bench.
//!
//! The node's arena is filled once over before each size, so that every put evicts: steady state.

mod client;
mod larder;
mod plan;
pub(crate) mod reference;
mod rows;

use crate::{child::Child, error::BenchError, figures::Pairs, report};
use client::{Client, Member, Parts, check, run_leg};
use larder::Node;
use plan::{Cell, Op, Path, Plan, Timing};
use reference::client::{OverMemory, OverStream};
use rows::Row;
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::time::Instant;

/// Parts of a batch get.
const BATCH: usize = 64;
/// Pairs of a row, even if they take longer than planned.
const MIN_PAIRS: u32 = 3;

/// `larder-bench transfer`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// End within 60 seconds: fewer sizes, pairs and bytes
    #[arg(long)]
    quick: bool,
    /// Write the rows to this file as a JSON list
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only these paths
    #[arg(long, value_name = "PATH", value_delimiter = ',')]
    path: Vec<Path>,
    /// Only these operations
    #[arg(long, value_name = "OP", value_delimiter = ',')]
    op: Vec<Op>,
    /// Part sizes in KiB [default: 64,256,1024,4096,16384; with --quick 64,1024,16384]
    #[arg(long, value_name = "KIB", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(4..=16384))]
    size: Vec<u32>,
    /// Numbers of clients, each with a connection and a task of its own [default: 1,4]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=64))]
    clients: Vec<u32>,
    /// Pairs of legs a row [default: 9; with --quick 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: Option<u32>,
    /// Milliseconds a leg [default: 400; with --quick as many of them as fit]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    leg_ms: Option<u64>,
}

const HELP: &str = "\
Paths:
  tcp            the data plane over TCP; the receiver verifies every chunk
  unix           the same over the node's Unix socket
  local_inplace  a lease: the part is read where it lies, one byte a chunk is touched, and it is released
  local_copy     get: a lease and a copy into an own buffer; put: through the staging area
Operations: get, put (always a fresh key), batch_get (64 parts of 1 MiB in one call)

The reference is the least work that a verified service can do: framed requests on the same runtime, 256 KiB
at a time, CRC-32 on both sides, slots instead of a catalog. For local_inplace it answers with an offset and
releases nothing; for local_copy a get is a bare memcpy and a put one copy into staging, one out of it.

Columns: ratios are ours / reference, the median of interleaved pairs with the middle half of them. cpu is
CPU seconds of client and server together for each GB (10^9 bytes): at most the goal. GB/s: at least the goal.
The node's arena is filled once over before each size, so every put evicts (LRU, watermarks 0.95 and 0.90);
the reference has slots of as much memory, and its puts go round in them.
verified in the JSON: the receiver checked every byte against its sums inside the measured time. Bytes that are
read in place were verified when they were committed.

A verdict is `unclear` where the goal lies inside the middle half. A row is `not judged` where the mean call of
either side took over 3 times its median: it measured stalls. Seen with small parts while threads move between
cores; why is not known. `taskset -c 0 larder-bench transfer --clients 1` had none, but gives both ends one core.

Examples:
  larder-bench transfer --quick
  larder-bench transfer --path tcp --op get --size 64,1024 --clients 1 --pairs 15
  larder-bench transfer --json target/bench/transfer.json";

/// Runs the bench and prints its table.
pub(crate) async fn run(args: &Args) -> Result<(), BenchError> {
    let plan = Plan::of(args);
    let dir = tempfile::tempdir().map_err(BenchError::io("make a folder for sockets and logs"))?;
    let node = Node::start(dir.path(), plan.arena_mib)?;
    let bar = report::progress(plan.cells().count());
    let fresh = Arc::new(AtomicU64::new(0));
    let (mut rows, mut cells_left) = (Vec::new(), plan.cells().count());
    let mut sizes_left = plan.sizes.len();
    for len in plan.sizes.iter().copied() {
        sizes_left -= 1;
        bar.set_message(format!("filling the arena with parts of {} KiB", len >> 10));
        let bench = OfOneSize::start(&plan, &node, len, &fresh, dir.path()).await?;
        for cell in plan.cells().filter(|cell| cell.len == len) {
            bar.set_message(cell.to_string());
            let timing = plan.timing(cells_left, sizes_left);
            rows.push(Row::new(cell, &bench.measure(cell, timing).await?));
            cells_left -= 1;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    rows.sort_by_key(|row| row.cell);
    println!("{}", rows::render(&rows, &plan));
    match &args.json {
        Some(path) => report::write_json(path, &rows),
        None => Ok(()),
    }
}

/// Both sides, holding parts of one size.
struct OfOneSize<'a> {
    node: &'a Node,
    reference: Child,
    reference_tcp: String,
    unix: PathBuf,
    shared: PathBuf,
    parts: Parts,
    _dir: tempfile::TempDir,
}

impl<'a> OfOneSize<'a> {
    async fn start(
        plan: &Plan,
        node: &'a Node,
        len: usize,
        fresh: &Arc<AtomicU64>,
        dir: &std::path::Path,
    ) -> Result<Self, BenchError> {
        let (count, slots) = (plan.parts_there(len), plan.parts_to_fill(len));
        let first = fresh.fetch_add(slots as u64, Ordering::Relaxed);
        let parts = Parts { len, first, slots, count, fresh: Arc::clone(fresh) };
        let dir = tempfile::tempdir_in(dir).map_err(BenchError::io("make a folder for sockets"))?;
        let args = [
            "reference".to_owned(),
            format!("--len={len}"),
            format!("--count={slots}"),
            format!("--first-part={first}"),
            format!("--dir={}", dir.path().display()),
        ];
        let this = std::env::current_exe().map_err(BenchError::io("find this program"))?;
        let mut reference = Child::start("reference", &this, &args, dir.path())?;
        // The two fill their memory at the same time.
        node.fill(&parts).await?;
        let reference_tcp = reference.announced("tcp")?;
        let unix = reference.announced("unix")?.into();
        let shared = reference.announced("shared")?.into();
        Ok(Self { node, reference, reference_tcp, unix, shared, parts, _dir: dir })
    }

    async fn measure(&self, cell: Cell, timing: Timing) -> Result<Pairs, BenchError> {
        let (mut tcp, mut unix, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        let (mut stream, mut local) = (Vec::new(), Vec::new());
        for _ in 0..cell.clients {
            let connecting = || BenchError::io("connect to the reference");
            match cell.path {
                Path::Tcp => {
                    stream.push(self.node.tcp().await?);
                    tcp.push(OverStream::tcp(&self.reference_tcp).await.map_err(connecting())?);
                }
                Path::Unix => {
                    stream.push(self.node.unix().await?);
                    unix.push(OverStream::unix(&self.unix).await.map_err(connecting())?);
                }
                Path::LocalInplace | Path::LocalCopy => {
                    let copying = cell.path == Path::LocalCopy;
                    local.push(self.node.local(copying).await?);
                    let client = OverMemory::connect(&self.shared, cell.len, copying).await;
                    memory.push(client.map_err(connecting())?);
                }
            }
        }
        match cell.path {
            Path::Tcp => self.pairs(cell, timing, stream, tcp).await,
            Path::Unix => self.pairs(cell, timing, stream, unix).await,
            Path::LocalInplace | Path::LocalCopy => self.pairs(cell, timing, local, memory).await,
        }
    }

    /// Interleaved pairs, the first leg of each by turns. One short pair before warms both sides up.
    async fn pairs<A: Client, B: Client>(
        &self,
        cell: Cell,
        timing: Timing,
        ours: Vec<A>,
        reference: Vec<B>,
    ) -> Result<Pairs, BenchError> {
        let (node, other) = (&self.node.process, &self.reference);
        let began = Instant::now();
        let mut ours: Vec<Member<A>> = ours.into_iter().map(Member::from).collect();
        let mut reference: Vec<Member<B>> = reference.into_iter().map(Member::from).collect();
        let mut pairs = Pairs::default();
        for turn in 0..=timing.pairs {
            if turn > MIN_PAIRS && began.elapsed() > timing.whole {
                break;
            }
            let length = if turn == 0 { timing.leg / 8 } else { timing.leg };
            let (op, parts) = (cell.op, &self.parts);
            let (a, b);
            if turn % 2 == 0 {
                a = run_leg(&mut ours, node, op, parts, length).await?;
                b = run_leg(&mut reference, other, op, parts, length).await?;
            } else {
                b = run_leg(&mut reference, other, op, parts, length).await?;
                a = run_leg(&mut ours, node, op, parts, length).await?;
            }
            if turn > 0 {
                pairs.push(a, b);
            }
        }
        check(&mut ours).await?;
        check(&mut reference).await?;
        Ok(pairs)
    }
}
