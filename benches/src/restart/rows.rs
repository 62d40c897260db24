//! Rows of the table and of the JSON file.

use super::{Sizes, What, plain::PlainRead};
use crate::{
    error::BenchError,
    figures::Spread,
    report::{Goal, table},
};
use serde::Serialize;
use std::time::Duration;

/// Of what was on the ssd, in percent.
const SERVED: Goal = Goal::at_least(100.0);
/// Seconds for at least so many records.
const ADOPTED: (Goal, u64) = (Goal::at_most(2.0), 1_000_000);

/// What was seen of the life after the kill.
#[derive(Debug)]
pub(super) struct Warm {
    /// From the start of the process.
    pub(super) first_answer: Option<Duration>,
    /// From the start of the process.
    pub(super) adopted: Duration,
    /// Of the node, until all was adopted.
    pub(super) cpu_seconds: f64,
    pub(super) served: u64,
}

/// One measured restart. The fields are an interface: the names of the JSON rows.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    what: What,
    records: u64,
    size_bytes: usize,
    segment_bytes: u64,
    first_answer_ms: Option<f64>,
    adopted_ms: f64,
    cpu_s: f64,
    plain_read_ms: f64,
    plain_read_bytes: u64,
    served: u64,
    served_pct: f64,
    goal: String,
}

impl Row {
    /// Reads the reference, too: no node may run.
    pub(super) fn new(
        what: What,
        records: u64,
        sizes: Sizes,
        warm: &Warm,
        plain: &PlainRead,
    ) -> Result<Self, BenchError> {
        let read = plain.run().map_err(BenchError::io("read the segments plainly"))?;
        let served_pct = percent(warm.served, records);
        Ok(Self {
            what,
            records,
            size_bytes: sizes.len,
            segment_bytes: sizes.segment_bytes,
            first_answer_ms: warm.first_answer.map(millis),
            adopted_ms: millis(warm.adopted),
            cpu_s: warm.cpu_seconds,
            plain_read_ms: millis(read),
            plain_read_bytes: plain.bytes(),
            served: warm.served,
            served_pct,
            goal: goal(what, records, served_pct, warm.adopted),
        })
    }

    fn cells(&self) -> Vec<String> {
        let what = match self.what {
            What::Records => "records",
            What::Footers => "footers",
        };
        let first = self.first_answer_ms.map_or("-".to_owned(), |ms| format!("{ms:.0}"));
        vec![
            what.to_owned(),
            self.records.to_string(),
            format!("{} KiB", self.size_bytes >> 10),
            first,
            format!("{:.0}", self.adopted_ms),
            format!("{:.2}", self.cpu_s),
            format!("{:.0}", self.plain_read_ms),
            (self.plain_read_bytes >> 20).to_string(),
            self.served.to_string(),
            format!("{:.3}", self.served_pct),
            self.goal.clone(),
        ]
    }
}

fn goal(what: What, records: u64, served_pct: f64, adopted: Duration) -> String {
    let served = format!("% {}", SERVED.verdict(Spread::exactly(served_pct)));
    match (what, ADOPTED) {
        (What::Footers, (seconds, of)) if records >= of => {
            let reached = seconds.verdict(Spread::exactly(adopted.as_secs_f64()));
            format!("s {reached}; {served}")
        }
        _ => served,
    }
}

/// The table, and what holds for all rows.
pub(super) fn render(rows: &[Row]) -> String {
    let headers = [
        "what",
        "records",
        "size",
        "first answer ms",
        "adopted ms",
        "CPU s",
        "plain read ms",
        "MiB",
        "served",
        "%",
        "goals",
    ];
    let segment_mib = rows.first().map_or(0, |row| row.segment_bytes >> 20);
    format!(
        "{}\n\nsegments of {segment_mib} MiB; times from the start of the process after kill -9",
        table(&headers, 1, rows.iter().map(Row::cells).collect())
    )
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn percent(of: u64, all: u64) -> f64 {
    of as f64 / all as f64 * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_record_of_a_million_that_is_gone_misses_the_goal() {
        let said = |served, seconds| {
            let served_pct = percent(served, 1_000_000);
            goal(What::Footers, 1_000_000, served_pct, Duration::from_secs(seconds))
        };
        assert_eq!(said(1_000_000, 1), "s <= 2 met; % >= 100 met");
        assert_eq!(said(999_999, 3), "s <= 2 missed; % >= 100 missed");
    }
}
