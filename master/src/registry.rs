//! Model versions that somebody registered, by what they are and not by what they are called.
//!
//! A registration carries the canonical bytes of both descriptions. The registry hashes exactly these
//! bytes, so anyone can check it, and registering twice changes nothing: no leader is needed. A display
//! name maps to a set of versions and decides nothing (F02): two contents behind one name are kept apart,
//! and whoever registers the second is told the fingerprints of both.

use larder_proto::{
    ContentFingerprint, ModelVersion,
    canonical::{Decoder, Encoder},
    fingerprint::{ContentDescription, LayoutDescription},
    wire::DecodeError,
};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of one description.
pub const DESCRIPTION_LIMIT: usize = 64 * 1024;
/// Bytes of a display name.
pub const NAME_LIMIT: usize = 256;
/// Display names of one model version.
pub const NAMES_LIMIT: usize = 16;

/// Why a model version is not registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// A field breaks its rule.
    #[error("{field}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// Which rule.
        source: DecodeError,
    },
    /// The limit is reached.
    #[error("{limit} {what} are registered, which is the limit")]
    Full {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
}

/// What is known of one model version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// What people call it.
    pub names: BTreeSet<String>,
    /// Canonical bytes of what decides the values.
    pub content: Vec<u8>,
    /// Canonical bytes of how they are laid out.
    pub layout: Vec<u8>,
    /// The same, read.
    pub described: LayoutDescription,
}

/// What a registration would lead to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registration {
    /// The version.
    pub version: ModelVersion,
    /// All that is to be kept of it.
    pub model: Registered,
    /// Whether the version itself is new.
    pub is_new: bool,
    /// Whether there is something to keep that is not kept yet.
    pub changes: bool,
    /// Other contents under the same display name.
    pub other_contents: Vec<ContentFingerprint>,
}

/// See the module.
#[derive(Debug)]
pub struct Registry {
    limit: usize,
    models: BTreeMap<ModelVersion, Registered>,
}

const SCHEME: &str = "larder/master/model/1";

impl Registered {
    /// Checks both descriptions.
    ///
    /// # Errors
    /// They are too long, not canonical, or break a limit.
    pub fn new(
        names: BTreeSet<String>,
        content: &[u8],
        layout: &[u8],
    ) -> Result<(ModelVersion, Self), RegisterError> {
        let invalid = |field| move |source| RegisterError::Invalid { field, source };
        within("content", content.len(), DESCRIPTION_LIMIT)?;
        within("layout", layout.len(), DESCRIPTION_LIMIT)?;
        let decides = ContentDescription::decode(content).map_err(invalid("content"))?;
        let described = LayoutDescription::decode(layout).map_err(invalid("layout"))?;
        let version =
            ModelVersion { content: decides.fingerprint(), layout: described.fingerprint() };
        let (content, layout) = (content.to_vec(), layout.to_vec());
        Ok((version, Self { names, content, layout, described }))
    }

    /// As it is kept on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::with_scheme(SCHEME);
        out.list(1, self.names.iter().map(|name| name.as_bytes().to_vec()));
        out.field(2, &self.content).field(3, &self.layout);
        out.finish()
    }

    /// Reads [`Self::encode`].
    ///
    /// # Errors
    /// The bytes are something else.
    pub fn decode(bytes: &[u8]) -> Result<(ModelVersion, Self), RegisterError> {
        let invalid = |source| RegisterError::Invalid { field: "model on disk", source };
        let mut from = Decoder::with_scheme(SCHEME, bytes).map_err(invalid)?;
        let names = from.list(1).map_err(invalid)?;
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        let names = names.into_iter().map(text).collect();
        let (content, layout) = (from.field(2).map_err(invalid)?, from.field(3).map_err(invalid)?);
        from.finish().map_err(invalid)?;
        Self::new(names, content, layout)
    }
}

impl Registry {
    /// No models yet, and at most `limit` versions.
    pub fn new(limit: usize) -> Self {
        Self { limit, models: BTreeMap::new() }
    }

    /// What registering would lead to; [`Self::insert`] it once it is kept.
    ///
    /// # Errors
    /// A field breaks its rule, or a limit is reached.
    pub fn check(
        &self,
        name: &str,
        content: &[u8],
        layout: &[u8],
    ) -> Result<Registration, RegisterError> {
        within("display_name", name.len(), NAME_LIMIT)?;
        if name.is_empty() || name.chars().any(char::is_control) {
            let rule = "must not be empty and have no control characters";
            let source = DecodeError::Text { what: "display name", rule };
            return Err(RegisterError::Invalid { field: "display_name", source });
        }
        let (version, mut model) = Registered::new(BTreeSet::new(), content, layout)?;
        let known = self.models.get(&version);
        if let Some(known) = known {
            model.names.clone_from(&known.names);
        } else if self.models.len() >= self.limit {
            return Err(RegisterError::Full { what: "model versions", limit: self.limit });
        }
        let new_name = model.names.insert(name.to_owned());
        if model.names.len() > NAMES_LIMIT {
            let what = "display names of this model version";
            return Err(RegisterError::Full { what, limit: NAMES_LIMIT });
        }
        let others = self.models.iter().filter(|(other, registered)| {
            other.content != version.content && registered.names.contains(name)
        });
        let other_contents: BTreeSet<_> = others.map(|(other, _)| other.content).collect();
        Ok(Registration {
            version,
            model,
            is_new: known.is_none(),
            changes: known.is_none() || new_name,
            other_contents: other_contents.into_iter().collect(),
        })
    }

    /// Keeps a model version.
    pub fn insert(&mut self, version: ModelVersion, model: Registered) {
        self.models.insert(version, model);
    }

    /// What is known of a version.
    pub fn get(&self, version: &ModelVersion) -> Option<&Registered> {
        self.models.get(version)
    }

    /// All versions.
    pub fn iter(&self) -> impl Iterator<Item = (&ModelVersion, &Registered)> {
        self.models.iter()
    }
}

fn within(field: &'static str, len: usize, limit: usize) -> Result<(), RegisterError> {
    if len <= limit {
        return Ok(());
    }
    let source = DecodeError::Limit { what: "length", value: len as u64, limit: limit as u64 };
    Err(RegisterError::Invalid { field, source })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use larder_proto::{
        fingerprint::{Digest, LayerGroup},
        part::GroupRule,
    };

    /// A content that differs by `weights`, and a layout of one group.
    pub(crate) fn descriptions(weights: u8) -> (ContentDescription, LayoutDescription) {
        let content = ContentDescription {
            weights: Digest::from_bytes([weights; 32]),
            weight_epoch: 0,
            tokenizer: Digest::from_bytes([1; 32]),
            adapter: None,
            kv_dtype: "f16".to_owned(),
            kv_scales: None,
        };
        let group = LayerGroup {
            rule: GroupRule::EveryBlock,
            layers: vec![0],
            dtype: "f16".to_owned(),
            shape: vec![2],
            strides: vec![],
            part_bytes: 4,
        };
        let layout = LayoutDescription {
            engine_family: "test".to_owned(),
            kv_format_version: 1,
            block_tokens: 16,
            groups: vec![group],
            parallel: BTreeMap::new(),
            options: BTreeMap::new(),
        };
        (content, layout)
    }

    fn register(
        registry: &mut Registry,
        name: &str,
        weights: u8,
    ) -> Result<Registration, RegisterError> {
        let (content, layout) = descriptions(weights);
        let registration = registry.check(name, &content.encode(), &layout.encode())?;
        registry.insert(registration.version, registration.model.clone());
        Ok(registration)
    }

    #[test]
    fn two_contents_behind_one_name_are_kept_apart_and_the_second_is_told_of_the_first() {
        // F02
        let mut registry = Registry::new(8);
        let first = register(&mut registry, "llama", 1).unwrap();
        let second = register(&mut registry, "llama", 2).unwrap();
        assert_ne!(first.version, second.version);
        assert_eq!(first.other_contents, []);
        assert_eq!(second.other_contents, [first.version.content]);
        assert_eq!(registry.iter().count(), 2);
    }

    #[test]
    fn registering_again_changes_nothing_and_another_name_adds_one() {
        let mut registry = Registry::new(1);
        assert!(register(&mut registry, "llama", 1).unwrap().is_new);
        let again = register(&mut registry, "llama", 1).unwrap();
        assert!(!again.is_new && !again.changes, "at the limit too");
        let renamed = register(&mut registry, "llama-2", 1).unwrap();
        assert!(!renamed.is_new && renamed.changes);
        assert_eq!(renamed.model.names.len(), 2);
        let full = register(&mut registry, "other", 2).unwrap_err();
        assert_eq!(full, RegisterError::Full { what: "model versions", limit: 1 });
    }

    #[test]
    fn a_registration_comes_back_from_disk_as_it_was() {
        let mut registry = Registry::new(1);
        let Registration { version, model, .. } = register(&mut registry, "../etc/x", 1).unwrap();
        assert_eq!(Registered::decode(&model.encode()), Ok((version, model.clone())));
        let cut = &model.encode()[..20];
        assert!(Registered::decode(cut).is_err());
    }

    #[test]
    fn an_error_names_the_field_and_the_rule() {
        let registry = Registry::new(1);
        let (content, layout) = descriptions(1);
        let error = registry.check("x", &[], &layout.encode()).unwrap_err();
        assert!(error.to_string().contains("content"));
        let long = "x".repeat(NAME_LIMIT + 1);
        let error = registry.check(&long, &content.encode(), &layout.encode()).unwrap_err();
        assert!(matches!(error, RegisterError::Invalid { field: "display_name", .. }));
    }
}
