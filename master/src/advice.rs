//! Advice to nodes: which of their blocks the cluster would miss least.
//!
//! Three kinds. A block whose parent nobody holds cannot be reached by any match, and neither can what follows it.
//! A block of which nobody holds a part that every match needs is of no use to anybody. And of a block that several
//! nodes hold one of them is chosen to keep it: the one with the fastest copy and, of those, the one that a hash
//! of the block's chain and the node picks: a chain that several hold in the same tier and with the same parts is kept
//! whole by one of them, and the others may let go of all of it, from its end. Every master picks the same one, so two
//! holders are not told to rely on each other; a node that names no chains relies on nobody, as the others' choice
//! rests on them.
//!
//! Said is only what the index is sure of: an absence counts when the answer sees the whole cluster, and a keeper
//! is one whose node is in session. It may be out of date when it arrives: the node has the last word.

use crate::{
    answers::{BadRequest, Naming, consistent, field, keys},
    cluster::Cluster,
    index::{HOLDER_LIMIT, Holder, finalise},
};
use larder_proto::{
    BlockKey, Location, ModelVersion, NodeId, control, ids::TenantId, wire::DecodeError,
};
use std::cmp::Reverse;

/// Answers a node that asks what it can miss.
///
/// # Errors
/// A field breaks its rule.
pub fn advise(
    cluster: &Cluster,
    keys_limit: usize,
    request: &control::AdviseRequest,
) -> Result<control::AdviseReply, BadRequest> {
    let node = field("node", NodeId::try_from(request.node.as_ref()))?;
    let tenant = field("tenant", TenantId::try_from(request.tenant.as_ref()))?;
    let content = field("content", request.content.as_ref().try_into())?;
    let layout = field("layout", request.layout.as_ref().try_into())?;
    let held = keys("keys", &request.keys, keys_limit)?;
    let parents = keys("parents", &request.parents, keys_limit)?;
    one_for_each(&held, &request.chains)?;
    let counters = cluster.counters();
    counters.advise_calls.add(1);
    counters.advise_keys.add((held.len() + parents.len()) as u64);
    let index = cluster.index();
    let mut naming = Naming::default();
    let (found, coverage) = consistent(cluster, &mut naming, |naming| {
        let mut reply = control::AdviseReply::default();
        let space = index.find_space(&tenant, &ModelVersion { content, layout });
        let (Some(space), Some(asker)) = (space, naming.location(&node)) else { return reply };
        for (at, holders) in (0u32..).zip(index.locate(space, &held).iter()) {
            let mine = holders.iter().find(|holder| holder.location == asker);
            // More are not looked at, and the index may not know yet what the asker stored.
            let Some(mine) = mine.filter(|_| holders.len() < HOLDER_LIMIT) else { continue };
            if !index.is_usable(space, holders) {
                reply.broken.push(at);
            } else if let Some(chain) = request.chains.get(at as usize)
                && keeper(naming, *chain, mine, holders) != Some(asker)
            {
                reply.spare.push(at);
            }
        }
        let located = index.locate(space, &parents);
        let gone = (0..).zip(located.iter()).filter(|(_, holders)| holders.is_empty());
        reply.gone.extend(gone.map(|(at, _)| at));
        reply
    });
    let sure = coverage.complete;
    let control::AdviseReply { gone, broken, spare, .. } = found;
    let [gone, broken] = [gone, broken].map(|list| if sure { list } else { Vec::new() });
    counters.advised_blocks.add((gone.len() + broken.len() + spare.len()) as u64);
    Ok(control::AdviseReply { gone, broken, spare, coverage: Some(coverage) })
}

/// Whether chains are named for all blocks that are asked about, or for none.
fn one_for_each(held: &[BlockKey], chains: &[u64]) -> Result<(), BadRequest> {
    if !chains.is_empty() && chains.len() != held.len() {
        let (value, limit) = (chains.len() as u64, held.len() as u64);
        let what = "number of chains, one for each key,";
        return field("chains", Err(DecodeError::Limit { what, value, limit }));
    }
    Ok(())
}

/// Who of the holders keeps a block of this chain: `mine`, or one that is in session and holds all that `mine` is.
fn keeper(naming: &mut Naming, chain: u64, mine: &Holder, holders: &[Holder]) -> Option<Location> {
    let mut weigh = |holder: &Holder| {
        let node = naming.node(holder.location)?;
        Some((holder.tiers.fastest()?, Reverse(weight(chain, &node)), holder.location))
    };
    let others = holders.iter().filter(|holder| holder.location != mine.location);
    let able = others.filter(|holder| mine.parts.is_within(&holder.parts));
    let best = able.filter_map(&mut weigh).min();
    let own = weigh(mine);
    [own, best].into_iter().flatten().min().map(|(_, _, location)| location)
}

/// Who keeps a chain among equals: the highest weight (rendezvous hashing, Thaler and Ravishankar 1998). FNV-1a
/// and a finaliser, both without a secret: the same on every master.
fn weight(chain: u64, node: &NodeId) -> u64 {
    let chain = chain.to_le_bytes();
    let bytes = chain.iter().chain(node.as_bytes());
    finalise(bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    }))
}
