//! Rows of the table and of the JSON file.

use super::{Args, Column, Contender, Hits, columns, range::Range};
use crate::report::table;
use serde::Serialize;

/// How far below the best the default policy may be, in points of prefix hits.
const GOAL: f64 = 0.6;
/// The default of `dram.policy`.
const DEFAULT: Contender = Contender::S3Fifo;

/// One measured row. The fields are an interface: the names of the JSON rows.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    trace: String,
    range: String,
    blocks: u32,
    policy: Contender,
    /// It was told of the ends of sessions.
    hints: bool,
    prefix_hit_pct: f64,
}

impl Row {
    pub(super) fn new(trace: &str, range: Range, blocks: u32, column: Column, hits: Hits) -> Self {
        let (trace, range) = (trace.to_owned(), range.to_string());
        let Column { policy, hints } = column;
        Self { trace, range, blocks, policy, hints, prefix_hit_pct: hits.percent() }
    }
}

/// A line of the table: one trace and size, all policies.
fn cells(rows: &[Row]) -> Vec<String> {
    let first = &rows[0];
    let mut cells = vec![first.trace.clone(), first.range.clone(), first.blocks.to_string()];
    cells.extend(rows.iter().map(|row| format!("{:.2}", row.prefix_hit_pct)));
    let online = rows.iter().filter(|row| row.policy != Contender::Belady && !row.hints);
    let best = online.map(|row| row.prefix_hit_pct).fold(0.0, f64::max);
    let default = rows.iter().find(|row| row.policy == DEFAULT && !row.hints);
    cells.push(default.map_or_else(String::new, |row| {
        let behind = row.prefix_hit_pct - best;
        format!("{behind:+.2} {}", if behind >= -GOAL { "met" } else { "missed" })
    }));
    cells
}

/// The table and what else there is to say.
pub(super) fn render(rows: &[Row], args: &Args) -> String {
    let columns = columns(args);
    let names = columns.iter().map(|column| match (column.policy, column.hints) {
        (Contender::S3Fifo, false) => "s3fifo",
        (Contender::Lru, false) => "lru",
        (Contender::Gdsf, false) => "gdsf",
        (Contender::Belady, _) => "belady",
        (Contender::S3Fifo, true) => "s3fifo + hints",
        (Contender::Lru, true) => "lru + hints",
        (Contender::Gdsf, true) => "gdsf + hints",
    });
    let goal = format!("default to best, >= -{GOAL}");
    let headers: Vec<&str> =
        ["trace", "range", "blocks"].into_iter().chain(names).chain([goal.as_str()]).collect();
    let lines = rows.chunks(columns.len()).map(cells).collect();
    let begin = match args.range {
        Range::All | Range::FirstHalf => "the cache starts empty, and that counts",
        Range::SecondHalf | Range::Seconds(..) => {
            "the cache is warm: what came before the range ran first and is not counted"
        }
    };
    format!(
        "{}\n\nprefix hits in per cent of blocks asked for; {begin}; belady knows the future",
        table(&headers, 2, lines)
    )
}
