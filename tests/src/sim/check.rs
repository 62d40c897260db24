//! The promises, held against the truth that only a simulation knows.

use super::{
    node::{BlockName, Held},
    world::{Broken, SPACES, World},
};
use larder_master::answers;
use larder_proto::{
    Incarnation, NodeId,
    control::{LocateReply, LocateRequest, MatchPrefixRequest},
    event::PartSet,
    part::{PartNumber, TierSet},
};
use std::collections::BTreeMap;

/// What each life of each node holds.
type Copies = BTreeMap<(NodeId, Incarnation), BTreeMap<BlockName, Held>>;

impl World {
    /// During faults: no answer names who was superseded or left, and a complete answer is exact for the
    /// sequence numbers that it names.
    pub(super) fn check_answers(&mut self) -> Result<(), Broken> {
        for at in 0..self.masters.len() {
            if !self.masters[at].is_up(self.now) {
                continue;
            }
            self.met.answers += 1;
            let mut complete = true;
            let mut said = Copies::new();
            for space in 0..SPACES {
                let reply = self.locate(at, space)?;
                complete &= reply.coverage.is_some_and(|coverage| coverage.complete);
                self.check_sources(at, &reply)?;
                self.gather(space, &reply, &mut said);
            }
            if complete {
                self.met.complete += 1;
                let truth = self.truth_at_stated(at);
                self.compare(at, &truth, &said)?;
                self.check_matches(at, &truth)?;
            }
        }
        Ok(())
    }

    /// After a quiet time: every index is the union of the catalogs of all live nodes (P5, F09, F10, F25).
    pub(super) fn check_agreement(&mut self) -> Result<(), Broken> {
        for at in 0..self.masters.len() {
            let index = self.masters[at].cluster.index();
            let (stats, limited) = (index.stats(), index.limited());
            let mut said = Copies::new();
            for space in 0..SPACES {
                let reply = self.locate(at, space)?;
                let coverage = reply.coverage.unwrap_or_default();
                if coverage.complete == limited || coverage.nodes_known as usize != self.nodes.len()
                {
                    return Err(self.broken(format!("master {at} is not in step: {coverage:?}")));
                }
                self.gather(space, &reply, &mut said);
            }
            let mut truth = Copies::new();
            for node in &self.nodes {
                let life =
                    node.life.as_ref().ok_or_else(|| self.broken("a node did not come back"))?;
                truth.insert((node.id, life.incarnation), life.catalog.now());
            }
            if limited {
                self.met.limited += 1;
                self.check_subset(at, &truth, &said)?;
                continue;
            }
            self.compare(at, &truth, &said)?;
            self.check_matches(at, &truth)?;
            let held: usize = truth.values().map(BTreeMap::len).sum();
            if stats.entries != held as u64 || stats.to_sweep != 0 {
                return Err(self.broken(format!("master {at} keeps {stats:?}, nodes hold {held}")));
            }
        }
        Ok(())
    }

    fn locate(&self, at: usize, space: usize) -> Result<LocateReply, Broken> {
        let (_, model) = self.universe.spaces[space];
        let tenant = &self.universe.tenants[self.universe.tenant_of[space]];
        let keys: Vec<u8> = self.universe.keys.iter().flat_map(|key| *key.as_bytes()).collect();
        let request = LocateRequest {
            tenant: tenant.to_string(),
            content: model.content.as_bytes().to_vec().into(),
            layout: model.layout.as_bytes().to_vec().into(),
            keys: keys.into(),
        };
        let reply = answers::locate(&self.masters[at].cluster, 1_024, &request);
        reply.map_err(|error| self.broken(error.to_string()))
    }

    fn check_sources(&self, at: usize, reply: &LocateReply) -> Result<(), Broken> {
        for source in &reply.sources {
            let node = source.node.as_ref().try_into();
            let node: NodeId = node.map_err(|_| self.broken("a source without a node"))?;
            let believed =
                self.masters[at].believed.get(&node).map(|(incarnation, _)| incarnation.0);
            if believed != Some(source.incarnation) {
                return Err(self.broken(format!(
                    "master {at} names life {} of {node}, in session is {believed:?}",
                    source.incarnation
                )));
            }
        }
        Ok(())
    }

    fn gather(&self, space: usize, reply: &LocateReply, said: &mut Copies) {
        for (key, block) in self.universe.keys.iter().zip(&reply.blocks) {
            for holder in &block.holders {
                let source = &reply.sources[holder.source as usize];
                let (Ok(node), Ok(parts)) =
                    (source.node.as_ref().try_into(), PartSet::from_bytes(&holder.parts))
                else {
                    continue;
                };
                let tiers = u8::try_from(holder.tiers).ok();
                let tiers =
                    tiers.and_then(|bits| TierSet::from_bits(bits).ok()).unwrap_or_default();
                let copy = said.entry((node, Incarnation(source.incarnation))).or_default();
                copy.insert((space, *key), (parts, tiers));
            }
        }
    }

    /// What the sources of a master held when the events had happened that it says it knows.
    fn truth_at_stated(&self, at: usize) -> Copies {
        let roster = self.masters[at].cluster.roster();
        let mut truth = Copies::new();
        for source in roster.sources() {
            let node = self.nodes.iter().find(|node| node.id == source.node);
            if let Some(catalog) = node.and_then(|node| node.lives.get(&source.incarnation)) {
                truth.insert((source.node, source.incarnation), catalog.at(source.seq()));
            }
        }
        truth
    }

    fn compare(&self, at: usize, truth: &Copies, said: &Copies) -> Result<(), Broken> {
        let nothing = BTreeMap::new();
        for life in truth.keys().chain(said.keys()) {
            let (held, told) =
                (truth.get(life).unwrap_or(&nothing), said.get(life).unwrap_or(&nothing));
            for name in held.keys().chain(told.keys()) {
                if held.get(name) != told.get(name) {
                    return Err(self.broken(format!(
                        "master {at} says {:?} of block {} in space {} at {}.{}, it is {:?}",
                        told.get(name),
                        name.1,
                        name.0,
                        life.0,
                        life.1,
                        held.get(name)
                    )));
                }
            }
        }
        Ok(())
    }

    /// At its limit an index leaves out and never makes up.
    fn check_subset(&self, at: usize, truth: &Copies, said: &Copies) -> Result<(), Broken> {
        for (life, told) in said {
            for (name, state) in told {
                if truth.get(life).and_then(|held| held.get(name)) != Some(state) {
                    return Err(self.broken(format!("master {at} makes up block {}", name.1)));
                }
            }
        }
        Ok(())
    }

    /// A complete match reaches exactly as far as the union of all copies does.
    fn check_matches(&self, at: usize, truth: &Copies) -> Result<(), Broken> {
        for space in 0..SPACES {
            for rank in 0..2u16 {
                let part = PartNumber(rank);
                let held = |key: &larder_proto::BlockKey| {
                    let name = (space, *key);
                    truth.values().any(|copy| copy.get(&name).is_some_and(|held| held.0.has(part)))
                };
                let expected = self.universe.keys.iter().take_while(|key| held(key)).count();
                let (_, model) = self.universe.spaces[space];
                let tenant = &self.universe.tenants[self.universe.tenant_of[space]];
                let keys: Vec<u8> =
                    self.universe.keys.iter().flat_map(|key| *key.as_bytes()).collect();
                let request = MatchPrefixRequest {
                    tenant: tenant.to_string(),
                    content: model.content.as_bytes().to_vec().into(),
                    layout: model.layout.as_bytes().to_vec().into(),
                    keys: keys.into(),
                    rank: u32::from(rank),
                    ..MatchPrefixRequest::default()
                };
                let reply = answers::match_prefix(&self.masters[at].cluster, 1_024, &request);
                let reply = reply.map_err(|error| self.broken(error.to_string()))?;
                if reply.blocks as usize != expected {
                    return Err(self.broken(format!(
                        "master {at} matches {} blocks of space {space} for rank {rank}, usable are \
                         {expected}",
                        reply.blocks
                    )));
                }
            }
        }
        Ok(())
    }
}
