//! `larderctl` against real masters and nodes: processes on loopback, ports chosen by the system.

mod client;
mod commands;
mod explain;
mod files;
mod support;
