//! Question: how much of the prompts of a real day would a node of a given size find, under each eviction policy?
//!
//! Requests of a trace go one after the other through a cache of so many blocks that keeps the catalog's rules and
//! asks the node's own policy code what goes. No bytes, no time: only order matters. Hits are those of the leading
//! run of blocks that are here, since only these save prefill.

mod belady;
mod cache;
mod range;
mod rows;
mod sessions;
#[cfg(test)]
mod tests;
mod trace;

pub(crate) use trace::TraceError;

use crate::{error::BenchError, report};
use cache::Cache;
use indicatif::ProgressBar;
use larder_store_node::eviction::PolicyName;
use range::Range;
use rows::Row;
use std::{ops, path::PathBuf};
use trace::{Format, Trace};

/// What decides what goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
enum Contender {
    S3Fifo,
    Lru,
    Gdsf,
    Belady,
}

/// `larder-bench replay`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Request traces
    #[arg(required = true, value_name = "FILE")]
    traces: Vec<PathBuf>,
    /// How they are written [default: as their first line looks]
    #[arg(long, value_name = "FORMAT")]
    format: Option<Format>,
    /// Sizes of the cache, in blocks
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1000, 5000, 20_000, 50_000], value_parser = clap::value_parser!(u32).range(1..))]
    sizes: Vec<u32>,
    /// Requests that count: all, first-half, second-half or A..B in seconds since the first request
    #[arg(long, value_name = "RANGE", default_value = "all")]
    range: Range,
    /// Only these
    #[arg(long = "policy", value_name = "POLICY", value_delimiter = ',', default_values = ["s3fifo", "lru", "gdsf", "belady"])]
    policies: Vec<Contender>,
    /// Show besides what each policy finds when it is told that a session is over, as far as that can be inferred
    /// from the chains
    #[arg(long)]
    hints: bool,
    /// Write the rows to this file as a JSON list
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const HELP: &str = "\
Figures are per cent of the blocks that requests asked for: those of the leading run of each request that was there.
Requests before the range run first and are not counted, so a later range starts with a warm cache; halves are halves
of the time. belady knows the future: it evicts what is asked for last, and of what is asked for by one request
the deepest block, so it too goes tail first; no policy that takes in every block finds more.

--hints: a request goes on with the session whose last request it extends, up to the last block, which may have
been incomplete. After a session's last request in the trace the cache is told that it is over. So this is the
most that such hints can bring: clients that always know when a session ends.

Formats: mooncake and bailian are JSON lines with a timestamp (milliseconds, seconds) and hash_ids; plain is one
request a line, its seconds and then its block ids. Equal ids are equal prefixes. Repeats in a request count once.

Examples:
  larder-bench replay conversation_trace.jsonl
  larder-bench replay --range second-half --sizes 5000 --policy s3fifo,lru trace.jsonl --json rows.json";

/// Runs the bench and prints its table.
pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let mut rows = Vec::new();
    for path in &args.traces {
        let trace = Trace::read(path, args.format)?;
        let counted = args.range.of(&trace);
        if counted.is_empty() {
            return Err(TraceError::EmptyRange { path: path.clone() }.into());
        }
        let columns = columns(args);
        let last_of_sessions = sessions::last_requests(&trace);
        let runs = args.sizes.len() * columns.len();
        let bar = report::progress(runs * counted.end);
        for blocks in &args.sizes {
            for column in &columns {
                bar.set_message(format!("{}, {blocks} blocks", trace.name));
                let closing = if column.hints { last_of_sessions.as_slice() } else { &[] };
                let hits = replay(&trace, &counted, *blocks, column.policy, closing, &bar);
                rows.push(Row::new(&trace.name, args.range, *blocks, *column, hits));
            }
        }
        bar.finish_and_clear();
    }
    println!("{}", rows::render(&rows, args));
    match &args.json {
        Some(path) => report::write_json(path, &rows),
        None => Ok(()),
    }
}

/// Blocks that were asked for, and those of them that were found.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Hits {
    found: u64,
    asked: u64,
}

impl Hits {
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    fn percent(self) -> f64 {
        100.0 * self.found as f64 / self.asked.max(1) as f64
    }
}

/// A policy, told of the ends of sessions or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Column {
    policy: Contender,
    hints: bool,
}

/// In the order of the table.
fn columns(args: &Args) -> Vec<Column> {
    let of =
        |hints: bool| args.policies.iter().map(move |policy| Column { policy: *policy, hints });
    let hinted = of(true).filter(|column| args.hints && column.policy != Contender::Belady);
    of(false).chain(hinted).collect()
}

/// Runs the requests up to the end of `counted`. `closing`: of each request, whether its session is over after it.
fn replay(
    trace: &Trace,
    counted: &ops::Range<usize>,
    blocks: u32,
    contender: Contender,
    closing: &[bool],
    bar: &ProgressBar,
) -> Hits {
    let capacity = blocks as usize;
    let name = match contender {
        Contender::S3Fifo => PolicyName::S3Fifo,
        Contender::Lru => PolicyName::Lru,
        Contender::Gdsf => PolicyName::Gdsf,
        Contender::Belady => {
            let mut cache = belady::Belady::new(trace, capacity);
            return count(trace, counted, bar, |at, blocks| cache.request(at, blocks));
        }
    };
    let mut cache = Cache::new(name.build(), trace.blocks, capacity);
    count(trace, counted, bar, |at, blocks| {
        let found = cache.request(blocks);
        if closing.get(at) == Some(&true) {
            cache.close(blocks);
        }
        found
    })
}

/// Makes the requests, each of which says how many of its leading blocks were there.
fn count(
    trace: &Trace,
    counted: &ops::Range<usize>,
    bar: &ProgressBar,
    mut request: impl FnMut(usize, &[u32]) -> usize,
) -> Hits {
    let mut hits = Hits::default();
    for (at, asked) in trace.requests[..counted.end].iter().enumerate() {
        let found = request(at, &asked.blocks);
        if counted.contains(&at) {
            hits.found += found as u64;
            hits.asked += asked.blocks.len() as u64;
        }
        bar.inc(1);
    }
    hits
}
