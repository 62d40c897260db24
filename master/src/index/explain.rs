//! Questions of people: why a block is, or is not, a hit.

use super::{Holder, Index, SpaceId, locations::State};
use larder_proto::{BlockKey, ModelVersion, PartNumber, event::PartSet, ids::TenantId};

impl Index {
    /// Who holds the block but is hidden: its session ended and it is not forgotten yet.
    pub fn holders_hidden(&self, space: SpaceId, key: &BlockKey) -> Vec<Holder> {
        self.locate_in(space, std::slice::from_ref(key), State::Hidden).into_holders()
    }

    /// Who holds the same block in other layouts of the same tenant and content.
    pub fn holders_in_other_layouts(
        &self,
        tenant: &TenantId,
        model: &ModelVersion,
        key: &BlockKey,
    ) -> Vec<(ModelVersion, Vec<Holder>)> {
        let other = |space: &(SpaceId, ModelVersion)| {
            space.1.content == model.content && space.1.layout != model.layout
        };
        let others = self.spaces_of(tenant).into_iter().filter(other);
        let held = others.map(|(space, model)| {
            (model, self.locate(space, std::slice::from_ref(key)).into_holders())
        });
        held.filter(|(_, holders)| !holders.is_empty()).collect()
    }

    /// The live spaces of a tenant.
    pub fn spaces_of(&self, tenant: &TenantId) -> Vec<(SpaceId, ModelVersion)> {
        let spaces = self.spaces.read();
        let of_tenant = spaces.live().filter(|(_, row)| row.tenant == *tenant);
        of_tenant.map(|(id, row)| (id, row.model)).collect()
    }

    /// The parts of a whole block that no shown location holds. `None` when the layout was not described,
    /// so that nobody knows what a whole block is.
    pub fn missing_parts(&self, space: SpaceId, key: &BlockKey) -> Option<Vec<PartNumber>> {
        let rules = self.spaces.read().row(space)?.rules.clone()?;
        let mut held = PartSet::default();
        for holder in self.locate(space, std::slice::from_ref(key)).into_holders() {
            held.unite(&holder.parts);
        }
        Some(rules.parts().filter(|part| !held.has(*part)).collect())
    }
}
