//! Whole-system tests: the seeded simulation, and what tests over real processes share.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod demo;
pub mod memory_node;
pub mod process;
pub mod sim;
