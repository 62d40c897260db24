//! What a node's catalog would keep, without bytes: the same rules around the same policies.
//!
//! A block in the cache counts its children there; only one without any may go, and a parent that was parked for
//! its last child comes back to the policy when that goes. A request reads the leading run of its blocks, head first,
//! and then puts those that are missing, head first, as an engine publishes them. Blocks after the first gap
//! that are here all the same are left alone: a put that is answered with `exists` is no use of a block.

use larder_proto::{BlockKey, LayoutFingerprint, ids::TenantName};
use larder_store_node::{
    catalog::BlockId,
    eviction::{Order, Policy, Proposal, Released, Spare, Unit, UseClock, Verdict},
};
use std::sync::Arc;

/// See the module.
pub(super) struct Cache {
    order: Order,
    clock: UseClock,
    blocks: Blocks,
    capacity: usize,
}

/// By number.
struct Blocks {
    all: Vec<Block>,
    held: usize,
}

#[derive(Clone, Default)]
struct Block {
    /// While it is held.
    unit: Option<Arc<Unit>>,
    parent: Option<u32>,
    children: u32,
    parked: bool,
}

impl Cache {
    /// An empty cache of `capacity` blocks, for blocks numbered below `blocks`.
    pub(super) fn new(policy: Box<dyn Policy>, blocks: usize, capacity: usize) -> Self {
        let blocks = Blocks { all: vec![Block::default(); blocks], held: 0 };
        Self { order: Order::new(policy), clock: UseClock::default(), blocks, capacity }
    }

    /// Makes a request; how many of its leading blocks were here.
    pub(super) fn request(&mut self, asked: &[u32]) -> usize {
        let found = asked.iter().map_while(|block| self.blocks.all[*block as usize].unit.as_ref());
        let found = found.map(|unit| unit.touch(&self.clock)).count();
        for at in found..asked.len() {
            let parent = at.checked_sub(1).map(|parent| asked[parent]);
            if self.blocks.of(asked[at]).unit.is_none() {
                self.put(asked[at], parent);
            }
        }
        found
    }

    /// Blocks that are here.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.blocks.held
    }

    fn put(&mut self, number: u32, parent: Option<u32>) {
        self.make_room();
        if let Some(parent) = parent {
            self.blocks.of(parent).children += 1;
        }
        let unit = Unit::new(id(number), 1, &self.clock);
        let block = self.blocks.of(number);
        block.unit = Some(Arc::clone(&unit));
        block.parent = parent;
        self.blocks.held += 1;
        self.order.admit(unit, &self.clock);
    }

    /// The session that made this request is over: what is here of it alone goes next, as the catalog does with
    /// such a hint.
    pub(super) fn close(&mut self, asked: &[u32]) {
        let mut spare = Vec::new();
        let mut next_is_here = false;
        for number in asked.iter().rev() {
            let block = self.blocks.of(*number);
            if block.children > u32::from(next_is_here) {
                break;
            }
            next_is_here = block.unit.is_some();
            spare.extend(block.unit.clone());
        }
        spare.iter().for_each(|unit| unit.call_spare(Spare::Over, &self.clock));
        self.order.spare(spare);
    }

    fn make_room(&mut self) {
        let (blocks, capacity) = (std::cell::RefCell::new(&mut self.blocks), self.capacity);
        self.order.evict(
            &self.clock,
            &mut |unit, proposal| blocks.borrow_mut().judge(unit, proposal),
            &mut || blocks.borrow().held < capacity,
        );
    }
}

impl Blocks {
    fn of(&mut self, number: u32) -> &mut Block {
        &mut self.all[number as usize]
    }

    fn judge(&mut self, unit: &Unit, proposal: Proposal) -> Verdict {
        let block = self.of(number(unit));
        if !block.unit.as_deref().is_some_and(|current| std::ptr::eq(current, unit)) {
            return Verdict::Gone;
        }
        if block.children > 0 {
            block.parked |= proposal == Proposal::Policy;
            return Verdict::Parked;
        }
        block.unit = None;
        let parent = block.parent.take();
        self.held -= 1;
        Verdict::Evicted(parent.and_then(|parent| self.child_left(parent)))
    }

    fn child_left(&mut self, parent: u32) -> Option<Released> {
        let block = self.of(parent);
        block.children -= 1;
        if block.children > 0 {
            return None;
        }
        let parked = std::mem::take(&mut block.parked);
        block.unit.clone().map(|unit| Released { unit, parked })
    }
}

fn id(number: u32) -> BlockId {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&number.to_le_bytes());
    BlockId {
        tenant: TenantName::default().id(),
        layout: LayoutFingerprint::from_bytes([0; 32]),
        key: BlockKey::from_bytes(key),
    }
}

fn number(unit: &Unit) -> u32 {
    let [a, b, c, d, ..] = *unit.id.key.as_bytes();
    u32::from_le_bytes([a, b, c, d])
}
