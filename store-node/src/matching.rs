//! Matches: how far a chain can be used, over this node and its peers.
//!
//! The node answers from its own catalog first; what it does not hold, one question to a master adds. A
//! match is a hint in time: what it names may be gone when it is fetched, which is then a miss.

use crate::{catalog::BlockId, models::MatchRules, node::Node};
use larder_client::{locations, masters::packed_keys};
use larder_proto::{
    BlockKey, PartNumber, Tier, TierSet,
    control::{MatchPrefixReply, MatchPrefixRequest},
    frame::{Match, MatchRun, Matched, PeerSource, RunPeer},
    ids::TenantName,
    part::longest_match,
    wire::DecodeError,
};
use std::time::Duration;

/// How long a master may take before the match goes on without peers: a fraction of the shortest prefill
/// that is worth a fetch.
const ASK_LIMIT: Duration = Duration::from_millis(250);
/// Peers that a run names.
const PEERS_OF_RUN: usize = 4;

/// Where the blocks of a chain are, as far as masters know.
#[derive(Debug, Default)]
struct PeerView {
    peers: Vec<PeerSource>,
    /// For each block of the chain the peers that hold it whole.
    of_block: Vec<Vec<RunPeer>>,
    complete: bool,
}

impl Node {
    /// Answers a match. `None` when the layout has no such rank.
    pub(crate) async fn match_prefix(&self, tenant: &TenantName, ask: &Match) -> Option<Matched> {
        let rules = self.models.rules(ask.model.layout, ask.rank)?;
        let local = self.holdings(tenant, ask, &rules);
        let held = |group: usize, block: usize| local[block] >> group & 1 == 1;
        let blocks = ask.keys.len();
        let own = longest_match(&rules.rules, blocks, held);
        let alone = own == blocks || !ask.peers || self.masters.is_empty();
        let view = match alone {
            true => PeerView { complete: true, ..PeerView::default() },
            false => self.ask_masters(tenant, ask).await,
        };
        let at_peers = |block: usize| view.of_block.get(block).is_some_and(|p| !p.is_empty());
        let present = |group: usize, block: usize| held(group, block) || at_peers(block);
        let reach = longest_match(&rules.rules, blocks, present);
        // The groups that a match of this reach needs of a block: all for full attention, fewer for
        // blocks that lie before a window or a snapshot.
        let needed = |block: usize| {
            let groups = rules.rules.iter().enumerate();
            let of_group = |(group, rule): (usize, &larder_proto::part::GroupRule)| {
                u64::from(rule.first_needed(reach) <= block) << group
            };
            groups.map(of_group).fold(0, |bits, bit| bits | bit)
        };
        let mut runs: Vec<MatchRun> = Vec::new();
        for (block, held_groups) in local.iter().enumerate().take(reach) {
            let (tiers, peers) = match needed(block) & !*held_groups == 0 {
                true => (self.tiers_of(tenant, ask, &rules, block), Vec::new()),
                false => (TierSet::EMPTY, view.of_block.get(block).cloned().unwrap_or_default()),
            };
            match runs.last_mut() {
                Some(run) if run.local == tiers && run.peers == peers => run.blocks += 1,
                _ => runs.push(MatchRun { blocks: 1, local: tiers, peers }),
            }
        }
        Some(Matched { peers: view.peers, runs, complete: view.complete })
    }

    /// Where this node holds a block: in dram only if all of its parts are there.
    fn tiers_of(
        &self,
        tenant: &TenantName,
        ask: &Match,
        rules: &MatchRules,
        block: usize,
    ) -> TierSet {
        let id = BlockId { tenant: tenant.id(), layout: ask.model.layout, key: ask.keys[block] };
        match self.catalog().holds_in(&id, &rules.parts, Tier::Dram) {
            true => TierSet::of(Tier::Dram),
            false => TierSet::of(Tier::Ssd),
        }
    }

    /// For each block a bit for each group that this node holds for the rank.
    fn holdings(&self, tenant: &TenantName, ask: &Match, rules: &MatchRules) -> Vec<u64> {
        let tenant = tenant.id();
        let of_block = |key: &BlockKey| {
            let id = BlockId { tenant, layout: ask.model.layout, key: *key };
            let bit = |(group, part): (usize, &PartNumber)| {
                u64::from(self.catalog().holds(&id, std::slice::from_ref(part))) << group
            };
            rules.parts.iter().enumerate().map(bit).fold(0, |bits, bit| bits | bit)
        };
        ask.keys.iter().map(of_block).collect()
    }

    async fn ask_masters(&self, tenant: &TenantName, ask: &Match) -> PeerView {
        let request = MatchPrefixRequest {
            tenant: tenant.as_str().to_owned(),
            content: ask.model.content.as_bytes().to_vec().into(),
            layout: ask.model.layout.as_bytes().to_vec().into(),
            root: ask.keys.first().map(|key| key.as_bytes().to_vec()).unwrap_or_default().into(),
            keys: packed_keys(&ask.keys),
            rank: ask.rank,
            exclude: self.id().as_bytes().to_vec().into(),
        };
        // Each master gets its share of the time, so that a dead one does not hide the others.
        let masters = u32::try_from(self.masters.addresses().count().max(1)).unwrap_or(u32::MAX);
        let asked = self.masters.ask_within(ASK_LIMIT / masters, |mut master| {
            let request = request.clone();
            async move { master.match_prefix(request).await }
        });
        match asked.await {
            Ok(reply) => self.learn(tenant, ask, &reply).unwrap_or_else(|error| {
                tracing::warn!(%error, "a master's match makes no sense");
                PeerView::default()
            }),
            // Unknown is not absent: the answer says that it is not complete (F38).
            Err(error) => {
                tracing::debug!(%error, "match without masters");
                PeerView::default()
            }
        }
    }

    fn learn(
        &self,
        tenant: &TenantName,
        ask: &Match,
        reply: &MatchPrefixReply,
    ) -> Result<PeerView, DecodeError> {
        self.locations.learn_match(tenant.id(), ask.model, &ask.keys, reply)?;
        let peers = locations::addresses(&reply.sources)?
            .iter()
            .map(|source| PeerSource { node: source.node, incarnation: source.incarnation })
            .collect();
        let mut of_block = Vec::with_capacity(ask.keys.len());
        for run in &reply.runs {
            let of_run = run.sources.iter().take(PEERS_OF_RUN).map(|source| {
                let unknown = |what, value| DecodeError::Unknown { what, value };
                let peer = u16::try_from(source.source)
                    .ok()
                    .filter(|peer| usize::from(*peer) < reply.sources.len())
                    .ok_or_else(|| unknown("source index", u64::from(source.source)))?;
                let tier = u8::try_from(source.tier).ok().and_then(Tier::from_code);
                let tier = tier.ok_or_else(|| unknown("tier", u64::from(source.tier)))?;
                Ok(RunPeer { peer, tier })
            });
            let of_run = of_run.collect::<Result<Vec<_>, _>>()?;
            let blocks = (run.blocks as usize).min(ask.keys.len() - of_block.len());
            of_block.extend(std::iter::repeat_n(of_run, blocks));
        }
        let complete = reply.coverage.as_ref().is_some_and(|coverage| coverage.complete);
        Ok(PeerView { peers, of_block, complete })
    }
}
