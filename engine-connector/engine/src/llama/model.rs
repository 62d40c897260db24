//! A loaded model and its tokenizer. Shared freely between threads; read only.

use super::LlamaError;
use larder_proto::fingerprint::Digest;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::model::{LlamaModel, RopeType};
use llama_cpp_2::send_logs_to_tracing;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::{LlamaModelLoadError, LogOptions};
use std::io::{self, Read};
use std::path::Path;
use std::sync::OnceLock;

/// Number of a token in the model's vocabulary.
pub type Token = u32;

/// A model in memory.
#[derive(Debug)]
pub struct Model {
    pub(super) inner: LlamaModel,
    vocabulary: u32,
}

/// llama.cpp is started once a process, and never stopped.
pub(super) fn backend() -> Result<&'static LlamaBackend, LlamaError> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    let started = BACKEND.get_or_init(|| {
        send_logs_to_tracing(LogOptions::default());
        LlamaBackend::init().map_err(|error| error.to_string())
    });
    started.as_ref().map_err(|reason| LlamaError::Backend(reason.clone()))
}

/// What a GGUF file begins with.
const GGUF_MAGIC: &[u8] = b"GGUF";

fn begins_with(file: impl Read, wanted: &[u8]) -> io::Result<bool> {
    let mut start = Vec::new();
    file.take(wanted.len() as u64).read_to_end(&mut start)?;
    Ok(start == wanted)
}

fn why_not_loaded(error: &LlamaModelLoadError) -> String {
    match error {
        LlamaModelLoadError::NullResult => "llama.cpp does not take it: it is cut off or damaged, needs \
            more memory than there is, or its architecture is not known; its own words are in the log, all \
            of them with --log.level=info"
            .to_owned(),
        other => other.to_string(),
    }
}

impl Model {
    /// Loads a GGUF file. `progress` hears the share that is loaded, 0 to 1.
    pub fn load(path: &Path, mut progress: impl FnMut(f32) + 'static) -> Result<Self, LlamaError> {
        let refused = |reason: String| LlamaError::Load { path: path.to_owned(), reason };
        // llama.cpp says only "null result" for a file that is not there or is something else.
        let file = std::fs::File::open(path);
        let begins_as_gguf = file.and_then(|file| begins_with(file, GGUF_MAGIC));
        if !begins_as_gguf.map_err(|error| refused(error.to_string()))? {
            return Err(refused("it is no GGUF file: it does not begin with \"GGUF\"".into()));
        }
        let params = LlamaModelParams::default().with_progress_callback(move |share| {
            progress(share);
            true
        });
        let inner = LlamaModel::load_from_file(backend()?, path, &params)
            .map_err(|error| refused(why_not_loaded(&error)))?;
        let vocabulary = u32::try_from(inner.n_vocab()).unwrap_or(0);
        if vocabulary == 0 {
            return Err(refused("it has no vocabulary".into()));
        }
        Ok(Self { inner, vocabulary })
    }

    /// Tokens of the vocabulary: ids are below this.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// Tokens of context that the model was trained on.
    #[must_use]
    pub fn trained_context(&self) -> u32 {
        self.inner.n_ctx_train()
    }

    /// Layers of the model.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.inner.n_layer()
    }

    /// Why the KV of this model cannot be cut into blocks, if it cannot.
    #[must_use]
    pub fn blocks_unsupported(&self) -> Option<&'static str> {
        if self.inner.is_recurrent() || self.inner.is_hybrid() {
            return Some("its state is recurrent: one snapshot, not one entry a token");
        }
        match self.inner.rope_type() {
            Some(RopeType::MRope | RopeType::IMRope | RopeType::Vision) => {
                Some("its positions have several dimensions")
            }
            Some(RopeType::Norm | RopeType::NeoX) | None => None,
        }
    }

    /// The tokens of a text, with the special ones that the model wants at its start. Special
    /// tokens written out in the text count as such.
    #[must_use]
    pub fn tokenize(&self, text: &str) -> Vec<Token> {
        let tokens = self.inner.vocab().tokenize(text.as_bytes(), true, true);
        tokens.into_iter().map(|LlamaToken(id)| id.cast_unsigned()).collect()
    }

    /// The bytes that a token stands for; often not whole characters. Control tokens have none.
    #[must_use]
    pub fn piece(&self, token: Token) -> Vec<u8> {
        self.inner.vocab().token_to_piece(LlamaToken(token.cast_signed()), false, None)
    }

    /// Whether the model ends its answer with this token.
    #[must_use]
    pub fn ends_generation(&self, token: Token) -> bool {
        self.inner.vocab().is_eog(LlamaToken(token.cast_signed()))
    }

    /// Digest of what decides how text becomes tokens: the kind of tokenizer and every token's
    /// text, score and attributes.
    #[must_use]
    pub fn tokenizer_digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        let mut frame = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        frame(b"larder/llama.cpp-tokenizer/1");
        for index in 0..self.inner.meta_count() {
            let Ok(key) = self.inner.meta_key_by_index(index) else { continue };
            if key.starts_with("tokenizer.") && !key.contains("chat_template") {
                frame(key.as_bytes());
                frame(self.inner.meta_val_str_by_index(index).unwrap_or_default().as_bytes());
            }
        }
        let vocab = self.inner.vocab();
        for token in vocab.tokens() {
            frame(vocab.text(token).map_or(&[], std::ffi::CStr::to_bytes));
            frame(&vocab.score(token).to_le_bytes());
            frame(&vocab.attr(token).bits().to_le_bytes());
        }
        Digest::from_bytes(*hasher.finalize().as_bytes())
    }
}
