//! How a program reaches Larder: through its local node ([`local`]), or straight to masters and data
//! planes ([`cluster`]).
//!
//! Both sit on one connection type ([`connection`]), which pipelines requests over a TCP or Unix socket,
//! verifies every chunk before its bytes are handed on (P1), and gives up on silent peers. [`masters`],
//! [`peers`], [`locations`] and [`failover`] are shared with the store node, which is a client of masters
//! and peers itself. Dropping any future here cancels its request and leaks nothing (P10).
//!
//! `unsafe` is confined to [`memory`], which maps memory shared with a node, and its use in [`local`].
#![deny(unsafe_code)]

pub mod cluster;
pub mod connection;
pub mod error;
pub mod failover;
pub mod local;
pub mod locations;
pub mod masters;
#[expect(unsafe_code, reason = "maps memory that two processes share; each block has its proof")]
pub mod memory;
pub mod peers;

pub use error::{ClientError, TransferError};
