# Every way to build, try and check Larder. `make` alone lists them.
#
# Prerequisite: Rust 1.88 or newer from rustup. System packages are installed when missing (Debian),
# or listed (elsewhere).

.DEFAULT_GOAL := help
.PHONY: help demo test test-long bench lint

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## one master, two nodes, two engines and a real model on this machine
	@scripts/demo.sh

test: ## build everything and run all tests; the first time compiles RocksDB and llama.cpp
	@scripts/test.sh

test-long: ## the tests, and those that take minutes: more seeds, more cases
	@scripts/test.sh --long

bench: ## a quick round of the benches (about 3 minutes); larder-bench --help has more
	@scripts/bench.sh

lint: ## format, clippy and documentation, warnings as errors
	@scripts/lint.sh
