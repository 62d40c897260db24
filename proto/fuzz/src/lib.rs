//! Coverage-guided fuzzing of decoders that read what a peer sent: the header, the main bodies,
//! descriptions and inventory records.
//!
//! `cargo test` runs each harness for a moment on the stable toolchain; `cargo bolero test NAME` drives
//! the same harnesses with a fuzzer for as long as wanted.
#![forbid(unsafe_code)]
