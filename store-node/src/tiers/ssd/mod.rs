//! The ssd tier: parts on disks, in a log of segments.
//!
//! A node has one or many paths. A [`SsdPath`] is a folder with a hard capacity: it appends records to
//! its open segment, seals it with a footer when it is full, and starts the next one in the slot of the
//! oldest. `format` says how records lie on the disk, `segment`, `path` and `records` what happens while
//! the node runs, `removals` keeps what was taken back for good, `recovery` finds everything again after a
//! restart, `verify` looks for damage before anybody reads it, and `io` moves the bytes.
//!
//! As every tier it knows parts and places, and nothing of visibility: the catalog decides what is
//! offered to it, and what of an old segment is carried on.

pub mod format;
pub mod io;
mod path;
mod records;
mod recovery;
mod removals;
mod segment;
mod steps;
mod verify;

pub use format::FooterEntry;
pub use path::{Durability, Health, PathCounters, PathSettings, SsdPath, slot_name, slots_of};
pub use recovery::{Adoption, AdoptionCounts, OpenError, Owner};
pub use removals::UseId;
pub use segment::{Segment, SsdCopy};
pub use steps::{Steps, in_steps};
pub use verify::Pace;

use larder_proto::checksum::Damaged;
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// Why a path did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum SsdError {
    /// No segment is ready: the disk is slower than the traffic. Nothing was written.
    #[error("no segment is ready for it")]
    Busy,
    /// No segment is long enough.
    #[error("the part is longer than a segment")]
    TooLong,
    /// The record is not what it should be: the copy is to be withdrawn.
    #[error("the record cannot be read: {0}")]
    Unreadable(#[from] format::Unreadable),
    /// Its bytes are not those that were written: the copy is to be withdrawn.
    #[error("the record is damaged: {0}")]
    Damaged(#[from] Damaged),
    /// Its file ends before it: the copy is to be withdrawn.
    #[error("somebody has cut the file: {0}")]
    Cut(std::io::Error),
    /// The disk failed; the path is fenced now.
    #[error("the disk failed: {0}")]
    Io(std::io::Error),
    /// The path takes part no more.
    #[error("the path is fenced: {0}")]
    Fenced(Arc<str>),
}

impl SsdError {
    /// Whether the copy itself is bad, and not its path.
    pub fn is_of_the_copy(&self) -> bool {
        match self {
            Self::Unreadable(_) | Self::Damaged(_) | Self::Cut(_) => true,
            Self::Busy | Self::TooLong | Self::Io(_) | Self::Fenced(_) => false,
        }
    }
}
