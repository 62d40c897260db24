//! Question: how much of the disk does the ssd tier reach, beside `fio`?
//!
//! `--raw` measures the driver of the tier alone: the same file, offsets, lengths and depth as `fio` with io_uring
//! and direct I/O, in interleaved pairs of legs. Both write the file that both read: where it lies on the disk
//! falls on both sides alike. Every block that ours reads has to carry the stamp that ours wrote there, and the
//! whole file is compared once before the reads; wrong bytes end the bench.

mod disk;
mod fio;
mod plan;
mod rows;

use crate::{error::BenchError, figures::Pairs, report};
use disk::Disk;
use fio::Fio;
use larder_store_node::tiers::ssd::io::DriverChoice;
use plan::{Cell, Op, Plan};
use rows::Row;
use std::path::PathBuf;

/// `larder-bench ssd`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Measure the driver alone, without catalog, records and checksums
    #[arg(long, required = true)]
    raw: bool,
    /// End within 60 seconds: a shorter file, fewer and shorter legs
    #[arg(long)]
    quick: bool,
    /// Write the rows to this file as a JSON list
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// A folder on the disk to measure; a folder of the bench's own is made in it and removed
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Only these operations
    #[arg(long, value_name = "OP", value_delimiter = ',')]
    op: Vec<Op>,
    /// Bytes of a request, in KiB
    #[arg(long, value_name = "KIB", value_delimiter = ',', default_values_t = [1024, 4096], value_parser = clap::value_parser!(u32).range(4..=65_536))]
    size: Vec<u32>,
    /// Requests in flight
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [8, 32], value_parser = clap::value_parser!(u32).range(1..=256))]
    depth: Vec<u32>,
    /// MiB of the file [default: 2048; with --quick 512]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    file_mib: Option<u32>,
    /// Pairs of legs a row [default: 9; with --quick 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: Option<u32>,
    /// Milliseconds a leg [default: 1000; with --quick as many of them as fit]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(100..=60_000))]
    leg_ms: Option<u64>,
    /// What carries our requests out
    #[arg(long, value_name = "DRIVER", default_value = "auto")]
    driver: Driver,
    /// Lock our memory once for all requests, not once a request
    #[arg(long)]
    register: bool,
}

/// What carries requests out.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Driver {
    /// io_uring, or threads where it cannot be used
    Auto,
    /// io_uring, or an error
    IoUring,
    /// A few threads that wait for the disk
    Threads,
}

impl Driver {
    fn choice(self) -> DriverChoice {
        match self {
            Self::Auto => DriverChoice::Auto,
            Self::IoUring => DriverChoice::IoUring,
            Self::Threads => DriverChoice::Threads,
        }
    }
}

const HELP: &str = "\
The reference is fio: --ioengine=io_uring --direct=1, sequential, on the same file. Install it with
`apt-get install fio`. The file is set aside and written once over before anything is measured, so writes
overwrite: a file that was only set aside is slower to write, on both sides.

Columns: ratios are ours / fio, the median of interleaved pairs with the middle half of them; the goal is on
GB/s. cpu is CPU seconds for each GB (10^9 bytes), of this process, and of fio as it states them itself.
A disk of a virtual machine may be a cache of its host: a longer file (--file-mib) shows that.
keys_* in the JSON belong to the whole tier and are null here.

Examples:
  larder-bench ssd --raw --quick --dir /mnt/nvme0
  larder-bench ssd --raw --op read --size 1024 --depth 8 --pairs 15
  larder-bench ssd --raw --driver threads --json target/bench/ssd-threads.json";

/// Runs the bench and prints its table.
pub(crate) async fn run(args: &Args) -> Result<(), BenchError> {
    let plan = Plan::of(args);
    let fio = Fio::find().await?;
    let mut disk = Disk::start(&args.dir, args.driver.choice(), args.register, &plan).await?;
    let bar = report::progress(plan.cells().count());
    let mut cells_left = plan.cells().count();
    let mut rows = Vec::new();
    let mut stamped = true; // Until fio writes.
    for cell in plan.cells() {
        if cell.op == Op::Read && !stamped {
            bar.set_message("writing the file again");
            disk.fill().await?;
            stamped = true;
        }
        stamped &= cell.op == Op::Read;
        bar.set_message(cell.to_string());
        disk.reopen(cell.depth).await?;
        rows.push(Row::new(cell, &measure(cell, &plan, cells_left, &disk, &fio).await?));
        cells_left -= 1;
        bar.inc(1);
    }
    bar.finish_and_clear();
    println!("{}", rows::render(&rows, &plan, &disk, &fio));
    disk.remove().await?;
    match &args.json {
        Some(path) => report::write_json(path, &rows),
        None => Ok(()),
    }
}

/// Interleaved pairs, the first leg of each by turns. One short pair before warms both sides up.
async fn measure(
    cell: Cell,
    plan: &Plan,
    cells_left: usize,
    disk: &Disk,
    fio: &Fio,
) -> Result<Pairs, BenchError> {
    let leg = plan.leg(cells_left);
    let mut pairs = Pairs::default();
    for turn in 0..=plan.pairs {
        let length = if turn == 0 { leg / 4 } else { leg };
        let (ours, reference);
        if turn % 2 == 0 {
            ours = disk.leg(cell, length).await?;
            reference = fio.leg(cell, length, &disk.path(), plan.file_len).await?;
        } else {
            reference = fio.leg(cell, length, &disk.path(), plan.file_len).await?;
            ours = disk.leg(cell, length).await?;
        }
        if turn > 0 {
            pairs.push(ours, reference);
        }
    }
    Ok(pairs)
}
