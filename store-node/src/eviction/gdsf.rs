//! GDSF, Greedy-Dual-Size-Frequency: least frequently used for its size first, with aging (Cherkasova,
//! "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Laboratories
//! report HPL-98-69R1, 1998).
//!
//! ```text
//! priority = age + frequency * cost / size
//! ```
//! The lowest priority goes first; the age rises to the priority of each block that goes, so a block that
//! was popular once does not stay for good. Frequency: uses in this life of the block, its put included.
//! Size: bytes. Cost: 1 for every block, wherever it stands in its chain, so the policy keeps the most
//! blocks that are hit, which is what the prefix hit rate counts; where all blocks have one size it is
//! LFU with dynamic aging.

use super::{Policy, Released, Unit, Verdict};
use std::{cmp::Reverse, collections::BinaryHeap, sync::Arc};

/// Steps of the age that are remembered.
const STEPS: usize = 1024;

/// A heap by priority. As with LRU a use does not move its block; a block that comes to the top and was
/// used since goes back with its new priority, counted from the age at its last use.
#[derive(Default)]
pub struct Gdsf {
    heap: BinaryHeap<Reverse<Placed>>,
    age: f64,
    past: Ages,
    /// The latest use that this has come to know of.
    now: u64,
}

struct Placed {
    priority: f64,
    /// When it was last used, as far as the priority knows; among equals the older one goes first.
    used: u64,
    unit: Arc<Unit>,
}

impl PartialEq for Placed {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
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
        self.priority.total_cmp(&other.priority).then(self.used.cmp(&other.used))
    }
}

/// The age at times past. Its further past is known in coarser steps.
#[derive(Default)]
struct Ages(Vec<(u64, f64)>);

impl Ages {
    /// From `at` on the age is `age`.
    fn note(&mut self, at: u64, age: f64) {
        if self.0.last().is_some_and(|(known, last)| *known >= at || *last >= age) {
            return;
        }
        if self.0.len() >= STEPS {
            let mut keep = false;
            self.0.retain(|_| {
                keep = !keep;
                keep
            });
        }
        self.0.push((at, age));
    }

    /// The age at a time.
    fn at(&self, time: u64) -> f64 {
        let later = self.0.partition_point(|(at, _)| *at <= time);
        later.checked_sub(1).map_or(0.0, |step| self.0[step].1)
    }
}

impl Gdsf {
    #[expect(clippy::cast_precision_loss, reason = "a priority is a rough figure")]
    fn place(&mut self, unit: Arc<Unit>) {
        let used = unit.last_used();
        let frequency = unit.uses() as f64 + 1.0;
        let size = unit.bytes.load(std::sync::atomic::Ordering::Relaxed).max(1) as f64;
        let priority = self.past.at(used) + frequency / size;
        self.heap.push(Reverse(Placed { priority, used, unit }));
    }
}

impl Policy for Gdsf {
    fn admit(&mut self, unit: Arc<Unit>) {
        // A block comes here when it is new, so its last use tells the time. One that was parked brings
        // an older time, and its old priority if nobody used it since.
        self.now = self.now.max(unit.last_used());
        self.past.note(self.now, self.age);
        self.place(unit);
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
            let Some(Reverse(placed)) = self.heap.pop() else { break false };
            if placed.unit.last_used() != placed.used {
                self.place(placed.unit);
                continue;
            }
            match judge(&placed.unit) {
                Verdict::Evicted(parent) => {
                    self.age = self.age.max(placed.priority);
                    parent.and_then(Released::parked).into_iter().for_each(|unit| self.place(unit));
                }
                Verdict::InUse => in_use.push(placed),
                Verdict::Parked | Verdict::Gone => {}
            }
        };
        // As if used once more at this age: the next rounds do not come by it again.
        for placed in in_use {
            let gained = placed.priority - self.past.at(placed.used);
            let priority = self.age + gained;
            self.heap.push(Reverse(Placed { priority, ..placed }));
        }
        is_enough
    }

    fn places(&self) -> usize {
        self.heap.len()
    }

    fn retain(&mut self, alive: &mut dyn FnMut(&Unit) -> bool) {
        self.heap.retain(|Reverse(placed)| alive(&placed.unit));
    }
}
