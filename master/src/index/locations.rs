//! Locations: who is shown, and what the index keeps of each.
//!
//! ```text
//! free -> shown <-> hidden        shown, hidden -> dead -> free
//! ```
//! All steps are O(1). A dead location is never shown; its number is used again only when its last entry is
//! swept, so an entry of an earlier life never answers for a later one.
//!
//! The tally of a location keeps one digest, one count and one colour a shard. A replacement of a shard flips
//! its colour; what the snapshot confirms takes the new colour, and what keeps the old one is stale
//! at its end. So a snapshot in any number of pieces needs no memory of what came before.

use larder_proto::{
    Location,
    event::{SHARDS, Shard},
};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::BTreeSet,
    sync::{
        OnceLock,
        atomic::{
            AtomicU8, AtomicU64,
            Ordering::{Relaxed, Release},
        },
    },
};

/// What a location is to those who ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    Free = 0,
    Shown = 1,
    Hidden = 2,
    Dead = 3,
}

/// What the index knows of one shard of one location.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ShardTally {
    /// XOR of the digests of its entries.
    digest: u64,
    entries: u32,
    /// Entries of the current colour, while a replacement is under way.
    confirmed: u32,
    /// Entries that were left out since the last replacement began.
    left_out: u32,
    pub(super) colour: bool,
    pub(super) replacing: bool,
    /// Something of a retired space was not recorded since then.
    retired: bool,
}

impl ShardTally {
    /// An entry of the current colour was added.
    pub(super) fn add(&mut self, digest: u64) {
        self.digest ^= digest;
        self.entries += 1;
        self.confirmed += u32::from(self.replacing);
    }

    /// An entry took another digest, and the current colour if it had not.
    pub(super) fn change(&mut self, old: u64, new: u64, had_colour: bool) {
        self.digest ^= old ^ new;
        self.confirmed += u32::from(self.replacing && had_colour != self.colour);
    }

    /// An entry was removed.
    pub(super) fn remove(&mut self, digest: u64, had_colour: bool) {
        self.digest ^= digest;
        self.entries -= 1;
        self.confirmed -= u32::from(self.replacing && had_colour == self.colour);
    }

    /// The digest, if all that the location said of the shard is held.
    fn comparable(&self) -> Option<u64> {
        (self.left_out == 0 && !self.retired).then_some(self.digest)
    }
}

/// What the index knows of one location.
#[derive(Debug)]
pub(super) struct Tally {
    state: State,
    entries: u64,
    left_out: u64,
    shards: [ShardTally; SHARDS],
}

impl Tally {
    fn new() -> Self {
        Self {
            state: State::Free,
            entries: 0,
            left_out: 0,
            shards: [ShardTally::default(); SHARDS],
        }
    }

    pub(super) fn shard(&mut self, shard: Shard) -> &mut ShardTally {
        &mut self.shards[usize::from(shard.0)]
    }

    pub(super) fn add(&mut self, shard: Shard, digest: u64) {
        self.entries += 1;
        self.shard(shard).add(digest);
    }

    pub(super) fn remove(&mut self, shard: Shard, digest: u64, had_colour: bool) {
        self.entries -= 1;
        self.shard(shard).remove(digest, had_colour);
    }

    /// Something of a retired space is not recorded: the digest of the shard covers less than the node's.
    /// The index is no less complete for it.
    pub(super) fn leave_out_retired(&mut self, shard: Shard) {
        self.shard(shard).retired = true;
    }
}

/// What an index says of a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocationStats {
    /// Which.
    pub location: Location,
    /// Whether answers may name it.
    pub shown: bool,
    /// Entries held.
    pub entries: u64,
    /// Entries that were left out, each since the last snapshot of its shard began.
    pub left_out: u64,
}

/// All locations of an index.
#[derive(Debug)]
pub(super) struct Locations {
    /// The states once more, where a lookup finds them without a lock.
    states: Box<[AtomicU8]>,
    tallies: Box<[OnceLock<Box<Mutex<Tally>>>]>,
    numbers: Mutex<Numbers>,
    /// Sum over locations that are not dead.
    left_out: AtomicU64,
    left_out_ever: AtomicU64,
}

#[derive(Debug, Default)]
struct Numbers {
    fresh: u32,
    free: BTreeSet<u32>,
    dead: BTreeSet<u32>,
}

impl Locations {
    pub(super) fn new(limit: u32) -> Self {
        Self {
            states: (0..limit).map(|_| AtomicU8::new(State::Free as u8)).collect(),
            tallies: (0..limit).map(|_| OnceLock::new()).collect(),
            numbers: Mutex::default(),
            left_out: AtomicU64::new(0),
            left_out_ever: AtomicU64::new(0),
        }
    }

    /// A number for a new location, shown and without entries. `None` at the limit.
    pub(super) fn begin(&self) -> Option<Location> {
        let mut numbers = self.numbers.lock();
        let number = match numbers.free.pop_first() {
            Some(number) => number,
            None if (numbers.fresh as usize) < self.tallies.len() => {
                numbers.fresh += 1;
                numbers.fresh - 1
            }
            None => return None,
        };
        let cell = self.tallies.get(number as usize)?;
        let mut tally = cell.get_or_init(|| Box::new(Mutex::new(Tally::new()))).lock();
        *tally = Tally::new();
        self.set_state(number, &mut tally, State::Shown);
        Some(Location(number))
    }

    /// Release: a reader that sees a number shown again also sees that its old entries are gone.
    fn set_state(&self, number: u32, tally: &mut Tally, state: State) {
        tally.state = state;
        self.states[number as usize].store(state as u8, Release);
    }

    /// Whether a lookup may see it in this state. Relaxed: the reader of a bucket fences before it trusts
    /// what it saw.
    #[inline]
    pub(super) fn is(&self, location: Location, state: State) -> bool {
        let known = self.states.get(location.0 as usize);
        known.is_some_and(|known| known.load(Relaxed) == state as u8)
    }

    /// The tally of a location whatever its state, for its entries to be taken off.
    pub(super) fn any_tally(&self, location: Location) -> Option<MutexGuard<'_, Tally>> {
        Some(self.tallies.get(location.0 as usize)?.get()?.lock())
    }

    /// The tally of a location that is neither free nor dead.
    pub(super) fn tally(&self, location: Location) -> Option<MutexGuard<'_, Tally>> {
        let live =
            |tally: &MutexGuard<'_, Tally>| matches!(tally.state, State::Shown | State::Hidden);
        self.any_tally(location).filter(live)
    }

    /// Shows or hides it. False when it is free or dead.
    pub(super) fn show(&self, location: Location, shown: bool) -> bool {
        let Some(mut tally) = self.tally(location) else { return false };
        self.set_state(location.0, &mut tally, if shown { State::Shown } else { State::Hidden });
        true
    }

    /// Ends it. False when it is free or dead already.
    pub(super) fn forget(&self, location: Location) -> bool {
        let mut numbers = self.numbers.lock();
        let Some(mut tally) = self.tally(location) else { return false };
        self.left_out.fetch_sub(tally.left_out, Relaxed);
        self.set_state(location.0, &mut tally, State::Dead);
        numbers.dead.insert(location.0);
        true
    }

    /// Dead locations that still have a number, and the entries they still have.
    pub(super) fn dead(&self) -> (usize, u64) {
        let dead = self.numbers.lock().dead.clone();
        let tallies = dead.iter().filter_map(|number| self.any_tally(Location(*number)));
        (dead.len(), tallies.map(|tally| tally.entries).sum())
    }

    /// Frees the numbers of dead locations without entries. Entries come only to those that are not dead
    /// and are counted under the same lock, so none can come after.
    pub(super) fn free_swept(&self) {
        let mut numbers = self.numbers.lock();
        for number in numbers.dead.clone() {
            if let Some(mut tally) = self.any_tally(Location(number))
                && tally.entries == 0
            {
                self.set_state(number, &mut tally, State::Free);
                numbers.dead.remove(&number);
                numbers.free.insert(number);
            }
        }
    }

    /// Counts an entry of the shard that was left out.
    pub(super) fn leave_out(&self, tally: &mut Tally, shard: Shard) {
        tally.left_out += 1;
        let shard = tally.shard(shard);
        shard.left_out = shard.left_out.saturating_add(1);
        self.left_out.fetch_add(1, Relaxed);
        self.left_out_ever.fetch_add(1, Relaxed);
    }

    /// Begins a replacement of the shard: what is confirmed from here on takes the other colour.
    pub(super) fn begin_replace(&self, tally: &mut Tally, shard: Shard) {
        let of_shard = tally.shard(shard);
        let left_out = u64::from(std::mem::take(&mut of_shard.left_out));
        of_shard.colour = !of_shard.colour;
        of_shard.confirmed = 0;
        of_shard.replacing = true;
        of_shard.retired = false;
        tally.left_out -= left_out;
        self.left_out.fetch_sub(left_out, Relaxed);
    }

    /// Ends it, and says whether entries of the other colour are left.
    pub(super) fn end_replace(&self, tally: &mut Tally, shard: Shard) -> bool {
        let shard = tally.shard(shard);
        shard.replacing = false;
        shard.confirmed < shard.entries
    }

    /// Shards with entries left out at a limit.
    pub(super) fn left_out_shards(&self, location: Location) -> Vec<Shard> {
        let Some(tally) = self.tally(location) else { return Vec::new() };
        let shards = (0..=u8::MAX).map(Shard).zip(&tally.shards);
        shards.filter(|(_, tally)| tally.left_out > 0).map(|(shard, _)| shard).collect()
    }

    /// The digest of every shard; `None` where something was not recorded.
    pub(super) fn digests(&self, location: Location) -> Option<Vec<Option<u64>>> {
        Some(self.tally(location)?.shards.iter().map(ShardTally::comparable).collect())
    }

    /// What is known of a location that is neither free nor dead.
    pub(super) fn stats(&self, location: Location) -> Option<LocationStats> {
        let tally = self.tally(location)?;
        let shown = tally.state == State::Shown;
        Some(LocationStats { location, shown, entries: tally.entries, left_out: tally.left_out })
    }

    /// Numbers ever given: all locations are below.
    pub(super) fn numbers(&self) -> u32 {
        self.numbers.lock().fresh
    }

    /// Entries left out now, and ever.
    pub(super) fn left_out(&self) -> (u64, u64) {
        (self.left_out.load(Relaxed), self.left_out_ever.load(Relaxed))
    }

    /// Bytes taken from the allocator, without the three small sets of numbers.
    pub(super) fn bytes(&self) -> u64 {
        let tallies = self.tallies.iter().filter(|tally| tally.get().is_some()).count();
        let fixed = size_of_val::<[_]>(&self.states) + size_of_val::<[_]>(&self.tallies);
        (fixed + tallies * size_of::<Mutex<Tally>>()) as u64
    }
}
