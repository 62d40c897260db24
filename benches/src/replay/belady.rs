//! The offline bound: evicts what is asked for last of all, knowing the future (Belady, 1966).
//!
//! Tail first comes by itself: a block is asked for whenever one of its descendants is, so none is asked for later
//! than they are, and among blocks that the same request asks for next the deepest goes. So there are no holes, and
//! what counts as a prefix hit is what counts as a hit.

use super::trace::Trace;
use std::collections::BTreeSet;

/// No further request asks for it.
const NEVER: usize = usize::MAX;

/// See the module.
pub(super) struct Belady {
    /// For each request, when each of its blocks is asked for next.
    next: Vec<Vec<usize>>,
    /// By block: its entry in `order`, while it is here.
    held: Vec<Option<Entry>>,
    order: BTreeSet<Entry>,
    capacity: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    next: usize,
    depth: usize,
    block: u32,
}

impl Belady {
    pub(super) fn new(trace: &Trace, capacity: usize) -> Self {
        let mut last = vec![NEVER; trace.blocks];
        let later = trace.requests.iter().enumerate().rev().map(|(at, request)| {
            let ask = |block: &u32| std::mem::replace(&mut last[*block as usize], at);
            request.blocks.iter().map(ask).collect()
        });
        let mut next: Vec<Vec<usize>> = later.collect();
        next.reverse();
        Self { next, held: vec![None; trace.blocks], order: BTreeSet::new(), capacity }
    }

    /// Makes the request at a place; how many of its leading blocks were here.
    pub(super) fn request(&mut self, at: usize, asked: &[u32]) -> usize {
        let found = asked.iter().take_while(|block| self.held[**block as usize].is_some()).count();
        for (depth, block) in asked.iter().enumerate() {
            match self.held[*block as usize].take() {
                Some(old) => _ = self.order.remove(&old),
                None => self.make_room(),
            }
            let entry = Entry { next: self.next[at][depth], depth, block: *block };
            self.held[*block as usize] = Some(entry);
            self.order.insert(entry);
        }
        found
    }

    fn make_room(&mut self) {
        if self.order.len() >= self.capacity
            && let Some(victim) = self.order.pop_last()
        {
            self.held[victim.block as usize] = None;
        }
    }
}
