//! The index: who holds what, as a soft copy of all catalogs. Pure: no IO, no clock, no tasks.
//!
//! An entry is 24 bytes: a key prefix, a part set, a location and tiers. Everything else stays with the
//! nodes. The index may be wrong (it lags, it may be full, a prefix is not a key): an answer is a hint, and
//! the node has the last word.
//!
//! Promises:
//! - Lookups take no lock of an entry and write nothing; they read the rules of their space under a lock that
//!   nobody holds for long. Growth, sweeps, snapshots and storms of events go bucket by bucket (about
//!   256 entries), and a reader that meets one of them looks again.
//! - A location that was hidden or forgotten before a lookup began is not in its answer.
//! - Memory follows the most entries ever held at once, at 36 to 40 bytes each from a million on, and so
//!   the limit of entries bounds it (F18): at the limit entries are left out and counted, nothing held is
//!   dropped, and answers say that they are [`Match::limited`].
//! - The digest of a (location, shard) is that of the node's own change log when both hold the same; where
//!   entries were left out it is known not to be comparable.
//!
//! Calls that change what *one* location holds come from one task at a time, its session. Everything else
//! may be called from anywhere at any time.
//!
//! Layers, lowest first: `entry` (24 bytes, mixed keys), `page` (memory), `bucket` (sorted slots, readers
//! without locks), `writer` (changes of a bucket), `table` (an inventory shard, grown by splitting
//! buckets); beside them `locations`, `spaces`, `removals`. `record`, `lookup`, `advice`, `sweep`, `explain`
//! and `stats` are what others call. Locks are taken in this order: `spaces`, bucket, tally of a location.
//!
//! Not here: sequence numbers, sessions and node identities (`session`), coverage of an answer.

mod advice;
mod bucket;
mod entry;
mod explain;
mod locations;
mod lookup;
mod page;
mod record;
mod removals;
mod spaces;
mod stats;
mod sweep;
mod table;
#[cfg(test)]
mod tests;
mod writer;

pub(crate) use entry::finalise;
pub use locations::LocationStats;
pub use lookup::{HOLDER_LIMIT, Holder, Located, Match, Run, SOURCE_LIMIT, Source, WARM_LIMIT};
pub use record::Upsert;
pub use spaces::{IndexSetId, SpaceId};
pub use stats::{IndexStats, SpaceStats};
pub use sweep::SweepProgress;

use larder_proto::{
    BlockKey, Location, ModelVersion,
    event::{PartSet, SHARDS, Shard},
    fingerprint::LayoutDescription,
    ids::TenantId,
};
use locations::Locations;
use page::Pool;
use parking_lot::{Mutex, RwLock};
use removals::Removals;
use spaces::{Rules, Spaces};
use std::{
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};
use table::Table;

/// What an index may grow to. At each limit the answer is stated where it is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLimits {
    /// Entries, at most 2^30: one for each block and location that holds it. Some 37 bytes each.
    pub entries: u64,
    /// Spaces (tenant and model version).
    pub spaces: u32,
    /// Distinct part sets over all spaces.
    pub part_sets: u32,
    /// Locations, with those that are still being swept. Some 6 KiB each once used.
    pub locations: u32,
    /// Removals that are remembered for `explain`, 8 bytes each once used.
    pub removals: u32,
}

impl Default for IndexLimits {
    fn default() -> Self {
        Self {
            entries: 20_000_000,
            spaces: 4_096,
            part_sets: 65_536,
            locations: 4_096,
            removals: 256 * 1024,
        }
    }
}

/// Who holds what. See the module for its promises.
#[derive(Debug)]
pub struct Index {
    limits: IndexLimits,
    pool: Pool,
    /// One for each inventory shard.
    tables: Box<[Table]>,
    spaces: RwLock<Spaces>,
    locations: Locations,
    removals: Removals,
    /// Entries held, with those that wait to be swept.
    entries: AtomicU64,
    sweep: Mutex<sweep::Cursor>,
}

impl Index {
    /// An empty index with secrets of its own.
    pub fn new(limits: IndexLimits) -> Self {
        Self::with_seed(limits, RandomState::new().hash_one("larder index"))
    }

    /// An empty index whose placement is decided by `seed`: for simulations. No answer depends on it.
    pub fn with_seed(limits: IndexLimits, seed: u64) -> Self {
        let entries = limits.entries.min(1 << 30);
        Self {
            limits: IndexLimits { entries, ..limits },
            // 64 bytes an entry, twice what tables need on average, and some pages for each of 256 nearly
            // empty tables: the limit of entries is met first.
            pool: Pool::new(entries / 32 + 8 * SHARDS as u64),
            tables: (0..SHARDS).map(|_| Table::new()).collect(),
            spaces: RwLock::new(Spaces::new(limits.spaces, limits.part_sets, seed)),
            locations: Locations::new(limits.locations),
            removals: Removals::new(limits.removals as usize),
            entries: AtomicU64::new(0),
            sweep: Mutex::default(),
        }
    }

    fn table(&self, shard: Shard) -> &Table {
        &self.tables[usize::from(shard.0)]
    }

    // ---- spaces ----------------------------------------------------------------------------------

    /// The space of a tenant's blocks of a model version, made if need be. `None` at the limit: what
    /// would go there is [left out](Self::leave_out). A question uses [`Self::find_space`].
    pub fn space(&self, tenant: &TenantId, model: &ModelVersion) -> Option<SpaceId> {
        let found = self.find_space(tenant, model);
        found.or_else(|| self.spaces.write().space(tenant, model))
    }

    /// The space of this name, if there is one: nothing is made for a question.
    pub fn find_space(&self, tenant: &TenantId, model: &ModelVersion) -> Option<SpaceId> {
        self.spaces.read().find(tenant, model)
    }

    /// Tells the index how blocks of a space match. Until then a space counts as one group that needs every
    /// block, where rank `r` holds part `r`: right for every layout with one group. False when the
    /// space is gone.
    pub fn set_rules(&self, space: SpaceId, layout: &LayoutDescription) -> bool {
        self.spaces.write().set_rules(space, Rules::of(layout))
    }

    /// The number of a set of parts in a space, for [`Self::upsert`]. `None` when the space is gone, and
    /// at the limit of part sets: what would use it is [left out](Self::leave_out).
    pub fn intern_set(&self, space: SpaceId, parts: &PartSet) -> Option<IndexSetId> {
        self.spaces.write().intern(space, parts)
    }

    /// Takes a space out of all answers at once (a weight epoch was bumped); its entries are swept later.
    /// Its ids and those of its sets are dead: what is recorded under them is left out. Asking
    /// [`Self::space`] for the same name begins a new space. Shards of the nodes that hold some of it are not
    /// comparable until they have dropped it and sent a snapshot. False when it was gone already.
    pub fn retire_space(&self, space: SpaceId) -> bool {
        let mut spaces = self.spaces.write();
        let retired = spaces.retire(space);
        spaces.free_swept(); // One that is empty needs no sweep.
        retired
    }

    // ---- locations -------------------------------------------------------------------------------

    /// A new location, shown and without entries. `None` at the limit.
    pub fn begin_location(&self) -> Option<Location> {
        self.locations.begin()
    }

    /// Leaves a location out of answers at once; its entries stay. False when it was forgotten.
    pub fn hide(&self, location: Location) -> bool {
        self.locations.show(location, false)
    }

    /// Takes a hidden location into answers again. False when it was forgotten.
    pub fn show(&self, location: Location) -> bool {
        self.locations.show(location, true)
    }

    /// Ends a location: it is out of answers at once, nothing more is recorded for it, its entries are
    /// swept later, and only then its number may be given again. False when it was forgotten already.
    pub fn forget(&self, location: Location) -> bool {
        let forgotten = self.locations.forget(location);
        self.locations.free_swept(); // One that is empty needs no sweep.
        forgotten
    }

    // ---- digests ---------------------------------------------------------------------------------

    /// The digest of every shard of a location, as `proto::event` defines it; `None` for a shard of which
    /// something is not recorded, at a limit or because its space was retired, until a snapshot of which
    /// everything is. Empty when the location was forgotten.
    pub fn digests(&self, location: Location) -> Vec<Option<u64>> {
        self.locations.digests(location).unwrap_or_default()
    }

    /// The shards whose digest is comparable and differs from the node's.
    pub fn differing(&self, location: Location, theirs: &[u64; SHARDS]) -> Vec<Shard> {
        let ours = self.digests(location);
        let differs =
            |(ours, theirs): (&Option<u64>, &u64)| ours.is_some_and(|ours| ours != *theirs);
        let pairs = (0..=u8::MAX).zip(ours.iter().zip(theirs));
        pairs.filter(|(_, pair)| differs(*pair)).map(|(shard, _)| Shard(shard)).collect()
    }

    /// The shards of a location that miss entries because they were left out at a limit. A snapshot of
    /// them is worth asking for when there is [room](Self::room) again.
    pub fn left_out_shards(&self, location: Location) -> Vec<Shard> {
        self.locations.left_out_shards(location)
    }

    /// Entries that the limit still allows.
    pub fn room(&self) -> u64 {
        self.limits.entries.saturating_sub(self.entries.load(Relaxed))
    }

    /// Why a block was removed, if that was lately and is still remembered. Of several locations the last
    /// removal counts.
    pub fn recall(
        &self,
        space: SpaceId,
        key: &BlockKey,
    ) -> Option<larder_proto::event::RecordKind> {
        let mixer = self.spaces.read().row(space)?.mixer;
        self.removals.recall(mixer.mix(key))
    }
}
