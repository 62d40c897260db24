//! `--print-config`: the configuration in effect, as TOML that reads back as the same.

use std::fmt::Write;

use toml::{Table, Value};

use super::{
    error::Origin,
    layers::Layer,
    rules::origin,
    schema::{Field, Schema, Shape, is_unset, join},
};

/// Every key with its value. A comment names the origin of what is not a default, and says what must
/// still be given.
pub(crate) fn print(schema: &Schema, values: &Table, layer: &Layer) -> String {
    let mut page = Page { out: String::new(), schema, layer };
    page.table(&schema.fields, "", values);
    page.out.trim_start().to_owned()
}

struct Page<'a> {
    out: String,
    schema: &'a Schema,
    layer: &'a Layer,
}

impl Page<'_> {
    /// Single values first: below a table header they would belong to that table.
    fn table(&mut self, fields: &[Field], path: &str, values: &Table) {
        for field in fields {
            let value = values.get(field.name);
            let has_no_header = match &field.shape {
                Shape::Leaf(_) => true,
                Shape::Table(_) => false,
                // Left out, it would read back as the default.
                Shape::Tables(_) => value.and_then(Value::as_array).is_some_and(Vec::is_empty),
            };
            if has_no_header {
                self.value(&join(path, field.name), field.name, value);
            }
        }
        for field in fields {
            let inner = join(path, field.name);
            match (&field.shape, values.get(field.name)) {
                (Shape::Table(fields), Some(Value::Table(values))) => {
                    let _ = writeln!(self.out, "\n[{inner}]");
                    self.table(fields, &inner, values);
                }
                (Shape::Tables(fields), Some(Value::Array(entries))) => {
                    for (index, entry) in entries.iter().enumerate() {
                        let Value::Table(values) = entry else { continue };
                        let _ = writeln!(self.out, "\n[[{}]]", without_indexes(&inner));
                        self.table(fields, &format!("{inner}[{index}]"), values);
                    }
                }
                _ => {}
            }
        }
    }

    fn value(&mut self, path: &str, name: &str, value: Option<&Value>) {
        let text = value.map_or_else(|| "\"\"".to_owned(), Value::to_string);
        let required = self.schema.key(path).is_some_and(|key| key.required);
        let remark = match (origin(self.layer, path), value) {
            (_, Some(value)) if required && is_unset(value) => "  # must be given".to_owned(),
            (Origin::Default, Some(_)) => String::new(),
            (Origin::Default, None) => "  # not set".to_owned(),
            (origin, _) => format!("  # {origin}"),
        };
        let _ = writeln!(self.out, "{name} = {text}{remark}");
    }
}

/// `a[0].b` is the header `a.b`: it belongs to the entry of `a` printed last.
fn without_indexes(path: &str) -> String {
    path.split('.').map(|word| word.split('[').next().unwrap_or(word)).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use crate::{
        config::{
            Command, ConfigError, DaemonConfig, DaemonKind, ProcessSettings, Rules, Sources,
            check_values, load,
        },
        log::LogConfig,
    };

    crate::settings! {
        /// An engine that cannot run without its model.
        struct Engine {
            /// What people call it.
            name: String,
            /// The model.
            model: Model,
            /// Logs.
            log: LogConfig,
        }
    }

    crate::settings! {
        /// The model.
        struct Model {
            /// The file.
            path: PathBuf,
        }
    }

    impl DaemonConfig for Engine {
        const KIND: DaemonKind = DaemonKind::Engine;
        const ABOUT: &'static str = "Serves a model";
        const REQUIRED: &'static [&'static str] = &["model.path"];

        fn validate(&self, _: &mut Rules<'_>) {}

        fn process(&self) -> ProcessSettings<'_> {
            let stop_grace = std::time::Duration::from_secs(1);
            ProcessSettings { log: &self.log, metrics_listen: None, stop_grace }
        }
    }

    fn start(args: &[&str]) -> Result<String, ConfigError> {
        let args = ["larder-engine"].iter().chain(args).map(Into::into).collect();
        match load::<Engine>(&Sources { args, environment: Vec::new() })? {
            Command::Print(text) => Ok(text),
            Command::Run(effective) => Ok(effective.to_toml()),
        }
    }

    #[test]
    fn what_must_be_given_is_marked_when_printed_and_refused_at_a_start() {
        let printed = start(&["--print-config"]).unwrap();
        assert!(printed.contains("[model]\npath = \"\"  # must be given\n"), "{printed}");
        assert!(printed.starts_with("name = \"\"\n"), "an empty text may be meant: {printed}");
        for args in [&[][..], &["--check-config"]] {
            let refusal = start(args).unwrap_err().to_string();
            assert_eq!(refusal, "model.path is not set: must be given: it has no default");
        }
        assert!(check_values(&Engine::default()).is_err());
        let given = start(&["--model.path=m.gguf", "--print-config"]).unwrap();
        assert!(given.contains("path = \"m.gguf\"  # from --model.path\n"), "{given}");
        assert!(start(&["--model.path=m.gguf", "--check-config"]).is_ok());
    }

    #[test]
    fn the_help_speaks_of_the_daemons_own_keys() {
        let help = start(&["--help"]).unwrap();
        assert!(help.contains("The file. [required]"), "{help}");
        assert!(help.contains("What people call it. [default: \"\"]"), "{help}");
        assert!(help.contains("--model.path is `path` in the table [model]"), "{help}");
        assert!(help.contains("a variable, here LARDER_ENGINE__MODEL__PATH:"), "{help}");
    }
}
