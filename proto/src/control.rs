//! Messages and services of the control plane, generated from `control/larder.proto`.
#![expect(
    missing_docs,
    clippy::all,
    clippy::cast_possible_truncation,
    reason = "generated; the .proto file is the documentation"
)]

tonic::include_proto!("larder.v1");
