//! Which block goes when there is no room.
//!
//! A [`Policy`] orders the blocks of a tier; the catalog judges each victim it proposes, and evicts in
//! the same step, so a policy never has to know what is in use. A block that has descendants here is
//! parked: the catalog admits it again when the last one goes, so tails go before heads and no hole is
//! made. One that is being read is passed over and goes to the hot end, so that the next rounds do not come
//! by it again. So a round costs O(evicted), whatever is parked or in use at the cold end; only one that
//! finds nothing to evict looks at everything.

mod gdsf;
mod ghost;
mod lru;
mod order;
mod s3fifo;
mod wishes;

pub use gdsf::Gdsf;
pub use lru::Lru;
pub use order::{Order, Proposal};
pub use s3fifo::S3Fifo;
pub use wishes::{KeepLevel, Spare};

use crate::catalog::BlockId;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use wishes::Wishes;

larder_daemon::choices! {
    /// What goes first when a tier is full.
    pub enum PolicyName {
        /// What was used once goes before what was used again; see [`S3Fifo`].
        S3Fifo = "s3fifo",
        /// The least recently used; see [`Lru`].
        Lru = "lru",
        /// The least frequently used for its size, with aging; see [`Gdsf`].
        Gdsf = "gdsf",
    }
}

impl PolicyName {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::S3Fifo, Self::Lru, Self::Gdsf];

    /// A policy without blocks.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::S3Fifo => Box::<S3Fifo>::default(),
            Self::Lru => Box::<Lru>::default(),
            Self::Gdsf => Box::<Gdsf>::default(),
        }
    }
}

/// What the policy knows of a block: its name, size and uses. One value for each life of a block in the
/// catalog, shared by both.
#[derive(Debug)]
pub struct Unit {
    /// Which block.
    pub id: BlockId,
    /// Bytes that its eviction gives back; grows with the parts of a block.
    pub bytes: AtomicU64,
    last_used: AtomicU64,
    /// The same in seconds of the clock: coarse, and good enough to tell what is old.
    used_at: AtomicU32,
    /// Reads, not counting that the block came.
    uses: AtomicU64,
    /// What a policy wants to know again of a block that it let go of because it was parked.
    note: AtomicU64,
    /// What others than its readers say of its future.
    wishes: Wishes,
}

impl Unit {
    /// A block that was just used.
    pub fn new(id: BlockId, bytes: u64, clock: &UseClock) -> Arc<Self> {
        Arc::new(Self {
            id,
            bytes: AtomicU64::new(bytes),
            last_used: AtomicU64::new(clock.tick()),
            used_at: AtomicU32::new(clock.seconds()),
            uses: AtomicU64::new(0),
            note: AtomicU64::new(0),
            wishes: Wishes::default(),
        })
    }

    /// The same block, without bytes in this tier, under another identity: places that the old one has in an order
    /// are stale.
    pub fn again(&self) -> Arc<Self> {
        let copied = |of: &AtomicU64| AtomicU64::new(of.load(Ordering::Relaxed));
        Arc::new(Self {
            id: self.id,
            bytes: AtomicU64::new(0),
            last_used: copied(&self.last_used),
            used_at: AtomicU32::new(self.used_at.load(Ordering::Relaxed)),
            uses: copied(&self.uses),
            note: AtomicU64::new(0),
            wishes: self.wishes.to_keep(),
        })
    }

    /// Notes a use. Lock-free: this is on the path of every read.
    pub fn touch(&self, clock: &UseClock) {
        self.last_used.store(clock.tick(), Ordering::Relaxed);
        self.used_at.store(clock.seconds(), Ordering::Relaxed);
        self.uses.fetch_add(1, Ordering::Relaxed);
    }

    /// When it was last used, in ticks of the clock.
    pub fn last_used(&self) -> u64 {
        self.last_used.load(Ordering::Relaxed)
    }

    /// Whether it was not used for longer than this, by a clock that was just set.
    pub fn unused_for(&self, time: Duration, clock: &UseClock) -> bool {
        // Both are cut to seconds, so a difference that equals the time may be a little less than it.
        let unused = clock.seconds().saturating_sub(self.used_at.load(Ordering::Relaxed));
        u64::from(unused) > time.as_secs()
    }

    /// How often it was used since it came.
    pub fn uses(&self) -> u64 {
        self.uses.load(Ordering::Relaxed)
    }

    fn note(&self) -> u64 {
        self.note.load(Ordering::Relaxed)
    }

    fn set_note(&self, note: u64) {
        self.note.store(note, Ordering::Relaxed);
    }
}

/// Counts uses; the order of time for a policy. Seconds are told from outside, so that no read asks the
/// system for the time.
#[derive(Debug, Default)]
pub struct UseClock {
    ticks: AtomicU64,
    seconds: AtomicU32,
    /// By level: wishes to keep that were given before this second of the clock are void.
    void_before: [AtomicU32; 2],
}

impl UseClock {
    fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::Relaxed)
    }

    /// Since the clock began, this time has passed.
    pub fn set(&self, passed: Duration) {
        let seconds = u32::try_from(passed.as_secs()).unwrap_or(u32::MAX);
        self.seconds.fetch_max(seconds, Ordering::Relaxed);
    }

    fn seconds(&self) -> u32 {
        self.seconds.load(Ordering::Relaxed)
    }

    /// Wishes of this level that were given until now are void.
    fn void(&self, level: KeepLevel) {
        self.void_before[level as usize].store(self.seconds() + 1, Ordering::Relaxed);
    }

    fn is_void(&self, level: KeepLevel, given: u32) -> bool {
        given < self.void_before[level as usize].load(Ordering::Relaxed)
    }

    /// What it shows after this time.
    fn seconds_in(&self, time: Duration) -> u32 {
        let time = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        self.seconds().saturating_add(time)
    }
}

/// What became of a proposed victim.
#[derive(Debug)]
pub enum Verdict {
    /// It was evicted, and with it the last descendant of its parent.
    Evicted(Option<Released>),
    /// Somebody reads or writes it: propose it later.
    InUse,
    /// It has descendants here: it will be admitted again when they are gone.
    Parked,
    /// It is no longer in the catalog.
    Gone,
}

/// A block whose last descendant went: it may go now.
#[derive(Debug)]
pub struct Released {
    /// The block.
    pub unit: Arc<Unit>,
    /// A policy let go of it because it was parked, so it has to be admitted again.
    pub parked: bool,
}

impl Released {
    /// For the policy, which has a place for it unless it was parked.
    fn parked(self) -> Option<Arc<Unit>> {
        self.parked.then_some(self.unit)
    }
}

/// Orders the blocks of a tier for eviction, knowing only when and how often they were used; see [`Order`] for
/// what is known besides.
pub trait Policy: Send {
    /// Takes a block into the order: a new one, or a parked one that has no descendants any more.
    fn admit(&mut self, unit: Arc<Unit>);

    /// Proposes victims to `judge` until `enough` is true or each was proposed; whether it is true.
    fn evict(
        &mut self,
        judge: &mut dyn FnMut(&Unit) -> Verdict,
        enough: &mut dyn FnMut() -> bool,
    ) -> bool;

    /// Blocks in the order, those that are gone from the catalog included.
    fn places(&self) -> usize;

    /// Forgets the blocks that are gone from the catalog.
    fn retain(&mut self, alive: &mut dyn FnMut(&Unit) -> bool);
}

#[cfg(test)]
mod tests;
