//! `larder-master`: see the library.
#![forbid(unsafe_code)]

use larder_master::{config::MasterConfig, server};
use std::process::ExitCode;

fn main() -> ExitCode {
    larder_daemon::launch(|config: MasterConfig, context| server::run(config, context))
}
