//! Model versions that engines of this host run: what a match needs to know of a layout.

use larder_proto::{
    LayoutFingerprint, ModelVersion, PartNumber,
    fingerprint::{ContentDescription, LayoutDescription, ModelDescription},
    frame::Register,
    part::GroupRule,
    wire::DecodeError,
};
use parking_lot::RwLock;
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// Model versions that a node remembers.
const LIMIT: usize = 4096;

/// How blocks of a layout are matched by one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatchRules {
    /// One rule a group.
    pub rules: Vec<GroupRule>,
    /// The rank's part of each group.
    pub parts: Vec<PartNumber>,
}

impl MatchRules {
    /// The rules of a layout that nobody described: one group of full attention, one part.
    fn unknown() -> Self {
        Self { rules: vec![GroupRule::EveryBlock], parts: vec![PartNumber(0)] }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Models {
    described: RwLock<BTreeMap<ModelVersion, Arc<ModelDescription>>>,
    layouts: RwLock<HashMap<LayoutFingerprint, Arc<ModelDescription>>>,
}

impl Models {
    /// Takes a model version as an engine describes it; whether it was new.
    pub fn register(
        &self,
        register: &Register,
    ) -> Result<(Arc<ModelDescription>, bool), DecodeError> {
        let model = Arc::new(ModelDescription {
            display_name: register.display_name.as_str().to_owned(),
            content: ContentDescription::decode(register.content.as_bytes())?,
            layout: LayoutDescription::decode(register.layout.as_bytes())?,
        });
        let version = model.version();
        let mut described = self.described.write();
        if described.len() >= LIMIT && !described.contains_key(&version) {
            let value = described.len() as u64;
            return Err(DecodeError::Limit { what: "model versions", value, limit: LIMIT as u64 });
        }
        let is_new = described.insert(version, Arc::clone(&model)).is_none();
        self.layouts.write().insert(version.layout, Arc::clone(&model));
        Ok((model, is_new))
    }

    /// All that were registered.
    pub fn all(&self) -> Vec<Arc<ModelDescription>> {
        self.described.read().values().cloned().collect()
    }

    /// How `rank` matches blocks of a layout; `None` when the layout has no such rank.
    pub fn rules(&self, layout: LayoutFingerprint, rank: u32) -> Option<MatchRules> {
        let Some(model) = self.layouts.read().get(&layout).cloned() else {
            return (rank == 0).then(MatchRules::unknown);
        };
        let layout = &model.layout;
        let parts = (0..layout.groups.len())
            .map(|group| layout.part_number(group, rank as usize))
            .collect::<Option<Vec<_>>>()?;
        Some(MatchRules { rules: layout.groups.iter().map(|group| group.rule).collect(), parts })
    }
}
