//! Configuration of a daemon: defaults, then one TOML file, then variables, then flags.
//!
//! Contract: nothing is corrected quietly. A value of the wrong form, an unknown key, variable or
//! flag, and a broken rule each refuse the start, and all that can be told at once is told at once,
//! with key, value, origin and rule. `--check-config` runs the very same code and stops before any
//! socket or data file is opened.
//!
//! A daemon declares its keys with [`settings!`](crate::settings) and its rules in
//! [`DaemonConfig::validate`].
//!
//! Rejected: a general layering crate. Those at hand lose the line of a value in the file, read
//! `"8"` where a size is asked for, or stop at the first error.

mod command;
mod declare;
mod error;
mod layers;
mod print;
mod rules;
mod schema;
mod units;
mod variables;

use std::{ffi::OsString, fs, io, path::PathBuf, time::Duration};

use serde::{Serialize, de::DeserializeOwned};
use toml::{Table, Value};

use self::{
    command::{CommandLine, Options},
    layers::Layer,
    schema::{Schema, is_unset},
};
pub use self::{
    declare::macro_support,
    error::{ConfigError, Origin, Problem},
    rules::{Examined, Rules},
    schema::{Field, Leaf, Setting, Shape},
    units::{ByteSize, HumanDuration, UnitError},
};
use crate::{address::ListenAddress, log::LogConfig};

/// The daemons of Larder. Each has its file, its variables and its binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonKind {
    /// `larder-master`
    Master,
    /// `larder-node`
    Node,
    /// `larder-engine`
    Engine,
}

impl DaemonKind {
    pub(crate) const ALL: [Self; 3] = [Self::Master, Self::Node, Self::Engine];

    /// The name of the program.
    pub const fn binary(self) -> &'static str {
        match self {
            Self::Master => "larder-master",
            Self::Node => "larder-node",
            Self::Engine => "larder-engine",
        }
    }

    /// The file that is read unless `--config` names another. It may be missing.
    pub const fn default_file(self) -> &'static str {
        match self {
            Self::Master => "/etc/larder/master.toml",
            Self::Node => "/etc/larder/node.toml",
            Self::Engine => "/etc/larder/engine.toml",
        }
    }

    /// Starts every variable of this daemon.
    pub const fn variable_prefix(self) -> &'static str {
        match self {
            Self::Master => "LARDER_MASTER__",
            Self::Node => "LARDER_NODE__",
            Self::Engine => "LARDER_ENGINE__",
        }
    }
}

/// The whole configuration of a daemon.
pub trait DaemonConfig: Setting + Default + Serialize + DeserializeOwned {
    /// Which daemon it is.
    const KIND: DaemonKind;
    /// One sentence for the help.
    const ABOUT: &'static str;
    /// Keys that have no useful default and must be given; their default is an empty text.
    const REQUIRED: &'static [&'static str] = &[];

    /// States what must hold between and beyond the types, before any file or socket is opened.
    fn validate(&self, rules: &mut Rules<'_>);

    /// The settings that [`launch`](crate::launch) itself acts on.
    fn process(&self) -> ProcessSettings<'_>;
}

/// What every daemon does the same way, taken from wherever its configuration keeps it.
#[derive(Debug, Clone, Copy)]
pub struct ProcessSettings<'a> {
    /// How to log.
    pub log: &'a LogConfig,
    /// Where `/metrics` and `/health` are served. `None` when the daemon serves them on a port of
    /// its own, as the engine does.
    pub metrics_listen: Option<&'a ListenAddress>,
    /// How long a stop may take before tasks are abandoned.
    pub stop_grace: Duration,
}

/// What a configuration is read from.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The command line, the program's name first.
    pub args: Vec<OsString>,
    /// The environment.
    pub environment: Vec<(OsString, OsString)>,
}

impl Sources {
    /// The arguments and variables of this process.
    pub fn of_process() -> Self {
        Self { args: std::env::args_os().collect(), environment: std::env::vars_os().collect() }
    }
}

/// What a start should do.
#[derive(Debug)]
pub enum Command<C> {
    /// Run with this configuration.
    Run(Effective<C>),
    /// Print this text on standard output and end well.
    Print(String),
}

/// A configuration that passed every rule, with the origins of its values.
#[derive(Debug)]
pub struct Effective<C> {
    /// The values.
    pub config: C,
    /// What is odd about them, or unknown and allowed by `--allow-unknown-keys`.
    pub warnings: Vec<Problem>,
    layer: Layer,
    schema: Schema,
}

impl<C: Serialize> Effective<C> {
    /// The configuration as TOML, with a comment on every value that is no default.
    pub fn to_toml(&self) -> String {
        // The default configuration was serialised when the schema was made, so this one can be.
        let values = Table::try_from(&self.config).unwrap_or_default();
        print::print(&self.schema, &values, &self.layer)
    }

    /// Where the value of `key` came from.
    pub fn origin(&self, key: &str) -> Origin {
        rules::origin(&self.layer, key)
    }
}

/// Reads, checks and merges all sources of the daemon's configuration.
///
/// # Errors
/// Everything that is wrong with any of them.
pub fn load<C: DaemonConfig>(sources: &Sources) -> Result<Command<C>, ConfigError> {
    let schema = Schema::of::<C>();
    let options = match command::parse(C::KIND, C::ABOUT, &schema, &sources.args)? {
        CommandLine::Print(text) => return Ok(Command::Print(text)),
        CommandLine::Configure(options) => options,
    };
    let layer = merged_layers(C::KIND, &schema, &options, sources)?;
    let leniency = Leniency {
        unknown: options.allow_unknown_keys,
        // What is in force can be shown before all of it is given.
        not_given: options.print_only,
    };
    let effective = check::<C>(schema, layer, leniency)?;
    Ok(if options.print_only {
        Command::Print(effective.to_toml())
    } else if options.check_only {
        Command::Print(checked_report(C::KIND, &effective))
    } else {
        Command::Run(effective)
    })
}

/// Checks a configuration that was made in code rather than read: in tests, or when a daemon is
/// embedded.
///
/// # Errors
/// Every broken rule.
pub fn check_values<C: DaemonConfig>(config: &C) -> Result<(), ConfigError> {
    let values = Table::try_from(config).map_err(|error| Problem::Usage(error.to_string()))?;
    let layer = Layer { values, ..Layer::default() };
    check::<C>(Schema::of::<C>(), layer, Leniency::default()).map(drop)
}

fn merged_layers(
    kind: DaemonKind,
    schema: &Schema,
    options: &Options,
    sources: &Sources,
) -> Result<Layer, Problem> {
    let mut layer = match read_file(kind, options)? {
        Some((path, text)) => layers::file_layer(schema, path, &text),
        None => Layer::default(),
    };
    layer.cover(variables::variables_layer(kind, schema, &sources.environment));
    for (path, text) in &options.values {
        let Some(key) = schema.keys.iter().find(|key| key.path == *path) else { continue };
        let origin = Origin::Flag(format!("--{path}"));
        layer.cover(layers::text_layer(schema, path, &key.shape, text, &origin));
    }
    Ok(layer)
}

/// A missing file is right unless somebody named it.
fn read_file(kind: DaemonKind, options: &Options) -> Result<Option<(PathBuf, String)>, Problem> {
    let path = options.file.clone().unwrap_or_else(|| PathBuf::from(kind.default_file()));
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some((path, text))),
        Err(error) if error.kind() == io::ErrorKind::NotFound && options.file.is_none() => Ok(None),
        Err(source) => Err(Problem::Unreadable { path, source }),
    }
}

/// What is let pass.
#[derive(Debug, Clone, Copy, Default)]
struct Leniency {
    /// Unknown keys become warnings.
    unknown: bool,
    /// Keys that must be given may be missing.
    not_given: bool,
}

/// Rules are stated only about values of the right form; unknown keys do not hinder them.
fn check<C: DaemonConfig>(
    schema: Schema,
    mut layer: Layer,
    leniency: Leniency,
) -> Result<Effective<C>, ConfigError> {
    let (unknown, malformed): (Vec<_>, Vec<_>) = std::mem::take(&mut layer.problems)
        .into_iter()
        .partition(|problem| matches!(problem, Problem::Unknown { .. }));
    let all_well_formed = malformed.is_empty();
    let (mut problems, mut warnings) = (malformed, Vec::new());
    if leniency.unknown { &mut warnings } else { &mut problems }.extend(unknown);
    if !all_well_formed {
        return Err(ConfigError { problems });
    }

    let values = effective_values(&schema, &layer);
    let config: C = values
        .clone()
        .try_into()
        .map_err(|error: toml::de::Error| Problem::Usage(error.message().to_owned()))?;
    let mut rules = Rules::new(&schema, &values, &layer);
    for key in schema.keys.iter().filter(|key| key.required && !leniency.not_given) {
        let given = !schema::lookup(&values, &key.path).is_some_and(is_unset);
        rules.key(&*key.path).must(given, "be given: it has no default");
    }
    config.validate(&mut rules);
    let (broken, odd) = rules.finish();
    problems.extend(broken);
    warnings.extend(odd);
    if problems.is_empty() {
        Ok(Effective { config, warnings, layer, schema })
    } else {
        Err(ConfigError { problems })
    }
}

/// The given values over the defaults, without the optional keys that are not set.
fn effective_values(schema: &Schema, given: &Layer) -> Table {
    let mut values = schema.defaults.clone();
    layers::merge(&mut values, given.values.clone());
    remove_unset(&schema.fields, &mut values);
    values
}

fn remove_unset(fields: &[Field], values: &mut Table) {
    for field in fields {
        match (&field.shape, values.get_mut(field.name)) {
            (Shape::Leaf(leaf), Some(value)) if leaf.optional && is_unset(value) => {
                values.remove(field.name);
            }
            (Shape::Table(fields), Some(Value::Table(values))) => remove_unset(fields, values),
            (Shape::Tables(fields), Some(Value::Array(entries))) => {
                let tables = entries.iter_mut().filter_map(Value::as_table_mut);
                tables.for_each(|values| remove_unset(fields, values));
            }
            _ => {}
        }
    }
}

fn checked_report<C>(kind: DaemonKind, effective: &Effective<C>) -> String {
    let mut report: String =
        effective.warnings.iter().map(|warning| format!("warning: {warning}\n")).collect();
    let given = effective.layer.origins.keys().filter(|key| !key.contains('[')).count();
    report.push_str(&format!(
        "{}: the configuration is right: {given} of {} settings given, the rest by default; files, \
         ports and memory are tried at the start\n",
        kind.binary(),
        effective.schema.keys.len(),
    ));
    report
}

#[cfg(test)]
mod tests;
