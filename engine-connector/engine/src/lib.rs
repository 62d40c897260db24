//! The bundled serving engine: llama.cpp behind an OpenAI-compatible HTTP interface, with its
//! prompt cache in the local store node.
//!
//! [`llama`] wraps the library, [`scheduler`] runs several requests on it, [`http`] speaks with
//! clients, [`serve`] puts them together under a [`config`].
#![deny(unsafe_code)]

pub mod config;
pub mod http;
pub mod llama;
pub mod metric;
pub mod scheduler;
pub mod serve;
