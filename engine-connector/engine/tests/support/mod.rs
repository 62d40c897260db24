//! Shared by the engine's tests: a model of our own making.
#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

pub(crate) mod gguf;
pub(crate) mod tiny_model;

use std::path::PathBuf;
use std::sync::OnceLock;

/// A tiny model on disk, written once a process.
pub(crate) fn tiny_model() -> PathBuf {
    static MODEL: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = MODEL.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        tiny_model::write(&path, 7).unwrap();
        (folder, path)
    });
    path.clone()
}

/// The real model, where `scripts/fetch-model.sh` puts it or `LARDER_TEST_MODEL` says; absent on a
/// machine that has not fetched it.
pub(crate) fn real_model() -> Option<PathBuf> {
    let stated = std::env::var_os("LARDER_TEST_MODEL").map(PathBuf::from);
    let fetched = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = stated.unwrap_or(fetched);
    path.exists().then_some(path)
}
