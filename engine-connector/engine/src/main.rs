//! `larder-engine`: serves a model, and reuses the KV of prompts through the local node.

use std::process::ExitCode;

fn main() -> ExitCode {
    larder_daemon::launch(larder_engine::serve::serve)
}
