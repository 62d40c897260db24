//! `larder-node`: see the library.
#![forbid(unsafe_code)]

use larder_store_node::config::NodeConfig;
use std::process::ExitCode;

fn main() -> ExitCode {
    larder_daemon::launch(|config: NodeConfig, context| {
        larder_store_node::daemon::run(config, context)
    })
}
