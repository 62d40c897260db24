//! Least recently used first.

use super::{Policy, Unit, Verdict};
use std::{cmp::Reverse, collections::BinaryHeap, sync::Arc};

/// A heap by last use. A use does not move its block in the heap (that would put a lock on the read
/// path); a block that comes to the top and was used since goes back with its new time instead, so each
/// use costs at most one later step.
#[derive(Default)]
pub struct Lru {
    heap: BinaryHeap<Reverse<Placed>>,
}

struct Placed {
    at: u64,
    unit: Arc<Unit>,
}

impl PartialEq for Placed {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}
impl Eq for Placed {}
impl PartialOrd for Placed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Placed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Policy for Lru {
    fn admit(&mut self, unit: Arc<Unit>) {
        self.heap.push(Reverse(Placed { at: unit.last_used(), unit }));
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
            let Some(Reverse(Placed { at, unit })) = self.heap.pop() else { break false };
            if unit.last_used() != at {
                self.admit(unit);
                continue;
            }
            match judge(&unit) {
                Verdict::Evicted(parent) => parent.into_iter().for_each(|unit| self.admit(unit)),
                Verdict::InUse => in_use.push(unit),
                Verdict::Parked | Verdict::Gone => {}
            }
        };
        // Back with their old time: a reader that lets go has not used the block again.
        in_use.into_iter().for_each(|unit| self.admit(unit));
        is_enough
    }

    fn places(&self) -> usize {
        self.heap.len()
    }

    fn retain(&mut self, alive: &mut dyn FnMut(&Unit) -> bool) {
        self.heap.retain(|Reverse(placed)| alive(&placed.unit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{catalog::BlockId, eviction::UseClock};
    use larder_proto::{BlockKey, LayoutFingerprint, ids::TenantName};

    fn unit(n: u8, clock: &UseClock) -> Arc<Unit> {
        let id = BlockId {
            tenant: TenantName::default().id(),
            layout: LayoutFingerprint::from_bytes([0; 32]),
            key: BlockKey::from_bytes([n; 32]),
        };
        Unit::new(id, 1, clock)
    }

    /// Evicts one block; which.
    fn evicted(lru: &mut Lru, verdict: impl Fn(u8) -> Verdict) -> Option<u8> {
        let gone = std::cell::Cell::new(None);
        lru.evict(
            &mut |unit| {
                let n = unit.id.key.as_bytes()[0];
                let verdict = verdict(n);
                if let Verdict::Evicted(_) = verdict {
                    gone.set(Some(n));
                }
                verdict
            },
            &mut || gone.get().is_some(),
        );
        gone.get()
    }

    #[test]
    fn the_least_recently_used_block_goes_first() {
        let (clock, mut lru) = (UseClock::default(), Lru::default());
        let units: Vec<_> = (1..=3).map(|n| unit(n, &clock)).collect();
        units.iter().for_each(|unit| lru.admit(Arc::clone(unit)));
        units[0].touch(&clock);
        let order: Vec<_> =
            std::iter::from_fn(|| evicted(&mut lru, |_| Verdict::Evicted(None))).collect();
        assert_eq!(order, [2, 3, 1]);
    }

    #[test]
    fn a_block_in_use_is_passed_over_and_stays_in_the_order() {
        let (clock, mut lru) = (UseClock::default(), Lru::default());
        (1..=2).for_each(|n| lru.admit(unit(n, &clock)));
        let busy = |n| if n == 1 { Verdict::InUse } else { Verdict::Evicted(None) };
        assert_eq!(evicted(&mut lru, busy), Some(2));
        assert_eq!(evicted(&mut lru, busy), None, "one round, then a clear no");
        assert_eq!(evicted(&mut lru, |_| Verdict::Evicted(None)), Some(1));
    }
}
