//! Question: how fast is a store node warm again after kill -9, and how much of what it had is served?
//!
//! `records` puts real records, kills a real `larder-node`, starts it again on the same folders, and reads back every
//! record that was on the ssd before; every byte is compared, and wrong bytes end the bench. `footers` shows how
//! adoption scales: segment files that are sparse but for header, footer and trailer, made with the tier's own
//! encoders, are adopted by a real node; every key is looked up afterwards.

mod footers;
mod node;
mod parts;
mod plain;
mod records;
mod rows;

use crate::{error::BenchError, report};
use rows::Row;
use std::path::PathBuf;

/// What a node is to find again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum What {
    Records,
    Footers,
}

/// `larder-bench restart`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// End within 60 seconds: a tenth of the records, and shorter segments
    #[arg(long)]
    quick: bool,
    /// Write the rows to this file as a JSON list
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// A folder on the disk to measure; folders of the bench's own are made in it and removed
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Only these rows
    #[arg(long, value_name = "WHAT", value_delimiter = ',', default_values = ["records", "footers"])]
    what: Vec<What>,
    /// Records to put and to read back [default: 100000; with --quick 10000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(100..=100_000_000))]
    records: Option<u64>,
    /// Records that the synthetic footers name [default: 1000000; with --quick 100000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(100..=100_000_000))]
    footers: Option<u64>,
    /// Bytes of a record's payload, in KiB
    #[arg(long, value_name = "KIB", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    size_kib: u32,
    /// MiB of a segment [default: 256, as a node has it; with --quick 32]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(16..=4096))]
    segment_mib: Option<u32>,
}

const HELP: &str = "\
Rows:
  records  real records: put over the node's socket, written to the ssd, the node killed with SIGKILL, started again
  footers  synthetic footers without payloads: how long it takes to know so many records again

Columns: times count from the start of the process, so they include its memory and its sockets.
first answer: the first of 16 records, spread evenly over all, that is read with the right bytes; footers have none.
adopted: all segments are adopted, those without a footer (the open one and the one made ready) record by record.
CPU s: CPU seconds of the node until then. served: records that are read back with the right bytes, of those that
were on the ssd before the kill; of footers, keys that a lookup finds on the ssd.
plain read is the reference: one thread reads what adoption cannot do without (header, footer and trailer of sealed
segments, all of the others) through an emptied page cache, after the node was measured; it looks at nothing.
The disk of a virtual machine may be a cache of its host: neither side is colder than that.
Goals: all that was on the ssd is served; 1000000 footers are adopted within 2 seconds (fewer are not judged).

Examples:
  larder-bench restart --quick --dir /mnt/nvme0
  larder-bench restart --what footers --footers 4000000
  larder-bench restart --what records --records 20000 --size-kib 256 --json target/bench/restart.json";

/// How large everything is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) records: u64,
    /// Bytes of a payload.
    pub(super) len: usize,
    /// Bytes of a segment.
    pub(super) segment_bytes: u64,
}

/// Runs the bench and prints its table.
pub(crate) async fn run(args: &Args) -> Result<(), BenchError> {
    let (records, footers, segment_mib) =
        if args.quick { (10_000, 100_000, 32) } else { (100_000, 1_000_000, 256) };
    let sizes = |records| Sizes {
        records,
        len: args.size_kib as usize * 1024,
        segment_bytes: u64::from(args.segment_mib.unwrap_or(segment_mib)) << 20,
    };
    let bar = report::progress(args.what.len());
    let mut rows = Vec::<Row>::new();
    for what in &args.what {
        rows.push(match what {
            What::Records => {
                let sizes = sizes(args.records.unwrap_or(records));
                records::measure(&args.dir, sizes, &bar).await?
            }
            What::Footers => {
                let sizes = sizes(args.footers.unwrap_or(footers));
                footers::measure(&args.dir, sizes, &bar).await?
            }
        });
        bar.inc(1);
    }
    bar.finish_and_clear();
    println!("{}", rows::render(&rows));
    match &args.json {
        Some(path) => report::write_json(path, &rows),
        None => Ok(()),
    }
}
