//! Whether the index and the node agree.

use super::cluster::Cluster;
use crate::{content, error::BenchError};
use larder_proto::{BlockKey, frame::KEYS_LIMIT};

/// Blocks of a run on which the two do not agree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Differences {
    /// Blocks asked for.
    pub(super) keys: u64,
    /// Of these, what the node holds.
    pub(super) held: u64,
    /// In the index, and not on the node.
    pub(super) orphans: u64,
    /// On the node, and not in the index.
    pub(super) missing: u64,
    /// Not on the node, between two blocks of their chain that are.
    pub(super) holes: u64,
    /// Blocks not on the node since the last one of the chain that is, if there was one.
    gap: Option<u64>,
}

impl Differences {
    /// The next block, in order; whether it begins a chain.
    fn count(&mut self, root: bool, located: bool, held: bool) {
        if root {
            self.gap = None;
        }
        self.gap = match (self.gap, held) {
            (gap, true) => {
                self.holes += gap.unwrap_or(0);
                Some(0)
            }
            (gap, false) => gap.map(|gap| gap + 1),
        };
        self.keys += 1;
        self.held += u64::from(held);
        self.orphans += u64::from(located && !held);
        self.missing += u64::from(held && !located);
    }
}

/// Asks both for every block with a number below `blocks`, which are chains of so many.
pub(super) async fn compare(
    cluster: &Cluster,
    blocks: u64,
    chain: u64,
) -> Result<Differences, BenchError> {
    let mut differences = Differences::default();
    for first in (0..blocks).step_by(KEYS_LIMIT) {
        let numbers = first..blocks.min(first + KEYS_LIMIT as u64);
        let keys: Vec<BlockKey> = numbers.clone().map(content::key).collect();
        let (located, held) = (cluster.located(&keys).await?, cluster.held(&keys).await?);
        for (number, (located, held)) in numbers.zip(located.into_iter().zip(held)) {
            differences.count(number % chain == 0, located, held);
        }
    }
    Ok(differences)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_side_alone_knows_is_an_orphan_or_missing() {
        let mut differences = Differences::default();
        [(true, true), (true, false), (true, false), (false, true), (false, false)]
            .into_iter()
            .for_each(|(located, held)| differences.count(true, located, held));
        let Differences { keys, held, orphans, missing, holes, .. } = differences;
        assert_eq!((keys, held, orphans, missing, holes), (5, 2, 2, 1, 0));
    }

    #[test]
    fn a_hole_lies_between_two_held_blocks_of_one_chain() {
        let holes = |chains: &[&str]| {
            let mut differences = Differences::default();
            for chain in chains {
                let blocks = chain.chars().enumerate();
                blocks.for_each(|(at, block)| differences.count(at == 0, false, block == 'x'));
            }
            differences.holes
        };
        assert_eq!(holes(&["xx--", "--xx", "----"]), 0);
        assert_eq!(holes(&["x--x", "-x-x"]), 3);
    }
}
