//! One entry: 16 bytes of key, and who holds which parts of it in which tiers. 24 bytes in all.
//!
//! Keys are mixed with secrets of the index before they choose a place. Block keys are BLAKE3 output, but
//! nobody can check that: a tenant may publish any 32 bytes it likes, and could pile keys onto one place.
//! Without the secrets it cannot tell which keys meet. Mixing also takes the space in, so that the same
//! key in two spaces is two entries. It is a bijection, so a prefix comes back for digests.

use larder_proto::{BlockKey, Location, TierSet};

/// Part sets that an [`Meta`] can name.
pub(super) const SET_LIMIT: u32 = 1 << 28;

/// The 16-byte prefix of a block key, mixed. Tables are sorted by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MixedKey {
    /// Chooses the place: low bits the bucket, high bits the slot.
    pub(super) order: u64,
    /// The other half.
    pub(super) rest: u64,
}

/// The secrets of one space.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mixer {
    inner: u64,
    outer: u64,
}

impl Mixer {
    /// Secrets that differ for every `space`, from the index's own `seed`.
    pub(super) fn new(seed: u64, space: u64) -> Self {
        let inner = finalise(seed ^ finalise(space));
        Self { inner, outer: finalise(inner ^ seed.rotate_left(32)) }
    }

    /// Two rounds of a Feistel network over the halves of the prefix: each half ends up depending on both
    /// and on a secret.
    #[inline]
    pub(super) fn mix(&self, key: &BlockKey) -> MixedKey {
        let [head, tail] = halves(key);
        let rest = tail ^ finalise(head ^ self.inner);
        MixedKey { order: head ^ finalise(rest ^ self.outer), rest }
    }

    /// A key with the prefix that was mixed; its other 16 bytes are zero.
    pub(super) fn unmix(&self, key: MixedKey) -> BlockKey {
        let head = key.order ^ finalise(key.rest ^ self.outer);
        let tail = key.rest ^ finalise(head ^ self.inner);
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&head.to_le_bytes());
        bytes[8..16].copy_from_slice(&tail.to_le_bytes());
        BlockKey::from_bytes(bytes)
    }
}

fn halves(key: &BlockKey) -> [u64; 2] {
    let half = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&key.as_bytes()[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    [half(0), half(8)]
}

/// Finaliser of SplitMix64 (Steele, Lea, Flood 2014).
#[inline]
pub(crate) fn finalise(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Location, part set, colour and tiers in one word. Zero is an empty slot, since an entry has a tier.
///
/// `location: 32 | set: 28 | colour: 1 | tiers: 3`, so that order by word is order by location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Meta(pub(super) u64);

impl Meta {
    const COLOUR: u64 = 1 << 3;

    /// `set` is below [`SET_LIMIT`] and `tiers` is not empty.
    pub(super) fn new(location: Location, set: u32, tiers: TierSet, colour: bool) -> Self {
        debug_assert!(set < SET_LIMIT && !tiers.is_empty());
        let colour = if colour { Self::COLOUR } else { 0 };
        let set = u64::from(set) << 4;
        Self(u64::from(location.0) << 32 | set | colour | u64::from(tiers.bits()))
    }

    #[inline]
    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[inline]
    pub(super) fn location(self) -> Location {
        Location((self.0 >> 32) as u32)
    }

    #[inline]
    pub(super) fn set(self) -> u32 {
        ((self.0 >> 4) & 0x0fff_ffff) as u32
    }

    #[inline]
    pub(super) fn tiers(self) -> TierSet {
        TierSet::from_bits((self.0 & 0b111) as u8).unwrap_or_default()
    }

    /// Which of two replacements of its shard confirmed the entry, see `locations`.
    pub(super) fn colour(self) -> bool {
        self.0 & Self::COLOUR != 0
    }

    pub(super) fn with_colour(self, colour: bool) -> Self {
        Self(self.0 & !Self::COLOUR | if colour { Self::COLOUR } else { 0 })
    }
}

/// A key and what one location holds of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: MixedKey,
    pub(super) meta: Meta,
}

impl Entry {
    /// Tables are sorted by this: entries of one key lie together, by location.
    pub(super) fn rank(&self) -> (MixedKey, Location) {
        (self.key, self.meta.location())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn mixing_loses_no_bit_of_the_prefix(seed: u64, space: u64, key: [u8; 32]) {
            let mixer = Mixer::new(seed, space);
            let back = mixer.unmix(mixer.mix(&BlockKey::from_bytes(key)));
            prop_assert_eq!(&back.as_bytes()[..16], &key[..16]);
        }

        #[test]
        fn an_entry_gives_back_what_was_packed(location: u32, set in 0..SET_LIMIT, tiers in 1u8..8, colour: bool) {
            let tiers = TierSet::from_bits(tiers).unwrap();
            let meta = Meta::new(Location(location), set, tiers, colour);
            prop_assert!(!meta.is_empty());
            prop_assert_eq!((meta.location(), meta.set(), meta.tiers(), meta.colour()), (Location(location), set, tiers, colour));
            prop_assert_eq!(meta.with_colour(!colour).with_colour(colour), meta);
        }
    }

    #[test]
    fn keys_chosen_to_meet_are_spread() {
        // All bits equal but the low ones of the second half.
        let mixer = Mixer::new(7, 1);
        let mut buckets = std::collections::BTreeMap::new();
        for n in 0u64..65_536 {
            let mut bytes = [0x11; 32];
            bytes[8..16].copy_from_slice(&n.to_le_bytes());
            *buckets.entry(mixer.mix(&BlockKey::from_bytes(bytes)).order % 512).or_insert(0u32) +=
                1;
        }
        assert_eq!(buckets.len(), 512);
        assert!(buckets.values().all(|n| (64..=192).contains(n)), "{buckets:?}");
    }
}
