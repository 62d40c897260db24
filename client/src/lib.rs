//! How a program reaches Larder: through its local node (`local`), or straight to masters and data
//! planes (`cluster`).
//!
//! Both sit on one connection type ([`connection`]), which pipelines requests over a TCP or Unix socket,
//! verifies every chunk before its bytes are handed on (P1), and gives up on silent peers. Dropping any
//! future here cancels its request and leaks nothing (P10).
//!
//! `unsafe` is confined to [`memory`], which maps memory shared with a node.
#![deny(unsafe_code)]

pub mod connection;
pub mod error;
#[expect(unsafe_code, reason = "maps memory that two processes share; each block has its proof")]
pub mod memory;

pub use error::{ClientError, TransferError};
