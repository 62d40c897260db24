//! The order in which blocks of a tier go: spare ones, then what the policy says, kept ones last.
//!
//! Every block that may be proposed has one place in the policy, whatever is said of it; spare ones stand in a
//! queue besides, and a place that turns out to be stale is passed over. One that has descendants when its turn
//! comes leaves that queue, and is the next in it when they are gone. So hints and advice change what goes
//! next and cannot lose a block or make it stay for good. A block that is to be kept goes to the hot end of
//! its policy whenever its turn comes. When nothing else is left the wishes to keep are void, the normal ones
//! before the high ones, all that were given until then at a stroke: a round costs O(evicted) again after it,
//! however much was to be kept.

use super::{KeepLevel, Policy, Released, Unit, UseClock, Verdict};
use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
};

/// Where a proposed victim stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proposal {
    /// In the policy, which has let go of it for now: it has to come back, unless it is gone.
    Policy,
    /// Among the spare ones: its place in the policy stands.
    Spare,
}

/// See the module.
pub struct Order {
    policy: Box<dyn Policy>,
    spare: VecDeque<Arc<Unit>>,
}

impl Order {
    /// An order without blocks.
    pub fn new(policy: Box<dyn Policy>) -> Self {
        Self { policy, spare: VecDeque::new() }
    }

    /// Takes a new block in.
    pub fn admit(&mut self, unit: Arc<Unit>, clock: &UseClock) {
        self.release(Released { unit, parked: true }, clock);
    }

    /// A block has no descendants any more.
    pub fn release(&mut self, released: Released, clock: &UseClock) {
        next_if_spare(&mut self.spare, &released.unit, clock);
        released.parked().into_iter().for_each(|unit| self.policy.admit(unit));
    }

    /// These were called spare, tail first: they go next, behind those called so before.
    pub fn spare(&mut self, units: impl IntoIterator<Item = Arc<Unit>>) {
        // One that has nothing in this tier stands here when it comes back to it.
        let here = |unit: &Arc<Unit>| unit.bytes.load(Ordering::Relaxed) > 0;
        self.spare.extend(units.into_iter().filter(|unit| here(unit) && !unit.queue(true)));
    }

    /// Proposes victims to `judge` until `enough` is true or each was proposed; whether it is true.
    pub fn evict(
        &mut self,
        clock: &UseClock,
        judge: &mut dyn FnMut(&Unit, Proposal) -> Verdict,
        enough: &mut dyn FnMut() -> bool,
    ) -> bool {
        loop {
            if enough() {
                return true;
            }
            let Some(unit) = self.spare.pop_front() else { break };
            unit.queue(false);
            if !unit.is_spare(clock) {
                continue;
            }
            match judge(&unit, Proposal::Spare) {
                Verdict::Evicted(parent) => {
                    parent.into_iter().for_each(|parent| self.release(parent, clock));
                }
                // It may be called spare again, and then stands in the queue again.
                Verdict::InUse => unit.unspare(),
                Verdict::Parked | Verdict::Gone => {}
            }
        }
        let give_up = KeepLevel::ALL.map(Some);
        for given_up in [None].into_iter().chain(give_up) {
            if let Some(level) = given_up {
                clock.void(level);
            }
            let mut kept_any = false;
            let Self { policy, spare } = self;
            let is_enough = policy.evict(
                &mut |unit| {
                    if unit.is_kept(clock) {
                        kept_any = true;
                        return Verdict::InUse;
                    }
                    let verdict = judge(unit, Proposal::Policy);
                    if let Verdict::Evicted(Some(parent)) = &verdict {
                        next_if_spare(spare, &parent.unit, clock);
                    }
                    verdict
                },
                enough,
            );
            if is_enough || !kept_any {
                return is_enough;
            }
        }
        false
    }

    /// Places taken, stale ones included.
    pub fn places(&self) -> usize {
        self.policy.places() + self.spare.len()
    }

    /// Forgets the blocks that are gone from the catalog.
    pub fn retain(&mut self, alive: &mut dyn FnMut(&Unit) -> bool) {
        self.spare.retain(|unit| {
            let stays = alive(unit);
            if !stays {
                unit.queue(false);
            }
            stays
        });
        self.policy.retain(alive);
    }
}

fn next_if_spare(spare: &mut VecDeque<Arc<Unit>>, unit: &Arc<Unit>, clock: &UseClock) {
    if unit.is_spare(clock) && !unit.queue(true) {
        spare.push_front(Arc::clone(unit));
    }
}
