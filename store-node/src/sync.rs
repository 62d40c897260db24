//! What the ownership of memory rests on: locks, and counts that decide.
//!
//! Named in one place because `store-node/loom` compiles the sources that use them against loom's, which
//! try every interleaving. Figures that decide nothing are plain atomics.

pub(crate) use parking_lot::{Mutex, MutexGuard};
/// An [`Arc`](std::sync::Arc) of which somebody asks how many own it.
pub(crate) use std::sync::Arc as Counted;
pub(crate) use std::sync::atomic::AtomicU64;
