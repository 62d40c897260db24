//! One KV context: a pool of cells that all sequences share, and the calls to the model.

use super::block::KvLayout;
use super::model::{Model, Token, backend};
use super::{KvError, LlamaError, state};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::{KvCacheType, LlamaContextParams};
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_sys_2::{LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED};
use std::num::NonZeroU32;

/// A sequence of the context, below [`ContextOptions::sequences`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u16);

impl std::fmt::Display for SequenceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Element type of the KV cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// 16-bit floats.
    F16,
    /// Blocks of 8-bit integers with a scale; needs flash attention.
    #[serde(rename = "q8_0")]
    Q8,
}

impl KvType {
    /// The name that goes into the content fingerprint.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8 => "q8_0",
        }
    }

    fn ggml(self) -> KvCacheType {
        match self {
            Self::F16 => KvCacheType::F16,
            Self::Q8 => KvCacheType::Q8_0,
        }
    }
}

/// How a context is made.
#[derive(Debug, Clone, Copy)]
pub struct ContextOptions {
    /// KV cells, one a token, for all sequences together.
    pub cells: u32,
    /// Sequences that can hold cells at once. One more is kept for moving blocks.
    pub sequences: u16,
    /// Most tokens of one call to [`Context::decode`].
    pub batch_tokens: u32,
    /// Threads that compute.
    pub threads: u16,
    /// Element type of the cells.
    pub kv_type: KvType,
    /// Fused attention; without it V is stored transposed, so it decides the layout.
    pub flash_attention: bool,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// One token of a call to the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchToken {
    /// Its number in the vocabulary.
    pub token: Token,
    /// Its position in its sequence.
    pub position: u32,
    /// Its sequence.
    pub sequence: SequenceId,
    /// Whether the next token's logits are wanted after it.
    pub logits: bool,
}

/// A KV context of a model. Belongs to the thread that computes with it.
pub struct Context<'m> {
    inner: LlamaContext<'m>,
    batch: LlamaBatch<'static>,
    options: ContextOptions,
    /// `None` when this model's state cannot be cut into blocks; then with the reason.
    layout: Result<KvLayout, String>,
    /// State bytes on their way in or out; kept, so that a block costs no allocation.
    staging: Vec<u8>,
    scratch: i32,
}

impl<'m> Context<'m> {
    /// Makes a context and learns its block layout by computing one block.
    pub fn new(model: &'m Model, options: ContextOptions) -> Result<Self, LlamaError> {
        let threads = i32::from(options.threads);
        let flash = match options.flash_attention {
            true => LLAMA_FLASH_ATTN_TYPE_ENABLED,
            false => LLAMA_FLASH_ATTN_TYPE_DISABLED,
        };
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(options.cells))
            .with_n_batch(options.batch_tokens)
            .with_n_ubatch(options.batch_tokens)
            .with_n_seq_max(u32::from(options.sequences) + 1)
            // Without one shared pool, copying a range between sequences aborts the process.
            .with_kv_unified(true)
            .with_swa_full(true)
            .with_type_k(options.kv_type.ggml())
            .with_type_v(options.kv_type.ggml())
            .with_flash_attention_policy(flash)
            .with_n_threads(threads)
            .with_n_threads_batch(threads);
        let refused = |reason: String| LlamaError::Context { cells: options.cells, reason };
        let inner = model
            .inner
            .new_context(backend()?, params)
            .map_err(|error| refused(error.to_string()))?;
        let batch = LlamaBatch::new(options.batch_tokens as usize, 1);
        let scratch = i32::from(options.sequences);
        let layout = Err(String::new());
        let mut context = Self { inner, batch, options, layout, staging: Vec::new(), scratch };
        context.layout = match model.blocks_unsupported() {
            Some(reason) => Err(reason.to_owned()),
            None => context.learn_layout(model)?,
        };
        Ok(context)
    }

    /// Cells of the context: llama.cpp may round what was asked for up.
    #[must_use]
    pub fn cells(&self) -> u32 {
        self.inner.n_ctx()
    }

    /// How blocks of this context look, or why it has none.
    pub fn layout(&self) -> Result<&KvLayout, &str> {
        self.layout.as_ref().map_err(String::as_str)
    }

    /// Runs the model over `tokens`, of any mix of sequences, and stores their KV. On an error the
    /// sequences in the call are in an unknown state: release them.
    pub fn decode(&mut self, tokens: &[BatchToken]) -> Result<(), LlamaError> {
        let refused = |reason: String| LlamaError::Decode { tokens: tokens.len(), reason };
        self.batch.clear();
        for token in tokens {
            let position = position(token.position)?;
            self.batch
                .add(
                    LlamaToken(token.token.cast_signed()),
                    position,
                    &[i32::from(token.sequence.0)],
                    token.logits,
                )
                .map_err(|error| refused(error.to_string()))?;
        }
        self.inner.decode(&mut self.batch).map_err(|error| refused(error.to_string()))
    }

    /// Scores of every token of the vocabulary after the `index`th token of the last call, which
    /// must have asked for them.
    #[must_use]
    pub fn logits(&self, index: usize) -> &[f32] {
        let index = i32::try_from(index).unwrap_or(i32::MAX);
        self.inner.get_logits_ith(index)
    }

    /// Frees all cells of a sequence.
    pub fn release(&mut self, sequence: SequenceId) {
        self.clear(i32::from(sequence.0));
    }

    /// First position that a sequence does not hold.
    #[must_use]
    pub fn end_of(&self, sequence: SequenceId) -> i64 {
        i64::from(self.inner.kv_cache_seq_pos_max(i32::from(sequence.0))) + 1
    }

    /// Writes the bytes of one whole block of `sequence` into `into`, which is cleared first.
    pub fn export_block(
        &mut self,
        sequence: SequenceId,
        block: u32,
        into: &mut Vec<u8>,
    ) -> Result<(), KvError> {
        let (first, end) = self.range(block)?;
        let held = self.end_of(sequence);
        if held < i64::from(end) {
            let expected = i64::from(end);
            return Err(KvError::Position { block, sequence, end: held, expected });
        }
        let source = i32::from(sequence.0);
        self.copy(source, self.scratch, Some((first, end)))?;
        let read = state::read(&mut self.inner, self.scratch, &mut self.staging);
        self.clear(self.scratch);
        if !read {
            return Err(KvError::Refused { block });
        }
        let layout = self.layout.as_ref().map_err(|why| KvError::Unsupported(why.clone()))?;
        layout
            .normalise(&self.staging, i64::from(first), into)
            .map_err(|source| KvError::Format { block, source })
    }

    /// Appends one block to `sequence`, which must end exactly where the block begins. On an error
    /// the sequence holds what it held before.
    pub fn import_block(
        &mut self,
        sequence: SequenceId,
        block: u32,
        bytes: &[u8],
    ) -> Result<(), KvError> {
        let (first, _) = self.range(block)?;
        let held = self.end_of(sequence);
        if held != i64::from(first) {
            let expected = i64::from(first);
            return Err(KvError::Position { block, sequence, end: held, expected });
        }
        let layout = self.layout.as_ref().map_err(|why| KvError::Unsupported(why.clone()))?;
        layout
            .denormalise(bytes, position(first)?, self.scratch, &mut self.staging)
            .map_err(|source| KvError::Format { block, source })?;
        // llama.cpp clears the destination first, hence the detour over a sequence of its own.
        if !state::write(&mut self.inner, self.scratch, &self.staging) {
            return Err(KvError::Refused { block });
        }
        let copied = self.copy(self.scratch, i32::from(sequence.0), None);
        self.clear(self.scratch);
        Ok(copied?)
    }

    /// Computes one block of an arbitrary token and reads the layout off its state.
    fn learn_layout(&mut self, model: &Model) -> Result<Result<KvLayout, String>, LlamaError> {
        let token = model.vocabulary() / 2;
        let sequence = SequenceId(0);
        let block: Vec<BatchToken> = (0..self.options.block_tokens)
            .map(|position| BatchToken { token, position, sequence, logits: false })
            .collect();
        for call in block.chunks(self.options.batch_tokens as usize) {
            self.decode(call)?;
        }
        let read = state::read(&mut self.inner, 0, &mut self.staging);
        self.clear(0);
        if !read {
            return Ok(Err("llama.cpp wrote another state than it announced".into()));
        }
        let learned = KvLayout::learn(&self.staging, self.options.block_tokens);
        Ok(learned.map_err(|error| format!("its state has another structure: {error}")))
    }

    /// Positions of a block, `[first, end)`.
    fn range(&self, block: u32) -> Result<(u32, u32), LlamaError> {
        let first = u64::from(block) * u64::from(self.options.block_tokens);
        let end = first + u64::from(self.options.block_tokens);
        let end =
            u32::try_from(end).map_err(|_| LlamaError::Range { what: "position", value: end })?;
        Ok((end - self.options.block_tokens, end))
    }

    fn copy(&mut self, from: i32, to: i32, range: Option<(u32, u32)>) -> Result<(), LlamaError> {
        let (first, end) = (range.map(|r| r.0), range.map(|r| r.1));
        self.inner
            .kv_cache_seq_cp(from, to, first, end)
            .map_err(|_| LlamaError::Range { what: "position", value: end.map_or(0, u64::from) })
    }

    fn clear(&mut self, sequence: i32) {
        let cleared = self.inner.clear_kv_cache_seq(Some(sequence.cast_unsigned()), None, None);
        // Removing a whole sequence always succeeds; only ranges of recurrent states can fail.
        debug_assert!(matches!(cleared, Ok(true)), "{cleared:?}");
    }
}

fn position(value: u32) -> Result<i32, LlamaError> {
    i32::try_from(value)
        .map_err(|_| LlamaError::Range { what: "position", value: u64::from(value) })
}
