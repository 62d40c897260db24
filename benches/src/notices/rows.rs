//! The row of the table and of the JSON file.

use super::{Args, check::Differences, cluster::Figures, lag::Lags, load::Put};
use crate::{
    error::BenchError,
    figures::Spread,
    report::{Goal, table},
};
use larder_proto::control::AuditReply;
use serde::Serialize;
use std::time::Duration;

/// One measured row. The fields are an interface: the names of the JSON rows.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    tiers: &'static str,
    seconds: f64,
    puts_per_s: f64,
    evictions_per_s: f64,
    lag_p50_ms: f64,
    lag_p99_ms: f64,
    holes: u64,
    orphans: u64,
    missing: u64,
    keys: u64,
}

impl Row {
    pub(super) fn new(
        args: &Args,
        took: Duration,
        put: u64,
        evicted: &Figures,
        lag: &Lags,
        audit: &AuditReply,
        differences: &Differences,
    ) -> Result<Self, BenchError> {
        let quantile = |share| {
            lag.quantile_ms(share).ok_or_else(|| BenchError::Answer {
                doing: "read the node's metrics",
                answer: "they count no lag of any change".to_owned(),
            })
        };
        let seconds = took.as_secs_f64();
        Ok(Self {
            tiers: if args.ssd { "dram+ssd" } else { "dram" },
            seconds,
            puts_per_s: as_f64(put) / seconds,
            evictions_per_s: as_f64(evicted.evictions()) / seconds,
            lag_p50_ms: quantile(0.5)?,
            lag_p99_ms: quantile(0.99)?,
            holes: audit.holes.max(differences.holes),
            orphans: differences.orphans,
            missing: differences.missing,
            keys: differences.keys,
        })
    }

    /// The figures to reach, each with what was reached.
    fn verdicts(&self) -> String {
        let none = |what: &str, count| {
            format!("{what} {}", Goal::at_most(0.0).verdict(Spread::exactly(as_f64(count))))
        };
        let lag = Goal::at_most(100.0).verdict(Spread::exactly(self.lag_p99_ms));
        [
            format!("p99 ms {lag}"),
            none("holes", self.holes),
            none("orphans", self.orphans),
            none("missing", self.missing),
        ]
        .join("; ")
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.tiers.to_owned(),
            format!("{:.1}", self.seconds),
            format!("{:.0}", self.puts_per_s),
            format!("{:.0}", self.evictions_per_s),
            format!("{:.2}", self.lag_p50_ms),
            format!("{:.2}", self.lag_p99_ms),
            self.holes.to_string(),
            self.orphans.to_string(),
            self.missing.to_string(),
            self.keys.to_string(),
            self.verdicts(),
        ]
    }
}

/// The table and what else there is to say.
pub(super) fn render(
    rows: &[Row],
    lag: &Lags,
    evicted: &Figures,
    put: &Put,
    differences: &Differences,
) -> String {
    let headers = [
        "tiers",
        "s",
        "puts/s",
        "evictions/s",
        "lag p50 ms",
        "lag p99 ms",
        "holes",
        "orphans",
        "missing",
        "keys",
        "goals",
    ];
    let out = table(&headers, 1, rows.iter().map(Row::cells).collect());
    let Figures { evicted, demoted, node_cpu_s, master_cpu_s } = evicted;
    let most = lag.most_ms().unwrap_or(f64::NAN);
    format!(
        "{out}\n\n{} changes, none later than {most} ms; {evicted} blocks evicted, {demoted} demoted to the ssd\n\
         {} of {} blocks held in the end; {} puts found no room and were tried again\n\
         CPU seconds while putting: node {node_cpu_s:.1}, master {master_cpu_s:.1}",
        lag.count(),
        differences.held,
        put.blocks,
        put.refused,
    )
}

#[expect(clippy::cast_precision_loss, reason = "counts of one run")]
fn as_f64(count: u64) -> f64 {
    count as f64
}
