//! Which cells are measured, in which order and for how long.

use super::Args;
use crate::budget::Budget;
use std::{fmt, time::Duration};
use tokio::time::Instant;

/// What a leg takes besides its own time: fio's start and what is still in flight at the end.
const AROUND_A_LEG: Duration = Duration::from_millis(450);
/// The shortest leg that says something.
const SHORTEST: Duration = Duration::from_millis(100);

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum Op {
    Write,
    Read,
}

impl Op {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// One row to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) op: Op,
    /// Bytes of a request.
    pub(super) len: usize,
    pub(super) depth: usize,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} KiB, depth {}", self.op.name(), self.len >> 10, self.depth)
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Plan {
    ops: Vec<Op>,
    sizes: Vec<usize>,
    depths: Vec<usize>,
    pub(super) pairs: u32,
    /// Time of a leg, if there is enough.
    wanted: Duration,
    budget: Budget,
    /// Bytes of the file: whole requests of every size.
    pub(super) file_len: u64,
}

impl Plan {
    pub(super) fn of(args: &Args) -> Self {
        let wanted = |op: &Op| args.op.is_empty() || args.op.contains(op);
        let sizes: Vec<usize> =
            args.size.iter().map(|kib| (*kib as usize * 1024).next_multiple_of(4096)).collect();
        let file_mib = args.file_mib.unwrap_or(if args.quick { 512 } else { 2048 });
        Self {
            ops: [Op::Write, Op::Read].into_iter().filter(wanted).collect(),
            sizes,
            depths: args.depth.iter().map(|depth| *depth as usize).collect(),
            pairs: args.pairs.unwrap_or(if args.quick { 5 } else { 9 }),
            wanted: Duration::from_millis(args.leg_ms.unwrap_or(1000)),
            budget: Budget::start(args.quick, Instant::now()),
            file_len: u64::from(file_mib) << 20,
        }
    }

    /// All cells, in the order in which they are measured: writes first, so that the file is written again
    /// only once for the reads.
    pub(super) fn cells(&self) -> impl Iterator<Item = Cell> + '_ {
        let of_op = move |op: Op| {
            self.sizes.iter().flat_map(move |len| {
                self.depths.iter().map(move |depth| Cell { op, len: *len, depth: *depth })
            })
        };
        self.ops.iter().flat_map(move |op| of_op(*op))
    }

    /// The time of a leg, when so many cells are still to be measured, this one included.
    pub(super) fn leg(&self, cells: usize) -> Duration {
        // Two legs a pair, and a short pair before.
        let legs = cells * (2 * self.pairs as usize + 1);
        let around = AROUND_A_LEG * u32::try_from(legs).unwrap_or(u32::MAX);
        self.budget.share(Instant::now(), legs, around, self.wanted).max(SHORTEST)
    }

    /// Memory for all requests of any cell.
    pub(super) fn memory(&self) -> usize {
        self.cells().map(|cell| cell.depth * cell.len).max().unwrap_or(0)
    }
}
