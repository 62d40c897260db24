//! Inventory events: what a node tells a master about its catalog.
//!
//! One numbered stream per node and life: a record's number is its place in the node's change log, the
//! same in every session. A record states what the node holds of one block *now*, so
//! applying it twice, or a snapshot after it, changes nothing. Space and part set travel once per session as a
//! small number ([`PartSetDef`]).
//!
//! A shard is 1/256 of a node's blocks, by the first byte of the key. Both ends keep one digest a shard
//! (the XOR of [`record_digest`] over its records); comparing them finds the shards that differ, and a
//! snapshot of a shard replaces it.

use crate::{
    block_key::BlockKey,
    fingerprint::ModelVersion,
    ids::TenantId,
    part::{PartNumber, TierSet},
    wire::{DecodeError, Reader, Wire, wire_enum, wire_struct},
};

/// Shards of a node's inventory.
pub const SHARDS: usize = 256;

/// One of [`SHARDS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shard(pub u8);

impl Shard {
    /// The shard of a block.
    pub fn of(key: &BlockKey) -> Self {
        Self(key.as_bytes()[0])
    }
}

/// The parts of a block that a node holds, as a bitmap over part numbers: 1,024 at most, without
/// trailing zero bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PartSet(Vec<u8>);

impl PartSet {
    /// The set of these parts; parts of [`crate::fingerprint::PART_LIMIT`] or above are refused.
    pub fn of(parts: impl IntoIterator<Item = PartNumber>) -> Result<Self, DecodeError> {
        let mut set = Self::default();
        for part in parts {
            set.insert(part)?;
        }
        Ok(set)
    }

    /// Adds a part.
    pub fn insert(&mut self, part: PartNumber) -> Result<(), DecodeError> {
        let limit = crate::fingerprint::PART_LIMIT;
        let at = usize::from(part.0);
        if at >= limit {
            return Err(DecodeError::Limit {
                what: "part number",
                value: at as u64,
                limit: limit as u64,
            });
        }
        if self.0.len() <= at / 8 {
            self.0.resize(at / 8 + 1, 0);
        }
        self.0[at / 8] |= 1 << (at % 8);
        Ok(())
    }

    /// Whether the part is in the set.
    pub fn has(&self, part: PartNumber) -> bool {
        let at = usize::from(part.0);
        self.0.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1)
    }

    /// Whether every part of this set is in `other`.
    pub fn is_within(&self, other: &Self) -> bool {
        let theirs = other.0.iter().chain(std::iter::repeat(&0));
        self.0.iter().zip(theirs).all(|(ours, theirs)| ours & !theirs == 0)
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds everything in `other`.
    pub fn unite(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine |= theirs);
    }

    /// The bitmap.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The set with this bitmap; trailing zero bytes and oversize bitmaps are refused.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let limit = crate::fingerprint::PART_LIMIT / 8;
        if bytes.len() > limit {
            return Err(DecodeError::Limit {
                what: "part set",
                value: bytes.len() as u64,
                limit: limit as u64,
            });
        }
        match bytes.last() {
            Some(0) => Err(DecodeError::Text { what: "part set", rule: "must not end in zeroes" }),
            _ => Ok(Self(bytes.to_vec())),
        }
    }
}

/// Gives a number to a set of parts in a space (tenant, model version), for the length of a session.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PartSetDef {
    /// Whose blocks.
    pub tenant: TenantId,
    /// Of which model version.
    pub model: ModelVersion,
    /// The parts that are there.
    pub parts: PartSet,
}

wire_enum! {
    /// What a record says, and for a removal why.
    pub enum RecordKind: u8, "record kind" {
        /// The node holds these parts of the block.
        Stored = 1 => "stored",
        /// It holds none any more: evicted to make room.
        Evicted = 2 => "evicted",
        /// It holds none any more: removed by command.
        Removed = 3 => "removed",
        /// It holds none any more: a copy was found damaged.
        Damaged = 4 => "damaged",
        /// It was asked for the block and does not hold it.
        Absent = 5 => "absent",
    }
}

wire_struct! {
    /// What a node holds of one block now. 40 bytes, packed in `Events` and `Snapshot` messages.
    #[derive(Copy)]
    pub struct Record {
        /// The block.
        pub key: BlockKey,
        /// The number of a [`PartSetDef`]: space and parts. For a removal any set of the same space.
        pub set: u32,
        /// Tiers with at least one part; empty for a removal.
        pub tiers: TierSet,
        /// What the record says.
        pub kind: RecordKind,
        /// Zero.
        pub reserved: u16,
    }
}

/// Bytes of a packed [`Record`].
pub const RECORD_LEN: usize = Record::MIN_LEN;

/// Appends a record to a packed list.
pub fn push_record(packed: &mut Vec<u8>, record: &Record) {
    record.put(packed);
}

/// Reads a packed list; the caller bounds its length by the size of the message.
pub fn records(packed: &[u8]) -> impl Iterator<Item = Result<Record, DecodeError>> + '_ {
    let trailing = packed.len() % RECORD_LEN;
    let whole = packed.chunks_exact(RECORD_LEN).map(|bytes| Record::take(&mut Reader::new(bytes)));
    let left = (trailing != 0)
        .then_some(Err(DecodeError::Trailing { what: "packed records", left: trailing }));
    left.into_iter().chain(whole)
}

/// The contribution of one stored block to its shard's digest. Over what an index knows: space, key
/// prefix, parts and tiers; not over session numbers.
pub fn record_digest(def: &PartSetDef, key: &BlockKey, tiers: TierSet) -> u64 {
    SetDigester::new(def).digest(key, tiers)
}

/// [`record_digest`] with the work that depends only on the part set done once.
#[derive(Debug, Clone, Copy)]
pub struct SetDigester(u64);

impl SetDigester {
    /// For the records of `def`.
    pub fn new(def: &PartSetDef) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(def.tenant.as_bytes());
        hasher.update(def.model.content.as_bytes());
        hasher.update(def.model.layout.as_bytes());
        hasher.update(def.parts.as_bytes());
        Self(first_u64(hasher.finalize().as_bytes()))
    }

    /// The digest of one record. The key is already uniform, so a multiply-xor mix over its prefix is
    /// enough: digests find lost notices, they keep nobody out.
    pub fn digest(&self, key: &BlockKey, tiers: TierSet) -> u64 {
        let mix = |x: u64| {
            // Finaliser of SplitMix64 (Steele, Lea, Flood 2014).
            let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ x >> 31
        };
        let prefix = key.as_bytes();
        let (head, tail) = (first_u64(&prefix[..8]), first_u64(&prefix[8..16]));
        mix(mix(mix(self.0 ^ head) ^ tail) ^ u64::from(tiers.bits()))
    }
}

fn first_u64(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packed_records_round_trip(seeds in prop::collection::vec((any::<[u8; 32]>(), any::<u32>(), 0u8..8), 0..50)) {
            let made: Vec<Record> = seeds
                .into_iter()
                .map(|(key, set, tiers)| Record {
                    key: BlockKey::from_bytes(key),
                    set,
                    tiers: TierSet::from_bits(tiers).unwrap(),
                    kind: RecordKind::Stored,
                    reserved: 0,
                })
                .collect();
            let mut packed = Vec::new();
            made.iter().for_each(|record| push_record(&mut packed, record));
            prop_assert_eq!(packed.len(), made.len() * 40);
            prop_assert_eq!(&records(&packed).collect::<Result<Vec<_>, _>>().unwrap(), &made);
            packed.push(0);
            prop_assert!(records(&packed).collect::<Result<Vec<_>, _>>().is_err());
        }

        #[test]
        fn part_sets_hold_what_was_put_in(parts in prop::collection::btree_set(0u16..1024, 0..40)) {
            let set = PartSet::of(parts.iter().map(|part| PartNumber(*part))).unwrap();
            for part in 0..1024 {
                prop_assert_eq!(set.has(PartNumber(part)), parts.contains(&part));
            }
            prop_assert_eq!(PartSet::from_bytes(set.as_bytes()), Ok(set));
        }
    }
}
