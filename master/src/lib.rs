//! The master: knows which node holds which block, and answers lookups.
//!
//! Truth lies with the nodes. A master keeps a soft copy of all their catalogs ([`index`]), fed by one
//! [`session`] a node, and knows who is there ([`membership`]); [`cluster`] is what these share. What
//! cannot be learned again is little and lies in [`hard_state`]; [`registry`] knows the registered models.
//! [`answers`] and [`explain`] read them. All of that has no IO but `hard_state`, which has no tasks;
//! [`server`] puts gRPC around it.
//!
//! Not here: bytes of blocks, and any decision about memory (P3).
#![forbid(unsafe_code)]

pub mod advice;
pub mod answers;
pub mod cluster;
pub mod config;
pub mod counters;
pub mod explain;
pub mod hard_state;
pub mod index;
pub mod membership;
pub mod metrics;
pub mod registry;
pub mod server;
pub mod session;
