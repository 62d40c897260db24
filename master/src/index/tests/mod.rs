//! Tests of the index as a whole.

mod concurrent;
mod limits;
mod model;

use super::{Index, IndexLimits};
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, ModelVersion, PartNumber,
    event::{PartSet, SHARDS},
    fingerprint::{LayerGroup, LayoutDescription},
    ids::TenantId,
    part::GroupRule,
};
use std::collections::BTreeMap;

fn tenant(n: u8) -> TenantId {
    TenantId::from_bytes([n; 16])
}

fn model(content: u8, layout: u8) -> ModelVersion {
    ModelVersion {
        content: ContentFingerprint::from_bytes([content; 32]),
        layout: LayoutFingerprint::from_bytes([layout; 32]),
    }
}

fn parts(numbers: &[u16]) -> PartSet {
    PartSet::of(numbers.iter().copied().map(PartNumber)).unwrap()
}

/// The `n`th of a row of keys like those that BLAKE3 makes.
fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    for (at, chunk) in (0..).zip(bytes.chunks_exact_mut(8)) {
        chunk.copy_from_slice(&super::entry::finalise(n * 4 + at).to_le_bytes());
    }
    BlockKey::from_bytes(bytes)
}

fn layout(rules: &[GroupRule], ranks: u32) -> LayoutDescription {
    let group = |rule: &GroupRule| LayerGroup {
        rule: *rule,
        layers: vec![0],
        dtype: "f16".to_owned(),
        shape: vec![1],
        strides: Vec::new(),
        part_bytes: 2,
    };
    LayoutDescription {
        engine_family: "test".to_owned(),
        kv_format_version: 1,
        block_tokens: 16,
        groups: rules.iter().map(group).collect(),
        parallel: BTreeMap::from([("tp".to_owned(), ranks)]),
        options: BTreeMap::new(),
    }
}

fn small(entries: u64) -> Index {
    Index::with_seed(IndexLimits { entries, locations: 16, ..IndexLimits::default() }, 1)
}

fn sweep_all(index: &Index) {
    while !index.sweep(1_000).done {}
}

/// The digests as a node would send them in a heartbeat.
fn all_comparable(digests: Vec<Option<u64>>) -> [u64; SHARDS] {
    let digests: Vec<u64> = digests.into_iter().map(|digest| digest.unwrap()).collect();
    digests.try_into().unwrap()
}
