//! Rows of the table and of the JSON file.

use super::plan::{Cell, Op, Path, Plan};
use crate::{
    figures::{Leg, Pairs, Spread},
    report::{Goal, table, with_spread},
};
use serde::Serialize;

/// One measured cell. The fields are an interface: the names of the JSON rows.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    path: Path,
    op: Op,
    size_bytes: usize,
    clients: usize,
    gb_per_s: f64,
    ref_gb_per_s: f64,
    throughput_ratio: f64,
    cpu_s_per_gb: f64,
    ref_cpu_s_per_gb: f64,
    cpu_ratio: f64,
    p50_us: f64,
    ref_p50_us: f64,
    verified: bool,
    #[serde(skip)]
    pub(super) cell: Cell,
    #[serde(skip)]
    throughput: Spread,
    #[serde(skip)]
    cpu: Spread,
    #[serde(skip)]
    disturbed: Option<f64>,
}

impl Row {
    pub(super) fn new(cell: Cell, pairs: &Pairs) -> Self {
        let throughput = pairs.ratio(Leg::gb_per_second);
        let cpu = pairs.ratio(Leg::cpu_seconds_per_gb);
        let (p50_us, ref_p50_us) = pairs.p50_us();
        Self {
            path: cell.path,
            op: cell.op,
            size_bytes: cell.len,
            clients: cell.clients,
            gb_per_s: pairs.ours(Leg::gb_per_second).median,
            ref_gb_per_s: pairs.reference(Leg::gb_per_second).median,
            throughput_ratio: throughput.median,
            cpu_s_per_gb: pairs.ours(Leg::cpu_seconds_per_gb).median,
            ref_cpu_s_per_gb: pairs.reference(Leg::cpu_seconds_per_gb).median,
            cpu_ratio: cpu.median,
            p50_us,
            ref_p50_us,
            // In shared memory the sums are made (put) or were compared (get) once, at the commit.
            verified: matches!(cell.path, Path::Tcp | Path::Unix),
            cell,
            throughput,
            cpu,
            disturbed: pairs.disturbed(),
        }
    }

    /// The figures of the design that this row answers, each with what was reached.
    fn verdicts(&self) -> Vec<String> {
        if let Some(times) = self.disturbed {
            return vec![format!("not judged: stalls, mean call {times:.0} x median")];
        }
        let Cell { path, op, len, .. } = self.cell;
        let is_floor_row = path == Path::Tcp && len == 1 << 20;
        let cpu = Goal::at_most(1.25);
        let throughput = Goal::at_least(0.9);
        let (cpu, throughput) = match is_floor_row {
            true => (cpu.floor(1.5), throughput.floor(0.8)),
            false => (cpu, throughput),
        };
        let mut verdicts = Vec::new();
        match (path, op) {
            (Path::Tcp, Op::Get | Op::Put) => {
                verdicts.push(format!("cpu {}", cpu.verdict(self.cpu)));
                verdicts.push(format!("GB/s {}", throughput.verdict(self.throughput)));
                if op == Op::Get && len == 64 << 10 && self.clients == 1 {
                    let ratio = self.p50_us / self.ref_p50_us;
                    verdicts.push(format!(
                        "p50 {}",
                        Goal::at_most(1.5).verdict(Spread::exactly(ratio))
                    ));
                }
            }
            (Path::Tcp, Op::BatchGet) => {
                let goal = Goal::at_least(0.95);
                verdicts.push(format!("GB/s {}", goal.verdict(self.throughput)));
            }
            (Path::LocalInplace, Op::Get) if self.clients == 1 => {
                verdicts.push(format!(
                    "p50 us {}",
                    Goal::at_most(10.0).verdict(Spread::exactly(self.p50_us))
                ));
            }
            (Path::LocalCopy, Op::Get) => {
                verdicts.push(format!("GB/s {}", throughput.verdict(self.throughput)));
            }
            _ => {}
        }
        verdicts
    }

    fn cells(&self) -> Vec<String> {
        vec![
            format!("{} {}", self.path.name(), self.op.name()),
            format!("{} KiB", self.size_bytes >> 10),
            self.clients.to_string(),
            format!("{:.2}", self.gb_per_s),
            format!("{:.2}", self.ref_gb_per_s),
            with_spread(self.throughput),
            format!("{:.3}", self.cpu_s_per_gb),
            format!("{:.3}", self.ref_cpu_s_per_gb),
            with_spread(self.cpu),
            format!("{:.1}", self.p50_us),
            format!("{:.1}", self.ref_p50_us),
            self.verdicts().join("; "),
        ]
    }
}

/// The table, and what holds over several rows.
pub(super) fn render(rows: &[Row], plan: &Plan) -> String {
    let headers = [
        "path op",
        "size",
        "clients",
        "GB/s",
        "ref",
        "ratio",
        "CPU s/GB",
        "ref",
        "ratio",
        "p50 us",
        "ref",
        "goals (ratio to the reference)",
    ];
    let mut out = table(&headers, 1, rows.iter().map(Row::cells).collect()).to_string();
    out.push_str(&format!(
        "\n\n{} pairs of legs of up to {} ms; arena {} MiB, filled once over before each size: every put evicts",
        plan.pairs,
        plan.leg.as_millis(),
        plan.arena_mib
    ));
    for (one, four) in slower_with_four(rows) {
        out.push_str(&format!(
            "\n{}: slower than 1 client, {:.2} of {:.2} GB/s (reference {:.2} of {:.2}); goal: never",
            four.cell, four.gb_per_s, one.gb_per_s, four.ref_gb_per_s, one.ref_gb_per_s
        ));
    }
    out
}

/// Pairs of rows over TCP where four clients moved fewer bytes a second than one.
fn slower_with_four(rows: &[Row]) -> impl Iterator<Item = (&Row, &Row)> {
    let with_one = |four: &Row| {
        let cell = Cell { clients: 1, ..four.cell };
        rows.iter().find(|row| row.cell == cell)
    };
    let four = rows.iter().filter(|row| row.path == Path::Tcp && row.clients == 4);
    four.filter_map(move |four| Some((with_one(four)?, four)))
        .filter(|(one, four)| one.disturbed.is_none() && four.disturbed.is_none())
        .filter(|(one, four)| four.gb_per_s < one.gb_per_s)
}
