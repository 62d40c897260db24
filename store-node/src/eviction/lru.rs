//! Least recently used first.

use super::{Policy, Released, Unit, Verdict};
use std::{cmp::Reverse, collections::BinaryHeap, sync::Arc};

/// A heap by last use. A use does not move its block in the heap (that would put a lock on the read
/// path); a block that comes to the top and was used since goes back with its new time instead, so each
/// use costs at most one later step.
#[derive(Default)]
pub struct Lru {
    heap: BinaryHeap<Reverse<Placed>>,
    /// The hot end: the latest time in the order.
    latest: u64,
}

struct Placed {
    /// Its place in the order.
    at: u64,
    /// When it was last used, as far as the place knows.
    used: u64,
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
        let used = unit.last_used();
        self.latest = self.latest.max(used);
        self.heap.push(Reverse(Placed { at: used, used, unit }));
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
            let Some(Reverse(Placed { used, unit, .. })) = self.heap.pop() else { break false };
            if unit.last_used() != used {
                self.admit(unit);
                continue;
            }
            match judge(&unit) {
                Verdict::Evicted(parent) => {
                    parent.and_then(Released::parked).into_iter().for_each(|unit| self.admit(unit));
                }
                Verdict::InUse => in_use.push((used, unit)),
                Verdict::Parked | Verdict::Gone => {}
            }
        };
        // To the hot end: it is being used, and the next rounds do not come by it again.
        let at = self.latest;
        self.heap.extend(in_use.into_iter().map(|(used, unit)| Reverse(Placed { at, used, unit })));
        is_enough
    }

    fn places(&self) -> usize {
        self.heap.len()
    }

    fn retain(&mut self, alive: &mut dyn FnMut(&Unit) -> bool) {
        self.heap.retain(|Reverse(placed)| alive(&placed.unit));
    }
}
