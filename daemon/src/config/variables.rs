//! Environment variables: which are ours, which are misspelt, which are somebody else's.

use std::ffi::OsString;

use super::{
    DaemonKind,
    error::{Origin, Problem, nearest},
    layers::{Layer, text_layer},
    schema::Schema,
};

/// Starts every variable that concerns Larder.
const LARDER: &str = "LARDER_";

/// `dram.capacity` of a node is `LARDER_NODE__DRAM__CAPACITY`.
pub(crate) fn variable_name(kind: DaemonKind, key: &str) -> String {
    format!("{}{}", kind.variable_prefix(), key.replace('.', "__").to_uppercase())
}

/// Reads the variables of one daemon out of the whole environment.
pub(crate) fn variables_layer(
    kind: DaemonKind,
    schema: &Schema,
    environment: &[(OsString, OsString)],
) -> Layer {
    let known: Vec<_> = schema.keys.iter().map(|key| variable_name(kind, &key.path)).collect();
    let mut layer = Layer::default();
    for (name, value) in environment {
        let Some(name) = name.to_str().filter(|name| name.starts_with(LARDER)) else { continue };
        let origin = Origin::Variable(name.to_owned());
        match known.iter().position(|known| known == name) {
            Some(index) => {
                let key = &schema.keys[index];
                layer.cover(match value.to_str() {
                    Some(text) => text_layer(schema, &key.path, &key.shape, text, &origin),
                    None => not_text(&key.path, value, origin),
                });
            }
            None if is_meant_for(kind, name, &known) => layer.problems.push(Problem::Unknown {
                what: "variable",
                name: name.to_owned(),
                origin,
                nearest: nearest(name, known.iter().map(String::as_str)),
            }),
            None => {}
        }
    }
    layer
}

fn not_text(key: &str, value: &OsString, origin: Origin) -> Layer {
    let problem = Problem::Invalid {
        key: key.to_owned(),
        value: Some(format!("{value:?}")),
        origin,
        rule: "be UTF-8".to_owned(),
    };
    Layer { problems: vec![problem], ..Layer::default() }
}

/// Whether an unknown `LARDER_` variable was probably meant for this daemon.
///
/// `LARDER_<WORD>__` is ours by its form, unless the word is another daemon's. Without `__` only
/// what is one of our variables with single underscores counts: other tools have variables of their
/// own (`LARDER_CACHE_DIR`), and Kubernetes sets `LARDER_NODE_PORT` in every pod beside a service
/// named `larder-node`.
fn is_meant_for(kind: DaemonKind, name: &str, known: &[String]) -> bool {
    let others = DaemonKind::ALL.into_iter().filter(|other| *other != kind);
    if name.contains("__") {
        return !others.into_iter().any(|other| name.starts_with(other.variable_prefix()));
    }
    let plain = |name: &str| name.replace('_', "");
    !is_service_link(name) && known.iter().any(|known| plain(known) == plain(name))
}

/// The variables that Kubernetes and old Docker links make for a service.
fn is_service_link(name: &str) -> bool {
    name.ends_with("_PORT") || name.contains("_PORT_") || name.contains("_SERVICE_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_of_a_service_are_not_taken_for_misspelt_ones() {
        let known = ["LARDER_NODE__PORT", "LARDER_NODE__SERVICE__HOST"].map(str::to_owned);
        let meant = |name: &str| is_meant_for(DaemonKind::Node, name, &known);
        assert!(!meant("LARDER_NODE_PORT"));
        assert!(!meant("LARDER_NODE_SERVICE_HOST"));
        assert!(meant("LARDER_NODEPORT"));
    }
}
