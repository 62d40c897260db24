//! What every Larder daemon does the same way: read its configuration, log, serve `/metrics` and
//! `/health`, own its tasks, stop when asked to.
//!
//! A daemon declares its keys ([`settings!`]), states its rules ([`config::DaemonConfig`]) and hands
//! one async function to [`launch`]; the example there is a whole daemon. Not here: anything that
//! only one daemon does.

#![forbid(unsafe_code)]

// The macros name this crate by its name, and are used in it as well.
extern crate self as larder_daemon;

pub mod address;
pub mod config;
pub mod http;
mod launch;
pub mod log;
pub mod run;

#[doc(hidden)]
pub use config::macro_support;
pub use launch::{Context, EXIT_FAILED, EXIT_OK, EXIT_USAGE, launch, launch_with};
pub use run::{TaskError, Tasks};
