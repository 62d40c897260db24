//! Commands of masters, as the node understands them.

use larder_proto::{BlockKey, ContentFingerprint, LayoutFingerprint, Tier, ids::TenantId};
use std::{future::Future, time::Duration};

/// What to evict: all stated conditions must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// Whose blocks.
    pub tenant: TenantId,
    /// Only of this content.
    pub content: Option<ContentFingerprint>,
    /// Only in this layout.
    pub layout: Option<LayoutFingerprint>,
    /// Only these blocks; all when empty.
    pub keys: Vec<BlockKey>,
    /// Only what this principal published.
    pub producer: Option<String>,
    /// What follows these blocks on this node as well.
    pub descendants: bool,
    /// Only what was not used for longer than this.
    pub unused_for: Option<Duration>,
    /// Only the copies in this tier: a part with another copy stays.
    pub tier: Option<Tier>,
    /// Count what would go, and keep it.
    pub dry_run: bool,
}

/// What an eviction removed, or would remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evicted {
    /// Blocks.
    pub blocks: u64,
    /// Bytes of their parts.
    pub bytes: u64,
}

impl std::ops::AddAssign for Evicted {
    fn add_assign(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.bytes += other.bytes;
    }
}

/// Obeys commands; implemented by the node.
pub trait CommandSink: Send + Sync + 'static {
    /// Removes what matches; bytes that are being read stay in place until their readers are done. Dropping the future may leave it half done.
    ///
    /// # Errors
    /// Why it was not obeyed, for people.
    fn evict(&self, eviction: Eviction) -> impl Future<Output = Result<Evicted, String>> + Send;
}
