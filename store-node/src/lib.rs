//! A store node: keeps the bytes of parts, proves them, and moves them.
//!
//! [`catalog`] is the truth of what is held; [`tiers`] hold the bytes; [`tiering`] moves parts
//! between them; [`eviction`] orders what goes;
//! [`inventory`] tells masters; [`transfer`] serves the data plane and the local socket; `matching` and
//! `pull` find blocks at peers and bring them here. [`node`] is what they share, [`daemon`] the whole.
#![deny(unsafe_code)]

pub mod advice;
pub mod catalog;
pub mod config;
pub mod daemon;
pub mod eviction;
pub mod inventory;
mod matching;
pub mod metrics;
pub mod models;
pub mod node;
mod pull;
pub mod service;
pub mod state;
mod sync;
pub mod tiering;
pub mod tiers;
pub mod transfer;
