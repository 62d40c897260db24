//! Messages and services of the control plane, generated from `control/larder.proto`, which documents
//! them.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "generated code"
)]

tonic::include_proto!("larder.v1");
