//! Model versions: what decides the values of a block, and how they are laid out.
//!
//! A fingerprint is BLAKE3 over the canonical encoding ([`crate::canonical`]) of a description. Anyone
//! with the description can check it; a display name decides nothing (F02): it maps to a *set* of model
//! versions. Descriptions travel as their canonical bytes, so the receiver hashes exactly what the
//! sender hashed.

use crate::{
    canonical::{Decoder, Encoder},
    ids::hex_id,
    part::{GroupRule, PartNumber},
    wire::{DecodeError, wire_struct},
};
use std::collections::BTreeMap;

hex_id! {
    /// What decides the values of a block. Two contents never mix, whatever their display names.
    pub struct ContentFingerprint([u8; 32]), "content fingerprint"
}
hex_id! {
    /// How the values of a block are laid out. Parts of different layouts never answer for one another.
    pub struct LayoutFingerprint([u8; 32]), "layout fingerprint"
}
hex_id! {
    /// BLAKE3 of something that a description refers to: weight files, a tokenizer, an adapter.
    pub struct Digest([u8; 32]), "digest"
}

wire_struct! {
    /// Content and layout: together they say which parts can serve which engine.
    #[derive(Copy, Hash, PartialOrd, Ord)]
    pub struct ModelVersion {
        /// What decides the values.
        pub content: ContentFingerprint,
        /// How they are laid out.
        pub layout: LayoutFingerprint,
    }
}

impl std::fmt::Display for ModelVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.content, self.layout)
    }
}

const CONTENT_SCHEME: &str = "larder/content/1";
const LAYOUT_SCHEME: &str = "larder/layout/1";

/// The most layer groups of a layout.
pub const GROUP_LIMIT: usize = 64;
/// The most parts of a block: groups times ranks. Bounded by the part bitmap of the index.
pub const PART_LIMIT: usize = 1024;

/// An adapter (LoRA and its like), by what it does and not by its name or id (F35).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// Digest of the adapter's weights.
    pub weights: Digest,
    /// Everything else that changes its effect, as the engine spells it: scale, target modules.
    pub semantics: String,
}

/// What decides the values of a block, given its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentDescription {
    /// Digest of the weight files, or one that the operator states. Never a display name.
    pub weights: Digest,
    /// Raised by an operator when weights change in place (online training).
    pub weight_epoch: u64,
    /// Digest of the tokenizer.
    pub tokenizer: Digest,
    /// The adapter in force, if one is.
    pub adapter: Option<Adapter>,
    /// Element type of the stored KV, as the engine names it (`f16`, `q8_0`). A lossy type is a
    /// content of its own, so exact and lossy copies never answer for one another (F06).
    pub kv_dtype: String,
    /// Digest of KV quantisation scales, where they are not part of the weights.
    pub kv_scales: Option<Digest>,
}

impl ContentDescription {
    /// The canonical bytes.
    pub fn encode(&self) -> Vec<u8> {
        let Self { weights, weight_epoch, tokenizer, adapter, kv_dtype, kv_scales } = self;
        let mut out = Encoder::with_scheme(CONTENT_SCHEME);
        out.field(1, weights.as_bytes()).number(2, *weight_epoch).field(3, tokenizer.as_bytes());
        out.list(
            4,
            adapter.iter().map(|Adapter { weights, semantics }| {
                Encoder::nested()
                    .field(1, weights.as_bytes())
                    .field(2, semantics.as_bytes())
                    .finish()
            }),
        );
        out.field(5, kv_dtype.as_bytes());
        out.list(6, kv_scales.iter().map(|scales| scales.as_bytes().to_vec()));
        out.finish()
    }

    /// Reads canonical bytes; refuses any other form of the same description.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Decoder::with_scheme(CONTENT_SCHEME, bytes)?;
        let description = Self {
            weights: Digest::from_bytes(from.array(1)?),
            weight_epoch: from.number(2)?,
            tokenizer: Digest::from_bytes(from.array(3)?),
            adapter: at_most_one(from.list(4)?, |bytes| {
                let mut from = Decoder::nested(bytes);
                let adapter = Adapter {
                    weights: Digest::from_bytes(from.array(1)?),
                    semantics: from.text(2)?,
                };
                from.finish()?;
                Ok(adapter)
            })?,
            kv_dtype: from.text(5)?,
            kv_scales: at_most_one(from.list(6)?, Digest::try_from)?,
        };
        from.finish()?;
        Ok(description)
    }

    /// BLAKE3 over [`Self::encode`].
    pub fn fingerprint(&self) -> ContentFingerprint {
        ContentFingerprint::from_bytes(*blake3::hash(&self.encode()).as_bytes())
    }
}

/// A set of layers that are stored together and matched by one rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerGroup {
    /// When the group counts as present for a match.
    pub rule: GroupRule,
    /// The model's layers in it.
    pub layers: Vec<u32>,
    /// Element type.
    pub dtype: String,
    /// Shape of one part of this group in elements, outermost first, as the engine lays it out.
    pub shape: Vec<u64>,
    /// Strides in elements, of the same length as `shape`; empty for dense row-major.
    pub strides: Vec<u64>,
    /// Bytes of one stored part. Zero when they vary.
    pub part_bytes: u64,
}

impl LayerGroup {
    fn encode(&self) -> Vec<u8> {
        let Self { rule, layers, dtype, shape, strides, part_bytes } = self;
        let (kind, argument) = rule.code();
        let mut out = Encoder::nested();
        out.number(1, u64::from(kind)).number(2, argument);
        out.list(3, layers.iter().map(|layer| layer.to_le_bytes()));
        out.field(4, dtype.as_bytes());
        out.list(5, shape.iter().map(|n| n.to_le_bytes()));
        out.list(6, strides.iter().map(|n| n.to_le_bytes()));
        out.number(7, *part_bytes);
        out.finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Decoder::nested(bytes);
        let (kind, argument) = (from.number(1)?, from.number(2)?);
        let group = Self {
            rule: GroupRule::from_code(kind, argument)?,
            layers: numbers(from.list(3)?)?,
            dtype: from.text(4)?,
            shape: numbers(from.list(5)?)?,
            strides: numbers(from.list(6)?)?,
            part_bytes: from.number(7)?,
        };
        from.finish()?;
        Ok(group)
    }
}

/// How an engine lays out the KV of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutDescription {
    /// Which engine family wrote it (`llama.cpp`, `vllm`): its conventions are part of the layout.
    pub engine_family: String,
    /// Version of that family's KV format, as we number it.
    pub kv_format_version: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// The layer groups, in the engine's order.
    pub groups: Vec<LayerGroup>,
    /// Parallel scheme: size by axis (`tp`, `pp`), without axes of size one. A block is complete when
    /// every rank's part of every group is there (F30).
    pub parallel: BTreeMap<String, u32>,
    /// Everything else that changes the bytes (`flash_attention = on`), sorted by name.
    pub options: BTreeMap<String, String>,
}

impl LayoutDescription {
    /// The canonical bytes.
    pub fn encode(&self) -> Vec<u8> {
        let Self { engine_family, kv_format_version, block_tokens, groups, parallel, options } =
            self;
        let mut out = Encoder::with_scheme(LAYOUT_SCHEME);
        out.field(1, engine_family.as_bytes());
        out.number(2, u64::from(*kv_format_version)).number(3, u64::from(*block_tokens));
        out.list(4, groups.iter().map(LayerGroup::encode));
        out.list(
            5,
            parallel.iter().map(|(axis, size)| {
                Encoder::nested().field(1, axis.as_bytes()).number(2, u64::from(*size)).finish()
            }),
        );
        out.list(
            6,
            options.iter().map(|(name, value)| {
                Encoder::nested().field(1, name.as_bytes()).field(2, value.as_bytes()).finish()
            }),
        );
        out.finish()
    }

    /// Reads canonical bytes; refuses any other form of the same description, and more than
    /// [`GROUP_LIMIT`] groups or [`PART_LIMIT`] parts.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Decoder::with_scheme(LAYOUT_SCHEME, bytes)?;
        let description = Self {
            engine_family: from.text(1)?,
            kv_format_version: from.number_u32(2)?,
            block_tokens: from.number_u32(3)?,
            groups: from.list(4)?.into_iter().map(LayerGroup::decode).collect::<Result<_, _>>()?,
            parallel: sorted(from.list(5)?, |from| Ok((from.text(1)?, from.number_u32(2)?)))?,
            options: sorted(from.list(6)?, |from| Ok((from.text(1)?, from.text(2)?)))?,
        };
        from.finish()?;
        description.check()?;
        Ok(description)
    }

    /// Holds the limits that the rest of the system relies on.
    pub fn check(&self) -> Result<(), DecodeError> {
        let within = |what, value: u64, limit: usize| match (1..=limit as u64).contains(&value) {
            true => Ok(()),
            false => Err(DecodeError::Limit { what, value, limit: limit as u64 }),
        };
        within("block length", u64::from(self.block_tokens), 65_536)?;
        within("layer groups", self.groups.len() as u64, GROUP_LIMIT)?;
        within("parts of a block", self.part_count() as u64, PART_LIMIT)
    }

    /// Ranks of the parallel scheme: the product of its axes.
    pub fn ranks(&self) -> usize {
        self.parallel.values().fold(1usize, |ranks, size| ranks.saturating_mul(*size as usize))
    }

    /// Parts that make a whole block.
    pub fn part_count(&self) -> usize {
        self.groups.len().saturating_mul(self.ranks())
    }

    /// The number of the part that `rank` holds of `group`: `group * ranks + rank`.
    pub fn part_number(&self, group: usize, rank: usize) -> Option<PartNumber> {
        let valid = group < self.groups.len() && rank < self.ranks();
        valid.then(|| u16::try_from(group * self.ranks() + rank).ok().map(PartNumber)).flatten()
    }

    /// BLAKE3 over [`Self::encode`].
    pub fn fingerprint(&self) -> LayoutFingerprint {
        LayoutFingerprint::from_bytes(*blake3::hash(&self.encode()).as_bytes())
    }
}

/// A model version with its full description and the name that people give it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelDescription {
    /// What people call it. Decides nothing.
    pub display_name: String,
    /// What decides the values.
    pub content: ContentDescription,
    /// How they are laid out.
    pub layout: LayoutDescription,
}

impl ModelDescription {
    /// The pair of both fingerprints.
    pub fn version(&self) -> ModelVersion {
        ModelVersion { content: self.content.fingerprint(), layout: self.layout.fingerprint() }
    }
}

fn at_most_one<'a, T>(
    items: Vec<&'a [u8]>,
    decode: impl Fn(&'a [u8]) -> Result<T, DecodeError>,
) -> Result<Option<T>, DecodeError> {
    match items.as_slice() {
        [] => Ok(None),
        [one] => decode(one).map(Some),
        more => Err(DecodeError::Limit { what: "optional", value: more.len() as u64, limit: 1 }),
    }
}

fn numbers<T: crate::wire::Wire>(items: Vec<&[u8]>) -> Result<Vec<T>, DecodeError> {
    items.into_iter().map(|item| T::from_wire("number", item)).collect()
}

/// Reads a list of pairs whose names rise strictly, so that a map has one encoding.
fn sorted<'a, V>(
    items: Vec<&'a [u8]>,
    decode: impl Fn(&mut Decoder<'a>) -> Result<(String, V), DecodeError>,
) -> Result<BTreeMap<String, V>, DecodeError> {
    let mut map = BTreeMap::new();
    for item in items {
        let mut from = Decoder::nested(item);
        let (name, value) = decode(&mut from)?;
        from.finish()?;
        if map.last_key_value().is_some_and(|(last, _)| *last >= name) {
            return Err(DecodeError::Text { what: "map", rule: "names must rise" });
        }
        map.insert(name, value);
    }
    Ok(map)
}
