//! Block keys: the name of a block's content, chained over all blocks before it.
//!
//! `key = BLAKE3(canonical encoding of: scheme, kind, content fingerprint, block length, parent key or
//! root salt, token ids, extras, origin hash)`. Equal keys mean equal prefixes. There is no seed, no
//! process-local hash (F34) and no cut digest (F37): two programs that agree on the tokens agree on the
//! key, and [`self_check`] lets two peers find out before they talk.

use crate::{
    canonical::Encoder,
    fingerprint::ContentFingerprint,
    ids::hex_id,
    wire::{ShortBytes, wire_enum},
};

hex_id! {
    /// Hash of a token block and of every block before it: equal keys mean equal prefixes.
    pub struct BlockKey([u8; 32]), "block key"
}
hex_id! {
    /// The first 16 bytes of a [`BlockKey`]: what a master's index stores. A hint only; the node
    /// compares the whole key.
    pub struct KeyPrefix([u8; 16]), "key prefix"
}

impl BlockKey {
    /// The part that an index stores.
    pub fn prefix(&self) -> KeyPrefix {
        let mut prefix = [0; 16];
        prefix.copy_from_slice(&self.as_bytes()[..16]);
        KeyPrefix::from_bytes(prefix)
    }

    /// A number for the chain of which this is the root, where few chains are told apart.
    pub fn chain(&self) -> u64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.as_bytes()[..8]);
        u64::from_le_bytes(first)
    }
}

/// The scheme of block keys. A new meaning of any field is a new scheme.
pub const KEY_SCHEME: &str = "larder/block-key/1";

/// An engine's own block hash (vLLM, SGLang), carried along opaquely and mixed into the key.
pub type OriginHash = ShortBytes<64>;

wire_enum! {
    /// What, besides its tokens, makes a block differ.
    pub enum ExtraKind: u8, "extra kind" {
        /// Digest of an adapter that is chosen per request.
        Adapter = 1 => "adapter",
        /// Digest of an image, sound or video whose placeholder tokens lie in the block.
        Media = 2 => "media",
        /// Keeps apart those who must not share. Chosen by the tenant's operator, never by the caller.
        CacheSalt = 3 => "cache_salt",
    }
}

/// One thing, besides its tokens, that makes a block differ.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extra {
    /// What it is.
    pub kind: ExtraKind,
    /// Its value, usually a digest.
    pub value: Vec<u8>,
}

/// Computes the keys of one chain, block by block.
///
/// ```
/// # use larder_proto::{block_key::KeyChain, fingerprint::ContentFingerprint};
/// let mut chain = KeyChain::new(ContentFingerprint::from_bytes([7; 32]), 2, b"");
/// let first = chain.next(&[1, 2], &[], None);
/// let second = chain.next(&[3, 4], &[], None);
/// assert_ne!(first, second);
/// ```
#[derive(Debug, Clone)]
pub struct KeyChain {
    content: ContentFingerprint,
    block_tokens: u32,
    link: Link,
}

#[derive(Debug, Clone)]
enum Link {
    Root { salt: Vec<u8> },
    Parent(BlockKey),
}

impl KeyChain {
    /// The chain of prompts computed with `content`, in blocks of `block_tokens` tokens. `root_salt`
    /// separates chains that must not meet (a tenant's cache salt); empty for none.
    pub fn new(content: ContentFingerprint, block_tokens: u32, root_salt: &[u8]) -> Self {
        Self { content, block_tokens, link: Link::Root { salt: root_salt.to_vec() } }
    }

    /// The key of the next block. `extras` in any order; `origin` is the engine's own hash, if any.
    ///
    /// # Panics
    /// When `tokens` is not one block long: only whole blocks have keys.
    pub fn next(
        &mut self,
        tokens: &[u32],
        extras: &[Extra],
        origin: Option<&OriginHash>,
    ) -> BlockKey {
        assert_eq!(tokens.len(), self.block_tokens as usize, "only whole blocks have keys");
        let mut out = Encoder::with_scheme(KEY_SCHEME);
        out.number(1, u64::from(origin.is_some()));
        out.field(2, self.content.as_bytes()).number(3, u64::from(self.block_tokens));
        match &self.link {
            Link::Root { salt } => out.field(4, salt),
            Link::Parent(parent) => out.field(5, parent.as_bytes()),
        };
        let ids: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        out.field(6, &ids);
        let mut extras: Vec<&Extra> = extras.iter().collect();
        extras.sort();
        out.list(
            7,
            extras.iter().map(|extra| {
                let code = u64::from(extra.kind.code());
                Encoder::nested().number(1, code).field(2, &extra.value).finish()
            }),
        );
        out.list(8, origin.iter().map(|hash| hash.as_bytes()));
        let key = BlockKey::from_bytes(*blake3::hash(&out.finish()).as_bytes());
        self.link = Link::Parent(key);
        key
    }
}

/// Keys of all whole blocks of `tokens`, without extras: the common case of a text prompt.
pub fn keys_of(
    content: ContentFingerprint,
    block_tokens: u32,
    root_salt: &[u8],
    tokens: &[u32],
) -> Vec<BlockKey> {
    let mut chain = KeyChain::new(content, block_tokens, root_salt);
    let blocks = tokens.chunks_exact(block_tokens as usize);
    blocks.map(|block| chain.next(block, &[], None)).collect()
}

/// The key of a fixed published chain. Two programs whose values differ would never share a block, so
/// they tell each other at hello and the difference is refused there (F34).
pub fn self_check() -> KeyPrefix {
    let content = ContentFingerprint::from_bytes([0x5a; 32]);
    let mut chain = KeyChain::new(content, 4, b"larder self check");
    chain.next(&[0, 1, u32::MAX, 128_000], &[], None);
    let extras = [
        Extra { kind: ExtraKind::Media, value: vec![9; 32] },
        Extra { kind: ExtraKind::Adapter, value: vec![8; 32] },
    ];
    chain.next(&[5, 6, 7, 8], &extras, None).prefix()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn content() -> ContentFingerprint {
        ContentFingerprint::from_bytes([1; 32])
    }

    #[test]
    fn pairs_that_collide_under_a_polynomial_hash_have_different_keys() {
        // Raise one token by 31, lower the next by 1 (F37).
        let one = keys_of(content(), 4, b"", &[100, 200, 300, 400]);
        let two = keys_of(content(), 4, b"", &[131, 199, 300, 400]);
        assert_ne!(one, two);
    }

    #[test]
    fn the_order_of_extras_does_not_matter_but_their_presence_does() {
        let a = Extra { kind: ExtraKind::Adapter, value: vec![1] };
        let m = Extra { kind: ExtraKind::Media, value: vec![1] };
        let key = |extras: &[Extra]| KeyChain::new(content(), 1, b"").next(&[1], extras, None);
        assert_eq!(key(&[a.clone(), m.clone()]), key(&[m.clone(), a.clone()]));
        assert_ne!(key(&[a]), key(&[m]));
        assert_ne!(key(&[]), KeyChain::new(content(), 1, b"salt").next(&[1], &[], None));
    }

    proptest! {
        #[test]
        fn a_key_is_shared_exactly_by_equal_prefixes(
            chains in prop::collection::vec(prop::collection::vec(0u32..3, 0..12), 2..20),
        ) {
            // The model: the prefix itself.
            let mut seen: HashMap<BlockKey, Vec<u32>> = HashMap::new();
            for tokens in &chains {
                for (i, key) in keys_of(content(), 2, b"", tokens).into_iter().enumerate() {
                    let prefix = tokens[..2 * (i + 1)].to_vec();
                    let known = seen.entry(key).or_insert_with(|| prefix.clone());
                    prop_assert_eq!(known, &prefix);
                }
            }
            let prefixes: std::collections::HashSet<_> = seen.values().collect();
            prop_assert_eq!(prefixes.len(), seen.len(), "one prefix, two keys");
        }
    }
}
