//! Small numbers for what many blocks have in common: tenant, model version and the parts held.
//!
//! Append-only and bounded: a number, once given, means the same for the whole life of the node and in
//! every session. At the limit a new set is refused; the node then keeps the block and cannot announce
//! it. Models have few part sets, so that a node which reaches the limit serves thousands of models.

use larder_proto::{
    event::{PartSet, PartSetDef, SetDigester},
    fingerprint::ModelVersion,
    ids::TenantId,
    part::TierSet,
};
use parking_lot::RwLock;
use std::{collections::HashMap, sync::Arc};

/// The number of a part set on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SetId(pub u32);

/// What a node holds of one block, as masters are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockState {
    /// Whose block, of which model version, and the parts that are there.
    pub set: SetId,
    /// Tiers with at least one part.
    pub tiers: TierSet,
}

/// No further part set fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the node knows {limit} part sets, which is the limit: the block is kept and not announced"
)]
pub struct SetsFull {
    /// The limit.
    pub limit: usize,
}

/// All part sets of a node.
#[derive(Debug)]
pub struct PartSets {
    limit: usize,
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    defs: Vec<(Arc<PartSetDef>, SetDigester)>,
    numbers: HashMap<Arc<PartSetDef>, SetId>,
}

impl PartSets {
    /// Part sets of a node by default: about 20 MiB when full.
    pub const DEFAULT_LIMIT: usize = 65_536;

    /// None yet, and at most `limit`.
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.min(u32::MAX as usize), inner: RwLock::default() }
    }

    /// The number of this set, the same at every call.
    ///
    /// # Errors
    /// The set is new and the limit is reached.
    pub fn intern(&self, def: &PartSetDef) -> Result<SetId, SetsFull> {
        if let Some(known) = self.inner.read().numbers.get(def) {
            return Ok(*known);
        }
        let mut inner = self.inner.write();
        if let Some(known) = inner.numbers.get(def) {
            return Ok(*known);
        }
        let number = u32::try_from(inner.defs.len()).unwrap_or(u32::MAX);
        if inner.defs.len() >= self.limit {
            return Err(SetsFull { limit: self.limit });
        }
        let def = Arc::new(def.clone());
        inner.defs.push((Arc::clone(&def), SetDigester::new(&def)));
        inner.numbers.insert(def, SetId(number));
        Ok(SetId(number))
    }

    /// The number that stands for a space itself, for changes that name no part.
    ///
    /// # Errors
    /// As [`Self::intern`].
    pub fn space(&self, tenant: TenantId, model: ModelVersion) -> Result<SetId, SetsFull> {
        self.intern(&PartSetDef { tenant, model, parts: PartSet::default() })
    }

    /// What a number means.
    ///
    /// # Panics
    /// When this table never gave the number.
    pub fn def(&self, set: SetId) -> Arc<PartSetDef> {
        Arc::clone(&self.inner.read().defs[set.0 as usize].0)
    }

    /// Digests the blocks of a set.
    ///
    /// # Panics
    /// When this table never gave the number.
    pub fn digester(&self, set: SetId) -> SetDigester {
        self.inner.read().defs[set.0 as usize].1
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.inner.read().defs.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_proto::{ContentFingerprint, LayoutFingerprint, part::PartNumber};

    fn def(part: u16) -> PartSetDef {
        let model = ModelVersion {
            content: ContentFingerprint::from_bytes([1; 32]),
            layout: LayoutFingerprint::from_bytes([2; 32]),
        };
        let parts = PartSet::of([PartNumber(part)]).unwrap();
        PartSetDef { tenant: TenantId::from_bytes([3; 16]), model, parts }
    }

    #[test]
    fn a_set_keeps_its_number_and_the_table_its_limit() {
        let sets = PartSets::new(2);
        let first = sets.intern(&def(0)).unwrap();
        let second = sets.intern(&def(1)).unwrap();
        assert_ne!(first, second);
        assert_eq!(sets.intern(&def(2)), Err(SetsFull { limit: 2 }));
        assert_eq!(sets.intern(&def(0)), Ok(first), "known sets are known at the limit too");
        assert_eq!(*sets.def(second), def(1));
    }
}
