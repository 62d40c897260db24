//! What a configuration may hold: every key with its type, its doc text and its default.
//!
//! The schema comes from the types themselves (`settings!`), never from a second list, and not from
//! a serialised default either: an optional key that is not set would be missing there. Everything
//! that has to know the keys (file, variables, flags, help, printing, suggestions) asks here.
//!
//! Optional keys: an `Option` defaults to "not set", and an empty string means "not set" in every
//! source, so that a variable or a flag can take back what the file gave.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use serde::{Serialize, de::DeserializeOwned};
use toml::{Table, Value};

use super::DaemonConfig;

/// A type that can stand in a configuration: one value, or a table of them.
pub trait Setting: Serialize + DeserializeOwned {
    /// What may stand there.
    fn shape() -> Shape;
}

/// What may stand at a place of the configuration.
#[derive(Debug, Clone)]
pub enum Shape {
    /// One value.
    Leaf(Leaf),
    /// A table: `[dram]`.
    Table(Vec<Field>),
    /// A list of tables: `[[ssd.path]]`.
    Tables(Vec<Field>),
}

/// One entry of a table.
#[derive(Debug, Clone)]
pub struct Field {
    /// The last word of the key.
    pub name: &'static str,
    /// The doc comment of the field, its lines joined.
    pub docs: String,
    /// What may stand there.
    pub shape: Shape,
}

/// One value of the configuration.
#[derive(Debug, Clone)]
pub struct Leaf {
    /// How the text of a variable or flag becomes a value.
    pub(crate) kind: Kind,
    /// Stands for the value in the help: `SIZE`.
    pub(crate) placeholder: &'static str,
    /// Completes "must be ...": `a size with a unit, like 8GiB`.
    pub(crate) form: String,
    /// Whether the key may be unset.
    pub(crate) optional: bool,
    /// Whether a value of this type can be made of it.
    accepts: fn(&Value) -> bool,
}

/// How the text of a variable or flag becomes a TOML value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Bool,
    Integer,
    Float,
    List(Box<Kind>),
}

impl Leaf {
    /// Stands in the help for one of a few words; their list is the form.
    pub const CHOICE: &'static str = "CHOICE";

    /// A value that is written as a text; `T` reads it with its `Deserialize`.
    pub fn text<T: DeserializeOwned>(placeholder: &'static str, form: impl Into<String>) -> Self {
        Self::of::<T>(Kind::Text, placeholder, form)
    }

    fn of<T: DeserializeOwned>(
        kind: Kind,
        placeholder: &'static str,
        form: impl Into<String>,
    ) -> Self {
        let accepts = |value: &Value| T::deserialize(value.clone()).is_ok();
        Self { kind, placeholder, form: form.into(), optional: false, accepts }
    }

    /// Whether `value` has the right type and form. "Not set" is right for an optional key.
    pub(crate) fn accepts(&self, value: &Value) -> bool {
        (self.optional && is_unset(value)) || (self.accepts)(value)
    }
}

/// An empty string means "not set" for an optional key.
pub(crate) fn is_unset(value: &Value) -> bool {
    value.as_str() == Some("")
}

impl<T: Setting> Setting for Option<T> {
    fn shape() -> Shape {
        match T::shape() {
            Shape::Leaf(leaf) => Shape::Leaf(Leaf {
                optional: true,
                form: format!("{}, or \"\" for none", leaf.form),
                ..leaf
            }),
            Shape::Table(_) | Shape::Tables(_) => {
                panic!("only single values can be optional; a table is there with its defaults")
            }
        }
    }
}

impl<T: Setting> Setting for Vec<T> {
    fn shape() -> Shape {
        match T::shape() {
            Shape::Leaf(leaf) => Shape::Leaf(Leaf::of::<Self>(
                Kind::List(Box::new(leaf.kind)),
                leaf.placeholder,
                format!("a list, each {}", leaf.form),
            )),
            Shape::Table(fields) => Shape::Tables(fields),
            Shape::Tables(_) => panic!("a list of lists of tables has no key that names its parts"),
        }
    }
}

macro_rules! plain_settings {
    ($($type:ty => $kind:expr, $placeholder:literal, $form:expr;)*) => {$(
        impl Setting for $type {
            fn shape() -> Shape {
                Shape::Leaf(Leaf::of::<Self>($kind, $placeholder, $form))
            }
        }
    )*};
}

plain_settings! {
    bool => Kind::Bool, "BOOL", "true or false";
    u16 => Kind::Integer, "NUMBER", "a whole number from 0 to 65535";
    u32 => Kind::Integer, "NUMBER", "a whole number from 0 to 4294967295";
    u64 => Kind::Integer, "NUMBER", "a whole number, 0 or more";
    usize => Kind::Integer, "NUMBER", "a whole number, 0 or more";
    i32 => Kind::Integer, "NUMBER", "a whole number from -2147483648 to 2147483647";
    f64 => Kind::Float, "NUMBER", "a number";
    String => Kind::Text, "TEXT", "a text";
    PathBuf => Kind::Text, "PATH", "a path";
    IpAddr => Kind::Text, "IP", "an IP address, like 10.0.0.1";
}

/// One key with all that is known of it. Its shape is a leaf or a list of tables.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    /// The whole key: `dram.capacity`.
    pub(crate) path: String,
    pub(crate) docs: String,
    pub(crate) shape: Shape,
    /// `None`: not set.
    pub(crate) default: Option<Value>,
    /// Whether it must be given.
    pub(crate) required: bool,
}

/// All keys of one daemon.
#[derive(Debug)]
pub(crate) struct Schema {
    pub(crate) fields: Vec<Field>,
    /// In the order of the types, tables after the single values beside them.
    pub(crate) keys: Vec<Key>,
    /// Doc text of each table by its path.
    pub(crate) tables: BTreeMap<String, String>,
    /// The default of everything, unset keys left out.
    pub(crate) defaults: Table,
}

impl Schema {
    /// Panics when the type cannot serve as a configuration: that is a mistake in our own code,
    /// and any start or test of the daemon shows it.
    pub(crate) fn of<C: DaemonConfig>() -> Self {
        let Shape::Table(fields) = C::shape() else { panic!("a configuration is a table") };
        let defaults = Table::try_from(C::default()).unwrap_or_else(|error| {
            panic!("the default configuration must be expressible as TOML: {error}")
        });
        let mut schema =
            Self { fields: Vec::new(), keys: Vec::new(), tables: BTreeMap::new(), defaults };
        schema.collect("", &fields);
        schema.fields = fields;
        for path in C::REQUIRED {
            let key = schema.keys.iter_mut().find(|key| key.path == *path);
            let key = key.unwrap_or_else(|| panic!("{path} must be given, but is no key"));
            let empty = key.default.as_ref().is_some_and(is_unset);
            assert!(empty, "{path}: a key that must be given defaults to an empty text");
            key.required = true;
        }
        schema
    }

    fn collect(&mut self, table: &str, fields: &[Field]) {
        let (subtables, values): (Vec<_>, Vec<_>) =
            fields.iter().partition(|field| matches!(field.shape, Shape::Table(_)));
        for field in values {
            let path = join(table, field.name);
            let default = lookup(&self.defaults, &path).cloned();
            check_own_key(&path, field, default.as_ref());
            let (docs, shape) = (field.docs.clone(), field.shape.clone());
            self.keys.push(Key { path, docs, shape, default, required: false });
        }
        for field in subtables {
            let path = join(table, field.name);
            self.tables.insert(path.clone(), field.docs.clone());
            if let Shape::Table(fields) = &field.shape {
                self.collect(&path, fields);
            }
        }
    }

    /// The key with this very path.
    pub(crate) fn key(&self, path: &str) -> Option<&Key> {
        self.keys.iter().find(|key| key.path == path)
    }

    /// Whether `path` names a key, `ssd.path[0].capacity` included.
    pub(crate) fn knows(&self, path: &str) -> bool {
        let mut fields = &self.fields;
        let mut segments = path.split('.').peekable();
        while let Some(segment) = segments.next() {
            let name = segment.split('[').next().unwrap_or(segment);
            let Some(field) = fields.iter().find(|field| field.name == name) else { return false };
            fields = match &field.shape {
                Shape::Leaf(_) => return segments.peek().is_none(),
                Shape::Table(fields) | Shape::Tables(fields) => fields,
            };
        }
        true
    }
}

/// What must hold of every key we define. See `Schema::of` for why it may panic.
fn check_own_key(path: &str, field: &Field, default: Option<&Value>) {
    let name = field.name;
    assert!(
        !name.contains("__") && !name.starts_with('_') && !name.ends_with('_'),
        "{path}: `__` separates the words of a variable, so a key cannot hold it"
    );
    if let Shape::Leaf(leaf) = &field.shape {
        assert_eq!(
            leaf.optional,
            default.is_none(),
            "{path}: an optional key defaults to unset, any other needs a default"
        );
        if let Some(default) = default {
            assert!(leaf.accepts(default), "{path}: its own default {default} is refused");
        }
    }
}

/// `dram` and `capacity` give `dram.capacity`.
pub(crate) fn join(table: &str, name: &str) -> String {
    if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") }
}

/// The value at `path`, which may go through lists: `ssd.path[0].capacity`.
pub(crate) fn lookup<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    let (head, rest) = path.split_once('.').map_or((path, None), |(head, rest)| (head, Some(rest)));
    let value = match head.split_once('[') {
        None => table.get(head)?,
        Some((name, index)) => {
            let index: usize = index.trim_end_matches(']').parse().ok()?;
            table.get(name)?.as_array()?.get(index)?
        }
    };
    match rest {
        None => Some(value),
        Some(rest) => lookup(value.as_table()?, rest),
    }
}
