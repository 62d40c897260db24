//! Where a value came from, and what is wrong with it.

use std::{fmt, io, path::PathBuf, sync::Arc};

/// Where the value of a key came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nobody gave it.
    Default,
    /// A line of the configuration file, counted from 1.
    File {
        /// The file.
        path: Arc<PathBuf>,
        /// The line of the value.
        line: usize,
    },
    /// An environment variable.
    Variable(String),
    /// A command-line flag, with its dashes.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "from {}:{line}", path.display()),
            Self::Variable(name) | Self::Flag(name) => write!(f, "from {name}"),
        }
    }
}

/// One thing that is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// A value breaks a rule.
    #[error("{}: must {rule}", Assignment { key, value: value.as_deref(), origin })]
    Invalid {
        /// The whole key.
        key: String,
        /// The value as TOML; `None` when the key is not set.
        value: Option<String>,
        /// Where the value came from.
        origin: Origin,
        /// Completes "must ...".
        rule: String,
    },
    /// A key, table, variable or flag that does not exist.
    #[error("{name}{}: unknown {what}{}", Place(origin), Suggestion(nearest.as_deref()))]
    Unknown {
        /// What it would be: key, table, variable, flag.
        what: &'static str,
        /// Its name as it was written.
        name: String,
        /// Where it was written.
        origin: Origin,
        /// The nearest name that exists.
        nearest: Option<String>,
    },
    /// The file is not TOML.
    #[error("{origin_text}: {message}", origin_text = origin.to_string().trim_start_matches("from "))]
    Syntax {
        /// The place.
        origin: Origin,
        /// What the parser says.
        message: String,
    },
    /// The file cannot be read.
    #[error("read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The command line cannot be understood.
    #[error("{0}")]
    Usage(String),
}

/// All that is wrong with a configuration: one line each.
#[derive(Debug, thiserror::Error)]
#[error("{}", lines(problems))]
pub struct ConfigError {
    /// Never empty.
    pub problems: Vec<Problem>,
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        Self { problems: vec![problem] }
    }
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n")
}

/// `dram.capacity = "4GiB" (from --dram.capacity)`, or `dram.capacity is not set`.
struct Assignment<'a> {
    key: &'a str,
    value: Option<&'a str>,
    origin: &'a Origin,
}

impl fmt::Display for Assignment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, origin } = self;
        match (value, origin) {
            (Some(value), origin) => write!(f, "{key} = {value} ({origin})"),
            (None, Origin::Default) => write!(f, "{key} is not set"),
            (None, origin) => write!(f, "{key} is not set ({origin})"),
        }
    }
}

/// ` (from node.toml:3)` for what was found in a file. A variable or flag is its own place.
struct Place<'a>(&'a Origin);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Origin::File { .. } => write!(f, " ({})", self.0),
            Origin::Default | Origin::Variable(_) | Origin::Flag(_) => Ok(()),
        }
    }
}

struct Suggestion<'a>(Option<&'a str>);

impl fmt::Display for Suggestion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(nearest) => write!(f, "; did you mean {nearest}?"),
            None => f.write_str("; --help lists what exists"),
        }
    }
}

/// The known name that is nearest to `name`, if any is near enough to be what was meant.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    // Picked by eye: two typing errors in a short word still pass, two unrelated words do not.
    const NEAR_ENOUGH: f64 = 0.6;
    known
        .into_iter()
        .map(|candidate| (likeness(name, candidate), candidate))
        .filter(|(score, _)| *score >= NEAR_ENOUGH)
        .max_by(|(left, _), (right, _)| left.total_cmp(right))
        .map(|(_, candidate)| candidate.to_owned())
}

/// From 0 to 1. The right word in the wrong table (`capacity` for `dram.capacity`) is near as well.
fn likeness(name: &str, candidate: &str) -> f64 {
    let whole = strsim::normalized_damerau_levenshtein(name, candidate);
    let last = strsim::normalized_damerau_levenshtein(last_word(name), last_word(candidate));
    whole.max(0.8 * last + 0.2 * whole)
}

fn last_word(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 4] = ["dram.capacity", "dram.high_watermark", "ssd.path", "listen"];

    #[test]
    fn a_misspelt_name_finds_its_neighbour_and_a_strange_one_finds_none() {
        assert_eq!(nearest("dram.capcity", KEYS).as_deref(), Some("dram.capacity"));
        assert_eq!(nearest("dram.high-watermark", KEYS).as_deref(), Some("dram.high_watermark"));
        assert_eq!(nearest("capacity", KEYS).as_deref(), Some("dram.capacity"));
        assert_eq!(nearest("node.listen", KEYS).as_deref(), Some("listen"));
        assert_eq!(nearest("zzz.qqqq", KEYS), None);
    }

    #[test]
    fn a_broken_rule_names_key_value_origin_and_rule() {
        let mut problem = Problem::Invalid {
            key: "dram.low_watermark".to_owned(),
            value: Some("0.97".to_owned()),
            origin: Origin::Variable("LARDER_NODE__DRAM__LOW_WATERMARK".to_owned()),
            rule: "be below dram.high_watermark".to_owned(),
        };
        assert_eq!(
            problem.to_string(),
            "dram.low_watermark = 0.97 (from LARDER_NODE__DRAM__LOW_WATERMARK): \
             must be below dram.high_watermark"
        );
        if let Problem::Invalid { value, origin, .. } = &mut problem {
            (*value, *origin) = (None, Origin::Default);
        }
        assert_eq!(
            problem.to_string(),
            "dram.low_watermark is not set: must be below dram.high_watermark"
        );
    }
}
