//! Whole-system tests: the seeded simulation, and what tests over real processes share.
#![deny(unsafe_code)]

pub mod blocks;
pub mod demo;
pub mod machine;
pub mod memory_node;
pub mod node;
pub mod process;
pub mod sim;
