//! One request's share of the cache, on its way from the connector to the engine's thread.

use crate::engine::KvEngine;
use crate::metric;
use crate::planner::Planner;
use crate::publish::{Ledger, Publication, accepted};
use crate::report::{KvReport, SkipReason};
use crate::store::BlockSource;
use metrics::counter;
use parking_lot::Mutex;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::debug;

/// A landed part, whatever store it came from.
pub(crate) type LandedPart = Box<dyn Deref<Target = [u8]> + Send>;

/// The landed blocks of one request and its right to publish. Dropping it releases both.
pub struct RequestKv {
    pub(crate) blocks: Vec<(BlockSource, LandedPart)>,
    pub(crate) publication: Option<Publication>,
    pub(crate) planner: Option<Arc<Mutex<Planner>>>,
    pub(crate) report: KvReport,
}

impl std::fmt::Debug for RequestKv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestKv")
            .field("blocks", &self.blocks.len())
            .field("report", &self.report)
            .finish_non_exhaustive()
    }
}

impl RequestKv {
    /// The share of a request that the cache has nothing to do with.
    #[must_use]
    pub fn none(reason: SkipReason) -> Self {
        metric::count_skip(reason);
        let report = KvReport::skipped(reason);
        Self { blocks: Vec::new(), publication: None, planner: None, report }
    }

    /// Puts the landed blocks into an empty sequence, in position order, and gives their leases
    /// back. Returns how many leading blocks are valid: the engine computes from there.
    pub fn restore<E: KvEngine>(&mut self, engine: &mut E, sequence: E::Sequence) -> u32 {
        let began = Instant::now();
        let landed = std::mem::take(&mut self.blocks);
        let count = landed.len();
        let mut valid = 0;
        for (source, part) in landed {
            if let Err(error) = engine.import_block(sequence, valid, &part) {
                debug!(block = valid, error = %error, "block refused by the engine");
                counter!(metric::FAILED_BLOCKS_TOTAL).increment(1);
                self.report.skip_reason = Some(SkipReason::ImportFailed);
                break;
            }
            valid += 1;
            match source {
                BlockSource::Local => self.report.local_blocks += 1,
                BlockSource::Peer(_) => self.report.peer_blocks += 1,
            }
        }
        if count > 0 {
            self.learn_import(engine.block_bytes() * valid as usize, began.elapsed());
        }
        if let Some(publication) = &mut self.publication {
            publication.restored(valid);
        }
        valid
    }

    /// The engine has computed the positions `range` of the sequence, from what it held before
    /// them; `tokens` are all tokens known so far. Whole blocks are offered for publishing.
    pub fn computed<E: KvEngine>(
        &mut self,
        engine: &mut E,
        sequence: E::Sequence,
        tokens: &[u32],
        range: Range<u32>,
    ) {
        if let Some(publication) = &mut self.publication {
            publication.computed(engine, sequence, tokens, range);
        }
    }

    /// Everything from this block on has turned out not to be valid. The engine computes it anew
    /// from an earlier position; until then nothing behind it is published.
    pub fn failed_from(&mut self, block: u32) {
        if let Some(publication) = &mut self.publication {
            publication.failed(block);
        }
    }

    /// The request ends, finished or cancelled, and its sequence is still there: what it completed
    /// and has not been offered yet is offered now.
    pub fn finish<E: KvEngine>(&mut self, engine: &mut E, sequence: E::Sequence) {
        if let Some(publication) = &mut self.publication {
            publication.finish(engine, sequence);
        }
    }

    /// What the cache did so far.
    #[must_use]
    pub fn report(&self) -> &KvReport {
        &self.report
    }

    /// Counts what becomes of this request's blocks from now on.
    #[must_use]
    pub fn published(&self) -> PublishedBlocks {
        PublishedBlocks(self.publication.as_ref().map(Publication::ledger))
    }

    fn learn_import(&mut self, bytes: usize, time: Duration) {
        self.report.import_time = time;
        if let Some(planner) = &self.planner {
            planner.lock().saw_import(bytes, time);
        }
    }
}

/// How many blocks of a request the publishing queue has taken.
#[derive(Debug, Clone, Default)]
pub struct PublishedBlocks(Option<Arc<Ledger>>);

impl PublishedBlocks {
    /// Blocks taken so far.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.as_deref().map_or(0, accepted)
    }
}
