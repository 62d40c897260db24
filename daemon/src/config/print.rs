//! `--print-config`: the configuration in effect, as TOML that reads back as the same.

use std::fmt::Write;

use toml::{Table, Value};

use super::{
    error::Origin,
    layers::Layer,
    rules::origin,
    schema::{Field, Shape, join},
};

/// Every key with its value. A comment names the origin of what is not a default.
pub(crate) fn print(fields: &[Field], values: &Table, layer: &Layer) -> String {
    let mut out = String::new();
    print_table(&mut out, fields, "", values, layer);
    out.trim_start().to_owned()
}

/// Single values first: below a table header they would belong to that table.
fn print_table(out: &mut String, fields: &[Field], path: &str, values: &Table, layer: &Layer) {
    for field in fields {
        let value = values.get(field.name);
        let has_no_header = match &field.shape {
            Shape::Leaf(_) => true,
            Shape::Table(_) => false,
            // Left out, it would read back as the default.
            Shape::Tables(_) => value.and_then(Value::as_array).is_some_and(Vec::is_empty),
        };
        if has_no_header {
            print_value(out, &join(path, field.name), field.name, value, layer);
        }
    }
    for field in fields {
        let inner = join(path, field.name);
        match (&field.shape, values.get(field.name)) {
            (Shape::Table(fields), Some(Value::Table(values))) => {
                let _ = writeln!(out, "\n[{inner}]");
                print_table(out, fields, &inner, values, layer);
            }
            (Shape::Tables(fields), Some(Value::Array(entries))) => {
                for (index, entry) in entries.iter().enumerate() {
                    let Value::Table(values) = entry else { continue };
                    let _ = writeln!(out, "\n[[{}]]", without_indexes(&inner));
                    print_table(out, fields, &format!("{inner}[{index}]"), values, layer);
                }
            }
            _ => {}
        }
    }
}

fn print_value(out: &mut String, path: &str, name: &str, value: Option<&Value>, layer: &Layer) {
    let text = value.map_or_else(|| "\"\"".to_owned(), Value::to_string);
    let _ = match (origin(layer, path), value) {
        (Origin::Default, Some(_)) => writeln!(out, "{name} = {text}"),
        (Origin::Default, None) => writeln!(out, "{name} = {text}  # not set"),
        (origin, _) => writeln!(out, "{name} = {text}  # {origin}"),
    };
}

/// `a[0].b` is the header `a.b`: it belongs to the entry of `a` printed last.
fn without_indexes(path: &str) -> String {
    path.split('.').map(|word| word.split('[').next().unwrap_or(word)).collect::<Vec<_>>().join(".")
}
