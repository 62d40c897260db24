//! What the connector needs from a serving engine.

use larder_proto::fingerprint::LayoutDescription;
use std::time::Duration;

/// The KV side of an engine, as the thread sees it that owns the engine's memory.
///
/// One block is one part here; the bytes of a block depend on its tokens alone (no position, no
/// sequence id), or equal blocks would not be equal parts.
pub trait KvEngine {
    /// Names a sequence of the engine.
    type Sequence: Copy + Send;
    /// Why a block could not leave or enter.
    type Error: std::error::Error;

    /// How blocks are laid out; its fingerprint is part of every part name.
    fn layout(&self) -> &LayoutDescription;

    /// Bytes of every block's part.
    fn block_bytes(&self) -> usize;

    /// Writes one whole block of a sequence into `into`, replacing what is there. Every position
    /// of the block has been computed or imported.
    fn export_block(
        &mut self,
        sequence: Self::Sequence,
        block: u32,
        into: &mut Vec<u8>,
    ) -> Result<(), Self::Error>;

    /// Appends one block to a sequence that ends where the block begins. The structure of `bytes`
    /// is checked, and on an error the sequence is as it was.
    fn import_block(
        &mut self,
        sequence: Self::Sequence,
        block: u32,
        bytes: &[u8],
    ) -> Result<(), Self::Error>;

    /// How fast prompts are computed, as measured lately.
    fn prefill_rate(&self) -> PrefillRate;
}

/// Time to compute one token of a prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillRate {
    /// Mean over the latest steps.
    pub per_token: Duration,
}

impl PrefillRate {
    /// Time to compute `tokens` tokens.
    #[must_use]
    pub fn time_for(&self, tokens: u32) -> Duration {
        self.per_token.saturating_mul(tokens)
    }
}
