//! The dram tier, and the names of an ssd tier.

#[path = "../../src/tiers/dram.rs"]
pub mod dram;

/// Copies in name only: they have a place, and no bytes.
pub mod ssd {
    use larder_proto::{BlockKey, Generation, PartName, fingerprint::ContentFingerprint};

    /// A copy, named by its place.
    #[derive(Debug, Clone)]
    pub struct SsdCopy(pub u32);

    impl SsdCopy {
        pub fn is_same(&self, other: &Self) -> bool {
            self.0 == other.0
        }

        pub fn footprint_bytes(&self) -> u64 {
            0
        }
    }

    /// What the catalog reads of one.
    #[derive(Debug)]
    pub struct FooterEntry {
        pub name: PartName,
        pub generation: Generation,
        pub content: ContentFingerprint,
        pub root: BlockKey,
        pub parent: Option<BlockKey>,
        pub len: u64,
    }
}
