#!/usr/bin/env bash
# A quick round of the benches. Tables on the screen, rows in target/bench/*.json.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/build-env.sh
. scripts/stages.sh

stage packages scripts/system-packages.sh
stage build cargo build --release --workspace --bins
mkdir -p target/bench
for question in transfer index notices restart; do
    stage "$question" target/release/larder-bench "$question" --quick --json "target/bench/$question.json"
done
# Beside fio, which is no part of the set-up.
if command -v fio > /dev/null; then
    stage ssd target/release/larder-bench ssd --quick --json target/bench/ssd.json
else
    echo "bench: ssd was left out, it measures beside fio: apt-get install fio"
fi
