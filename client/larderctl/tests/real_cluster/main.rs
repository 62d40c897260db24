//! `larderctl` against real masters and nodes: processes on loopback, ports chosen by the system.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod client;
mod commands;
mod explain;
mod files;
mod operation;
mod support;
