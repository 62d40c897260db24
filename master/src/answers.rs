//! Answers to lookups: what the index says, with the sources that may be named and what could be seen.
//!
//! An answer is complete only if every node was in session and in step with the index, nothing was left
//! out, and membership did not change meanwhile; the sequence number of a source is one that the whole
//! answer includes. A tenant or model that nobody knows is a miss like any other (P11).
//!
//! No IO: a few microseconds a call, on the thread that received it.

use crate::cluster::{Cluster, Roster};
use larder_proto::{
    BlockKey, Location, ModelVersion, NodeId,
    control::{self, Coverage},
    ids::{TenantId, TenantName},
    wire::DecodeError,
};
use std::sync::Arc;

/// A field of a request that breaks its rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {source}")]
pub struct BadRequest {
    /// Which field.
    pub field: &'static str,
    /// Which rule.
    pub source: DecodeError,
}

/// Names a field in the error of reading it.
pub(crate) fn field<T>(field: &'static str, read: Result<T, DecodeError>) -> Result<T, BadRequest> {
    read.map_err(|source| BadRequest { field, source })
}

/// How often an answer is tried again because membership changed under it.
const TRIES: usize = 3;

/// How far a match of a chain reaches, and where its blocks are.
///
/// # Errors
/// A field breaks its rule.
pub fn match_prefix(
    cluster: &Cluster,
    keys_limit: usize,
    request: &control::MatchPrefixRequest,
) -> Result<control::MatchPrefixReply, BadRequest> {
    let (tenant, model) = space(&request.tenant, &request.content, &request.layout)?;
    let keys = keys("keys", &request.keys, keys_limit)?;
    if !request.root.is_empty() {
        field("root", BlockKey::try_from(request.root.as_ref()))?;
    }
    let asker = match request.exclude.is_empty() {
        true => None,
        false => Some(field("exclude", NodeId::try_from(request.exclude.as_ref()))?),
    };
    let counters = cluster.counters();
    counters.match_calls.add(1);
    counters.match_keys.add(keys.len() as u64);
    let mut naming = Naming::default();
    let (found, coverage) = consistent(cluster, &mut naming, |naming| {
        let exclude = asker.and_then(|asker| naming.roster.location(&asker));
        let space = cluster.index().find_space(&tenant, &model);
        let found =
            space.map(|space| cluster.index().match_prefix(space, request.rank, exclude, &keys));
        let Some(found) = found else { return control::MatchPrefixReply::default() };
        let mut runs = Vec::with_capacity(found.runs.len());
        for run in &found.runs {
            let source = |source: &crate::index::Source| {
                let tier = u32::from(source.tier.code());
                Some(control::SourceRun { source: naming.name(source.location)?, tier })
            };
            let sources = run.sources.iter().filter_map(source).collect();
            runs.push(control::Run { blocks: small(run.blocks), sources });
        }
        control::MatchPrefixReply { blocks: small(found.blocks), runs, ..Default::default() }
    });
    counters.match_blocks.add(u64::from(found.blocks));
    Ok(control::MatchPrefixReply { sources: naming.named, coverage: Some(coverage), ..found })
}

/// Who holds each of these blocks.
///
/// # Errors
/// A field breaks its rule.
pub fn locate(
    cluster: &Cluster,
    keys_limit: usize,
    request: &control::LocateRequest,
) -> Result<control::LocateReply, BadRequest> {
    let (tenant, model) = space(&request.tenant, &request.content, &request.layout)?;
    let keys = keys("keys", &request.keys, keys_limit)?;
    cluster.counters().locate_calls.add(1);
    cluster.counters().locate_keys.add(keys.len() as u64);
    let mut naming = Naming::default();
    let (blocks, coverage) = consistent(cluster, &mut naming, |naming| {
        let Some(space) = cluster.index().find_space(&tenant, &model) else {
            return vec![control::LocatedBlock::default(); keys.len()];
        };
        let located = cluster.index().locate(space, &keys);
        let holder = |naming: &mut Naming, holder: &crate::index::Holder| {
            Some(control::LocatedSource {
                source: naming.name(holder.location)?,
                tiers: u32::from(holder.tiers.bits()),
                parts: bytes::Bytes::copy_from_slice(holder.parts.as_bytes()),
            })
        };
        let block = |holders: &[crate::index::Holder]| control::LocatedBlock {
            holders: holders.iter().filter_map(|one| holder(naming, one)).collect(),
        };
        located.iter().map(block).collect()
    });
    Ok(control::LocateReply { blocks, sources: naming.named, coverage: Some(coverage) })
}

/// Looks until membership did not change meanwhile, a few times at most. What is then still uncertain is
/// marked incomplete, and names only sources that spoke throughout, or none.
pub(crate) fn consistent<T>(
    cluster: &Cluster,
    naming: &mut Naming,
    mut look: impl FnMut(&mut Naming) -> T,
) -> (T, Coverage) {
    for _ in 0..TRIES {
        let epoch = cluster.epoch();
        *naming = Naming::begin(cluster.roster());
        let found = look(naming);
        let coverage = cluster.coverage(&naming.roster);
        if epoch.is_some() && epoch == cluster.epoch() {
            return (found, coverage);
        }
        let now = cluster.roster();
        if naming.locations.iter().all(|location| naming.roster.agrees_on(*location, &now)) {
            return (found, Coverage { complete: false, ..coverage });
        }
    }
    *naming = Naming::default();
    let found = look(naming);
    (found, Coverage { complete: false, ..cluster.coverage(&cluster.roster()) })
}

/// The sources that an answer names, each once.
#[derive(Debug, Default)]
pub(crate) struct Naming {
    roster: Arc<Roster>,
    /// What each source of the roster had applied before the answer was looked up.
    seqs: Vec<u64>,
    named: Vec<control::Source>,
    locations: Vec<Location>,
}

impl Naming {
    fn begin(roster: Arc<Roster>) -> Self {
        let seqs = roster.sources().iter().map(|source| source.seq()).collect();
        Self { roster, seqs, named: Vec::new(), locations: Vec::new() }
    }

    /// Where a node's blocks are, if a session speaks for it.
    pub(crate) fn location(&self, node: &NodeId) -> Option<Location> {
        self.roster.location(node)
    }

    /// The node of a location, which the answer relies on from now on. `None` when no session speaks for it.
    pub(crate) fn node(&mut self, location: Location) -> Option<NodeId> {
        let at = self.name(location)?;
        let place = self.roster.position(*self.locations.get(at as usize)?)?;
        Some(self.roster.sources()[place].node)
    }

    /// The place of a location among the named sources; `None` when no session speaks for it.
    fn name(&mut self, location: Location) -> Option<u32> {
        // Few sources are named, so a walk is faster than a table.
        let known = self.locations.iter().position(|known| *known == location);
        let at = match known {
            Some(at) => at,
            None => {
                let at = self.roster.position(location)?;
                self.named.push(self.roster.sources()[at].describe(self.seqs[at]));
                self.locations.push(location);
                self.named.len() - 1
            }
        };
        u32::try_from(at).ok()
    }
}

/// The space that a question is about.
pub(crate) fn space(
    tenant: &str,
    content: &[u8],
    layout: &[u8],
) -> Result<(TenantId, ModelVersion), BadRequest> {
    let tenant = field("tenant", tenant.parse::<TenantName>())?.id();
    let content = field("content", content.try_into())?;
    let layout = field("layout", layout.try_into())?;
    Ok((tenant, ModelVersion { content, layout }))
}

/// Packed keys, their number checked before anything is allocated.
pub(crate) fn keys(
    name: &'static str,
    packed: &[u8],
    limit: usize,
) -> Result<Vec<BlockKey>, BadRequest> {
    const LEN: usize = 32;
    let count = packed.len() / LEN;
    if count > limit {
        let (value, limit) = (count as u64, limit as u64);
        return field(name, Err(DecodeError::Limit { what: "number of keys", value, limit }));
    }
    let (keys, rest) = packed.as_chunks::<LEN>();
    if !rest.is_empty() {
        let left = rest.len();
        return field(name, Err(DecodeError::Trailing { what: "keys of 32 bytes", left }));
    }
    Ok(keys.iter().map(|key| BlockKey::from_bytes(*key)).collect())
}

fn small(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
