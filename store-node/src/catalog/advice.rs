//! What masters are asked about a node's blocks, and what their advice changes.
//!
//! The node judges: only blocks that nobody used for a while are asked about, and only those that are still unused
//! when the advice comes are called spare. Spare is what goes first when room is needed and nothing else: what is
//! being read or is followed by others stays, and a use ends it (see [`crate::eviction`]).

use super::{BlockId, Catalog};
use crate::eviction::{Spare, Unit};
use larder_proto::{BlockKey, ModelVersion, event::Shard, ids::TenantId};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// Blocks that follow one that cannot be reached are looked for up to this number.
const LINEAGE: usize = 1 << 16;

/// What to ask about blocks of one tenant and model version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Whose.
    pub tenant: TenantId,
    /// Of which model version.
    pub model: ModelVersion,
    /// Blocks that are here and were not used for a while.
    pub held: Vec<BlockKey>,
    /// Of each of these: the number of its chain.
    pub chains: Vec<u64>,
    /// Blocks that are not here, and that some of those follow.
    pub parents: Vec<BlockKey>,
}

/// What a master advises; places in the lists of the question.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Advice {
    /// Of the parents: nobody holds it.
    pub gone: Vec<u32>,
    /// Of the blocks held: nobody can use it.
    pub broken: Vec<u32>,
    /// Of the blocks held: another node keeps it.
    pub spare: Vec<u32>,
}

/// A block, its root and its parent.
type Linked = (BlockKey, BlockKey, Option<BlockKey>);

impl Catalog {
    /// What to ask about the blocks of a shard that were not used for `idle`, at most `limit` of them a question.
    pub fn questions(&self, shard: Shard, idle: Duration, limit: usize) -> Vec<Question> {
        let mut spaces = BTreeMap::<(TenantId, ModelVersion), Vec<Linked>>::new();
        let is_idle =
            |unit: &Arc<Unit>| unit.unused_for(idle, &self.clock) && !unit.is_kept(&self.clock);
        for (id, block) in self.shards[usize::from(shard.0)].lock().iter() {
            if block.is_stored() && block.unit.as_ref().is_some_and(is_idle) {
                let model = ModelVersion { content: block.content, layout: id.layout };
                let blocks = spaces.entry((id.tenant, model)).or_default();
                blocks.push((id.key, block.root, block.parent));
            }
        }
        let mut questions = Vec::new();
        for ((tenant, model), blocks) in spaces {
            for some in blocks.chunks(limit.max(1)) {
                let held = some.iter().map(|(key, ..)| *key).collect();
                let chains = some.iter().map(|(_, root, _)| root.chain()).collect();
                let parents: BTreeSet<BlockKey> = some.iter().filter_map(|(.., p)| *p).collect();
                let is_away = |key: &BlockKey| {
                    let id = BlockId { tenant, layout: model.layout, key: *key };
                    !self.shard(&id).get(&id).is_some_and(|block| block.is_stored())
                };
                let parents = parents.into_iter().filter(is_away).collect();
                questions.push(Question { tenant, model, held, chains, parents });
            }
        }
        questions
    }

    /// Follows advice on what was asked, for as long as it is not older than `time`. Blocks called spare.
    pub fn take_advice(
        &self,
        question: &Question,
        advice: &Advice,
        idle: Duration,
        time: Duration,
    ) -> u64 {
        let Question { tenant, model, held, chains: _, parents } = question;
        let id = |key: &BlockKey| BlockId { tenant: *tenant, layout: model.layout, key: *key };
        let of = |list: &[BlockKey], places: &[u32]| -> Vec<BlockId> {
            places.iter().filter_map(|at| list.get(*at as usize)).map(id).collect()
        };
        // What follows a block that is of no use is of none either. A parent that is not here knows its children.
        let gone = of(parents, &advice.gone).into_iter().filter(|id| {
            !self.shard(id).get(id).is_some_and(|block| block.is_stored()) // It came meanwhile.
        });
        let lost = self.with_descendants(gone.chain(of(held, &advice.broken)).collect());
        let lost = lost.into_iter().map(|id| (id, Some(Spare::Lost(time))));
        let kept: BTreeSet<u32> = advice.spare.iter().copied().collect();
        // What is not said any more held once, perhaps: whoever was to keep the block may have lost it.
        let asked = (0..)
            .zip(held)
            .map(|(at, key)| (id(key), kept.contains(&at).then_some(Spare::Kept(time))));
        let mut spare = Vec::new();
        for (id, why) in lost.chain(asked) {
            let shard = self.shard(&id);
            let Some(unit) = shard.get(&id).and_then(|block| block.unit.clone()) else { continue };
            match why {
                None => unit.not_kept_elsewhere(),
                Some(why) if unit.unused_for(idle, &self.clock) && !unit.is_kept(&self.clock) => {
                    unit.call_spare(why, &self.clock);
                    spare.push(unit);
                }
                Some(_) => {}
            }
        }
        let count = spare.len() as u64;
        self.counters.advised_blocks.fetch_add(count, Ordering::Relaxed);
        self.order.lock().spare(spare);
        count
    }

    /// These blocks and what follows them here, each before the one it follows: tails first.
    fn with_descendants(&self, heads: Vec<BlockId>) -> Vec<BlockId> {
        let mut seen = BTreeSet::new();
        let mut left: Vec<(BlockId, bool)> = heads.into_iter().map(|id| (id, false)).collect();
        let mut lineage = Vec::new();
        while let Some((id, followed)) = left.pop() {
            if followed {
                lineage.push(id);
            } else if seen.len() < LINEAGE && seen.insert(id) {
                left.push((id, true));
                let shard = self.shard(&id);
                let children = shard.get(&id).map(|block| block.children.to_vec());
                let children = children.into_iter().flatten();
                left.extend(children.map(|key| (BlockId { key, ..id }, false)));
            }
        }
        lineage
    }
}
