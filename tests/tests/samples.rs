//! The sample configurations in `deploy/` say what the programs do.
#![expect(clippy::unwrap_used, reason = "helpers of tests: what fails says where")]

use larder_tests::process::binary;
use std::{path::PathBuf, process::Command};

/// What a daemon would run with, without the remarks on where each value comes from.
fn printed(daemon: &str, arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new(binary(daemon).unwrap());
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("LARDER_") {
            command.env_remove(variable);
        }
    }
    let output = command.args(arguments).arg("--print-config").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let value = |line: &str| line.split("  # ").next().unwrap_or_default().to_owned();
    text.lines().map(value).collect()
}

fn sample(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/config").join(name)
}

/// The keys and values of a sample, as they are written.
fn written(name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(sample(name)).unwrap();
    text.lines().filter(|line| !line.starts_with('#')).skip(1).map(str::to_owned).collect()
}

#[test]
fn every_sample_states_every_key_with_its_default() {
    let model = ["--model.path=/var/lib/larder/models/model.gguf"];
    for (daemon, file, given) in [
        ("larder-master", "master.toml", &[][..]),
        ("larder-node", "node.toml", &[][..]),
        ("larder-engine", "engine.toml", &model[..]),
    ] {
        let defaults = printed(daemon, given);
        assert_eq!(written(file), defaults, "{file}");
        let config = format!("--config={}", sample(file).display());
        assert_eq!(printed(daemon, &[&config]), defaults, "{file} is read as it is written");
    }
}
