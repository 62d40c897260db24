//! What masters answer to lookups, read and held to what was asked.

use crate::{locations, peers::NodeAddress};
use larder_proto::{
    Tier, TierSet,
    control::{self, Coverage},
    event::PartSet,
    wire::DecodeError,
};
use std::sync::Arc;

/// A node that holds parts of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Which life of which node, and where.
    pub node: Arc<NodeAddress>,
    /// In which tiers.
    pub tiers: TierSet,
    /// Which parts of the block.
    pub parts: PartSet,
}

/// Who holds each of some blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Located {
    /// One list a block, in the order asked.
    pub blocks: Vec<Vec<Holder>>,
    /// How much of the cluster the answer could see.
    pub coverage: Coverage,
}

/// Blocks in a row that the same nodes hold whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixRun {
    /// How many.
    pub blocks: usize,
    /// Who, and the fastest tier there; best first.
    pub sources: Vec<(Arc<NodeAddress>, Tier)>,
}

/// How far a match of a chain reaches.
#[derive(Debug, Clone, PartialEq)]
pub struct Prefix {
    /// Usable blocks from the root on.
    pub blocks: usize,
    /// Where they are, in order and without gaps.
    pub runs: Vec<PrefixRun>,
    /// How much of the cluster the answer could see.
    pub coverage: Coverage,
}

/// The source that an answer refers to by its number.
fn pick(sources: &[Arc<NodeAddress>], index: u32) -> Result<Arc<NodeAddress>, DecodeError> {
    let (value, limit) = (u64::from(index), sources.len() as u64);
    let found = sources.get(index as usize).cloned();
    found.ok_or(DecodeError::Limit { what: "source index", value, limit })
}

pub(super) fn read_located(
    reply: &control::LocateReply,
    asked: usize,
) -> Result<Located, DecodeError> {
    if reply.blocks.len() != asked {
        let (value, limit) = (reply.blocks.len() as u64, asked as u64);
        return Err(DecodeError::Limit { what: "located blocks", value, limit });
    }
    let sources = locations::addresses(&reply.sources)?;
    let holder = |holder: &control::LocatedSource| {
        let bits = u8::try_from(holder.tiers);
        let unknown = |_| DecodeError::Unknown { what: "tier set", value: holder.tiers.into() };
        Ok(Holder {
            node: pick(&sources, holder.source)?,
            tiers: TierSet::from_bits(bits.map_err(unknown)?)?,
            parts: PartSet::from_bytes(&holder.parts)?,
        })
    };
    let block = |block: &control::LocatedBlock| block.holders.iter().map(holder).collect();
    let blocks = reply.blocks.iter().map(block).collect::<Result<_, DecodeError>>()?;
    Ok(Located { blocks, coverage: reply.coverage.unwrap_or_default() })
}

pub(super) fn read_prefix(
    reply: &control::MatchPrefixReply,
    asked: usize,
) -> Result<Prefix, DecodeError> {
    let sources = locations::addresses(&reply.sources)?;
    let source = |run: &control::SourceRun| {
        let unknown = DecodeError::Unknown { what: "tier", value: run.tier.into() };
        let tier = u8::try_from(run.tier).ok().and_then(Tier::from_code).ok_or(unknown)?;
        Ok((pick(&sources, run.source)?, tier))
    };
    let run = |run: &control::Run| {
        let sources = run.sources.iter().map(source).collect::<Result<_, DecodeError>>()?;
        Ok(PrefixRun { blocks: run.blocks as usize, sources })
    };
    let runs = reply.runs.iter().map(run).collect::<Result<Vec<_>, DecodeError>>()?;
    let in_runs = runs.iter().fold(0usize, |sum, run| sum.saturating_add(run.blocks));
    if reply.blocks as usize > asked || in_runs > asked {
        let (value, limit) = (in_runs as u64, asked as u64);
        return Err(DecodeError::Limit { what: "matched blocks", value, limit });
    }
    Ok(Prefix { blocks: reply.blocks as usize, runs, coverage: reply.coverage.unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_proto::PartNumber;

    fn source(n: u8) -> control::Source {
        control::Source {
            node: vec![n; 16].into(),
            incarnation: 1,
            data_address: format!("host-{n}:1"),
            seq: 0,
        }
    }

    #[test]
    fn an_answer_that_names_more_than_was_asked_is_refused() {
        let run = control::Run { blocks: 3, sources: vec![] };
        let reply = control::MatchPrefixReply {
            blocks: 3,
            runs: vec![run],
            sources: vec![],
            coverage: None,
        };
        assert_eq!(read_prefix(&reply, 3).unwrap().blocks, 3);
        assert!(read_prefix(&reply, 2).is_err());
        let reply = control::LocateReply { blocks: vec![], ..Default::default() };
        assert!(read_located(&reply, 1).is_err());
    }

    #[test]
    fn an_answer_with_an_unknown_source_or_tier_is_refused() {
        let holder = |source, tiers| control::LocateReply {
            blocks: vec![control::LocatedBlock {
                holders: vec![control::LocatedSource { source, tiers, parts: vec![1].into() }],
            }],
            sources: vec![self::source(1)],
            coverage: None,
        };
        let dram = u32::from(TierSet::of(Tier::Dram).bits());
        let located = read_located(&holder(0, dram), 1).unwrap();
        assert_eq!(located.blocks[0][0].node.address, "host-1:1");
        assert!(located.blocks[0][0].parts.has(PartNumber(0)));
        for (source, tiers) in [(1, dram), (0, 1 << 3), (0, 1 << 9)] {
            assert!(read_located(&holder(source, tiers), 1).is_err());
        }
    }
}
