//! Parts: what is stored, moved and checksummed; tiers; and the rules by which groups match.

use crate::{
    block_key::BlockKey,
    fingerprint::LayoutFingerprint,
    ids::TenantId,
    wire::{DecodeError, Reader, Wire, wire_enum, wire_struct},
};

/// Which part of a block: `group * ranks + rank` of its layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartNumber(pub u16);

impl Wire for PartNumber {
    const MIN_LEN: usize = 2;
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        u16::take(from).map(Self)
    }
}

wire_struct! {
    /// The name of a part within a tenant: what travels on the data plane, where the connection
    /// decides the tenant.
    #[derive(Copy, Hash, PartialOrd, Ord)]
    pub struct PartRef {
        /// The block.
        pub key: BlockKey,
        /// The layout it is stored in.
        pub layout: LayoutFingerprint,
        /// Which part of the block.
        pub part: PartNumber,
    }
}

wire_struct! {
    /// The full name of a part: equal names mean equal bytes, for ever.
    #[derive(Copy, Hash, PartialOrd, Ord)]
    pub struct PartName {
        /// Whose part it is.
        pub tenant: TenantId,
        /// What is stored.
        pub part: PartRef,
    }
}

impl std::fmt::Display for PartRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.key, self.part.0)
    }
}

impl std::fmt::Display for PartName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.part)
    }
}

wire_enum! {
    /// Where a node holds a part.
    pub enum Tier: u8, "tier" {
        /// Device memory of an engine or of the node's pool.
        Gpu = 0 => "gpu",
        /// The node's arena.
        Dram = 1 => "dram",
        /// The node's disks.
        Ssd = 2 => "ssd",
    }
}

/// A set of tiers, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TierSet(u8);

impl TierSet {
    /// No tier.
    pub const EMPTY: Self = Self(0);

    /// The set of one tier.
    pub const fn of(tier: Tier) -> Self {
        Self(1 << tier.code())
    }

    /// The set with `tier` added.
    #[must_use]
    pub const fn with(self, tier: Tier) -> Self {
        Self(self.0 | Self::of(tier).0)
    }

    /// The set with `tier` taken out.
    #[must_use]
    pub const fn without(self, tier: Tier) -> Self {
        Self(self.0 & !Self::of(tier).0)
    }

    /// Everything in either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether `tier` is in the set.
    pub const fn has(self, tier: Tier) -> bool {
        self.0 & Self::of(tier).0 != 0
    }

    /// Whether the set has no tier.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The fastest tier in the set.
    pub fn fastest(self) -> Option<Tier> {
        Tier::ALL.iter().copied().find(|tier| self.has(*tier))
    }

    /// The bits: bit `n` is the tier with code `n`.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The set with these bits; bits without a tier are refused.
    pub fn from_bits(bits: u8) -> Result<Self, DecodeError> {
        match bits >> Tier::ALL.len() {
            0 => Ok(Self(bits)),
            _ => Err(DecodeError::Unknown { what: "tier set", value: u64::from(bits) }),
        }
    }
}

impl Wire for TierSet {
    const MIN_LEN: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Self::from_bits(u8::take(from)?)
    }
}

/// When a group of layers counts as present for a match that ends after `n` blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupRule {
    /// Blocks `0..n` are all needed (full attention).
    EveryBlock,
    /// The last `window_blocks` blocks of `0..n` are needed (sliding window).
    LastWindow {
        /// Blocks that the window covers, rounded up.
        window_blocks: u64,
    },
    /// Block `n - 1` is needed (a recurrent snapshot at its end).
    AtBoundary,
}

impl GroupRule {
    /// The code and argument of the canonical encoding.
    pub fn code(&self) -> (u8, u64) {
        match self {
            Self::EveryBlock => (1, 0),
            Self::LastWindow { window_blocks } => (2, *window_blocks),
            Self::AtBoundary => (3, 0),
        }
    }

    /// The rule of a code.
    pub fn from_code(kind: u64, argument: u64) -> Result<Self, DecodeError> {
        match (kind, argument) {
            (1, 0) => Ok(Self::EveryBlock),
            (2, window_blocks) if window_blocks > 0 => Ok(Self::LastWindow { window_blocks }),
            (3, 0) => Ok(Self::AtBoundary),
            _ => Err(DecodeError::Unknown { what: "group rule", value: kind }),
        }
    }

    /// First block that a match of `n` blocks needs of this group: it needs `first..n`.
    pub fn first_needed(&self, n: usize) -> usize {
        match self {
            Self::EveryBlock => 0,
            Self::LastWindow { window_blocks } => {
                n.saturating_sub(usize::try_from(*window_blocks).unwrap_or(usize::MAX))
            }
            Self::AtBoundary => n.saturating_sub(1),
        }
    }
}

/// The longest match that is valid in every group: the largest `n` such that, for each group, the blocks
/// that its rule needs for `n` are present. `present(group, block)` says whether every part of that group
/// is there. One rule for what is kept and what is asked (F31, F33).
pub fn longest_match(
    rules: &[GroupRule],
    blocks: usize,
    present: impl Fn(usize, usize) -> bool,
) -> usize {
    // For each group, `run[n]` is the number of present blocks that end at n.
    let runs: Vec<Vec<usize>> = (0..rules.len())
        .map(|group| {
            let mut run = vec![0; blocks + 1];
            for block in 0..blocks {
                run[block + 1] = if present(group, block) { run[block] + 1 } else { 0 };
            }
            run
        })
        .collect();
    let valid =
        |n: usize| rules.iter().zip(&runs).all(|(rule, run)| n - run[n] <= rule.first_needed(n));
    (1..=blocks).rev().find(|n| valid(*n)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_deep_recurrent_snapshot_does_not_extend_a_shallow_attention_match() {
        // Attention holds blocks 0-1; the recurrent group has snapshots after blocks 0 and 3 (F31).
        let rules = [GroupRule::EveryBlock, GroupRule::AtBoundary];
        let present = |group: usize, block: usize| match group {
            0 => block <= 1,
            _ => block == 0 || block == 3,
        };
        assert_eq!(longest_match(&rules, 4, present), 1);
    }

    fn rule() -> impl Strategy<Value = GroupRule> {
        prop_oneof![
            Just(GroupRule::EveryBlock),
            (1u64..5).prop_map(|window_blocks| GroupRule::LastWindow { window_blocks }),
            Just(GroupRule::AtBoundary),
        ]
    }

    proptest! {
        #[test]
        fn the_longest_match_is_the_largest_depth_valid_in_every_group(
            rules in prop::collection::vec(rule(), 1..4),
            presence in prop::collection::vec(any::<u8>(), 0..10),
        ) {
            let present = |group: usize, block: usize| presence[block] >> group & 1 == 1;
            let naive = (0..=presence.len())
                .filter(|n| {
                    let needed = |rule: &GroupRule| rule.first_needed(*n)..*n;
                    rules.iter().enumerate().all(|(g, rule)| needed(rule).all(|b| present(g, b)))
                })
                .max();
            prop_assert_eq!(Some(longest_match(&rules, presence.len(), present)), naive);
        }
    }
}
