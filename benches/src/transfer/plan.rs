//! Which cells are measured, in which order and for how long.

use super::{Args, BATCH};
use crate::budget::Budget;
use std::{fmt, time::Duration};
use tokio::time::Instant;

/// Bytes of parts of a batch.
const BATCH_LEN: usize = 1 << 20;
/// What filling both sides with parts of one size takes on a busy machine, for the plan of `--quick`.
const FILL: Duration = Duration::from_secs(2);

/// Over what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum Path {
    Tcp,
    Unix,
    LocalInplace,
    LocalCopy,
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum Op {
    Get,
    BatchGet,
    /// Last, because it replaces what the gets read.
    Put,
}

/// One row to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cell {
    pub(super) path: Path,
    pub(super) op: Op,
    /// Bytes of a part.
    pub(super) len: usize,
    pub(super) clients: usize,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, op, len, clients } = self;
        write!(f, "{} {} {} KiB, {clients} clients", path.name(), op.name(), len >> 10)
    }
}

impl Path {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::LocalInplace => "local_inplace",
            Self::LocalCopy => "local_copy",
        }
    }
}

impl Op {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::BatchGet => "batch_get",
            Self::Put => "put",
        }
    }
}

/// How long a cell is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    pub(super) pairs: u32,
    /// Of a leg.
    pub(super) leg: Duration,
    /// Of all pairs together: no more begin after it.
    pub(super) whole: Duration,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Plan {
    paths: Vec<Path>,
    ops: Vec<Op>,
    pub(super) sizes: Vec<usize>,
    clients: Vec<usize>,
    pub(super) pairs: u32,
    /// Time of a leg, if there is enough.
    pub(super) leg: Duration,
    budget: Budget,
    pub(super) arena_mib: usize,
    /// Bytes that gets go round in, on both sides: more than the caches hold.
    working_set: usize,
}

impl Plan {
    pub(super) fn of(args: &Args) -> Self {
        let default_sizes: &[u32] =
            if args.quick { &[64, 1024, 16_384] } else { &[64, 256, 1024, 4096, 16_384] };
        let sizes = if args.size.is_empty() { default_sizes } else { &args.size };
        let clients: &[u32] = if args.clients.is_empty() { &[1, 4] } else { &args.clients };
        let (paths, ops) = (
            [Path::Tcp, Path::Unix, Path::LocalInplace, Path::LocalCopy],
            [Op::Get, Op::BatchGet, Op::Put],
        );
        let chosen = |path: &Path| args.path.is_empty() || args.path.contains(path);
        let wanted = |op: &Op| args.op.is_empty() || args.op.contains(op);
        Self {
            paths: paths.into_iter().filter(chosen).collect(),
            ops: ops.into_iter().filter(wanted).collect(),
            sizes: sizes.iter().map(|kib| *kib as usize * 1024).collect(),
            clients: clients.iter().map(|clients| *clients as usize).collect(),
            pairs: args.pairs.unwrap_or(if args.quick { 5 } else { 9 }),
            leg: Duration::from_millis(args.leg_ms.unwrap_or(400)),
            budget: Budget::start(args.quick, Instant::now()),
            arena_mib: if args.quick { 512 } else { 1024 },
            working_set: if args.quick { 128 << 20 } else { 256 << 20 },
        }
    }

    /// The time of a cell, when so many cells and sizes are still to be measured, this one included.
    pub(super) fn timing(&self, cells: usize, sizes: usize) -> Timing {
        let fill = FILL * u32::try_from(sizes).unwrap_or(u32::MAX);
        let whole = self.budget.share(Instant::now(), cells, fill, Duration::MAX);
        // One more for what comes before the first pair and after the last.
        let leg = self.leg.min(whole / (2 * (self.pairs + 1)));
        Timing { pairs: self.pairs, leg, whole }
    }

    /// All cells, in the order in which they are measured within a size.
    pub(super) fn cells(&self) -> impl Iterator<Item = Cell> + '_ {
        let of_op = move |op: Op| {
            self.paths.iter().flat_map(move |path| {
                self.sizes.iter().flat_map(move |len| {
                    self.clients.iter().map(move |clients| Cell {
                        path: *path,
                        op,
                        len: *len,
                        clients: *clients,
                    })
                })
            })
        };
        self.ops.iter().flat_map(move |op| of_op(*op)).filter(|cell| cell.is_asked())
    }

    /// Parts that gets go round in.
    pub(super) fn parts_there(&self, len: usize) -> usize {
        let clients = self.clients.iter().copied().max().unwrap_or(1);
        (self.working_set / len).max(2 * clients).max(if len == BATCH_LEN { BATCH } else { 1 })
    }

    /// Parts that fill the arena once over.
    pub(super) fn parts_to_fill(&self, len: usize) -> usize {
        ((self.arena_mib << 20) / len).max(self.parts_there(len))
    }
}

impl Cell {
    /// In place nothing is put, and batches are of 1 MiB.
    fn is_asked(&self) -> bool {
        match (self.path, self.op) {
            (Path::LocalInplace, Op::Put) => false,
            (_, Op::BatchGet) => self.len == BATCH_LEN,
            (_, Op::Get | Op::Put) => true,
        }
    }
}
