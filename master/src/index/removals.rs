//! A bounded memory of recent removals, for people who ask why a block is not there.
//!
//! Fixed size: sets of eight words, newest first, where the oldest makes room. A word is 61 bits of the mixed
//! key and three of the reason. It decides nothing, so a wrong answer in 2^58 does no harm, and neither
//! does one that two writers of the same set lose between them.

use super::entry::MixedKey;
use larder_proto::event::RecordKind;
use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

const WAYS: usize = 8;
/// Parts in which memory is taken from the allocator, when a part is first used.
const PARTS: usize = 16;
const REASON: u64 = 0b111;

#[derive(Debug)]
pub(super) struct Removals {
    sets_a_part: usize,
    parts: [OnceLock<Box<[[AtomicU64; WAYS]]>>; PARTS],
}

impl Removals {
    /// Room for `entries`, rounded up to 128.
    pub(super) fn new(entries: usize) -> Self {
        let sets_a_part = entries.div_ceil(WAYS * PARTS);
        Self { sets_a_part, parts: [const { OnceLock::new() }; PARTS] }
    }

    /// Part and set of a key.
    fn place(&self, key: MixedKey) -> (usize, usize) {
        let part = (key.rest & 0xffff_ffff) as usize % PARTS;
        let set = ((key.rest >> 32).wrapping_mul(self.sets_a_part as u64) >> 32) as usize;
        (part, set)
    }

    /// Remembers why a block was removed.
    pub(super) fn remember(&self, key: MixedKey, kind: RecordKind) {
        let (part, set) = self.place(key);
        let empty = || (0..self.sets_a_part).map(|_| Default::default()).collect();
        let Some(set) = self.parts[part].get_or_init(empty).get(set) else { return };
        let word = key.order & !REASON | u64::from(kind.code());
        let known = set.iter().position(|old| old.load(Relaxed) & !REASON == word & !REASON);
        for at in (1..=known.unwrap_or(WAYS - 1)).rev() {
            set[at].store(set[at - 1].load(Relaxed), Relaxed);
        }
        set[0].store(word, Relaxed);
    }

    /// Why a block was removed, if it was lately.
    pub(super) fn recall(&self, key: MixedKey) -> Option<RecordKind> {
        let (part, set) = self.place(key);
        let words = self.parts[part].get()?.get(set)?.iter().map(|word| word.load(Relaxed));
        let mut known = words.filter(|word| word & !REASON == key.order & !REASON);
        RecordKind::from_code((known.next()? & REASON) as u8)
    }

    /// Bytes taken from the allocator.
    pub(super) fn bytes(&self) -> u64 {
        let parts = self.parts.iter().filter_map(OnceLock::get);
        parts.map(|part| size_of_val::<[_]>(part) as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::entry::finalise;

    fn key(n: u64) -> MixedKey {
        MixedKey { order: finalise(n), rest: finalise(!n) }
    }

    #[test]
    fn the_latest_reason_is_recalled_and_old_ones_make_room() {
        let removals = Removals::new(4_096);
        assert_eq!(removals.recall(key(0)), None);
        for n in 0..100_000 {
            removals.remember(key(n), RecordKind::Evicted);
            removals.remember(key(n), RecordKind::Damaged);
            assert_eq!(removals.recall(key(n)), Some(RecordKind::Damaged));
        }
        let recalled = (0..100_000).filter(|n| removals.recall(key(*n)).is_some());
        assert_eq!(recalled.clone().count(), 4_096);
        assert!(recalled.filter(|n| *n >= 90_000).count() > 4_000, "the newest are kept");
        assert_eq!(removals.bytes(), 4_096 * 8);
    }
}
