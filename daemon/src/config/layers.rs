//! The sources of a configuration, read one by one into layers of known, well-formed values.
//!
//! A layer holds values that passed the type of their key, each with its origin; what did not pass
//! is a problem with the same origin. Laying a layer over another replaces whole values: a list
//! from a variable replaces the list of the file, it does not extend it.

use std::{collections::BTreeMap, ops::Range, path::PathBuf, sync::Arc};

use serde::Deserialize;
use toml::{
    Spanned, Table, Value,
    de::{DeTable, DeValue, ValueDeserializer},
};

use super::{
    error::{Origin, Problem, nearest},
    schema::{Field, Kind, Leaf, Schema, Shape, join},
};

/// Values with their origins, and what was wrong with the rest.
#[derive(Debug, Default)]
pub(crate) struct Layer {
    pub(crate) values: Table,
    /// By key, and by `ssd.path[0].capacity` within lists of tables.
    pub(crate) origins: BTreeMap<String, Origin>,
    pub(crate) problems: Vec<Problem>,
}

impl Layer {
    /// Lays `upper` over this layer.
    pub(crate) fn cover(&mut self, upper: Self) {
        for key in upper.origins.keys() {
            let inside = format!("{key}[");
            self.origins.retain(|old, _| !old.starts_with(&inside));
        }
        self.origins.extend(upper.origins);
        self.problems.extend(upper.problems);
        merge(&mut self.values, upper.values);
    }
}

/// Lays the tables of `upper` over those of `lower`, value by value.
pub(crate) fn merge(lower: &mut Table, upper: Table) {
    for (name, value) in upper {
        match (lower.get_mut(&name), value) {
            (Some(Value::Table(lower)), Value::Table(upper)) => merge(lower, upper),
            (_, value) => {
                lower.insert(name, value);
            }
        }
    }
}

/// Reads the text of a configuration file.
pub(crate) fn file_layer(schema: &Schema, path: PathBuf, text: &str) -> Layer {
    let path = Arc::new(path);
    let locate = |span: Range<usize>| Origin::File {
        path: Arc::clone(&path),
        line: 1 + text[..span.start.min(text.len())].matches('\n').count(),
    };
    let mut reader = Reader { schema, locate: &locate, layer: Layer::default() };
    match DeTable::parse(text) {
        Ok(table) => reader.layer.values = reader.table(&schema.fields, "", table.into_inner()),
        Err(error) => reader.layer.problems.push(Problem::Syntax {
            origin: locate(error.span().unwrap_or_default()),
            message: error.message().trim_end().replace('\n', ", "),
        }),
    }
    reader.layer
}

/// Reads the value that a variable or flag gives to the key `path`.
pub(crate) fn text_layer(
    schema: &Schema,
    path: &str,
    shape: &Shape,
    text: &str,
    origin: &Origin,
) -> Layer {
    let locate = |_| origin.clone();
    let mut reader = Reader { schema, locate: &locate, layer: Layer::default() };
    let value = match shape {
        Shape::Leaf(leaf) => reader.leaf_text(leaf, path, text, origin),
        Shape::Table(_) | Shape::Tables(_) => match DeValue::parse(text) {
            Ok(value) => reader.value(shape, path, value),
            Err(_) => {
                let written = Value::String(text.to_owned());
                reader.refuse(path, &written, origin.clone(), &tables_form(shape));
                None
            }
        },
    };
    if let Some(value) = value {
        insert(&mut reader.layer.values, path, value);
    }
    reader.layer
}

/// Puts `value` at `path`, making the tables on the way.
fn insert(table: &mut Table, path: &str, value: Value) {
    match path.split_once('.') {
        None => {
            table.insert(path.to_owned(), value);
        }
        Some((head, rest)) => {
            let inner = table.entry(head).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}

/// Holds values against the schema and notes origins and problems.
struct Reader<'a> {
    schema: &'a Schema,
    locate: &'a dyn Fn(Range<usize>) -> Origin,
    layer: Layer,
}

impl Reader<'_> {
    fn table(&mut self, fields: &[Field], path: &str, table: DeTable<'_>) -> Table {
        let mut known = Table::new();
        for (name, value) in table {
            let key = join(path, name.get_ref());
            match fields.iter().find(|field| field.name == name.get_ref().as_ref()) {
                None => self.unknown(fields, path, key, name.span(), &value),
                Some(field) => {
                    if let Some(value) = self.value(&field.shape, &key, value) {
                        known.insert(field.name.to_owned(), value);
                    }
                }
            }
        }
        known
    }

    fn value(&mut self, shape: &Shape, path: &str, value: Spanned<DeValue<'_>>) -> Option<Value> {
        let origin = (self.locate)(value.span());
        match (shape, value.get_ref()) {
            (Shape::Table(fields), DeValue::Table(table)) => {
                Some(Value::Table(self.table(fields, path, table.clone())))
            }
            (Shape::Tables(fields), DeValue::Array(entries))
                if entries.iter().all(|entry| entry.get_ref().is_table()) =>
            {
                self.layer.origins.insert(path.to_owned(), origin);
                let entries = entries.iter().enumerate();
                Some(Value::Array(
                    entries
                        .filter_map(|(index, entry)| {
                            let entry = entry.get_ref().as_table()?.clone();
                            let entry = self.table(fields, &format!("{path}[{index}]"), entry);
                            Some(Value::Table(entry))
                        })
                        .collect(),
                ))
            }
            (Shape::Leaf(leaf), _) => {
                let written = self.plain(path, value)?;
                self.accept(leaf, path, written, origin)
            }
            (Shape::Table(_) | Shape::Tables(_), _) => {
                let written = self.plain(path, value)?;
                self.refuse(path, &written, origin, &tables_form(shape));
                None
            }
        }
    }

    /// The value without its places in the text. Only a number beyond 64 bits has no such form.
    fn plain(&mut self, path: &str, value: Spanned<DeValue<'_>>) -> Option<Value> {
        let origin = (self.locate)(value.span());
        match Value::deserialize(ValueDeserializer::from(value)) {
            Ok(value) => Some(value),
            Err(error) => {
                let message = format!("{path}: {}", error.message().trim_end());
                self.layer.problems.push(Problem::Syntax { origin, message });
                None
            }
        }
    }

    fn leaf_text(&mut self, leaf: &Leaf, path: &str, text: &str, origin: &Origin) -> Option<Value> {
        // An optional number is unset by an empty text too, which is no number.
        let value = if leaf.optional && text.is_empty() {
            Some(Value::String(String::new()))
        } else {
            parse_text(&leaf.kind, text)
        };
        // What is no value of that kind at all is shown as it was written.
        let value = value.unwrap_or_else(|| Value::String(text.to_owned()));
        self.accept(leaf, path, value, origin.clone())
    }

    fn accept(&mut self, leaf: &Leaf, path: &str, value: Value, origin: Origin) -> Option<Value> {
        if leaf.accepts(&value) {
            self.layer.origins.insert(path.to_owned(), origin);
            Some(value)
        } else {
            self.refuse(path, &value, origin, &leaf.form);
            None
        }
    }

    fn refuse(&mut self, path: &str, value: &Value, origin: Origin, form: &str) {
        self.layer.problems.push(Problem::Invalid {
            key: path.to_owned(),
            value: Some(value.to_string()),
            origin,
            rule: format!("be {form}"),
        });
    }

    /// A table is compared with tables, a value with keys: beside it first, then everywhere.
    fn unknown(
        &mut self,
        siblings: &[Field],
        table: &str,
        key: String,
        span: Range<usize>,
        value: &Spanned<DeValue<'_>>,
    ) {
        let beside = |tables: bool| {
            let fits = move |field: &&Field| matches!(field.shape, Shape::Leaf(_)) != tables;
            siblings.iter().filter(fits).map(|field| join(table, field.name)).collect::<Vec<_>>()
        };
        let is_table = value.get_ref().is_table();
        let mut known = beside(is_table);
        if is_table {
            known.extend(self.schema.tables.keys().cloned());
        } else {
            known.extend(self.schema.keys.iter().map(|key| key.path.clone()));
        }
        let nearest = nearest(&key, known.iter().map(String::as_str));
        let what = if is_table { "table" } else { "key" };
        let origin = (self.locate)(span);
        self.layer.problems.push(Problem::Unknown { what, name: key, origin, nearest });
    }
}

fn tables_form(shape: &Shape) -> String {
    match shape {
        Shape::Tables(fields) => {
            let keys: Vec<_> = fields.iter().map(|field| format!("{} = ...", field.name)).collect();
            format!("a list of tables, like [{{{}}}]", keys.join(", "))
        }
        Shape::Table(_) | Shape::Leaf(_) => "a table".to_owned(),
    }
}

/// The TOML value that a variable or flag means. Texts need no quotes there; a list is separated by
/// commas, or written as in TOML when its texts hold commas themselves.
fn parse_text(kind: &Kind, text: &str) -> Option<Value> {
    match kind {
        Kind::Text => Some(Value::String(text.to_owned())),
        Kind::Bool => text.parse().ok().map(Value::Boolean),
        Kind::Integer => text.parse().ok().map(Value::Integer),
        Kind::Float => text.parse().ok().map(Value::Float),
        Kind::List(_) if text.is_empty() => Some(Value::Array(Vec::new())),
        Kind::List(_) if text.starts_with('[') => {
            let value = DeValue::parse(text).ok()?;
            Value::deserialize(ValueDeserializer::from(value)).ok()
        }
        Kind::List(kind) => {
            let parts = text.split(',').map(|part| parse_text(kind, part.trim()));
            parts.collect::<Option<Vec<_>>>().map(Value::Array)
        }
    }
}
