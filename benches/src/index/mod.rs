//! Question: how many keys does a master look up, at which cost in memory and CPU?
//!
//! `in_process` asks the index itself, on one thread. `wire` asks a real `larder-master` through `MatchPrefix`; a
//! simulated node fills it through a real session, events, digests and all. Every answer is checked: a match that
//! is shorter than its chain ends the bench.

mod in_process;
mod lookups;
mod node;
mod rows;
mod wire;

use crate::{allocator, budget::Budget, error::BenchError, report};
use larder_proto::{ContentFingerprint, LayoutFingerprint, ModelVersion};
use rows::Row;
use std::{path::PathBuf, time::Duration};
use tokio::time::Instant;

/// The model version of all blocks of the bench.
const MODEL: ModelVersion = ModelVersion {
    content: ContentFingerprint::from_bytes([0xbe; 32]),
    layout: LayoutFingerprint::from_bytes([0x1d; 32]),
};

/// Where lookups are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
enum Where {
    InProcess,
    Wire,
}

/// `larder-bench index`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// End within 60 seconds: shorter slices; sizes that do not fit the time are left out, and said so
    #[arg(long)]
    quick: bool,
    /// Write the rows to this file as a JSON list
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only here
    #[arg(long = "where", value_name = "WHERE", value_delimiter = ',', default_values = ["in_process", "wire"])]
    places: Vec<Where>,
    /// Entries in the index, each a block of one part at one node; in rising order
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [100_000, 1_000_000, 10_000_000], value_parser = clap::value_parser!(u64).range(16_384..=500_000_000))]
    entries: Vec<u64>,
    /// Keys of one call
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 64, 1000], value_parser = clap::value_parser!(u32).range(1..=16_384))]
    keys: Vec<u32>,
    /// Connections to the master
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 4], value_parser = clap::value_parser!(u32).range(1..=64))]
    connections: Vec<u32>,
    /// Calls in flight on each connection
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    in_flight: u32,
    /// Slices of time a row; figures are medians over them
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    slices: u32,
    /// Milliseconds a slice [default: 500; with --quick at most 150]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    slice_ms: Option<u64>,
}

const HELP: &str = "\
A call matches a chain of so many keys, all held by one node; chains are drawn at random from all entries.
bytes/entry: in_process what the allocator counts, all in; wire the growth of the master's resident memory.
CPU is that of the master process (wire) or of the one thread that asks (in_process, where connections is 1).
p99 is that of a call; over the wire with --in-flight calls waiting on each connection.

Examples:
  larder-bench index --quick
  larder-bench index --where wire --entries 1000000 --keys 64 --connections 1 --slices 15
  larder-bench index --json target/bench/index.json";

/// What every measurement needs to know.
#[derive(Debug)]
struct Plan<'a> {
    args: &'a Args,
    /// In rising order.
    entries: Vec<u64>,
    budget: Budget,
    /// Time of a slice, if there is enough.
    wanted: Duration,
}

impl Plan<'_> {
    /// The time of a slice, when so many rows are still to be measured and `reserved` goes to other things.
    fn slice(&self, rows_left: usize, reserved: Duration) -> Duration {
        let steps = rows_left * self.args.slices as usize;
        self.budget
            .share(Instant::now(), steps, reserved, self.wanted)
            .max(Duration::from_millis(10))
    }

    fn rows_in_process(&self) -> usize {
        self.args.keys.len()
    }

    fn rows_over_wire(&self) -> usize {
        self.args.keys.len() * self.args.connections.len()
    }
}

/// Runs the bench and prints its table.
pub(crate) async fn run(args: &Args) -> Result<(), BenchError> {
    allocator::start();
    let mut entries = args.entries.clone();
    entries.sort_unstable();
    entries.dedup();
    let slice_ms = args.slice_ms.unwrap_or(if args.quick { 150 } else { 500 });
    let wanted = Duration::from_millis(slice_ms);
    let plan = Plan { args, entries, budget: Budget::start(args.quick, Instant::now()), wanted };
    let (here, there) = (wants(args, Where::InProcess), wants(args, Where::Wire));
    let rows_per_size = if here { plan.rows_in_process() } else { 0 }
        + if there { plan.rows_over_wire() } else { 0 };
    let bar = report::progress(rows_per_size * plan.entries.len());
    let (mut rows, mut notes) = (Vec::new(), Vec::new());
    if here {
        in_process::measure(&plan, there, &bar, &mut rows)?;
    }
    if there {
        wire::measure(&plan, &bar, &mut rows, &mut notes).await?;
    }
    bar.finish_and_clear();
    println!("{}", rows::render(&rows, &notes, args));
    match &args.json {
        Some(path) => report::write_json(path, &rows),
        None => Ok(()),
    }
}

fn wants(args: &Args, place: Where) -> bool {
    args.places.contains(&place)
}
