//! What the catalog shows of itself to publishers.

use super::part_sets::BlockState;
use larder_proto::{block_key::BlockKey, event::Shard};

/// What the catalog lets a publisher see. Short: it runs under the lock of one shard.
pub trait Inventory: Send + Sync + 'static {
    /// All blocks of a shard, and the number of the last change that they include: the log's head, read
    /// under the shard's lock.
    fn snapshot(&self, shard: Shard) -> (u64, Vec<(BlockKey, BlockState)>);
    /// Figures for the heartbeat.
    fn vitals(&self) -> Vitals;
}

/// What a heartbeat tells besides digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Vitals {
    /// Bytes of all tiers in use.
    pub used_bytes: u64,
    /// Blocks held.
    pub blocks: u64,
    /// The node takes nothing new and is about to leave.
    pub draining: bool,
}
