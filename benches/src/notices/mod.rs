//! Question: how soon does the index know what a node evicted, and is it right in the end?
//!
//! A real `larder-master` and a real `larder-node`. Clients put chains of blocks as fast as the node takes them;
//! its memory is full, so every put evicts. The node itself times the way of its changes to the master's
//! acknowledgement. Then nothing happens for a while, and every block of the run is asked for on both sides.

mod check;
mod cluster;
mod lag;
mod load;
mod rows;

use crate::{error::BenchError, report};
use cluster::Cluster;
use larder_proto::{ContentFingerprint, LayoutFingerprint, ModelVersion};
use load::Load;
use rows::Row;
use std::{path::PathBuf, time::Duration};
use tokio::time::{Instant, sleep};

/// The model version of all blocks of the bench.
const MODEL: ModelVersion = ModelVersion {
    content: ContentFingerprint::from_bytes([0xbe; 32]),
    layout: LayoutFingerprint::from_bytes([0x0e; 32]),
};
/// How long the node may take until it is full.
const FILL_LIMIT: Duration = Duration::from_secs(60);
/// How often the node is asked meanwhile.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// `larder-bench notices`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// End within 60 seconds: 8 seconds of puts, 5 of quiet
    #[arg(long)]
    quick: bool,
    /// Write the rows to this file as a JSON list
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Give the node an ssd tier as well, so small that it evicts too; everything is offered to it
    #[arg(long)]
    ssd: bool,
    /// A folder for state, logs and the ssd tier; a folder of the bench's own is made in it and removed
    /// [default: that of the system for temporary files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Seconds of puts, once the node is full [default: 30; with --quick 8]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: Option<u64>,
    /// Seconds without puts before both sides are compared [default: 60; with --quick 5]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(0..=3600))]
    quiet: Option<u64>,
    /// Clients on the node's socket, each with one put at a time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    clients: u32,
    /// Blocks of a chain
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=1024))]
    chain: u64,
    /// KiB of a block
    #[arg(long, value_name = "KIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    block_kib: u32,
    /// MiB of the node's dram tier. It has to hold the chains that are being put, several times over
    #[arg(long, value_name = "MIB", default_value_t = 128, value_parser = clap::value_parser!(u64).range(16..=65_536))]
    dram_mib: u64,
}

const HELP: &str = "\
lag: from the moment a change is logged on the node to the master's acknowledgement that covers it,
  in larder_node_notice_lag_seconds of the node's /metrics. The first change after all were read and
  one in 64 are timed; those up to the next timed one count with it, though they waited less. Quantiles are
  interpolated within its buckets (... 20, 50, 100, 200 ms ...): against 100 ms they are exact.
  Every step of the way waits for a core, so a machine that is busy with other things shows here.
evictions: blocks that left the dram tier, whether or not a copy stays on the ssd.
After the quiet time every key that was put is asked for, of the master (Locate) and of the node:
orphans: the index says that the node holds the block, and it does not.
missing: the node holds the block, and the index does not know.
holes: blocks that are not there between a stored one and a stored descendant of it: the node's own
  audit, or what the answers of the node show, whichever finds more.

Examples:
  larder-bench notices --quick
  larder-bench notices --ssd --dir /mnt/nvme0 --seconds 120
  larder-bench notices --clients 16 --block-kib 4 --json target/bench/notices.json";

/// Runs the bench and prints its table.
pub(crate) async fn run(args: &Args) -> Result<(), BenchError> {
    let of = |given: Option<u64>, long, quick| {
        Duration::from_secs(given.unwrap_or(if args.quick { quick } else { long }))
    };
    let (seconds, quiet) = (of(args.seconds, 30, 8), of(args.quiet, 60, 5));
    let bar = report::progress(4);
    let step = |text: String| {
        bar.inc(1);
        bar.set_message(text);
    };

    bar.set_message("starting a master and a node");
    let mut cluster = Cluster::start(args).await?;
    let mut load = Load::start(args, cluster.socket()).await?;
    step("filling the node".to_owned());
    let full = Instant::now() + FILL_LIMIT;
    while cluster.figures().await?.evictions() == 0 {
        load.check()?;
        if Instant::now() > full {
            let answer = format!("it evicted nothing within {FILL_LIMIT:?}");
            return Err(BenchError::Answer { doing: "fill the node", answer });
        }
        sleep(ASK_EVERY).await;
    }

    step(format!("putting for {seconds:?}"));
    let (lag_before, before) = (cluster.lag().await?, cluster.figures().await?);
    let (began, put_before) = (Instant::now(), load.blocks());
    sleep(seconds).await;
    let (took, put) = (began.elapsed(), load.blocks() - put_before);
    let evicted = cluster.figures().await?.since(&before);
    let put_in_all = load.stop().await?;

    step(format!("quiet for {quiet:?}"));
    sleep(quiet).await;
    // Only now: changes whose acknowledgement was late count, too.
    let lag = cluster.lag().await?.since(&lag_before);

    step(format!("asking for {} blocks", put_in_all.blocks));
    let differences = check::compare(&cluster, put_in_all.blocks, args.chain).await?;
    let audit = cluster.audit().await?;
    bar.finish_and_clear();
    let rows = [Row::new(args, took, put, &evicted, &lag, &audit, &differences)?];
    println!("{}", rows::render(&rows, &lag, &evicted, &put_in_all, &differences));
    match &args.json {
        Some(path) => report::write_json(path, &rows),
        None => Ok(()),
    }
}
