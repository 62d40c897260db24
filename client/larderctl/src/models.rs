//! `models`, and how other commands find the model versions that a name stands for.

use crate::{
    cli::ModelArgs,
    ctl::{Ctl, hex},
    error::{CtlError, Doing},
    output::{Section, Table, Tone, count, short},
};
use larder_proto::{
    ModelVersion,
    control::{self, master_client::MasterClient},
    fingerprint::{ContentDescription, LayoutDescription},
    part::GroupRule,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A registered model version.
#[derive(Debug, Clone)]
pub(crate) struct Version {
    /// What people call it.
    pub(crate) names: BTreeSet<String>,
    /// What it is.
    pub(crate) id: ModelVersion,
    /// In words; none if a later program wrote it in a form that this one does not know.
    pub(crate) described: Option<(ContentDescription, LayoutDescription)>,
    /// Blocks, times the nodes that hold them.
    pub(crate) entries: u64,
}

impl Version {
    /// Tokens of a block, as far as the layout can be read.
    pub(crate) fn block_tokens(&self) -> Result<u32, CtlError> {
        let described = self.described.as_ref().map(|(_, layout)| layout.block_tokens);
        described.ok_or_else(|| {
            let layout = self.id.layout;
            CtlError::Failed(format!(
                "layout {layout} is described in a form that this larderctl does not know"
            ))
        })
    }

    /// Its names, for people.
    pub(crate) fn title(&self) -> String {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let (content, layout) = (self.id.content.to_string(), self.id.layout.to_string());
        format!("{} (content {}, layout {})", names.join(", "), short(&content), short(&layout))
    }
}

/// All registered model versions.
pub(crate) async fn registered(ctl: &Ctl) -> Result<Vec<Version>, CtlError> {
    let ask = |mut master: MasterClient<_>| async move {
        master.list_models(control::ListModelsRequest {}).await
    };
    let reply = ctl.masters().ask(ask).await.doing("list models")?;
    let mut versions: BTreeMap<ModelVersion, Version> = BTreeMap::new();
    for model in reply.models {
        let id = || {
            Some(ModelVersion {
                content: model.content.as_ref().try_into().ok()?,
                layout: model.layout.as_ref().try_into().ok()?,
            })
        };
        let Some(id) = id() else {
            let (content, layout) = (hex(&model.content), hex(&model.layout));
            let why = format!("the master named a model version {content}/{layout}, which is none");
            return Err(CtlError::Failed(why));
        };
        let version = versions.entry(id).or_insert_with(|| Version {
            names: BTreeSet::new(),
            id,
            described: describe(&model),
            entries: model.entries,
        });
        version.names.insert(model.display_name);
    }
    Ok(versions.into_values().collect())
}

fn describe(model: &control::Model) -> Option<(ContentDescription, LayoutDescription)> {
    let content = ContentDescription::decode(&model.content_description).ok()?;
    let layout = LayoutDescription::decode(&model.layout_description).ok()?;
    Some((content, layout))
}

/// The registered versions that the arguments select; at least one.
pub(crate) async fn select(ctl: &Ctl, args: &ModelArgs) -> Result<Vec<Version>, CtlError> {
    choose(registered(ctl).await?, args)
}

fn choose(all: Vec<Version>, args: &ModelArgs) -> Result<Vec<Version>, CtlError> {
    let ModelArgs { model, content, layout } = args;
    let known: BTreeSet<String> = all.iter().flat_map(|version| version.names.clone()).collect();
    let named: Vec<Version> = all
        .into_iter()
        .filter(|version| model.as_ref().is_none_or(|name| version.names.contains(name)))
        .collect();
    if let (true, Some(name)) = (named.is_empty(), model) {
        let known = match known.is_empty() {
            true => "none is registered".to_owned(),
            false => format!("known are {}", known.into_iter().collect::<Vec<_>>().join(", ")),
        };
        return Err(CtlError::NotFound(format!("no model is called {name}; {known}")));
    }
    let fits = |version: &Version| {
        content.is_none_or(|content| content == version.id.content)
            && layout.is_none_or(|layout| layout == version.id.layout)
    };
    let chosen: Vec<Version> = named.into_iter().filter(fits).collect();
    match chosen.is_empty() {
        false => Ok(chosen),
        true => Err(CtlError::NotFound(
            "no registered model version has that content and layout; `larderctl models` lists them"
                .to_owned(),
        )),
    }
}

#[derive(Debug, Serialize)]
struct Models {
    models: Vec<Model>,
}

#[derive(Debug, Serialize)]
struct Model {
    display_names: BTreeSet<String>,
    content: String,
    layout: String,
    entries: u64,
    description: Option<Description>,
}

#[derive(Debug, Serialize)]
struct Description {
    weights: String,
    weight_epoch: u64,
    tokenizer: String,
    adapter: Option<AdapterText>,
    kv_dtype: String,
    kv_scales: Option<String>,
    engine_family: String,
    kv_format_version: u32,
    block_tokens: u32,
    parts_per_block: usize,
    groups: Vec<Group>,
    parallel: BTreeMap<String, u32>,
    options: BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
struct AdapterText {
    weights: String,
    semantics: String,
}

#[derive(Debug, Serialize)]
struct Group {
    rule: String,
    layers: Vec<u32>,
    dtype: String,
    shape: Vec<u64>,
    strides: Vec<u64>,
    part_bytes: u64,
}

/// `larderctl models`.
pub(crate) async fn models(ctl: &Ctl, name: Option<String>) -> Result<(), CtlError> {
    let versions = ctl.within("models", registered(ctl)).await?;
    let versions = match name {
        None => versions,
        name => choose(versions, &ModelArgs { model: name, ..ModelArgs::default() })?,
    };
    let model = |version: Version| Model {
        content: version.id.content.to_string(),
        layout: version.id.layout.to_string(),
        entries: version.entries,
        description: version.described.as_ref().map(|(content, layout)| in_words(content, layout)),
        display_names: version.names,
    };
    let models = Models { models: versions.into_iter().map(model).collect() };
    ctl.out.show(&models, |models| vec![Section::Table(for_people(models))])
}

fn in_words(content: &ContentDescription, layout: &LayoutDescription) -> Description {
    let adapter = content.adapter.as_ref().map(|adapter| AdapterText {
        weights: adapter.weights.to_string(),
        semantics: adapter.semantics.clone(),
    });
    let groups = layout.groups.iter().map(|group| Group {
        rule: match group.rule {
            GroupRule::EveryBlock => "every_block".to_owned(),
            GroupRule::LastWindow { window_blocks } => format!("last_window({window_blocks})"),
            GroupRule::AtBoundary => "at_boundary".to_owned(),
        },
        layers: group.layers.clone(),
        dtype: group.dtype.clone(),
        shape: group.shape.clone(),
        strides: group.strides.clone(),
        part_bytes: group.part_bytes,
    });
    Description {
        weights: content.weights.to_string(),
        weight_epoch: content.weight_epoch,
        tokenizer: content.tokenizer.to_string(),
        adapter,
        kv_dtype: content.kv_dtype.clone(),
        kv_scales: content.kv_scales.map(|scales| scales.to_string()),
        engine_family: layout.engine_family.clone(),
        kv_format_version: layout.kv_format_version,
        block_tokens: layout.block_tokens,
        parts_per_block: layout.part_count(),
        groups: groups.collect(),
        parallel: layout.parallel.clone(),
        options: layout.options.clone(),
    }
}

fn for_people(models: &Models) -> Table {
    let columns = [
        "model",
        "content",
        "layout",
        "engine",
        "kv type",
        "epoch>",
        "tokens a block>",
        "parts a block>",
        "blocks held>",
    ];
    let mut table =
        Table::new(&columns, "no model is registered: engines register theirs at start");
    for model in &models.models {
        let names: Vec<&str> = model.display_names.iter().map(String::as_str).collect();
        let dash = || "-".to_owned();
        let [engine, kv_type, epoch, tokens, parts] = match &model.description {
            None => ["unknown form".to_owned(), dash(), dash(), dash(), dash()],
            Some(description) => [
                format!("{} {}", description.engine_family, description.kv_format_version),
                description.kv_dtype.clone(),
                description.weight_epoch.to_string(),
                description.block_tokens.to_string(),
                description.parts_per_block.to_string(),
            ],
        };
        table.row(
            Tone::Plain,
            [
                names.join(", "),
                short(&model.content),
                short(&model.layout),
                engine,
                kv_type,
                epoch,
                tokens,
                parts,
                count(model.entries),
            ],
        );
    }
    table
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use larder_proto::{ContentFingerprint, LayoutFingerprint};

    pub(crate) fn version(name: &str, content: u8, layout: u8) -> Version {
        Version {
            names: BTreeSet::from([name.to_owned()]),
            id: ModelVersion {
                content: ContentFingerprint::from_bytes([content; 32]),
                layout: LayoutFingerprint::from_bytes([layout; 32]),
            },
            described: None,
            entries: 0,
        }
    }

    #[test]
    fn a_name_stands_for_all_its_versions_and_fingerprints_narrow_it_down() {
        let all = || vec![version("llama", 1, 1), version("llama", 2, 1), version("qwen", 3, 1)];
        let llama = ModelArgs { model: Some("llama".to_owned()), ..ModelArgs::default() };
        assert_eq!(choose(all(), &llama).unwrap().len(), 2);
        let content = Some(ContentFingerprint::from_bytes([2; 32]));
        let one = ModelArgs { content, ..llama };
        assert_eq!(choose(all(), &one).unwrap()[0].id.content.as_bytes()[0], 2);
        let none = ModelArgs { model: Some("qwen".to_owned()), ..one };
        assert!(matches!(choose(all(), &none), Err(CtlError::NotFound(_))));
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let args = ModelArgs { model: Some("lama".to_owned()), ..ModelArgs::default() };
        let error = choose(vec![version("llama", 1, 1)], &args).unwrap_err();
        assert_eq!(error.to_string(), "no model is called lama; known are llama");
    }
}
