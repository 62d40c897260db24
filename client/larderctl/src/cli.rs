//! The command line: what can be asked, and the help that teaches it.

mod evict;
mod node;

pub(crate) use evict::{EvictArgs, TierName};
pub(crate) use node::{AuditArgs, NodeArgs, NodeCommand, PathCommand, ScrubArgs, TopArgs};

use crate::error::EXIT_CODES;
use clap::{Args, Parser, Subcommand, ValueEnum};
use larder_daemon::{address::HostPort, config::HumanDuration};
use larder_proto::{BlockKey, ContentFingerprint, LayoutFingerprint, ids::TenantName};
use std::path::PathBuf;

/// Looks into a Larder cluster and changes what it holds
#[derive(Debug, Parser)]
#[command(
    name = "larderctl",
    version,
    max_term_width = 100,
    after_help = EXIT_CODES,
    after_long_help = format!("{EXIT_CODES}\n\n{EXAMPLES}"),
    subcommand_required = true,
    arg_required_else_help = true
)]
pub(crate) struct Cli {
    /// What every command needs.
    #[command(flatten)]
    pub(crate) global: Global,
    /// Also before the command.
    #[command(flatten)]
    pub(crate) output: OutputArg,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  larderctl status                                  is the cluster well?
  larderctl nodes                                   who holds how much?
  larderctl top                                     what are they doing now?
  larderctl explain --model llama --tokens p.json   why was this prompt no hit? see its --help
  larderctl put notes.txt --name notes              keep a file, to try things out
  larderctl -o json stats | jq .nodes               for machines: sizes in bytes, ids in full";

/// Where the tokens of a prompt come from: blocks are named by tokens, never by text.
const TOKENS: &str = r#"Tokens of a text, as an engine counts them for this very model:
  curl -s localhost:8000/tokenize -d '{"prompt": "TEXT OF THE PROMPT"}' > prompt.json
Their model is the one that `larderctl models` lists. Only whole blocks of a prompt are kept, with
the bundled engine of 32 tokens. A prompt that is sent as a list of token ids is that list."#;

/// How to come by tokens, and examples that use them.
fn with_tokens(examples: &str) -> String {
    format!("{TOKENS}\n\n{examples}")
}

/// What every command needs.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Masters to ask, in turn until one answers
    #[arg(
        long,
        global = true,
        value_name = "HOST:PORT,...",
        env = "LARDER_MASTERS",
        default_value = "127.0.0.1:7400",
        value_delimiter = ',',
        help_heading = "Global options"
    )]
    pub(crate) masters: Vec<HostPort>,
    /// Whose blocks: tenants never see each other's
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "LARDER_TENANT",
        default_value = TenantName::DEFAULT,
        help_heading = "Global options"
    )]
    pub(crate) tenant: TenantName,
    /// How long one question or transfer may take, with its unit
    #[arg(
        long,
        global = true,
        value_name = "TIME",
        env = "LARDER_TIMEOUT",
        default_value = "15s",
        help_heading = "Global options"
    )]
    pub(crate) timeout: HumanDuration,
}

/// How answers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people: rounded sizes, short ids
    Table,
    /// For machines: sizes in bytes, ids in full
    Json,
}

/// The choice of [`Format`].
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct OutputArg {
    /// How the answer is written [default: table]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

/// The choice of [`Format`] where `-o` is something else.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct LongOutputArg {
    /// How the answer is written [default: table]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show masters, and how much of the cluster they see
    ///
    /// An answer is complete when every known node is in session and in step with the master. After a
    /// master restarts, it is incomplete until the nodes have told it again what they hold.
    #[command(after_help = "\
Examples:
  larderctl status
  larderctl --masters m1:7400,m2:7400 status    all masters, also those that are down
  larderctl status -o json | jq '.masters[0].index.entries'")]
    Status {
        #[command(flatten)]
        output: OutputArg,
    },
    /// List nodes: state, what they hold, ssd paths, where they listen
    ///
    /// Under `ssds` stands how many ssd paths take part, of how many there are; below the table, which are
    /// fenced and why. That is asked of each node itself: one that does not answer in time shows `?`, and the
    /// exit code is 0 all the same. States: `up`; `syncing`, its inventory is not yet all known; `down`, its session ended: its
    /// blocks are left out of answers, and forgotten when it stays away.
    #[command(after_help = "\
Examples:
  larderctl nodes
  larderctl nodes node-a             one node, by name or id
  larderctl nodes -o json | jq '.nodes[] | select(.state != \"up\").name'")]
    Nodes {
        /// Only this node, by name or id
        node: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// List registered model versions
    ///
    /// A display name stands for a set of model versions. A version is a content (what decides the
    /// values: weights, tokenizer, KV type) in a layout (how an engine lays them out). Blocks of
    /// different versions never answer for one another.
    #[command(after_help = "\
Examples:
  larderctl models
  larderctl models llama             versions behind one display name
  larderctl models -o json           full fingerprints and descriptions")]
    Models {
        /// Only versions with this display name
        name: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show memory, ssd paths, leases and counters of masters and nodes
    #[command(after_help = "\
Examples:
  larderctl stats
  larderctl stats node-a             one node, by name or id
  larderctl stats -o json | jq '.nodes[].tiers[] | {tier, used_bytes}'
  larderctl stats -o json | jq '.nodes[].tiers[].paths[] | select(.healthy | not)'")]
    Stats {
        /// Only this node, by name or id
        node: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show who holds a prompt's blocks, or a block
    ///
    /// With tokens: how far a match reaches from the start of the prompt, for each model version of the
    /// name. With keys: the holders of each block. Ends with exit code 3 when nothing is held.
    #[command(
        override_usage = "larderctl lookup [OPTIONS] --model <NAME> --tokens <FILE>\n       \
                          larderctl lookup [OPTIONS] --key <HEX>",
        after_help = with_tokens("\
Examples:
  larderctl lookup --model llama --tokens prompt.json
  echo 1 2 3 4 5 6 7 8 | larderctl lookup --model llama --tokens -
  larderctl lookup --key 5b1f...                 over all model versions")
    )]
    Lookup {
        #[command(flatten)]
        blocks: BlockArgs,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Say why blocks are, or are not, a hit
    ///
    /// Each block gets one reason:
    ///   hit            usable now
    ///   never_seen     nobody has it, and no removal of it is remembered
    ///   evicted        it was there and was removed lately
    ///   other_layout   it is there, laid out for another engine or another setting
    ///   other_content  these tokens are there, computed with other weights or settings
    ///   incomplete     parts of it are missing everywhere
    ///   node_down      who has it is not in session
    ///   damaged        a copy was found damaged and withdrawn
    ///   not_yours      another tenant has it
    ///
    /// With tokens, every model version of the name is asked, and blocks in a row with the same reason
    /// are shown as one. The exit code is 0 whatever the reason.
    #[command(
        verbatim_doc_comment,
        override_usage = "larderctl explain [OPTIONS] --model <NAME> --tokens <FILE>\n       \
                          larderctl explain [OPTIONS] --key <HEX>",
        after_help = with_tokens("\
Examples:
  larderctl explain --model llama --tokens prompt.json
  larderctl explain --model llama --content 5b1f... --tokens prompt.json
  larderctl explain --key 77ab...
  larderctl explain --key 77ab... -o json | jq -r '.models[0].groups[0].reason'")
    )]
    Explain {
        #[command(flatten)]
        blocks: BlockArgs,
        #[command(flatten)]
        output: OutputArg,
    },
    Evict(EvictArgs),
    Node(NodeArgs),
    Top(TopArgs),
    /// List what may not be evicted now: leases, writes, quarantined memory, with owners
    ///
    /// Asks every node. `quarantined` is memory of a reader that lost its socket while its process lives
    /// on: it comes back when the process ends.
    #[command(after_help = "\
Examples:
  larderctl pins
  larderctl pins node-a
  larderctl pins -o json | jq '[.pins[].bytes] | add'")]
    Pins {
        /// Only this node, by name or id
        node: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show the settings in force and where each comes from
    ///
    /// A flag wins over its environment variable, and that over the default.
    #[command(after_help = "\
Examples:
  larderctl config
  LARDER_MASTERS=m1:7400,m2:7400 larderctl config -o json")]
    Config {
        #[command(flatten)]
        output: OutputArg,
    },
    /// Keep a file under a name, to try things out
    ///
    /// The file becomes a chain of blocks of the model version `raw`, put on one node, which has to hold
    /// it whole. A name keeps the bytes it was first given until its blocks are evicted: like everything
    /// in a cache, it may go at any time to make room.
    #[command(after_help = "\
Examples:
  larderctl put notes.txt --name notes
  larderctl put notes.txt --name notes --node node-a
  larderctl lookup --model raw --key KEY     KEY as printed by put")]
    Put {
        /// The file
        file: PathBuf,
        /// Its name in the cluster
        #[arg(long, value_name = "NAME", value_parser = file_name)]
        name: String,
        /// The node that keeps it, by name or id [default: the one with most room]
        #[arg(long, value_name = "NODE")]
        node: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Bring back a file that was put, verified
    ///
    /// Here -o names the file; --output is the format of the report. The file appears only when all of
    /// it is there and its digest is right. Ends with exit code 3 when the name, or a block of it, is
    /// not in the cluster any more.
    #[command(after_help = "\
Examples:
  larderctl get notes -o copy.txt
  larderctl get notes -o - | wc -c           to standard output
  larderctl get notes -o copy.txt --output json")]
    Get {
        /// Its name in the cluster
        #[arg(value_parser = file_name)]
        name: String,
        /// Where it goes; `-` is standard output
        #[arg(short = 'o', long = "to", value_name = "FILE")]
        to: PathBuf,
        #[command(flatten)]
        output: LongOutputArg,
    },
    /// Print a completion script for a shell
    #[command(after_help = "\
Examples:
  larderctl completions bash > /etc/bash_completion.d/larderctl
  larderctl completions fish > ~/.config/fish/completions/larderctl.fish")]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

impl Command {
    /// The format that stands behind the command, if one does.
    pub(crate) fn format(&self) -> Option<Format> {
        match self {
            Self::Status { output }
            | Self::Nodes { output, .. }
            | Self::Models { output, .. }
            | Self::Stats { output, .. }
            | Self::Lookup { output, .. }
            | Self::Explain { output, .. }
            | Self::Evict(EvictArgs { output, .. })
            | Self::Top(TopArgs { output, .. })
            | Self::Pins { output, .. }
            | Self::Config { output }
            | Self::Put { output, .. } => output.output,
            Self::Node(NodeArgs { command }) => command.format(),
            Self::Get { output, .. } => output.output,
            Self::Completions { .. } => None,
        }
    }
}

/// Which model versions are meant.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ModelArgs {
    /// Model versions with this display name
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Only versions of this content fingerprint
    #[arg(long, value_name = "HEX")]
    pub(crate) content: Option<ContentFingerprint>,
    /// Only versions of this layout fingerprint
    #[arg(long, value_name = "HEX")]
    pub(crate) layout: Option<LayoutFingerprint>,
}

/// Blocks named by tokens or by key.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["tokens", "key"]))]
pub(crate) struct BlockArgs {
    #[command(flatten)]
    pub(crate) models: ModelArgs,
    #[command(flatten)]
    pub(crate) tokens: TokenArgs,
    /// A block by its key, 64 hex digits; may be repeated
    #[arg(long, value_name = "HEX")]
    pub(crate) key: Vec<BlockKey>,
}

/// A prompt, from which keys are computed.
#[derive(Debug, Clone, Args)]
pub(crate) struct TokenArgs {
    /// Token ids of a prompt of --model: what an engine's `/tokenize` answers, a JSON list, or numbers
    /// between spaces or commas; `-` is standard input
    #[arg(long, value_name = "FILE", requires = "model")]
    pub(crate) tokens: Option<PathBuf>,
    /// The cache salt that the engines use
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) salt: String,
}

/// The rule for names of files in the cluster.
fn file_name(text: &str) -> Result<String, String> {
    let fine = (1..=255).contains(&text.len()) && !text.chars().any(char::is_control);
    match fine {
        true => Ok(text.to_owned()),
        false => Err("must be 1 to 255 bytes long and have no control characters".to_owned()),
    }
}

#[cfg(test)]
mod tests;
