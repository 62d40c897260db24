//! Rows of the table and of the JSON file.

use super::{Args, Where, lookups::Lookups};
use crate::{
    figures::Spread,
    report::{Goal, table},
};
use serde::Serialize;

/// One measured row. The fields are an interface: the names of the JSON rows.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    #[serde(rename = "where")]
    place: Where,
    entries: u64,
    bytes_per_entry: f64,
    keys_per_call: u32,
    connections: u32,
    keys_per_s: f64,
    keys_per_master_cpu_s: f64,
    p99_us: f64,
    #[serde(skip)]
    rate: Spread,
    #[serde(skip)]
    rate_of_cpu: Spread,
}

impl Row {
    pub(super) fn new(place: Where, entries: u64, bytes_per_entry: f64, lookups: &Lookups) -> Self {
        let (rate, rate_of_cpu) = (lookups.keys_per_second(), lookups.keys_per_cpu_second());
        Self {
            place,
            entries,
            bytes_per_entry,
            keys_per_call: lookups.keys_per_call,
            connections: lookups.connections,
            keys_per_s: rate.median,
            keys_per_master_cpu_s: rate_of_cpu.median,
            p99_us: lookups.p99_us(),
            rate,
            rate_of_cpu,
        }
    }

    /// The figures of the design that this row answers, each with what was reached.
    fn verdicts(&self) -> Vec<String> {
        let millions = |rate: Spread| Spread {
            low: rate.low / 1e6,
            median: rate.median / 1e6,
            high: rate.high / 1e6,
        };
        let mut verdicts = Vec::new();
        match self.place {
            Where::InProcess => {
                if self.entries >= 1_000_000 {
                    let memory = Goal::at_most(48.0).floor(64.0);
                    verdicts.push(format!(
                        "bytes {}",
                        memory.verdict(Spread::exactly(self.bytes_per_entry))
                    ));
                }
                if self.keys_per_call >= 64 {
                    let rate = Goal::at_least(10.0).verdict(millions(self.rate_of_cpu));
                    verdicts.push(format!("M/CPU s {rate}"));
                }
            }
            Where::Wire if self.keys_per_call == 64 && self.connections == 1 => {
                let rate = Goal::at_least(1.5).verdict(millions(self.rate_of_cpu));
                verdicts.push(format!("M/CPU s {rate}"));
                let floor = Goal::at_least(0.5).verdict(millions(self.rate));
                verdicts.push(format!("floor M/s {floor}"));
            }
            Where::Wire => {}
        }
        verdicts
    }

    fn cells(&self) -> Vec<String> {
        let millions = |spread: Spread| {
            let Spread { low, median, high } = spread;
            format!("{:.3} ({:.3}-{:.3})", median / 1e6, low / 1e6, high / 1e6)
        };
        let place = match self.place {
            Where::InProcess => "in_process",
            Where::Wire => "wire",
        };
        vec![
            place.to_owned(),
            self.entries.to_string(),
            format!("{:.1}", self.bytes_per_entry),
            self.keys_per_call.to_string(),
            self.connections.to_string(),
            millions(self.rate),
            millions(self.rate_of_cpu),
            format!("{:.1}", self.p99_us),
            self.verdicts().join("; "),
        ]
    }
}

/// The table and what else there is to say.
pub(super) fn render(rows: &[Row], notes: &[String], args: &Args) -> String {
    let headers = [
        "where",
        "entries",
        "bytes/entry",
        "keys/call",
        "conns",
        "M keys/s",
        "M keys/CPU s",
        "p99 us",
        "goals",
    ];
    let mut out = table(&headers, 1, rows.iter().map(Row::cells).collect()).to_string();
    out.push_str(&format!(
        "\n\n{} slices a row; over the wire {} calls in flight on each connection",
        args.slices, args.in_flight
    ));
    for note in notes {
        out.push_str(&format!("\n{note}"));
    }
    out
}
