//! A small safe wrapper over llama.cpp: model, tokenizer, one unified KV context, sampling.
//!
//! Contract: nothing here blocks on anything but the computation itself; a [`Context`] belongs to
//! one thread. Sequences share one pool of KV cells, and the caller keeps the sum of what it
//! decodes within [`Context::cells`]. Blocks leave and enter a sequence whole, in the format that
//! [`block`] fixes. All `unsafe` of this crate is in `state`.
//! Not here: which tokens to decode when (`scheduler`), what is worth fetching (the connector).

pub mod block;
mod context;
mod model;
pub mod sample;
#[expect(unsafe_code, reason = "moves states through raw buffers; each block has its proof")]
mod state;

pub use context::{BatchToken, Context, ContextOptions, KvType, SequenceId};
pub use model::{Model, Token};

use std::path::PathBuf;

/// What can go wrong between us and llama.cpp.
#[derive(Debug, thiserror::Error)]
pub enum LlamaError {
    /// The library refused to start.
    #[error("start llama.cpp: {0}")]
    Backend(String),
    /// The file is absent, unreadable or not a model that llama.cpp knows.
    #[error("load the model {}: {reason}", path.display())]
    Load {
        /// The file that was to be loaded.
        path: PathBuf,
        /// What llama.cpp or the file system said.
        reason: String,
    },
    /// No KV context of the wanted size and type, most often for lack of memory.
    #[error("create a KV context of {cells} cells: {reason}")]
    Context {
        /// Cells asked for.
        cells: u32,
        /// What llama.cpp said.
        reason: String,
    },
    /// One call to the model was refused; the KV cells of its tokens may be half written.
    #[error("decode {tokens} tokens: {reason}")]
    Decode {
        /// Tokens in the call.
        tokens: usize,
        /// What llama.cpp said.
        reason: String,
    },
    /// A position or id beyond what llama.cpp can count.
    #[error("{what} {value} is beyond the engine's range")]
    Range {
        /// What was counted.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}

/// Why a block could not leave or enter the KV context.
#[derive(Debug, thiserror::Error)]
pub enum KvError {
    /// The bytes do not have the structure that this model's blocks have.
    #[error("block {block}: {source}")]
    Format {
        /// Index of the block in its sequence.
        block: u32,
        /// What differs.
        source: block::FormatError,
    },
    /// The sequence does not hold the positions that were asked for, or holds others.
    #[error("block {block}: sequence {sequence} ends at position {end}, expected {expected}")]
    Position {
        /// Index of the block in its sequence.
        block: u32,
        /// The sequence.
        sequence: SequenceId,
        /// First position that the sequence does not hold.
        end: i64,
        /// First position it should not hold.
        expected: i64,
    },
    /// llama.cpp refused the state, although its structure is right.
    #[error("block {block}: llama.cpp refused the state")]
    Refused {
        /// Index of the block in its sequence.
        block: u32,
    },
    /// This model's state cannot be cut into blocks.
    #[error("this model has no block-wise KV state: {0}")]
    Unsupported(String),
    /// An error of the library on the way.
    #[error(transparent)]
    Llama(#[from] LlamaError),
}
