//! What engines say of the future of a chain, and what it changes here.

use super::{BlockId, Catalog};
use crate::eviction::{KeepLevel, Spare, Unit};
use larder_proto::{
    frame::{DEFAULT_RETENTION_S, Priority, RETENTION_LIMIT_S, ReuseHint, SessionState},
    ids::TenantId,
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

impl Catalog {
    /// Takes a hint. Blocks that it changed something for.
    ///
    /// What only a session used that is over, or of little worth, goes next: the chain's end, back to where
    /// another one leaves it. What a living session uses is kept, as a wish, from the root on.
    pub fn take_hint(&self, tenant: TenantId, hint: &ReuseHint) -> u32 {
        self.tell_time();
        let default = match hint.priority {
            Priority::High => DEFAULT_RETENTION_S,
            Priority::Low | Priority::Normal => 0,
        };
        let wanted = if hint.retention_s == 0 { default } else { hint.retention_s };
        let retention = Duration::from_secs(u64::from(wanted.min(RETENTION_LIMIT_S)));
        let changed = match (hint.session, hint.priority) {
            (SessionState::Closed, _) | (_, Priority::Low) => self.call_spare(tenant, hint),
            (SessionState::Alive, Priority::Normal) => {
                self.keep(tenant, hint, retention, KeepLevel::Normal)
            }
            (SessionState::Alive, Priority::High) => {
                self.keep(tenant, hint, retention, KeepLevel::High)
            }
        };
        self.counters.hints.fetch_add(1, Ordering::Relaxed);
        self.counters.hinted_blocks.fetch_add(changed.into(), Ordering::Relaxed);
        changed
    }

    fn call_spare(&self, tenant: TenantId, hint: &ReuseHint) -> u32 {
        let mut spare: Vec<Arc<Unit>> = Vec::new();
        let mut next = None;
        for key in hint.keys.iter().rev() {
            let id = BlockId { tenant, layout: hint.layout, key: *key };
            let shard = self.shard(&id);
            if let Some(block) = shard.get(&id) {
                if !block.children.has_none_but(next) {
                    break; // Another session goes on from here.
                }
                spare.extend(block.unit.clone());
            }
            next = Some(key);
        }
        spare.iter().for_each(|unit| unit.call_spare(Spare::Over, &self.clock));
        let changed = spare.len();
        self.order.lock().spare(spare);
        u32::try_from(changed).unwrap_or(u32::MAX)
    }

    fn keep(&self, tenant: TenantId, hint: &ReuseHint, time: Duration, level: KeepLevel) -> u32 {
        let mut changed = 0;
        for key in &hint.keys {
            let id = BlockId { tenant, layout: hint.layout, key: *key };
            let shard = self.shard(&id);
            if let Some(unit) = shard.get(&id).and_then(|block| block.unit.as_ref()) {
                unit.keep(time, level, &self.clock);
                changed += 1;
            }
        }
        changed
    }
}
