//! Rows of the table and of the JSON file.

use super::{
    disk::Disk,
    fio::Fio,
    plan::{Cell, Op, Plan},
    tier::Pushed,
};
use crate::{
    figures::{Leg, Pairs, Spread},
    report::{Goal, table, with_spread},
};
use serde::Serialize;

/// Of fio's GB/s.
const GOAL: Goal = Goal::at_least(0.95);

/// One measured cell. The fields are an interface: the names of the JSON rows.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    op: Op,
    size_bytes: usize,
    depth: usize,
    gb_per_s: f64,
    fio_gb_per_s: f64,
    ratio: f64,
    cpu_s_per_gb: f64,
    /// Of a push through the whole tier; the driver alone knows no keys.
    keys_committed: Option<u64>,
    keys_refused: Option<u64>,
    keys_readable: Option<u64>,
    #[serde(skip)]
    fio_cpu_s_per_gb: f64,
    #[serde(skip)]
    throughput: Spread,
    #[serde(skip)]
    pushed: Option<Pushed>,
}

impl Row {
    pub(super) fn new(cell: Cell, pairs: &Pairs, pushed: Option<Pushed>) -> Self {
        let throughput = pairs.ratio(Leg::gb_per_second);
        Self {
            op: cell.op,
            size_bytes: cell.len,
            depth: cell.depth,
            gb_per_s: pairs.ours(Leg::gb_per_second).median,
            fio_gb_per_s: pairs.reference(Leg::gb_per_second).median,
            ratio: throughput.median,
            cpu_s_per_gb: pairs.ours(Leg::cpu_seconds_per_gb).median,
            keys_committed: pushed.map(|pushed| pushed.committed),
            keys_refused: pushed.map(|pushed| pushed.refused),
            keys_readable: pushed.map(|pushed| pushed.readable),
            fio_cpu_s_per_gb: pairs.reference(Leg::cpu_seconds_per_gb).median,
            throughput,
            pushed,
        }
    }

    /// What the push did, beside its goal: every part that was announced is readable.
    fn pushed(&self) -> String {
        let Some(pushed) = self.pushed else { return String::new() };
        let Pushed { committed, refused, readable, put_gb_per_s, written_gb_per_s } = pushed;
        let verdict = if readable == committed { "met" } else { "MISSED" };
        format!(
            "{committed} / {refused} / {readable} {verdict}; put {put_gb_per_s:.1}, written {written_gb_per_s:.1} GB/s"
        )
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.op.name().to_owned(),
            format!("{} KiB", self.size_bytes >> 10),
            self.depth.to_string(),
            format!("{:.2}", self.gb_per_s),
            format!("{:.2}", self.fio_gb_per_s),
            with_spread(self.throughput),
            format!("{:.3}", self.cpu_s_per_gb),
            format!("{:.3}", self.fio_cpu_s_per_gb),
            GOAL.verdict(self.throughput),
            self.pushed(),
        ]
    }
}

/// The table, and what holds for all rows.
pub(super) fn render(rows: &[Row], plan: &Plan, disk: &Disk, fio: &Fio) -> String {
    let headers = [
        "op",
        "size",
        "depth",
        "GB/s",
        "fio",
        "ratio",
        "CPU s/GB",
        "fio",
        "goal (ratio)",
        "pushed: committed / refused / readable",
    ];
    let table = table(&headers, 1, rows.iter().map(Row::cells).collect());
    format!(
        "{table}\n\n{} pairs of legs, a file of {} MiB; ours: {}; reference: {}, io_uring, direct I/O",
        plan.pairs,
        plan.file_len >> 20,
        disk.driver(),
        fio.version(),
    )
}
