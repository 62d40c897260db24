//! What is said of a block's future by others than its readers: engines by hints, masters by advice.
//!
//! A block may be *spare*: it is not likely to be missed, and goes before all others. A use says otherwise, so it
//! ends that by itself. Or it is to be *kept* for a time. Both are wishes: what is in use or has descendants
//! never goes, and what is kept goes all the same when nothing else is left.

use super::{Unit, UseClock};
use std::{
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

/// How much a wish to keep a block counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeepLevel {
    /// Given up first.
    Normal,
    /// Given up when there is no other.
    High,
}

impl KeepLevel {
    /// In the order in which they are given up.
    pub(super) const ALL: [Self; 2] = [Self::Normal, Self::High];
}

/// Why a block is not likely to be missed. While one reason holds, no lesser one (further up) takes its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Spare {
    /// Another node keeps it; until a master no longer says so, or this time is over.
    Kept(Duration),
    /// No match can reach it, or use it; until this time is over.
    Lost(Duration),
    /// Its session is over, or of little worth.
    Over,
}

/// In a [`Unit`]. Lock-free: eviction reads it for every block that it comes by.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    /// One more than the last use at which the block was called spare; zero for never.
    spare_since: AtomicU64,
    /// In seconds of the clock: what was said is too old from then on.
    spare_until: AtomicU32,
    /// The rank of the [`Spare`] that was said.
    spare_rank: AtomicU8,
    /// It stands in the queue of spare blocks.
    queued: AtomicBool,
    /// A [`Keep`]; zero for none.
    keep: AtomicU64,
}

/// To be kept, from and until these seconds of the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keep {
    pub(super) level: KeepLevel,
    pub(super) given: u32,
    pub(super) until: u32,
}

/// The top bit of `until`, which clocks do not reach in 68 years.
const HIGH: u32 = 1 << 31;

impl Keep {
    fn pack(self) -> u64 {
        let level = if self.level == KeepLevel::High { HIGH } else { 0 };
        u64::from(self.given) << 32 | u64::from(self.until & !HIGH | level)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the halves of 64 bits")]
    fn unpack(packed: u64) -> Option<Self> {
        let until = packed as u32;
        let level = if until & HIGH == 0 { KeepLevel::Normal } else { KeepLevel::High };
        (packed != 0).then_some(Self { level, given: (packed >> 32) as u32, until: until & !HIGH })
    }
}

impl Spare {
    const KEPT: u8 = 0;

    fn rank(self) -> u8 {
        match self {
            Self::Kept(_) => Self::KEPT,
            Self::Lost(_) => 1,
            Self::Over => 2,
        }
    }
}

impl Wishes {
    /// Those that go with a block that leaves a tier.
    pub(super) fn to_keep(&self) -> Self {
        let keep = AtomicU64::new(self.keep.load(Ordering::Relaxed));
        Self { keep, ..Self::default() }
    }
}

impl Unit {
    /// Nobody is likely to ask for it again. That ends with its next use.
    pub fn call_spare(&self, why: Spare, clock: &UseClock) {
        if self.is_spare(clock) && self.wishes.spare_rank.load(Ordering::Relaxed) > why.rank() {
            return;
        }
        let until = match why {
            Spare::Kept(time) | Spare::Lost(time) => clock.seconds_in(time),
            Spare::Over => u32::MAX,
        };
        self.wishes.keep.store(0, Ordering::Relaxed);
        self.wishes.spare_rank.store(why.rank(), Ordering::Relaxed);
        self.wishes.spare_until.store(until, Ordering::Relaxed);
        self.wishes.spare_since.store(self.last_used() + 1, Ordering::Relaxed);
    }

    /// Whether it was called spare and that still holds.
    pub fn is_spare(&self, clock: &UseClock) -> bool {
        self.wishes.spare_since.load(Ordering::Relaxed) == self.last_used() + 1
            && self.wishes.spare_until.load(Ordering::Relaxed) > clock.seconds()
    }

    /// It is spare no more.
    pub(super) fn unspare(&self) {
        self.wishes.spare_since.store(0, Ordering::Relaxed);
    }

    /// Nobody says any more that another node keeps it.
    pub fn not_kept_elsewhere(&self) {
        if self.wishes.spare_rank.load(Ordering::Relaxed) == Spare::KEPT {
            self.unspare();
        }
    }

    /// Notes whether it stands in the queue of spare blocks; whether it did before.
    pub(super) fn queue(&self, stands: bool) -> bool {
        self.wishes.queued.swap(stands, Ordering::Relaxed)
    }

    /// It is likely to be asked for again. A longer or weightier wish that was there stays.
    pub fn keep(&self, time: Duration, level: KeepLevel, clock: &UseClock) {
        self.unspare();
        let given = clock.seconds();
        let wish = Keep { level, given, until: clock.seconds_in(time).min(HIGH - 1) };
        if time.is_zero()
            || self.kept(clock).is_some_and(|k| (k.level, k.until) >= (level, wish.until))
        {
            return;
        }
        self.wishes.keep.store(wish.pack(), Ordering::Relaxed);
    }

    /// Whether it is to be kept, as far as wishes go.
    pub fn is_kept(&self, clock: &UseClock) -> bool {
        self.kept(clock).is_some()
    }

    /// The wish to keep it, if its time is not over and it was not given up.
    pub(super) fn kept(&self, clock: &UseClock) -> Option<Keep> {
        let keep = Keep::unpack(self.wishes.keep.load(Ordering::Relaxed))?;
        (keep.until > clock.seconds() && !clock.is_void(keep.level, keep.given)).then_some(keep)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_wish_is_unpacked_as_it_was_packed(given in 0u32.., until in 1..HIGH, high: bool) {
            let level = if high { KeepLevel::High } else { KeepLevel::Normal };
            let keep = Keep { level, given, until };
            prop_assert_eq!(Keep::unpack(keep.pack()), Some(keep));
        }
    }
}
