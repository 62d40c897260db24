# Sourced by everything that runs cargo, so that all builds share one set of compiled artefacts.
#
# The C++ libraries are rebuilt whenever CC or CXX change. With ccache at hand RocksDB is compiled
# through it (llama.cpp finds ccache by itself), so a second clone builds in a fraction of the time.
# To run cargo by hand beside the make targets: `. scripts/build-env.sh` first.

[ -d "$HOME/.cargo/bin" ] && case ":$PATH:" in
    *":$HOME/.cargo/bin:"*) ;;
    *) export PATH="$HOME/.cargo/bin:$PATH" ;;
esac

if [ -z "${CC:-}" ] && [ -z "${CXX:-}" ] && command -v ccache >/dev/null; then
    export CC="ccache cc" CXX="ccache c++"
fi
