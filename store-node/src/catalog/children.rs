//! Which blocks follow a block, on this node.

use larder_proto::BlockKey;
use smallvec::SmallVec;
use std::collections::HashMap;

/// From here on they are looked up and not looked through.
const FEW: usize = 32;

/// Nearly always one, and for a common prompt very many. A child may be noted several times, while
/// several of its parts are committed at once, and is there until each has been taken back.
#[derive(Debug)]
pub(super) enum Children {
    Few(SmallVec<[BlockKey; 1]>),
    Many(HashMap<BlockKey, u32>),
}

impl Default for Children {
    fn default() -> Self {
        Self::Few(SmallVec::new())
    }
}

impl Children {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Few(few) => few.is_empty(),
            Self::Many(many) => many.is_empty(),
        }
    }

    pub(super) fn insert(&mut self, child: BlockKey) {
        match self {
            Self::Few(few) if few.len() < FEW => few.push(child),
            Self::Few(few) => {
                let mut many = HashMap::with_capacity(2 * FEW);
                few.drain(..).chain([child]).for_each(|child| *many.entry(child).or_default() += 1);
                *self = Self::Many(many);
            }
            Self::Many(many) => *many.entry(child).or_default() += 1,
        }
    }

    /// Takes back one note of a child.
    pub(super) fn remove(&mut self, child: &BlockKey) {
        match self {
            Self::Few(few) => {
                if let Some(at) = few.iter().position(|other| other == child) {
                    few.swap_remove(at);
                }
            }
            Self::Many(many) => {
                if let Some(notes) = many.get_mut(child) {
                    *notes -= 1;
                    if *notes == 0 {
                        many.remove(child);
                    }
                }
            }
        }
    }

    /// Whether there is no child besides this one.
    pub(super) fn has_none_but(&self, child: Option<&BlockKey>) -> bool {
        match self {
            Self::Few(few) => few.iter().all(|other| Some(other) == child),
            Self::Many(many) => many.keys().all(|other| Some(other) == child),
        }
    }

    /// Each child, once.
    pub(super) fn to_vec(&self) -> Vec<BlockKey> {
        match self {
            Self::Few(few) => {
                let mut once = few.to_vec();
                once.sort_unstable();
                once.dedup();
                once
            }
            Self::Many(many) => many.keys().copied().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn a_child_is_there_until_each_note_of_it_is_taken_back(
            ops in prop::collection::vec((0u8..10, 0u8..60), 0..400),
        ) {
            let (mut children, mut model) = (Children::default(), BTreeMap::<BlockKey, u32>::new());
            for (op, n) in ops {
                let key = BlockKey::from_bytes([n; 32]);
                if op < 6 {
                    children.insert(key);
                    *model.entry(key).or_default() += 1;
                } else {
                    children.remove(&key);
                    model.entry(key).and_modify(|notes| *notes -= 1);
                    model.retain(|_, notes| *notes > 0);
                }
                prop_assert_eq!(children.is_empty(), model.is_empty());
                let mut there = children.to_vec();
                there.sort_unstable();
                prop_assert_eq!(there, model.keys().copied().collect::<Vec<_>>());
            }
        }
    }
}
