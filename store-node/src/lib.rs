//! A store node: keeps the bytes of parts, proves them, and moves them.
//!
//! [`catalog`] is the truth of what is held; [`tiers`] hold the bytes; [`eviction`] orders what goes;
//! [`inventory`] tells masters; [`transfer`] serves the data plane and the local socket.
#![deny(unsafe_code)]

pub mod catalog;
pub mod eviction;
pub mod inventory;
pub mod tiers;
