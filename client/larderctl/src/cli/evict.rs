//! `evict`.

use super::{ModelArgs, OutputArg, TokenArgs, with_tokens};
use clap::{ArgGroup, Args, ValueEnum, builder::NonEmptyStringValueParser};
use larder_daemon::config::HumanDuration;
use larder_proto::BlockKey;

/// Remove blocks from all nodes
///
/// All stated conditions must hold, within the tenant of --tenant. Without --yes it shows what would go, and
/// nothing does. Parts that are being read go as well; their bytes stay until the readers are done. Copies on
/// ssds do not come back with a restart. A node that is not in session keeps its blocks. As long as the master
/// remembers it (nodes.ttl after its session ended) the exit code is 1; after that nothing tells of it.
///
/// --tier removes only the copies in that tier: of a part that is in memory and on an ssd, the other copy
/// stays; a part without another copy goes. What was taken from ssds is not written there again for as long as
/// it stays in memory.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").required(true).multiple(true).args([
        "model", "content", "layout", "tokens", "key", "producer", "unused", "tier", "all",
    ]),
    override_usage = "larderctl evict [OPTIONS] --model <NAME> [--tokens <FILE>]\n       \
                      larderctl evict [OPTIONS] <--content <HEX>|--layout <HEX>|--key <HEX>|\
                      --producer <NAME>|--unused <TIME>|--tier <TIER>|--all>",
    after_help = with_tokens("\
Examples:
  larderctl evict --model llama                         what would go?
  larderctl evict --model llama --tokens prompt.json --yes
                                                        the blocks of one prompt
  larderctl evict --model llama --tokens system.json --descendants
                                                        its last whole block, and all that follows
  larderctl evict --key 77ab... --key 81c0... --yes
  larderctl evict --unused 6h --tier ssd --yes          make room on the disks
  larderctl evict --producer engine-7 --node node-a     what a bad engine wrote there
  larderctl --tenant acme evict --all --yes             everything of a tenant")
)]
pub(crate) struct EvictArgs {
    #[command(flatten)]
    pub(crate) models: ModelArgs,
    #[command(flatten)]
    pub(crate) tokens: TokenArgs,
    /// A block by its key, 64 hex digits; may be repeated
    #[arg(long, value_name = "HEX", conflicts_with = "tokens")]
    pub(crate) key: Vec<BlockKey>,
    /// A named block and all that follow it, as far as each node holds the chain. With --tokens: the last
    /// whole block of the prompt, since those before it belong to other prompts too
    #[arg(long)]
    pub(crate) descendants: bool,
    /// Only what this producer published
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) producer: Option<String>,
    /// Only blocks that were not used for longer than this, to the second; what a restart found counts as
    /// used then
    #[arg(long, value_name = "TIME")]
    pub(crate) unused: Option<HumanDuration>,
    /// Only the copies in this tier
    #[arg(long, value_enum, value_name = "TIER")]
    pub(crate) tier: Option<TierName>,
    /// Only on this node, by name or id
    #[arg(long, value_name = "NODE")]
    pub(crate) node: Option<String>,
    /// Everything of the tenant
    #[arg(long, conflicts_with_all = ["model", "content", "layout", "tokens", "key", "producer"])]
    pub(crate) all: bool,
    /// Show what would go, and keep it: also what happens without --yes
    #[arg(long, conflicts_with = "yes")]
    pub(crate) dry_run: bool,
    /// Do it
    #[arg(long)]
    pub(crate) yes: bool,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// A tier from which copies can be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TierName {
    /// Memory
    Dram,
    /// Disks
    Ssd,
}

impl TierName {
    /// As the nodes call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dram => "dram",
            Self::Ssd => "ssd",
        }
    }
}
