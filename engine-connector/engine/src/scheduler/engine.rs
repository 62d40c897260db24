//! llama.cpp as the connector's [`KvEngine`]: its context, its layout, its measured speed.

use crate::llama::block::{FORMAT_VERSION, KvLayout};
use crate::llama::{BatchToken, Context, ContextOptions, KvError, LlamaError, Model, SequenceId};
use larder_engine_connector::{Estimate, KvEngine, PrefillRate};
use larder_proto::fingerprint::{LayerGroup, LayoutDescription};
use larder_proto::part::GroupRule;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// The family under which blocks of this engine are found.
const ENGINE_FAMILY: &str = "llama.cpp";

/// What the rest of the program must know of a running engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineShape {
    /// KV cells of the context.
    pub cells: u32,
    /// The layout of its blocks and their size, or why it has none.
    pub blocks: Result<(LayoutDescription, usize), String>,
}

/// The engine, on the thread that owns it.
pub struct LlamaEngine<'m> {
    /// The KV context.
    pub context: Context<'m>,
    layout: LayoutDescription,
    block_bytes: usize,
    seconds_per_token: Estimate,
}

impl<'m> LlamaEngine<'m> {
    /// Makes the context, and measures how fast it computes a step of `step_tokens` tokens.
    pub fn new(
        model: &'m Model,
        options: ContextOptions,
        step_tokens: u32,
    ) -> Result<Self, LlamaError> {
        let context = Context::new(model, options)?;
        let (layout, block_bytes) = match context.layout() {
            Ok(layout) => (describe(layout, options), layout.block_bytes()),
            Err(_) => (without_blocks(options), 0),
        };
        let seconds_per_token = Estimate::prior(0.0);
        let mut engine = Self { context, layout, block_bytes, seconds_per_token };
        engine.measure(model, step_tokens)?;
        Ok(engine)
    }

    /// What the rest of the program must know.
    #[must_use]
    pub fn shape(&self) -> EngineShape {
        let blocks = match self.context.layout() {
            Ok(_) => Ok((self.layout.clone(), self.block_bytes)),
            Err(reason) => Err(reason.to_owned()),
        };
        EngineShape { cells: self.context.cells(), blocks }
    }

    /// Computes one step for its time alone. Making the context has warmed the model up.
    fn measure(&mut self, model: &Model, step_tokens: u32) -> Result<(), LlamaError> {
        let (token, sequence) = (model.vocabulary() / 2, SequenceId(0));
        let step: Vec<BatchToken> = (0..step_tokens)
            .map(|position| BatchToken { token, position, sequence, logits: false })
            .collect();
        let began = Instant::now();
        self.context.decode(&step)?;
        self.saw_step(step.len(), step.len(), began.elapsed());
        self.context.release(sequence);
        Ok(())
    }

    /// A step took `time`; `prompt_tokens` of its `tokens` belonged to a prompt.
    pub fn saw_step(&mut self, tokens: usize, prompt_tokens: usize, time: Duration) {
        if prompt_tokens > 0 && tokens > 0 {
            self.seconds_per_token.sample(time.as_secs_f64() / tokens as f64);
        }
    }
}

impl KvEngine for LlamaEngine<'_> {
    type Sequence = SequenceId;
    type Error = KvError;

    fn layout(&self) -> &LayoutDescription {
        &self.layout
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn export_block(
        &mut self,
        sequence: SequenceId,
        block: u32,
        into: &mut Vec<u8>,
    ) -> Result<(), KvError> {
        self.context.export_block(sequence, block, into)
    }

    fn import_block(
        &mut self,
        sequence: SequenceId,
        block: u32,
        bytes: &[u8],
    ) -> Result<(), KvError> {
        self.context.import_block(sequence, block, bytes)
    }

    fn prefill_rate(&self) -> PrefillRate {
        let seconds = self.seconds_per_token.mean();
        PrefillRate { per_token: Duration::try_from_secs_f64(seconds).unwrap_or_default() }
    }
}

/// Everything that decides the bytes of a block, as the layout fingerprint wants it.
fn describe(layout: &KvLayout, options: ContextOptions) -> LayoutDescription {
    let layers = (0..).take(layout.keys().len()).collect();
    let bytes_of = |values: &[crate::llama::block::Values]| {
        values.iter().map(|layer| layer.token_bytes).sum::<u64>()
    };
    let group = LayerGroup {
        rule: GroupRule::EveryBlock,
        layers,
        dtype: options.kv_type.name().into(),
        // Bytes of K and of V that one token takes in all layers; the exact structure is in
        // `structure` below.
        shape: vec![
            u64::from(options.block_tokens),
            bytes_of(layout.keys()),
            bytes_of(layout.values()),
        ],
        strides: Vec::new(),
        part_bytes: layout.block_bytes() as u64,
    };
    let structure = blake3::hash(&layout.fixed_bytes());
    let options_text = [
        ("flash_attention", options.flash_attention.to_string()),
        ("v_transposed", layout.values_transposed().to_string()),
        ("structure", structure.to_hex().to_string()),
    ];
    LayoutDescription {
        engine_family: ENGINE_FAMILY.into(),
        kv_format_version: FORMAT_VERSION,
        block_tokens: options.block_tokens,
        groups: vec![group],
        parallel: BTreeMap::new(),
        options: options_text.map(|(name, value)| (name.to_owned(), value)).into(),
    }
}

fn without_blocks(options: ContextOptions) -> LayoutDescription {
    LayoutDescription {
        engine_family: ENGINE_FAMILY.into(),
        kv_format_version: FORMAT_VERSION,
        block_tokens: options.block_tokens,
        groups: Vec::new(),
        parallel: BTreeMap::new(),
        options: BTreeMap::new(),
    }
}
