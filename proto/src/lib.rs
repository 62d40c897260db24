//! The shared vocabulary of Larder: what two processes must agree on, and nothing else.
//!
//! Names ([`ids`], [`part`], [`block_key`], [`fingerprint`]), integrity ([`checksum`]), what a node
//! tells a master ([`event`]), the data plane ([`frame`]) and the control plane ([`control`]).
//! Everything here is pure: no IO, no clocks, no tasks. Frozen vectors (`tests/vectors.rs`) hold every
//! format to the byte; a change of one fails a test that says which version to bump.
//!
//! Not here: any behaviour of a master, node or client.
#![forbid(unsafe_code)]

pub mod block_key;
pub mod canonical;
pub mod checksum;
#[cfg(feature = "control")]
pub mod control;
pub mod event;
pub mod explain;
pub mod fingerprint;
pub mod frame;
pub mod ids;
pub mod part;
pub mod wire;

pub use block_key::{BlockKey, KeyPrefix};
pub use fingerprint::{ContentFingerprint, LayoutFingerprint, ModelVersion};
pub use ids::{ClusterId, Generation, Incarnation, Location, NodeId, Term};
pub use part::{PartName, PartNumber, Tier, TierSet};
