//! The command line of a daemon: one flag a key, and a few of its own.

use std::{ffi::OsString, path::PathBuf};

use clap::{
    Arg, ArgAction, ArgMatches, Command,
    error::{ContextKind, ErrorKind},
};

use super::{
    DaemonKind,
    error::{Origin, Problem, nearest},
    schema::{Field, Key, Kind, Leaf, Schema, Shape, join},
    variables::variable_name,
};

/// What the command line says.
pub(crate) enum CommandLine {
    /// Print this and end: help or version.
    Print(String),
    /// Read the configuration.
    Configure(Options),
}

/// The flags that are no keys, and the values of those that are.
pub(crate) struct Options {
    /// `--config`.
    pub(crate) file: Option<PathBuf>,
    pub(crate) check_only: bool,
    pub(crate) print_only: bool,
    pub(crate) allow_unknown_keys: bool,
    /// Key and text, in the order of the schema.
    pub(crate) values: Vec<(String, String)>,
}

const CONFIG: &str = "config";
const CHECK: &str = "check-config";
const PRINT: &str = "print-config";
const ALLOW_UNKNOWN: &str = "allow-unknown-keys";

/// Reads the arguments, the name of the program first.
pub(crate) fn parse(
    kind: DaemonKind,
    about: &'static str,
    schema: &Schema,
    args: &[OsString],
) -> Result<CommandLine, Problem> {
    match command(kind, about, schema).try_get_matches_from(args) {
        Ok(matches) => Ok(CommandLine::Configure(options(schema, &matches))),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                Ok(CommandLine::Print(error.to_string()))
            }
            ErrorKind::UnknownArgument => Err(unknown_flag(schema, &error)),
            _ => Err(Problem::Usage(first_line(&error.to_string()))),
        },
    }
}

fn command(kind: DaemonKind, about: &'static str, schema: &Schema) -> Command {
    let command = Command::new(kind.binary())
        .version(env!("CARGO_PKG_VERSION"))
        .about(about)
        .after_help(sources_help(kind, schema))
        .next_line_help(true)
        .args([
            Arg::new(CONFIG)
                .long(CONFIG)
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help(format!("Read this file instead of {}", kind.default_file())),
            Arg::new(CHECK).long(CHECK).action(ArgAction::SetTrue).help(
                "Check keys, values and rules of all sources, and end. Opens no other file and \
                     no port and takes no memory: whether these are there shows at a start",
            ),
            Arg::new(PRINT).long(PRINT).action(ArgAction::SetTrue).help(
                "Print the configuration in force as TOML, with the origin of each value, and end",
            ),
            Arg::new(ALLOW_UNKNOWN).long(ALLOW_UNKNOWN).action(ArgAction::SetTrue).help(
                "Warn of unknown keys and variables instead of refusing them, for a rollback",
            ),
        ]);
    schema.keys.iter().fold(command, |command, key| command.arg(key_flag(schema, key)))
}

fn key_flag(schema: &Schema, key: &Key) -> Arg {
    let flag = Arg::new(key.path.clone())
        .long(key.path.clone())
        .value_name(placeholder(&key.shape))
        .help(key_help(key));
    let table = key.path.rsplit_once('.').map(|(table, _)| table);
    let flag = match table {
        None => flag.help_heading("Settings"),
        Some(table) => {
            let docs = schema.tables.get(table).map_or("", |docs| docs.trim_end_matches('.'));
            flag.help_heading(format!("[{table}] {docs}"))
        }
    };
    match &key.shape {
        // `--insecure` alone means true.
        Shape::Leaf(leaf) if leaf.kind == Kind::Bool => {
            flag.num_args(0..=1).default_missing_value("true")
        }
        // A flag for a list can be repeated.
        Shape::Leaf(leaf) if matches!(leaf.kind, Kind::List(_)) => flag.action(ArgAction::Append),
        _ => flag,
    }
}

fn placeholder(shape: &Shape) -> String {
    match shape {
        Shape::Leaf(leaf) => match leaf.kind {
            Kind::List(_) => format!("{0},{0}...", leaf.placeholder),
            _ => leaf.placeholder.to_owned(),
        },
        Shape::Table(_) | Shape::Tables(_) => "TABLES".to_owned(),
    }
}

fn key_help(key: &Key) -> String {
    let default = match &key.default {
        _ if key.required => "required".to_owned(),
        None => "default: not set".to_owned(),
        Some(value) if value.as_array().is_some_and(Vec::is_empty) => "default: none".to_owned(),
        Some(value) => match value.as_str().filter(|text| !text.is_empty()) {
            Some(text) => format!("default: {text}"),
            None => format!("default: {value}"),
        },
    };
    let mut help = key.docs.clone();
    if let Shape::Leaf(Leaf { placeholder: Leaf::CHOICE, form, .. }) = &key.shape {
        help.push_str(&format!(" [{form}]"));
    }
    help.push_str(&format!(" [{default}]"));
    if let Shape::Tables(fields) = &key.shape {
        help.push_str(&format!("\nOne [[{}]] table each, with the keys:", key.path));
        for Field { name, docs, .. } in fields {
            help.push_str(&format!("\n  {name}: {docs}"));
        }
    }
    help
}

fn sources_help(kind: DaemonKind, schema: &Schema) -> String {
    // Any key of a table shows the rule.
    let in_table = schema.keys.iter().find_map(|key| key.path.split_once('.'));
    let (table, name) = in_table.unwrap_or_default();
    let key = join(table, name);
    format!(
        "Every setting can stand in three places; a later one wins:\n  \
         1. the file {file} (TOML), where --{key} is `{name}` in the table [{table}]\n  \
         2. a variable, here {variable}: the key in capitals, `__` for each dot\n  \
         3. a flag, as above\n\n\
         Sizes and durations carry a unit (8GiB, 250ms). An empty text takes back an optional \
         setting.\nExit codes: 0 stopped when asked to, 1 failed, 2 usage or configuration.",
        file = kind.default_file(),
        variable = variable_name(kind, &key),
    )
}

fn options(schema: &Schema, matches: &ArgMatches) -> Options {
    let values = schema.keys.iter().filter_map(|key| {
        let texts = matches.get_many::<String>(&key.path)?.cloned().collect::<Vec<_>>();
        Some((key.path.clone(), texts.join(",")))
    });
    Options {
        file: matches.get_one::<PathBuf>(CONFIG).cloned(),
        check_only: matches.get_flag(CHECK),
        print_only: matches.get_flag(PRINT),
        allow_unknown_keys: matches.get_flag(ALLOW_UNKNOWN),
        values: values.collect(),
    }
}

fn unknown_flag(schema: &Schema, error: &clap::Error) -> Problem {
    let written = error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
    let name = written.split('=').next().unwrap_or(&written).to_owned();
    let known = schema.keys.iter().map(|key| key.path.as_str());
    let known = known.chain([CONFIG, CHECK, PRINT, ALLOW_UNKNOWN, "help", "version"]);
    let nearest = nearest(name.trim_start_matches('-'), known).map(|flag| format!("--{flag}"));
    let what = if name.starts_with('-') { "flag" } else { "argument" };
    Problem::Unknown { what, origin: Origin::Flag(name.clone()), name, nearest }
}

/// Without clap's own prefix and its usage text.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}
