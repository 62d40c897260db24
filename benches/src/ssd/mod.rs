//! Question: how much of the disk does the ssd tier reach, beside `fio`? And pushed beyond that, does it keep
//! every word it gave?
//!
//! Legs of the tier write and read records, every one proven; then parts are put as fast as memory takes them,
//! and each that was announced on the ssd is read back and compared.
//!
//! `--raw` measures the driver of the tier alone: the same file, offsets, lengths and depth as `fio` with io_uring
//! and direct I/O, in interleaved pairs of legs. Both write the file that both read: where it lies on the disk
//! falls on both sides alike. Every block that ours reads has to carry the stamp that ours wrote there, and the
//! whole file is compared once before the reads; wrong bytes end the bench.

mod disk;
mod fio;
mod plan;
mod rows;
mod tier;

use crate::{
    error::BenchError,
    figures::{Leg, Pairs},
    report,
};
use disk::Disk;
use fio::Fio;
use larder_store_node::tiers::ssd::io::DriverChoice;
use plan::{Cell, Op, Plan};
use rows::Row;
use std::{future::Future, path::PathBuf, time::Duration};
use tier::{Pushed, SEGMENT, Tier};

/// `larder-bench ssd`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Measure the driver alone, without catalog, records and checksums
    #[arg(long)]
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
    /// With --raw: lock our memory once for all requests, not once a request, as the tier does
    #[arg(long, requires = "raw")]
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
The reference is fio: --ioengine=io_uring --direct=1, sequential, on the same file, its memory in huge pages as
ours (GLIBC_TUNABLES=glibc.malloc.hugetlb=1). Install it with `apt-get install fio`. The file is set aside and written once over before anything is measured, so writes
overwrite: a file that was only set aside is slower to write, on both sides.

Columns: ratios are ours / fio, the median of interleaved pairs with the middle half of them; the goal is on
GB/s. cpu is CPU seconds for each GB (10^9 bytes), of this process, and of fio as it states them itself.
A disk of a virtual machine may be a cache of its host: a longer file (--file-mib) shows that.

The tier lies in a folder of its own beside that file and takes as much room, at least 2 GiB, all of it written
once before anything is measured: segments of 256 MiB, no fsync
(durability none), memory locked once; fio reads the same segment files. Its writes and reads count the bytes of parts, not of headers and footers,
and its CPU includes checksums. After the writes of a row parts are put as fast as memory takes them, three
eighths of what the path holds: keys_committed were announced on the ssd, keys_refused the write queue (depth x size) had no
room for, keys_readable are those committed that were read back from the ssd with every byte right. With --raw
they are null.

Examples:
  larder-bench ssd --quick --dir /mnt/nvme0
  larder-bench ssd --raw --op read --size 1024 --depth 8 --pairs 15
  larder-bench ssd --raw --driver threads --json target/bench/ssd-threads.json";

/// Runs the bench and prints its table.
pub(crate) async fn run(args: &Args) -> Result<(), BenchError> {
    let plan = Plan::of(args);
    let fio = Fio::find().await?;
    let disk = Disk::start(&args.dir, args.driver.choice(), args.register, &plan).await?;
    let bar = report::progress(plan.cells().count());
    let mut bench = Bench { plan, fio, disk, stamped: true, cells_left: 0 };
    bench.cells_left = bench.plan.cells().count();
    let mut rows = Vec::new();
    for cell in bench.plan.cells().collect::<Vec<_>>() {
        bar.set_message(cell.to_string());
        let row = match args.raw {
            true => bench.raw(cell).await?,
            false => bench.tier(cell, args).await?,
        };
        rows.push(row);
        bench.cells_left -= 1;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let Bench { plan, fio, disk, .. } = bench;
    println!("{}", rows::render(&rows, &plan, &disk, &fio));
    disk.remove().await?;
    match &args.json {
        Some(path) => report::write_json(path, &rows),
        None => Ok(()),
    }
}

struct Bench {
    plan: Plan,
    fio: Fio,
    disk: Disk,
    /// The file holds what ours reads: until `fio` writes.
    stamped: bool,
    /// Cells that are still to be measured, the next one included.
    cells_left: usize,
}

impl Bench {
    async fn raw(&mut self, cell: Cell) -> Result<Row, BenchError> {
        if cell.op == Op::Read && !self.stamped {
            self.disk.fill().await?;
            self.stamped = true;
        }
        self.stamped &= cell.op == Op::Read;
        self.disk.reopen(cell.depth).await?;
        let file = [self.disk.path()];
        let reference = |length| self.fio.leg(cell, length, &file, self.plan.file_len);
        let pairs = self.pairs(|length| self.disk.leg(cell, length), reference).await?;
        Ok(Row::new(cell, &pairs, None))
    }

    async fn tier(&self, cell: Cell, args: &Args) -> Result<Row, BenchError> {
        let queue = cell.depth * cell.len;
        let driver = args.driver.choice();
        let mut tier = Tier::start(&args.dir, driver, &self.plan, queue).await?;
        tier.write_once_over(cell).await?;
        let (mut files, mut size) = (vec![self.disk.path()], self.plan.file_len);
        if cell.op == Op::Read {
            // Both read the same files: where they lie on the disk falls on both sides alike.
            tier.fill(cell).await?;
            files = tier.files()?;
            size = SEGMENT * files.len() as u64;
        }
        let reference = |length| self.fio.leg(cell, length, &files, size);
        let pairs = self.pairs(|length| tier.leg(cell, length), reference).await?;
        let pushed: Option<Pushed> = match cell.op {
            Op::Write => Some(tier.push(cell).await?),
            Op::Read => None,
        };
        tier.remove().await?;
        Ok(Row::new(cell, &pairs, pushed))
    }

    /// Interleaved pairs, the first leg of each by turns. One short pair before warms both sides up.
    async fn pairs<A, B>(
        &self,
        ours: impl Fn(Duration) -> A,
        reference: impl Fn(Duration) -> B,
    ) -> Result<Pairs, BenchError>
    where
        A: Future<Output = Result<Leg, BenchError>>,
        B: Future<Output = Result<Leg, BenchError>>,
    {
        let leg = self.plan.leg(self.cells_left);
        let mut pairs = Pairs::default();
        for turn in 0..=self.plan.pairs {
            let length = if turn == 0 { leg / 4 } else { leg };
            let (a, b);
            if turn % 2 == 0 {
                a = ours(length).await?;
                b = reference(length).await?;
            } else {
                b = reference(length).await?;
                a = ours(length).await?;
            }
            if turn > 0 {
                pairs.push(a, b);
            }
        }
        Ok(pairs)
    }
}
