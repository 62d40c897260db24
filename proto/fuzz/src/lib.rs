//! Coverage-guided fuzzing of every decoder that reads what a peer sent.
//!
//! `cargo test` runs each harness for a moment on the stable toolchain; `cargo bolero test NAME` drives
//! the same harnesses with a fuzzer for as long as wanted.
#![forbid(unsafe_code)]
