//! What a daemon's `validate` uses to state its rules.

use std::fmt;

use toml::{Table, Value};

use super::{
    error::{Origin, Problem},
    layers::Layer,
    schema::{Schema, is_unset, lookup},
};

/// Collects broken rules, so that one start tells all of them.
#[derive(Debug)]
pub struct Rules<'a> {
    schema: &'a Schema,
    values: &'a Table,
    layer: &'a Layer,
    problems: Vec<Problem>,
    warnings: Vec<Problem>,
}

/// One key under examination. See [`Rules::key`].
#[derive(Debug)]
pub struct Examined<'r, 'a> {
    rules: &'r mut Rules<'a>,
    key: String,
}

impl<'a> Rules<'a> {
    pub(crate) fn new(schema: &'a Schema, values: &'a Table, layer: &'a Layer) -> Self {
        Self { schema, values, layer, problems: Vec::new(), warnings: Vec::new() }
    }

    /// Problems, then warnings.
    pub(crate) fn finish(self) -> (Vec<Problem>, Vec<Problem>) {
        (self.problems, self.warnings)
    }

    /// Examines the key `key`: `dram.capacity`, or `ssd.path[0].capacity` in a list of tables.
    ///
    /// Panics when there is no such key. All rules are stated at every start, so a misspelt name
    /// in a `validate` cannot hide.
    pub fn key(&mut self, key: impl Into<String>) -> Examined<'_, 'a> {
        let key = key.into();
        assert!(self.schema.knows(&key), "a rule names {key}, which is no key");
        Examined { rules: self, key }
    }

    /// Where the value of `key` came from.
    pub fn origin(&self, key: &str) -> Origin {
        origin(self.layer, key)
    }
}

impl Examined<'_, '_> {
    /// Refuses the configuration unless `holds`. `rule` completes "must ...".
    pub fn must(self, holds: bool, rule: impl fmt::Display) -> Self {
        if !holds {
            let problem = self.problem(&rule);
            self.rules.problems.push(problem);
        }
        self
    }

    /// Warns unless `holds`: for what is odd but can be meant. `rule` completes "must ...", as in
    /// "must be reachable from other hosts".
    pub fn should(self, holds: bool, rule: impl fmt::Display) -> Self {
        if !holds {
            let problem = self.problem(&rule);
            self.rules.warnings.push(problem);
        }
        self
    }

    fn problem(&self, rule: &dyn fmt::Display) -> Problem {
        let origin = self.rules.origin(&self.key);
        // Nobody wrote the empty default that stands for "not set".
        let is_said = |value: &&Value| !(matches!(origin, Origin::Default) && is_unset(value));
        let value = lookup(self.rules.values, &self.key).filter(is_said);
        Problem::Invalid {
            key: self.key.clone(),
            value: value.map(ToString::to_string),
            origin,
            rule: rule.to_string(),
        }
    }
}

/// An entry of a list (`masters[0]`) comes from where its list does. What lies inside a table of a list
/// (`ssd.path[0].weight`) and was not given there is a default.
pub(crate) fn origin(layer: &Layer, key: &str) -> Origin {
    let list = || key.strip_suffix(']')?.rsplit_once('[').map(|(list, _)| list);
    let given = layer.origins.get(key).or_else(|| layer.origins.get(list()?));
    given.cloned().unwrap_or(Origin::Default)
}
