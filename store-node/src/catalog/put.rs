//! Put lifecycle: reserve space, receive bytes, publish.
//!
//! Visibility: a part becomes visible at `commit`, never before. A put that is dropped, or whose deadline
//! passes, leaves no entry; its space comes back when the put itself is dropped, that is when its writer
//! can no longer write.

use super::{
    BlockId, Catalog, Loss, Occupied, PartRead, Producer, Stored, WriterId,
    block::{self, Block, InDram, Writing},
};
use crate::{eviction::Unit, tiers::dram::WritableExtent};
use larder_proto::{
    Generation, PartName,
    checksum::{ChunkSums, Damaged, RunningSums},
    frame::{Origin, PartInfo, Reserve},
    wire::ShortText,
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::time::Instant;

/// The answer to the wish to put a part, before any byte moves.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "made and taken apart at once, never kept")]
pub enum Admission {
    /// Go on.
    Granted(Put),
    /// It is stored already.
    Exists(Generation),
    /// Somebody else is writing it.
    InProgress {
        /// Who.
        producer: Arc<Producer>,
        /// For how long.
        since: Duration,
    },
    /// There is no room, and nothing that may be evicted.
    Full,
    /// The node takes nothing new.
    Draining,
}

/// A commit that did not take effect; the put is gone with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The bytes are not those that the writer summed.
    #[error("the bytes that arrived are not those that were summed: {0}")]
    Damaged(Damaged),
    /// Not all bytes came.
    #[error("{filled} of {len} bytes came before the commit")]
    Incomplete {
        /// Bytes that came.
        filled: u64,
        /// Bytes that were announced.
        len: u64,
    },
    /// The block would be its own ancestor: such blocks could never be evicted.
    #[error("the block's parents lead back to itself")]
    Ring,
    /// Its deadline passed, or another writer has the name now.
    #[error("the put was revoked: its deadline passed before the commit")]
    Revoked,
}

/// Ancestors that are looked at to keep rings out.
const ANCESTORS: usize = 1 << 20;

/// Where the bytes of a put may have come from.
#[derive(Debug, Clone)]
pub(super) struct Provenance {
    origin: Origin,
    codec: larder_proto::frame::Codec,
    producer: Arc<Producer>,
}

/// A part that is being written, by one writer. Dropping it aborts the put.
///
/// `reserve -> Put -> fill in order -> commit -> visible`
#[must_use = "dropping a put aborts it"]
#[derive(Debug)]
pub struct Put {
    catalog: Arc<Catalog>,
    name: PartName,
    writer: WriterId,
    provenance: Provenance,
    len: usize,
    filled: usize,
    sums: Option<RunningSums>,
    /// Taken by `commit` alone.
    extent: Option<WritableExtent>,
}

impl Catalog {
    /// Asks to put a part. `origin_of_copy` names the first producer when a node stores a peer's copy;
    /// otherwise `producer` is the first.
    pub fn reserve(
        self: &Arc<Self>,
        name: PartName,
        put: &Reserve,
        producer: &Arc<Producer>,
        origin_of_copy: Option<Origin>,
        now: Instant,
    ) -> Admission {
        if self.is_draining() {
            return Admission::Draining;
        }
        let id = BlockId::of(&name);
        let writer = WriterId(self.last_writer.fetch_add(1, Ordering::Relaxed) + 1);
        {
            let mut shard = self.shard(&id);
            let block = shard
                .entry(id)
                .or_insert_with(|| Block::empty(put.content, put.root, put.parent).into());
            match block.occupied(name.part.part) {
                Some(Occupied::Stored(stored)) => return Admission::Exists(stored.generation),
                Some(Occupied::Writing(writing)) => {
                    let producer = Arc::clone(&writing.producer);
                    return Admission::InProgress { producer, since: writing.age(now) };
                }
                None => {}
            }
            if !block.is_stored() && block.all_writing().next().is_none() {
                // The entry may have been made by a child, who knows nothing of its parent's parent.
                (block.content, block.root, block.parent) = (put.content, put.root, put.parent);
            }
            let writing = Writing { writer, producer: Arc::clone(producer), since: now };
            block.reserve(name.part.part, writing);
        }
        let origin = origin_of_copy.unwrap_or_else(|| Origin {
            content: put.content,
            root: put.root,
            parent: put.parent,
            origin_hash: put.origin_hash.clone(),
            producer: ShortText::cut(&producer.name),
            producer_incarnation: producer.incarnation,
        });
        // From here on the put owns the reservation, so every way out gives it back.
        let mut granted = Put {
            catalog: Arc::clone(self),
            name,
            writer,
            provenance: Provenance { origin, codec: put.codec, producer: Arc::clone(producer) },
            len: usize::try_from(put.len).unwrap_or(usize::MAX),
            filled: 0,
            sums: Some(RunningSums::new(put.chunk_len)),
            extent: None,
        };
        granted.extent = self.make_room(granted.len);
        if granted.extent.is_none() {
            self.counters.refused_full.fetch_add(1, Ordering::Relaxed);
            return Admission::Full;
        }
        Admission::Granted(granted)
    }
}

impl Put {
    /// The part.
    pub fn name(&self) -> &PartName {
        &self.name
    }

    /// Bytes of the part.
    pub fn part_len(&self) -> usize {
        self.len
    }

    /// Whether no byte is missing.
    pub fn is_full(&self) -> bool {
        self.filled == self.len
    }

    /// The space that is not filled yet.
    pub fn spare(&mut self) -> &mut [u8] {
        let filled = self.filled;
        self.extent.as_mut().map_or(&mut [], |extent| &mut extent.bytes_mut()[filled..])
    }

    /// Says that the next `n` bytes of [`Self::spare`] are filled; they are summed while they are still
    /// in the processor's cache.
    pub fn advance(&mut self, n: usize) {
        let (from, to) = (self.filled, self.filled + n);
        if let (Some(extent), Some(sums)) = (&mut self.extent, &mut self.sums) {
            sums.update(&extent.bytes_mut()[from..to], |_, _| ());
        }
        self.filled = to;
    }

    /// Fills the whole part from memory that its writer shares with us, copying and summing in one pass.
    /// The sums are those of the copy, so a writer that keeps scribbling cannot make them lie.
    pub fn fill_from(&mut self, memory: &larder_client::memory::SharedMemory, offset: usize) {
        const STEP: usize = 32 << 10; // Fits the first-level cache, so that summing reads from there.
        while !self.is_full() {
            let at = offset + self.filled;
            let spare = self.spare();
            let n = spare.len().min(STEP);
            memory.copy_out(at, &mut spare[..n]);
            self.advance(n);
        }
    }

    /// Makes the part visible, if all bytes came and, where the writer stated its own sums, match them.
    /// Hands it back for reading, so that nothing can evict it before its writer has seen it.
    pub fn commit(mut self, stated: Option<&ChunkSums>) -> Result<PartRead, CommitError> {
        let incomplete =
            CommitError::Incomplete { filled: self.filled as u64, len: self.len as u64 };
        let (true, Some(sums)) = (self.is_full(), self.sums.take()) else { return Err(incomplete) };
        let sums = sums.finish(|_, _| ());
        if let Some(stated) = stated {
            self.compare(stated, &sums)?;
        }
        let Some(extent) = self.extent.take() else { return Err(incomplete) };
        let catalog = Arc::clone(&self.catalog);
        let counter = catalog.last_generation.fetch_add(1, Ordering::Relaxed) + 1;
        let generation = Generation { incarnation: catalog.incarnation, counter };
        let Provenance { origin, codec, producer } = self.provenance.clone();
        let info = PartInfo { generation, len: self.len as u64, codec, sums, origin };
        let (copy, info) = (extent.freeze(), Arc::new(info));
        let read = PartRead { copy: copy.clone(), info: Arc::clone(&info) };
        catalog.publish(&self.name, self.writer, InDram { copy, info }, producer)?;
        catalog.counters.commits.fetch_add(1, Ordering::Relaxed);
        Ok(read)
    }

    fn compare(&self, stated: &ChunkSums, actual: &ChunkSums) -> Result<(), CommitError> {
        let wrong_form = Damaged { chunk: stated.sums.len(), expected: 0, actual: 0 };
        if stated.chunk_len != actual.chunk_len || !stated.fits(self.len as u64) {
            return Err(CommitError::Damaged(wrong_form));
        }
        let each = actual.sums.iter().enumerate();
        each.clone()
            .try_for_each(|(chunk, sum)| stated.verify_sum(chunk, *sum))
            .map_err(CommitError::Damaged)
    }
}

impl Drop for Put {
    fn drop(&mut self) {
        // After a commit the name is `Stored`, and the abort of a writer that is not there does nothing.
        self.catalog.abort(&self.name, self.writer);
    }
}

impl Catalog {
    fn publish(
        &self,
        name: &PartName,
        writer: WriterId,
        dram: InDram,
        producer: Arc<Producer>,
    ) -> Result<(), CommitError> {
        let id = BlockId::of(name);
        let bytes = dram.copy.footprint_bytes();
        // The parent learns of its child before the child is visible, so that it cannot be evicted
        // between the two; a commit that fails takes the child back.
        let parent = dram.info.origin.parent.map(|key| BlockId { key, ..id });
        let parent = parent.filter(|parent| *parent != id);
        if let Some(parent) = &parent {
            let origin = &dram.info.origin;
            self.child_came(parent, &id, origin.content, origin.root);
            // Asked after the parent knows of this child: of two commits that would close a ring
            // together, at least one sees the other.
            if self.closes_ring(&id, Some(parent)) {
                self.let_go(&id, Some(*parent));
                return Err(CommitError::Ring);
            }
        }
        let stored = Stored {
            generation: dram.info.generation,
            len: dram.info.len,
            producer,
            dram: Some(dram),
            ssd: None,
            offered: false,
            uses: 0,
        };
        let mut first_of_block = None;
        let committed = {
            let mut shard = self.shard(&id);
            match shard.get_mut(&id) {
                None => Err(CommitError::Revoked),
                Some(block) => match block.commit(name.part.part, writer, stored) {
                    Err(block::Revoked) => Err(CommitError::Revoked),
                    Ok(()) => {
                        if let Some(stored) = block.stored(name.part.part) {
                            self.tally.came(stored);
                        }
                        match &block.unit {
                            Some(unit) => _ = unit.bytes.fetch_add(bytes, Ordering::Relaxed),
                            None => first_of_block = Some(Unit::new(id, bytes, &self.clock)),
                        }
                        if let Some(unit) = &first_of_block {
                            block.unit = Some(Arc::clone(unit));
                            self.blocks.fetch_add(1, Ordering::Relaxed);
                            block.parent = parent.map(|parent| parent.key);
                        }
                        self.announce(&id, block, Loss::Removed);
                        if let Some(stored) = block.stored_mut(name.part.part) {
                            self.offer_new(name, stored);
                        }
                        Ok(())
                    }
                },
            }
        };
        let is_first = first_of_block.is_some();
        if let Some(unit) = first_of_block {
            self.admit(unit);
        }
        if !is_first && let Some(parent) = &parent {
            // Either the commit failed, or the block was counted with its first part.
            self.let_go(&id, Some(*parent));
        }
        if committed.is_err() {
            self.counters.late_commits.fetch_add(1, Ordering::Relaxed);
        }
        committed
    }

    /// Whether the parents of a block, as far as they are known here, lead back to it. Only a block that
    /// has children already can close a ring, so chains that are put in order are not walked.
    fn closes_ring(&self, id: &BlockId, parent: Option<&BlockId>) -> bool {
        if self.shard(id).get(id).is_none_or(|block| block.children.is_empty()) {
            return false;
        }
        let mut at = parent.copied();
        // Bounded by the longest chain that a match can name, many times over; no ring is ever stored, so
        // a walk cannot go round in one.
        for _ in 0..ANCESTORS {
            let Some(ancestor) = at else { return false };
            if ancestor == *id {
                return true;
            }
            let shard = self.shard(&ancestor);
            let next = shard.get(&ancestor).and_then(|block| block.parent);
            at = next.map(|key| BlockId { key, ..*id });
        }
        false
    }

    fn abort(&self, name: &PartName, writer: WriterId) {
        let id = BlockId::of(name);
        let mut shard = self.shard(&id);
        let Some(block) = shard.get_mut(&id) else { return };
        let writing = matches!(
            block.occupied(name.part.part),
            Some(Occupied::Writing(writing)) if writing.writer == writer
        );
        if writing {
            block.abort(name.part.part, writer);
            self.counters.aborts.fetch_add(1, Ordering::Relaxed);
            if block.is_empty() {
                shard.remove(&id);
            }
        }
    }

    /// Ends the right of a put to become visible; its space stays with it until it is dropped.
    pub fn revoke(&self, put: &Put) {
        self.abort(&put.name, put.writer);
    }
}
