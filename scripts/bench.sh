#!/usr/bin/env bash
# A quick round of the benches. Tables on the screen, rows in target/bench/*.json.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/build-env.sh
. scripts/stages.sh

stage packages scripts/system-packages.sh
stage build cargo build --release --workspace --bins
mkdir -p target/bench
for question in transfer index; do
    stage "$question" target/release/larder-bench "$question" --quick --json "target/bench/$question.json"
done
