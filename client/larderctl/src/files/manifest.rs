//! What the first block of a file says, and the keys of all of them.

use larder_proto::{
    BlockKey, ContentFingerprint,
    block_key::KeyChain,
    canonical::{Decoder, Encoder},
    fingerprint::{ContentDescription, Digest, LayerGroup, LayoutDescription, ModelDescription},
    frame::KEYS_LIMIT,
    part::GroupRule,
    wire::DecodeError,
};
use std::collections::BTreeMap;

/// The display name of the model version that files belong to.
const MODEL: &str = "raw";
/// A name or digest of 32 bytes is one block of this many 4-byte "tokens".
const BLOCK_TOKENS: u32 = 8;
/// Bytes of a piece: a few are in memory at a time.
pub(super) const PIECE_LEN: u64 = 4 << 20;
/// The longest file: its keys fit one question to a master.
pub(super) const FILE_LIMIT: u64 = PIECE_LEN * (KEYS_LIMIT as u64 - 1);
const SCHEME: &str = "larder/file/1";

/// What the first block of a file says of the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Manifest {
    /// The file's name in the cluster.
    pub(super) name: String,
    /// Bytes of the file.
    pub(super) len: u64,
    /// BLAKE3 of all of them.
    pub(super) digest: blake3::Hash,
    /// Bytes of a piece; the last one may be shorter.
    pub(super) piece_len: u64,
}

impl Manifest {
    /// The bytes of the first block.
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { name, len, digest, piece_len } = self;
        let mut out = Encoder::with_scheme(SCHEME);
        out.field(1, name.as_bytes()).number(2, *len);
        out.field(3, digest.as_bytes()).number(4, *piece_len).finish()
    }

    /// Reads them; refuses lengths that no file of ours has.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Decoder::with_scheme(SCHEME, bytes)?;
        let (name, len) = (from.text(1)?, from.number(2)?);
        let digest = blake3::Hash::from_bytes(from.array(3)?);
        let piece_len = from.number(4)?;
        from.finish()?;
        let within = |what, value: u64, limit: u64| match value <= limit {
            true => Ok(()),
            false => Err(DecodeError::Limit { what, value, limit }),
        };
        within("file length", len, FILE_LIMIT)?;
        within("piece length", piece_len, PIECE_LEN)?;
        match piece_len.is_power_of_two() && len / piece_len < KEYS_LIMIT as u64 {
            true => Ok(Self { name, len, digest, piece_len }),
            false => Err(DecodeError::Unknown { what: "piece length", value: piece_len }),
        }
    }

    /// How many pieces the file has.
    pub(super) fn pieces(&self) -> usize {
        usize::try_from(self.len.div_ceil(self.piece_len)).unwrap_or(usize::MAX)
    }

    /// Bytes of a piece: the last one may be shorter.
    pub(super) fn len_of(&self, piece: usize) -> u64 {
        let offset = (piece as u64).saturating_mul(self.piece_len);
        self.len.saturating_sub(offset).min(self.piece_len)
    }

    /// Keys of the manifest and of all pieces.
    pub(super) fn keys(&self) -> Vec<BlockKey> {
        let (mut chain, root) = root_of(&self.name);
        let mut keys = vec![root];
        for piece in 0..self.pieces() {
            let tokens = match piece {
                0 => tokens_of(self.digest.as_bytes()),
                later => {
                    let mut bytes = [0; 32];
                    bytes[..8].copy_from_slice(&(later as u64).to_le_bytes());
                    tokens_of(&bytes)
                }
            };
            keys.push(chain.next(&tokens, &[], None));
        }
        keys
    }
}

fn tokens_of(bytes: &[u8; 32]) -> Vec<u32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// The key of a file's manifest, and the chain that goes on from it.
pub(super) fn root_of(name: &str) -> (KeyChain, BlockKey) {
    let mut chain = KeyChain::new(content(), BLOCK_TOKENS, b"");
    let root = chain.next(&tokens_of(blake3::hash(name.as_bytes()).as_bytes()), &[], None);
    (chain, root)
}

fn content() -> ContentFingerprint {
    model().content.fingerprint()
}

/// What files are, in the words of an engine's blocks.
pub(super) fn model() -> ModelDescription {
    let digest = |text: &str| Digest::from_bytes(*blake3::hash(text.as_bytes()).as_bytes());
    let group = LayerGroup {
        rule: GroupRule::EveryBlock,
        layers: vec![0],
        dtype: "u8".to_owned(),
        shape: Vec::new(),
        strides: Vec::new(),
        part_bytes: 0,
    };
    ModelDescription {
        display_name: MODEL.to_owned(),
        content: ContentDescription {
            weights: digest("larderctl: the bytes of a file"),
            weight_epoch: 0,
            tokenizer: digest("larderctl: the name of a file"),
            adapter: None,
            kv_dtype: "u8".to_owned(),
            kv_scales: None,
        },
        layout: LayoutDescription {
            engine_family: "larderctl".to_owned(),
            kv_format_version: 1,
            block_tokens: BLOCK_TOKENS,
            groups: vec![group],
            parallel: BTreeMap::new(),
            options: BTreeMap::new(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn manifest(name: &str, len: u64) -> Manifest {
        let digest = blake3::hash(&len.to_le_bytes());
        Manifest { name: name.to_owned(), len, digest, piece_len: PIECE_LEN }
    }

    #[test]
    fn a_manifest_comes_back_as_it_was_and_a_lie_about_lengths_is_refused() {
        let one = manifest("notes", 2 * PIECE_LEN + 1);
        assert_eq!(Manifest::decode(&one.encode()), Ok(one.clone()));
        assert_eq!((one.pieces(), one.len_of(0), one.len_of(2)), (3, PIECE_LEN, 1));
        let lies = [
            Manifest { len: FILE_LIMIT + 1, ..one.clone() },
            Manifest { piece_len: 0, ..one.clone() },
            Manifest { piece_len: 1 << 40, ..one.clone() },
            Manifest { piece_len: 1, len: FILE_LIMIT, ..one },
        ];
        for lie in lies {
            assert!(Manifest::decode(&lie.encode()).is_err(), "{lie:?}");
        }
    }

    #[test]
    fn a_name_alone_gives_the_key_of_its_manifest_and_pieces_depend_on_the_bytes() {
        let (one, other) = (manifest("a", 10), manifest("a", 11));
        assert_eq!(one.keys()[0], other.keys()[0]);
        assert_ne!(one.keys()[1], other.keys()[1]);
        assert_ne!(one.keys()[0], manifest("b", 10).keys()[0]);
        assert_eq!(manifest("empty", 0).keys().len(), 1);
        let keys: BTreeSet<_> = manifest("long", 5 * PIECE_LEN).keys().into_iter().collect();
        assert_eq!(keys.len(), 6);
    }

    #[test]
    fn the_model_of_files_is_one_that_masters_take() {
        let model = model();
        assert!(model.layout.check().is_ok());
        assert_eq!(ContentDescription::decode(&model.content.encode()), Ok(model.content));
        assert_eq!(LayoutDescription::decode(&model.layout.encode()), Ok(model.layout));
    }
}
