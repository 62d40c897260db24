//! Self-describing blocks for tests: bytes made from the key and the offset, so that foreign, old or cut
//! bytes are recognised without a reference.

use larder_client::connection::Identity;
use larder_proto::{
    BlockKey, ContentFingerprint, LayoutFingerprint, ModelVersion, PartNumber, block_key,
    checksum::DEFAULT_CHUNK,
    frame::{Class, Codec, Hello, Read, Reserve, VERSION},
    part::PartRef,
    wire::{DecodeError, ShortBytes, ShortText},
};

/// The model version of all of them.
pub fn model() -> ModelVersion {
    ModelVersion {
        content: ContentFingerprint::from_bytes([0x51; 32]),
        layout: LayoutFingerprint::from_bytes([0x52; 32]),
    }
}

/// A key for each number, spread over all shards.
pub fn key(n: u64) -> BlockKey {
    BlockKey::from_bytes(*blake3::hash(&n.to_le_bytes()).as_bytes())
}

/// The only part of a block.
pub fn part(key: BlockKey) -> PartRef {
    PartRef { key, layout: model().layout, part: PartNumber(0) }
}

/// The bytes of a block.
pub fn bytes(key: &BlockKey, len: usize) -> Vec<u8> {
    let seed = key.as_bytes();
    (0..len).map(|at| seed[at % 32] ^ at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect()
}

/// What a writer says of a block of `len` bytes.
pub fn reserve(key: BlockKey, len: usize) -> Reserve {
    Reserve {
        part: part(key),
        len: len as u64,
        codec: Codec::Raw,
        chunk_len: DEFAULT_CHUNK,
        content: model().content,
        root: key,
        parent: None,
        origin_hash: None,
    }
}

/// A read of a whole block.
pub fn read(key: BlockKey) -> Read {
    Read {
        part: part(key),
        offset: 0,
        len: u64::MAX,
        generation: None,
        class: Class::Demand,
        verify: false,
        content: model().content,
    }
}

/// The greeting of a client, for tests that speak frames by hand.
///
/// # Errors
/// None; the type is that of the parts.
pub fn hello(producer: &str) -> Result<Hello, DecodeError> {
    let identity = Identity::client(producer);
    Ok(Hello {
        version_min: VERSION,
        version_max: VERSION,
        features: 0,
        role: identity.role,
        key_check: block_key::self_check(),
        tenant: identity.tenant,
        capability: ShortBytes::new(Vec::new())?,
        producer: ShortText::cut(producer),
        producer_incarnation: identity.producer_incarnation,
    })
}
