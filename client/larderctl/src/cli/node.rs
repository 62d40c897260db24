//! `node`, `top`: operating nodes, and watching them.

use super::{Format, OutputArg};
use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};
use larder_daemon::config::{ByteSize, HumanDuration};
use std::path::PathBuf;

/// Operate one node: audit its catalog, scrub its ssd paths, take one out of use and in again
#[derive(Debug, Args)]
#[command(
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "\
Examples:
  larderctl node audit node-a
  larderctl node scrub node-a
  larderctl node path fence node-a /mnt/ssd1 --reason 'smart errors'
  larderctl node path readmit node-a /mnt/ssd1 --yes"
)]
pub(crate) struct NodeArgs {
    #[command(subcommand)]
    pub(crate) command: NodeCommand,
}

/// What can be done with a node.
#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    Audit(AuditArgs),
    Scrub(ScrubArgs),
    /// Take an ssd path out of use, and in again
    #[command(
        subcommand_required = true,
        arg_required_else_help = true,
        after_help = "\
Examples:
  larderctl nodes                      which paths are fenced, and why?
  larderctl node path fence node-a /mnt/ssd1 --reason 'smart errors'
  larderctl node path readmit node-a /mnt/ssd1 --yes"
    )]
    Path {
        #[command(subcommand)]
        command: PathCommand,
    },
}

/// Look through a node's catalog for what must not be
///
/// Holes are blocks without parts between a stored one and a stored descendant of it: prefixes end there. Making
/// room never makes one; `evict` of single blocks and the withdrawal of a damaged one do. Empty parts have no copy,
/// and miscounted ones are in one count and not in another: both are mistakes of ours. Exact while nothing
/// changes: under load a few may be counted that are not there. Ends with exit code 1 if anything was found.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  larderctl node audit node-a
  larderctl node audit node-a -o json | jq .holes")]
pub(crate) struct AuditArgs {
    /// The node, by name or id
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// Verify all that lies on a node's ssds, and withdraw what is damaged
///
/// Goes through every record that is there when it comes by. What is damaged is withdrawn for good, so that it is
/// computed again and not missed at the moment it is needed. Nodes do this by themselves in the background
/// (ssd.scrub_rate); this is for now. Ends with exit code 1 when damage was found, or a path could not be
/// scrubbed to the end. Ctrl-C stops it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  larderctl node scrub node-a
  larderctl node scrub node-a --path /mnt/ssd1 --rate 200MiB
  larderctl node scrub node-a -o json | jq '[.paths[].damaged_records] | add'")]
pub(crate) struct ScrubArgs {
    /// The node, by name or id
    pub(crate) node: String,
    /// Only this path [default: all, one after the other]
    #[arg(long, value_name = "DIR")]
    pub(crate) path: Option<PathBuf>,
    /// Bytes a second that may be read [default: as fast as it goes]
    #[arg(long, value_name = "SIZE")]
    pub(crate) rate: Option<ByteSize>,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// What can be done with an ssd path.
#[derive(Debug, Subcommand)]
pub(crate) enum PathCommand {
    /// Take an ssd path out of use
    ///
    /// Everything on it is given up at once; copies in memory stay. Nothing is read from or written to it until
    /// it is taken in again, by `readmit` or by a restart of the node, both of which begin empty.
    #[command(after_help = "\
Examples:
  larderctl node path fence node-a /mnt/ssd1 --reason 'smart errors' --yes")]
    Fence {
        /// The node, by name or id
        node: String,
        /// The folder, as `larderctl stats` shows it
        dir: PathBuf,
        /// Why, for whoever asks later
        #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
        reason: String,
        /// Yes, give up what is on it
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Take a fenced ssd path in again, empty
    ///
    /// What the folder still holds is given up for good: while it was fenced, removals could not be noted
    /// there. The node goes on serving meanwhile. A path that could not be opened when the node started keeps what it
    /// holds if the node is restarted instead, and nothing was evicted by command meanwhile.
    #[command(after_help = "\
Examples:
  larderctl node path readmit node-a /mnt/ssd1 --yes")]
    Readmit {
        /// The node, by name or id
        node: String,
        /// The folder
        dir: PathBuf,
        /// Yes, empty it
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        output: OutputArg,
    },
}

impl NodeCommand {
    /// The format that stands behind the command, if one does.
    pub(crate) fn format(&self) -> Option<Format> {
        match self {
            Self::Audit(AuditArgs { output, .. })
            | Self::Scrub(ScrubArgs { output, .. })
            | Self::Path {
                command: PathCommand::Fence { output, .. } | PathCommand::Readmit { output, .. },
            } => output.output,
        }
    }
}

/// Watch nodes: used memory and disks, hits, transfers
///
/// Rates are per second, over the time between two looks. On a terminal the table is drawn again and again
/// until Ctrl-C; otherwise tables follow one another. As JSON there is one line for each look.
///
/// `hits` are parts that were asked for and found here, `misses` those that were not; `sent` and `received` are
/// bytes of parts over the data plane (reads in place on the host move none); `queue` are parts that wait to
/// be written to ssds.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  larderctl top
  larderctl top node-a --interval 500ms
  larderctl top --once                 one table, of the next two seconds
  larderctl top --once -o json | jq '.nodes[] | {name, hits_per_second}'")]
pub(crate) struct TopArgs {
    /// Only this node, by name or id
    pub(crate) node: Option<String>,
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "2s")]
    pub(crate) interval: HumanDuration,
    /// One table, and no more
    #[arg(long)]
    pub(crate) once: bool,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}
