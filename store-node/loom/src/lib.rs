//! The catalog, the dram tier and the leases of `larder-store-node`, as they are, over loom's locks, counts
//! and memory: `tests/` tries every interleaving of who reads, writes, evicts and frees.
//!
//! The sources are the node's own files. What they name as `crate::sync` and as `larder_client::memory` is
//! loom's here, so no line of the node knows of these tests; `--cfg loom` is not set, because tokio listens
//! to it. What is around them and takes no part is left out (the ssd tier, sessions with masters), with
//! the names in its place that the sources need: what one of them newly uses is to be added here.
//!
//! Not explored are plain atomics (tallies, clocks, wishes), which decide nothing about memory, and the locks
//! of the change log, under which nothing happens that loom watches. A lock under which a watched count can
//! change must be one of `crate::sync`: loom would run into any other, and stand still.

extern crate self as larder_client;
extern crate self as larder_daemon;

#[path = "../../src/catalog/mod.rs"]
pub mod catalog;
#[path = "../../src/eviction/mod.rs"]
pub mod eviction;
pub mod inventory;
pub mod memory;
mod sync;
pub mod tiers;
pub mod transfer;

/// In place of the one in `larder-daemon`: here nobody configures anything.
#[macro_export]
macro_rules! choices {
    ($(#[$doc:meta])* pub enum $name:ident {
        $($(#[$of:meta])* $variant:ident = $word:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$of])* $variant,)*
        }
    };
}
