//! S3-FIFO: a small queue for what is new, a main queue for what proved useful, and ghosts of what went
//! (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! Blocks enter the small queue. At its cold end a block that was used since goes over to the main queue,
//! another one goes for good and leaves its ghost. At the cold end of the main queue every use since buys
//! a block another turn, up to [`TURNS`]. So one-off traffic passes through the small queue and leaves the
//! main one alone. A use only counts up in the [`Unit`]; queues move during rounds.
//!
//! What differs from the paper, and why:
//! - One use is enough for the main queue: prefixes repeat a turn at a time, rarely more.
//! - The small queue's share of the blocks starts at a half and follows the ghosts, as in ARC (Megiddo and
//!   Modha, FAST 2003): a block that comes back after it went from the small queue says that queue was too
//!   short, one from the main queue the opposite, each weighted by how rare such ghosts are.
//! - Ghosts reach further back, since a conversation pauses for longer than its blocks last.
//! - A parked block is in no queue. It comes back to the cold end of the one that it left, as the next
//!   to be looked at, so a chain that nobody used goes at a stretch, tail first; if it was used
//!   meanwhile it moves on from there as any other.

use super::{
    Policy, Released, Unit, Verdict,
    ghost::{Ghosts, Queue, fingerprint},
};
use std::{collections::VecDeque, sync::Arc};

/// Most turns in the main queue that uses can buy ahead.
const TURNS: u64 = 3;
/// The bounds of the small queue's share; it starts at the upper one. Beyond that a block that moves over
/// has less time left in the main queue than it had as a new one. Fixed at a tenth, as in the paper, it
/// costs up to 7 points of prefix hits where a cache holds most of the work at hand (`larder-bench replay`).
const SHARE: (f64, f64) = (0.01, 0.5);
/// Ghosts for each block in the queues. Found by replay: fewer see less of small caches' mistakes, and more
/// bring back what is long over.
const GHOSTS: usize = 3;

/// See the module.
pub struct S3Fifo {
    small: VecDeque<Placed>,
    main: VecDeque<Placed>,
    ghosts: Ghosts,
    small_share: f64,
}

/// A block in a queue.
struct Placed {
    unit: Arc<Unit>,
    /// Its uses that were taken account of.
    seen: u64,
    /// Uses that may still buy it a turn.
    turns: u64,
}

impl Placed {
    fn new(unit: Arc<Unit>) -> Self {
        let seen = unit.uses();
        Self { unit, seen, turns: 0 }
    }

    /// Takes account of uses since the last time.
    fn count_uses(&mut self) {
        let uses = self.unit.uses();
        self.turns = (self.turns + (uses - self.seen)).min(TURNS);
        self.seen = uses;
    }

    /// Leaves what to know when a parked block comes back in the block itself.
    fn park(&self, queue: Queue) {
        let queue = match queue {
            Queue::Small => 1,
            Queue::Main => 2,
        };
        self.unit.set_note(self.seen << 2 | queue);
    }

    /// The block as it was parked, if it was.
    fn unpark(unit: Arc<Unit>) -> Result<(Self, Queue), Arc<Unit>> {
        let note = unit.note();
        let queue = match note & 3 {
            0 => return Err(unit),
            1 => Queue::Small,
            _ => Queue::Main,
        };
        unit.set_note(0);
        Ok((Self { unit, seen: note >> 2, turns: 0 }, queue))
    }
}

impl Default for S3Fifo {
    fn default() -> Self {
        let (small, main) = (VecDeque::new(), VecDeque::new());
        Self { small, main, ghosts: Ghosts::default(), small_share: SHARE.1 }
    }
}

impl S3Fifo {
    fn queue(&mut self, queue: Queue) -> &mut VecDeque<Placed> {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    /// The queue that has to give a block.
    #[expect(clippy::cast_precision_loss, reason = "a share of so many blocks, roughly")]
    fn giving(&self) -> Queue {
        let wanted = self.places() as f64 * self.small_share;
        match self.main.is_empty() || (!self.small.is_empty() && self.small.len() as f64 >= wanted)
        {
            true => Queue::Small,
            false => Queue::Main,
        }
    }

    /// A block came back that had gone from `queue`.
    #[expect(clippy::cast_precision_loss, reason = "ratios of so many blocks, roughly")]
    fn learn(&mut self, queue: Queue) {
        let (small, main) = self.ghosts.counts();
        let (small, main) = (small.max(1) as f64, main.max(1) as f64);
        let block = 1.0 / self.places().max(1) as f64;
        let change = match queue {
            Queue::Small => block * (main / small).max(1.0),
            Queue::Main => -block * (small / main).max(1.0),
        };
        self.small_share = (self.small_share + change).clamp(SHARE.0, SHARE.1);
    }
}

impl Policy for S3Fifo {
    fn admit(&mut self, unit: Arc<Unit>) {
        let unit = match Placed::unpark(unit) {
            Ok((placed, queue)) => return self.queue(queue).push_front(placed),
            Err(unit) => unit,
        };
        match self.ghosts.take(fingerprint(&unit.id)) {
            Some(queue) => {
                self.learn(queue);
                self.main.push_back(Placed::new(unit));
            }
            None => self.small.push_back(Placed::new(unit)),
        }
    }

    fn evict(
        &mut self,
        judge: &mut dyn FnMut(&Unit) -> Verdict,
        enough: &mut dyn FnMut() -> bool,
    ) -> bool {
        let mut in_use = Vec::new();
        let is_enough = loop {
            if enough() {
                break true;
            }
            let queue = self.giving();
            let Some(mut placed) = self.queue(queue).pop_front() else { break false };
            placed.count_uses();
            if placed.turns > 0 {
                placed.turns = match queue {
                    Queue::Small => 0, // Spent on the move.
                    Queue::Main => placed.turns - 1,
                };
                self.main.push_back(placed);
                continue;
            }
            match judge(&placed.unit) {
                Verdict::Evicted(parent) => {
                    let limit = (self.places() + 1) * GHOSTS;
                    self.ghosts.remember(fingerprint(&placed.unit.id), queue, limit);
                    parent.and_then(Released::parked).into_iter().for_each(|unit| self.admit(unit));
                }
                Verdict::InUse => in_use.push((placed, queue)),
                Verdict::Parked => placed.park(queue),
                Verdict::Gone => {}
            }
        };
        // To the hot end: it is being used, and the next rounds do not come by it again.
        in_use.into_iter().for_each(|(placed, queue)| self.queue(queue).push_back(placed));
        is_enough
    }

    fn places(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn retain(&mut self, alive: &mut dyn FnMut(&Unit) -> bool) {
        self.small.retain(|placed| alive(&placed.unit));
        self.main.retain(|placed| alive(&placed.unit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{catalog::BlockId, eviction::UseClock};
    use larder_proto::{BlockKey, LayoutFingerprint, ids::TenantName};
    use rand::{RngExt, SeedableRng};

    /// Evicts from `policy` until it has `capacity` blocks.
    fn shrink(policy: &mut S3Fifo, capacity: usize, count: &std::cell::Cell<usize>) {
        let mut judge = |_: &Unit| {
            count.set(count.get() - 1);
            Verdict::Evicted(None)
        };
        policy.evict(&mut judge, &mut || count.get() <= capacity);
    }

    #[test]
    fn ghosts_and_the_share_of_the_small_queue_stay_within_their_bounds() {
        const CAPACITY: usize = 64;
        for seed in 0..8 {
            let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
            let (clock, mut policy) = (UseClock::default(), S3Fifo::default());
            let count = std::cell::Cell::new(0);
            for _ in 0..5000 {
                let id = BlockId {
                    tenant: TenantName::default().id(),
                    layout: LayoutFingerprint::from_bytes([0; 32]),
                    key: BlockKey::from_bytes([rng.random_range(0..=255); 32]),
                };
                let unit = Unit::new(id, 1, &clock);
                if rng.random_range(0..4) == 0 {
                    unit.touch(&clock);
                }
                policy.admit(unit);
                count.set(count.get() + 1);
                shrink(&mut policy, CAPACITY, &count);
                let share = policy.small_share;
                assert!((SHARE.0..=SHARE.1).contains(&share), "seed {seed}: {share}");
                let ghosts = policy.ghosts.len();
                assert!(ghosts <= GHOSTS * (CAPACITY + 1), "seed {seed}: {ghosts} ghosts");
            }
            assert!(policy.ghosts.len() > CAPACITY, "seed {seed}: as many as they may be");
            assert!(policy.small_share < SHARE.1, "seed {seed}: the share followed the ghosts");
        }
    }
}
