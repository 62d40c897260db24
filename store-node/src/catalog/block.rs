//! One block in the catalog, and the life of its parts.
//!
//! ```text
//!            reserve             commit
//! (nothing) ---------> Writing ---------> Stored
//!     ^                   |                  |
//!     +---- abort, drop, -+                  |
//!     |     deadline                         |
//!     +------- evict, withdraw, remove ------+
//! ```
//!
//! A stored part has at least one copy: in dram, on an ssd, or both.
//!
//! This file is the only place where a part changes state. It takes no lock, allocates no space and
//! tells nobody: the catalog does that around it.

use super::children::Children;
use crate::{
    eviction::Unit,
    inventory::BlockState,
    tiers::{dram::DramCopy, ssd::SsdCopy},
};
use larder_proto::{
    BlockKey, Generation, PartNumber, Tier, TierSet, fingerprint::ContentFingerprint,
    frame::PartInfo, ids::Incarnation,
};
use smallvec::SmallVec;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Names one writer; never reused in a node's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WriterId(pub(super) u64);

/// Who publishes parts: a principal, in one of its lives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Producer {
    /// The principal.
    pub name: String,
    /// Its life.
    pub incarnation: Incarnation,
}

/// A part that is being written.
#[derive(Debug)]
pub(super) struct Writing {
    pub(super) writer: WriterId,
    pub(super) producer: Arc<Producer>,
    pub(super) since: Instant,
}

/// A copy in the arena, and what is known of the part. On an ssd that stands before the bytes.
#[derive(Debug, Clone)]
pub(super) struct InDram {
    pub(super) copy: DramCopy,
    pub(super) info: Arc<PartInfo>,
}

/// A visible part.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) generation: Generation,
    pub(super) len: u64,
    /// Who published it first.
    pub(super) producer: Arc<Producer>,
    pub(super) dram: Option<InDram>,
    pub(super) ssd: Option<SsdCopy>,
    /// It was handed out to be written to an ssd, and may come to be there.
    pub(super) offered: bool,
    /// Uses since it was stored, or since it was last written to an ssd.
    pub(super) uses: u8,
}

impl Stored {
    /// Tiers that hold it.
    pub(super) fn tiers(&self) -> TierSet {
        let dram = self.dram.as_ref().map_or(TierSet::EMPTY, |_| TierSet::of(Tier::Dram));
        let ssd = self.ssd.as_ref().map_or(TierSet::EMPTY, |_| TierSet::of(Tier::Ssd));
        dram.union(ssd)
    }

    /// Bytes of the arena that it takes.
    pub(super) fn dram_bytes(&self) -> u64 {
        self.dram.as_ref().map_or(0, |dram| dram.copy.footprint_bytes())
    }
}

#[derive(Debug)]
enum PartState {
    Writing(Writing),
    Stored(Stored),
}

/// What stands under a part's name.
#[derive(Debug)]
pub(super) enum Occupied<'a> {
    Writing(&'a Writing),
    Stored(&'a Stored),
}

/// Everything the node knows of one block. It may be without parts: then it counts the descendants that
/// are here, so that the block, once it comes, is not evicted before them.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) content: ContentFingerprint,
    pub(super) root: BlockKey,
    pub(super) parent: Option<BlockKey>,
    /// Blocks on this node, with stored parts, whose parent this is.
    pub(super) children: Children,
    /// The policy let go of it because it has children; it goes back when the last one goes.
    pub(super) parked: bool,
    /// What the policy knows it by, from its first stored part on.
    pub(super) unit: Option<Arc<Unit>>,
    /// What masters were told.
    pub(super) announced: Option<BlockState>,
    parts: SmallVec<[(PartNumber, PartState); 1]>,
}

/// A commit that may not take effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Revoked;

impl Block {
    /// A block without parts.
    pub(super) fn empty(
        content: ContentFingerprint,
        root: BlockKey,
        parent: Option<BlockKey>,
    ) -> Self {
        Self {
            content,
            root,
            parent,
            children: Children::default(),
            parked: false,
            unit: None,
            announced: None,
            parts: SmallVec::new(),
        }
    }

    fn position(&self, part: PartNumber) -> Option<usize> {
        self.parts.iter().position(|(number, _)| *number == part)
    }

    /// What stands under the name.
    pub(super) fn occupied(&self, part: PartNumber) -> Option<Occupied<'_>> {
        Some(match &self.parts[self.position(part)?].1 {
            PartState::Writing(writing) => Occupied::Writing(writing),
            PartState::Stored(stored) => Occupied::Stored(stored),
        })
    }

    /// The stored part, if it is stored.
    pub(super) fn stored(&self, part: PartNumber) -> Option<&Stored> {
        match self.occupied(part)? {
            Occupied::Stored(stored) => Some(stored),
            Occupied::Writing(_) => None,
        }
    }

    /// The stored part, to change its copies.
    pub(super) fn stored_mut(&mut self, part: PartNumber) -> Option<&mut Stored> {
        let at = self.position(part)?;
        match &mut self.parts[at].1 {
            PartState::Stored(stored) => Some(stored),
            PartState::Writing(_) => None,
        }
    }

    /// All stored parts, to change their copies.
    pub(super) fn all_stored_mut(&mut self) -> impl Iterator<Item = &mut Stored> {
        self.parts.iter_mut().filter_map(|(_, state)| match state {
            PartState::Stored(stored) => Some(stored),
            PartState::Writing(_) => None,
        })
    }

    /// Whether any part is stored.
    pub(super) fn is_stored(&self) -> bool {
        self.all_stored().next().is_some()
    }

    /// Tiers that hold parts of it.
    pub(super) fn tiers(&self) -> TierSet {
        self.all_stored().fold(TierSet::EMPTY, |tiers, (_, stored)| tiers.union(stored.tiers()))
    }

    /// All stored parts.
    pub(super) fn all_stored(&self) -> impl Iterator<Item = (PartNumber, &Stored)> {
        self.parts.iter().filter_map(|(number, state)| match state {
            PartState::Stored(stored) => Some((*number, stored)),
            PartState::Writing(_) => None,
        })
    }

    /// All parts that are being written.
    pub(super) fn all_writing(&self) -> impl Iterator<Item = (PartNumber, &Writing)> {
        self.parts.iter().filter_map(|(number, state)| match state {
            PartState::Writing(writing) => Some((*number, writing)),
            PartState::Stored(_) => None,
        })
    }

    /// `(nothing) -> Writing`.
    ///
    /// # Panics
    /// When the name is occupied: the catalog asks first, under the same lock.
    pub(super) fn reserve(&mut self, part: PartNumber, writing: Writing) {
        assert!(self.position(part).is_none(), "part {} is occupied", part.0);
        self.parts.push((part, PartState::Writing(writing)));
    }

    /// `(nothing) -> Stored`, for a copy that an earlier life left.
    ///
    /// # Panics
    /// When the name is occupied: the catalog asks first, under the same lock.
    pub(super) fn adopt(&mut self, part: PartNumber, stored: Stored) {
        assert!(self.position(part).is_none(), "part {} is occupied", part.0);
        self.parts.push((part, PartState::Stored(stored)));
    }

    /// `Writing -> Stored`, if `writer` is still the one.
    pub(super) fn commit(
        &mut self,
        part: PartNumber,
        writer: WriterId,
        stored: Stored,
    ) -> Result<(), Revoked> {
        let at = self.position(part).ok_or(Revoked)?;
        match &mut self.parts[at].1 {
            PartState::Writing(writing) if writing.writer == writer => {
                self.parts[at].1 = PartState::Stored(stored);
                Ok(())
            }
            PartState::Writing(_) | PartState::Stored(_) => Err(Revoked),
        }
    }

    /// `Writing -> (nothing)`, if `writer` is still the one.
    pub(super) fn abort(&mut self, part: PartNumber, writer: WriterId) {
        self.parts.retain(|(number, state)| {
            let ours = matches!(state, PartState::Writing(writing) if writing.writer == writer);
            *number != part || !ours
        });
    }

    /// `Stored -> (nothing)`, if it is stored.
    pub(super) fn take_stored(&mut self, part: PartNumber) -> Option<Stored> {
        let stored = self.stored(part)?.clone();
        let at = self.position(part)?;
        self.parts.remove(at);
        Some(stored)
    }

    /// Whether somebody reads a part in the arena or writes another.
    pub(super) fn is_in_use(&self) -> bool {
        self.parts.iter().any(|(_, state)| match state {
            PartState::Writing(_) => true,
            PartState::Stored(stored) => {
                stored.dram.as_ref().is_some_and(|dram| dram.copy.is_shared())
            }
        })
    }

    /// Whether nothing is left to remember.
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.children.is_empty()
    }
}

impl Writing {
    /// For how long it has been going on.
    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }
}
