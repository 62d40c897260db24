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
//! This file is the only place where a part changes state. It takes no lock, allocates no space and
//! tells nobody: the catalog does that around it.

use crate::{eviction::Unit, inventory::BlockState, tiers::dram::DramCopy};
use larder_proto::{
    BlockKey, PartNumber, fingerprint::ContentFingerprint, frame::PartInfo, ids::Incarnation,
};
use smallvec::SmallVec;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Names one writer; never reused in a node's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WriterId(pub(super) u64);

/// Who publishes parts: a principal, in one of its lives.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// A visible part.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) copy: DramCopy,
    pub(super) info: Arc<PartInfo>,
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
    pub(super) children: u32,
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
            children: 0,
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

    /// Whether somebody reads a stored part or writes another.
    pub(super) fn is_in_use(&self) -> bool {
        self.parts.iter().any(|(_, state)| match state {
            PartState::Writing(_) => true,
            PartState::Stored(stored) => stored.copy.is_shared(),
        })
    }

    /// Whether nothing is left to remember.
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.children == 0
    }
}

impl Writing {
    /// For how long it has been going on.
    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }
}
