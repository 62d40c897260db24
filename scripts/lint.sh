#!/usr/bin/env bash
# What reviewers should not have to look for. Without arguments all of it, else the named parts.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/build-env.sh
. scripts/stages.sh

[ "$#" -gt 0 ] || { stage packages scripts/system-packages.sh; set -- format clippy docs; }
for part in "$@"; do
    case "$part" in
        format)
            stage format cargo fmt --all --check
            stage format-loom cargo fmt --manifest-path store-node/loom/Cargo.toml --check
            stage format-fuzz cargo fmt --manifest-path proto/fuzz/Cargo.toml --check
            ;;
        # The profile of the tests, so that the C++ libraries are not compiled again.
        clippy)
            stage clippy cargo clippy --release --workspace --all-targets -- -D warnings
            # Workspaces of their own.
            stage clippy-loom env CARGO_TARGET_DIR="$PWD/target/loom" cargo clippy --release --locked \
                --manifest-path store-node/loom/Cargo.toml --lib --test ownership -- -D warnings
            stage clippy-fuzz env CARGO_TARGET_DIR="$PWD/target/fuzz" cargo clippy --release \
                --manifest-path proto/fuzz/Cargo.toml --all-targets -- -D warnings
            ;;
        docs) stage docs env RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps ;;
        *) echo "usage: scripts/lint.sh [format] [clippy] [docs]" >&2; exit 2 ;;
    esac
done
