#!/usr/bin/env bash
# The main job of Larder with a real model, on this machine alone: one master, two nodes, two engines.
# Installs what is missing, builds, fetches the model, runs, and leaves nothing running.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/build-env.sh

scripts/system-packages.sh
model=$(scripts/fetch-model.sh)
echo "demo: building (the first time compiles RocksDB and llama.cpp: about 17 minutes on two cores)" >&2
# The command of README.md: with fewer packages cargo would unify other features, and build again there.
cargo build --release --workspace --bins
target/release/larder-demo "$model" target/demo.json
cat <<'TEXT'

What to try next
  target/release/larderctl --help         status, nodes, lookup, explain, evict, put and get of files
  target/release/larder-node --help       every key of a node's configuration, with its default
  make bench                              transfer and index benches beside their references
The steps are in target/demo.json. README.md tells how to start the daemons by hand.
TEXT
