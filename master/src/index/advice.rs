//! What the cluster would miss least.

use super::{Holder, Index, SpaceId};
use larder_proto::part::GroupRule;

impl Index {
    /// Whether these holders together have every part that any match of a block needs, of every rank. Also when
    /// that is not known, because nobody has described the layout yet.
    pub fn is_usable(&self, space: SpaceId, holders: &[Holder]) -> bool {
        let spaces = self.spaces.read();
        let Some(rules) = spaces.row(space).and_then(|row| row.rules.as_ref()) else { return true };
        rules.parts_of(GroupRule::EveryBlock).all(|part| holders.iter().any(|h| h.parts.has(part)))
    }
}
