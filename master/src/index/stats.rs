//! What the index says of itself.

use super::{Index, LocationStats, SpaceId};
use larder_proto::{Location, ModelVersion, ids::TenantId};
use std::sync::atomic::Ordering::Relaxed;

/// Figures of an index.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IndexStats {
    /// Entries held, with those that wait to be swept.
    pub entries: u64,
    /// The most entries.
    pub entries_limit: u64,
    /// Bytes taken from the allocator.
    pub bytes: u64,
    /// Of those, bytes of entries' pages that wait to be used again.
    pub bytes_spare: u64,
    /// Entries that live locations said and that are not held: the index is partial while this is not zero.
    pub left_out: u64,
    /// Entries ever left out.
    pub left_out_total: u64,
    /// Entries that wait to be swept; one of a forgotten location in a retired space counts twice.
    pub to_sweep: u64,
    /// Live spaces.
    pub spaces: u64,
    /// Part sets in use.
    pub part_sets: u64,
    /// Buckets, of 256 entries on average.
    pub buckets: u64,
}

impl IndexStats {
    /// Bytes an entry, all in. Zero without entries.
    pub fn bytes_per_entry(&self) -> f64 {
        if self.entries == 0 { 0.0 } else { self.bytes as f64 / self.entries as f64 }
    }
}

/// What an index says of a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceStats {
    /// Its number.
    pub space: SpaceId,
    /// Whose blocks.
    pub tenant: TenantId,
    /// Of which model version.
    pub model: ModelVersion,
    /// Entries held.
    pub entries: u64,
    /// Whether its layout was described.
    pub described: bool,
}

impl Index {
    /// Figures of the whole index.
    pub fn stats(&self) -> IndexStats {
        let (left_out, left_out_total) = self.locations.left_out();
        let spaces = self.spaces.read();
        let retired: u64 = spaces.retired().map(|(_, row)| row.entries.load(Relaxed)).sum();
        IndexStats {
            entries: self.entries.load(Relaxed),
            entries_limit: self.limits.entries,
            bytes: self.fixed_bytes() + spaces.bytes(),
            bytes_spare: self.pool.spare_bytes(),
            left_out,
            left_out_total,
            to_sweep: self.locations.dead().1 + retired,
            spaces: spaces.live().count() as u64,
            part_sets: spaces.set_count(),
            buckets: self.tables.iter().map(|table| u64::from(table.buckets())).sum(),
        }
    }

    fn fixed_bytes(&self) -> u64 {
        let tables = self.tables.iter().map(super::table::Table::bytes).sum::<u64>()
            + size_of_val::<[_]>(&self.tables) as u64;
        self.pool.bytes() + tables + self.locations.bytes() + self.removals.bytes()
    }

    /// Whether entries of live locations are missing, so that answers are partial.
    pub fn limited(&self) -> bool {
        self.locations.left_out().0 > 0
    }

    /// Figures of a location; `None` when it was forgotten.
    pub fn location_stats(&self, location: Location) -> Option<LocationStats> {
        self.locations.stats(location)
    }

    /// Figures of all locations that were not forgotten.
    pub fn locations(&self) -> Vec<LocationStats> {
        let numbers = 0..self.locations.numbers();
        numbers.filter_map(|number| self.locations.stats(Location(number))).collect()
    }

    /// Figures of all live spaces.
    pub fn spaces(&self) -> Vec<SpaceStats> {
        let spaces = self.spaces.read();
        let of = |(space, row): (SpaceId, &super::spaces::SpaceRow)| SpaceStats {
            space,
            tenant: row.tenant,
            model: row.model,
            entries: row.entries.load(Relaxed),
            described: row.rules.is_some(),
        };
        spaces.live().map(of).collect()
    }
}
