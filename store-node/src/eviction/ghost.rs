//! What was evicted lately, and from where: names without blocks.

use crate::catalog::BlockId;
use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
};

/// A block's whole name in 64 bits.
pub(super) fn fingerprint(id: &BlockId) -> u64 {
    let BlockId { tenant, layout, key } = id;
    let mut hasher = DefaultHasher::new();
    (tenant, layout, key).hash(&mut hasher);
    hasher.finish()
}

/// The queue of [`super::S3Fifo`] that a block is or was in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    /// Of new blocks.
    Small,
    /// Of blocks that proved useful.
    Main,
}

/// Fingerprints in the order in which their blocks went. Two blocks with one fingerprint cost a wrong guess,
/// never a wrong byte, so 63 bits are plenty. About 40 bytes an entry.
#[derive(Default)]
pub(super) struct Ghosts {
    /// The lowest bit of a fingerprint gives way to the queue. An entry that was taken leaves its place
    /// behind until its turn comes.
    order: VecDeque<u64>,
    /// Places that have left `order`: what the first one that is left is counted as.
    gone: u64,
    /// Where in the order, counted from the first that ever was.
    places: HashMap<u64, u64>,
    from_small: usize,
}

const FROM_MAIN: u64 = 1;

impl Ghosts {
    /// Remembers a block, and forgets the oldest ones beyond `limit`.
    pub(super) fn remember(&mut self, fingerprint: u64, queue: Queue, limit: usize) {
        let name = fingerprint & !FROM_MAIN;
        self.take(name);
        self.places.insert(name, self.gone + self.order.len() as u64);
        match queue {
            Queue::Small => {
                self.from_small += 1;
                self.order.push_back(name);
            }
            Queue::Main => self.order.push_back(name | FROM_MAIN),
        }
        while self.order.len() > limit {
            let Some(oldest) = self.order.front() else { return };
            let name = oldest & !FROM_MAIN;
            if self.places.get(&name) == Some(&self.gone) {
                self.take(name);
            }
            self.order.pop_front();
            self.gone += 1;
        }
    }

    /// Forgets a block; which queue it had gone from, if it was remembered.
    pub(super) fn take(&mut self, fingerprint: u64) -> Option<Queue> {
        let place = self.places.remove(&(fingerprint & !FROM_MAIN))?;
        let at = usize::try_from(place - self.gone).ok()?;
        match self.order.get(at)? & FROM_MAIN {
            0 => {
                self.from_small -= 1;
                Some(Queue::Small)
            }
            _ => Some(Queue::Main),
        }
    }

    /// Entries from the small queue, and from the main one.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.from_small, self.places.len() - self.from_small)
    }

    /// Places taken, those of entries that are gone included.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.order.len().max(self.places.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten_first_and_a_taken_one_at_once() {
        let mut ghosts = Ghosts::default();
        (1..=4).for_each(|n| ghosts.remember(n << 1, Queue::Small, 3));
        assert_eq!(ghosts.take(1 << 1), None, "beyond the limit");
        assert_eq!(ghosts.take(3 << 1), Some(Queue::Small));
        assert_eq!(ghosts.take(3 << 1), None, "only once");
        assert_eq!(ghosts.counts(), (2, 0));
    }

    #[test]
    fn a_block_that_went_twice_is_remembered_as_it_went_last() {
        let mut ghosts = Ghosts::default();
        ghosts.remember(2, Queue::Small, 2);
        ghosts.remember(2, Queue::Main, 2);
        assert_eq!(ghosts.counts(), (0, 1));
        ghosts.remember(4, Queue::Small, 2); // The first place goes; its entry is no longer there.
        assert_eq!(ghosts.take(2), Some(Queue::Main));
    }
}
