//! Shared by the engine's tests: a model of our own making.
#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

pub(crate) mod gguf;
pub(crate) mod tiny_model;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::NamedTempFile;

/// A tiny model on disk, the same for all tests.
pub(crate) fn tiny_model() -> PathBuf {
    static MODEL: OnceLock<PathBuf> = OnceLock::new();
    let write = || {
        // Others may be writing it too: whole files take the place of each other.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (file, path) = (NamedTempFile::new_in(folder).unwrap(), folder.join("tiny.gguf"));
        tiny_model::write(file.path(), 7).unwrap();
        file.persist(&path).unwrap();
        path
    };
    MODEL.get_or_init(write).clone()
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
