//! Sweeping: the entries of forgotten locations and retired spaces, in bounded slices.

use super::{Index, entry::Entry, locations::State};
use larder_proto::event::{SHARDS, Shard};

/// What a slice of sweeping did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepProgress {
    /// Entries looked at.
    pub examined: u64,
    /// Entries dropped.
    pub removed: u64,
    /// Whether nothing waits to be swept.
    pub done: bool,
}

/// The bucket that the sweep looks at next. It goes round while anything waits: one round after
/// something died, all of it is gone.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    table: usize,
    bucket: u32,
}

impl Index {
    /// Drops entries of forgotten locations and retired spaces, until about `budget` entries were looked at
    /// or nothing waits. Only one caller at a time gets to work; each bucket is locked for as long as it
    /// takes to copy its entries. 10 million entries take some 0.3 s in all.
    pub fn sweep(&self, budget: u64) -> SweepProgress {
        let mut progress = SweepProgress::default();
        let Some(mut cursor) = self.sweep.try_lock() else { return progress };
        let mut empty_buckets = 0;
        while progress.examined + empty_buckets / 16 < budget {
            // Once a table, not once a bucket: both take locks.
            if cursor.bucket == 0 && !self.anything_to_sweep() {
                progress.done = true;
                return progress;
            }
            let (examined, removed) = self.sweep_bucket(&mut cursor);
            progress.examined += examined;
            progress.removed += removed;
            empty_buckets += u64::from(examined == 0);
        }
        progress.done = !self.anything_to_sweep();
        progress
    }

    /// Frees the numbers of what has no entries left, and says whether anything has some.
    fn anything_to_sweep(&self) -> bool {
        self.locations.free_swept();
        if self.locations.dead().0 > 0 {
            return true;
        }
        if self.spaces.read().retired().next().is_none() {
            return false;
        }
        let mut spaces = self.spaces.write();
        spaces.free_swept();
        spaces.retired().next().is_some()
    }

    /// Entries looked at and dropped in the bucket at the cursor, which moves on.
    fn sweep_bucket(&self, cursor: &mut Cursor) -> (u64, u64) {
        let shard = Shard(u8::try_from(cursor.table % SHARDS).unwrap_or_default());
        let table = self.table(shard);
        let spaces = self.spaces.read();
        let bucket = table.lock_number(&self.pool, cursor.bucket);
        cursor.bucket += 1;
        if cursor.bucket >= table.buckets() {
            *cursor = Cursor { table: (cursor.table + 1) % SHARDS, bucket: 0 };
        }
        let Some(mut bucket) = bucket else { return (0, 0) };
        let dead = |entry: &Entry| {
            self.locations.is(entry.meta.location(), State::Dead)
                || spaces.of_entry(entry.meta.set()).is_some_and(|(_, space)| space.is_retired())
        };
        let examined = bucket.len() as u64;
        let mut removed = 0;
        for entry in bucket.extract(dead) {
            if let Some(mut tally) = self.locations.any_tally(entry.meta.location()) {
                self.take_off(&spaces, &mut tally, shard, entry);
                // Where only the space is gone the node still holds the block, and its digest covers it;
                // unless a snapshot that is under way says otherwise.
                let of_shard = tally.shard(shard);
                if !of_shard.replacing || entry.meta.colour() == of_shard.colour {
                    tally.leave_out_retired(shard);
                }
                removed += 1;
            }
        }
        (examined, removed)
    }
}
