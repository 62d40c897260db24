//! Who holds which block, as masters said lately.
//!
//! Bounded and short-lived: an entry is a hint that saves a question, never the truth. An entry that
//! proves wrong is dropped by whoever found out, and by nobody else (P5).

use crate::peers::NodeAddress;
use larder_proto::{
    BlockKey, ModelVersion,
    block_key::KeyPrefix,
    control::{LocateReply, MatchPrefixReply, Source},
    ids::{NodeId, TenantId},
    wire::DecodeError,
};
use std::{sync::Arc, time::Duration};

/// Entries by default: about 10 MiB.
pub const CAPACITY: u64 = 65_536;
/// How long an entry is used.
pub const LIFETIME: Duration = Duration::from_secs(10);

/// Names a block in the cache. The prefix is enough: what a wrong hint costs is one miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    tenant: TenantId,
    model: ModelVersion,
    key: KeyPrefix,
}

/// Sources of a block, best first.
pub type Sources = Arc<[Arc<NodeAddress>]>;

/// See the module; clones share it.
#[derive(Debug, Clone)]
pub struct Locations {
    cache: moka::sync::Cache<Place, Sources>,
}

impl Default for Locations {
    fn default() -> Self {
        let cache =
            moka::sync::Cache::builder().max_capacity(CAPACITY).time_to_live(LIFETIME).build();
        Self { cache }
    }
}

impl Locations {
    /// What is remembered of a block.
    pub fn get(&self, tenant: TenantId, model: ModelVersion, key: &BlockKey) -> Option<Sources> {
        self.cache.get(&Place { tenant, model, key: key.prefix() })
    }

    /// Remembers the sources of a block.
    pub fn put(&self, tenant: TenantId, model: ModelVersion, key: &BlockKey, sources: Sources) {
        self.cache.insert(Place { tenant, model, key: key.prefix() }, sources);
    }

    /// Forgets one source of a block: it did not hold it.
    pub fn drop_source(&self, tenant: TenantId, model: ModelVersion, key: &BlockKey, node: NodeId) {
        let place = Place { tenant, model, key: key.prefix() };
        let Some(sources) = self.cache.get(&place) else { return };
        let left: Sources = sources.iter().filter(|source| source.node != node).cloned().collect();
        match left.is_empty() {
            true => self.cache.invalidate(&place),
            false => self.cache.insert(place, left),
        }
    }

    /// Remembers what a master answered to a match; the sources of each of its runs.
    pub fn learn_match(
        &self,
        tenant: TenantId,
        model: ModelVersion,
        keys: &[BlockKey],
        reply: &MatchPrefixReply,
    ) -> Result<(), DecodeError> {
        let addresses = addresses(&reply.sources)?;
        let mut keys = keys.iter();
        for run in &reply.runs {
            let of_run = run.sources.iter().map(|source| source.source);
            let sources = pick(&addresses, of_run)?;
            for key in keys.by_ref().take(run.blocks as usize) {
                if !sources.is_empty() {
                    self.put(tenant, model, key, Arc::clone(&sources));
                }
            }
        }
        Ok(())
    }

    /// Remembers what a master answered to a location question.
    pub fn learn_located(
        &self,
        tenant: TenantId,
        model: ModelVersion,
        keys: &[BlockKey],
        reply: &LocateReply,
    ) -> Result<(), DecodeError> {
        let addresses = addresses(&reply.sources)?;
        for (key, block) in keys.iter().zip(&reply.blocks) {
            let sources = pick(&addresses, block.holders.iter().map(|holder| holder.source))?;
            if !sources.is_empty() {
                self.put(tenant, model, key, sources);
            }
        }
        Ok(())
    }
}

/// The nodes that an answer of a master names.
pub fn addresses(sources: &[Source]) -> Result<Vec<Arc<NodeAddress>>, DecodeError> {
    let address = |source: &Source| {
        Ok(Arc::new(NodeAddress {
            node: source.node.as_ref().try_into()?,
            incarnation: larder_proto::ids::Incarnation(source.incarnation),
            address: source.data_address.clone(),
        }))
    };
    sources.iter().map(address).collect()
}

fn pick(
    addresses: &[Arc<NodeAddress>],
    indices: impl Iterator<Item = u32>,
) -> Result<Sources, DecodeError> {
    let of_index = |index: u32| {
        addresses.get(index as usize).cloned().ok_or(DecodeError::Limit {
            what: "source index",
            value: u64::from(index),
            limit: addresses.len() as u64,
        })
    };
    indices.map(of_index).collect()
}
