#!/usr/bin/env bash
# Builds everything and runs all tests. `--long` adds those that take minutes: tests marked
# `#[ignore]`, more cases for each property, and more interleavings.
#
# A cold build compiles RocksDB and llama.cpp: about 17 minutes on two idle cores, once.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/build-env.sh
. scripts/stages.sh

more=()
case "${1:-}" in
    '') ;;
    --long)
        more=(-- --include-ignored)
        export PROPTEST_CASES=${PROPTEST_CASES:-4096} LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-4}
        ;;
    *) echo "usage: scripts/test.sh [--long]" >&2; exit 2 ;;
esac

stage packages scripts/system-packages.sh
# Here, and not from a test: nothing is downloaded behind anybody's back in the middle of a run.
stage model scripts/fetch-model.sh
stage build cargo build --release --workspace --all-targets
# Doc tests included. Later crates are tested even if an earlier one fails.
stage test cargo test --release --workspace --no-fail-fast ${more[@]+"${more[@]}"}
# A workspace of its own, see proto/fuzz/Cargo.toml; each harness runs for a moment.
stage fuzz env CARGO_TARGET_DIR="$PWD/target/fuzz" \
    cargo test --release --manifest-path proto/fuzz/Cargo.toml
# A workspace of its own as well: half a minute when it is cold, ten seconds otherwise.
stage loom env CARGO_TARGET_DIR="$PWD/target/loom" \
    cargo test --release --locked --manifest-path store-node/loom/Cargo.toml
