//! Request traces: who reads which formats.

use serde_json::Value;
use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
};

/// How a trace is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// JSON lines with timestamp (ms) and hash_ids, as published with Mooncake (FAST 2025)
    Mooncake,
    /// JSON lines with chat_id, timestamp (s) and hash_ids, as in the Qwen-Bailian usage traces
    Bailian,
    /// Seconds, then block ids, with blanks between
    Plain,
}

/// A trace that cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// A line that is not what its format says.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Which field, and what is wrong with it.
        problem: String,
    },
    /// The file cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No request counts.
    #[error("{}: no request lies in the range", path.display())]
    EmptyRange {
        /// The file.
        path: PathBuf,
    },
}

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Request {
    pub(super) seconds: f64,
    /// The blocks of its prompt, head first, each once.
    pub(super) blocks: Vec<u32>,
}

/// Requests in the order of their time.
#[derive(Debug)]
pub(super) struct Trace {
    pub(super) name: String,
    pub(super) requests: Vec<Request>,
    /// Distinct blocks; requests number them from 0.
    pub(super) blocks: usize,
}

impl Trace {
    /// Reads a file, in the format that its first line looks like unless told.
    pub(super) fn read(path: &Path, format: Option<Format>) -> Result<Self, TraceError> {
        let failed = |source| TraceError::Read { path: path.to_owned(), source };
        let file = BufReader::new(File::open(path).map_err(failed)?);
        let mut reader = Reader::of(format);
        for (at, line) in file.lines().enumerate() {
            let named = |problem| TraceError::Line { path: path.to_owned(), line: at + 1, problem };
            reader.line(&line.map_err(failed)?).map_err(named)?;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(reader.finish(name))
    }
}

/// Takes lines, and numbers blocks as they come.
#[derive(Debug, Default)]
pub(super) struct Reader {
    format: Option<Format>,
    requests: Vec<Request>,
    numbers: HashMap<u64, u32>,
}

impl Reader {
    /// For a format, or for what the first line looks like.
    pub(super) fn of(format: Option<Format>) -> Self {
        Self { format, ..Self::default() }
    }

    /// Takes a line; or what is wrong with it.
    pub(super) fn line(&mut self, line: &str) -> Result<(), String> {
        if line.trim().is_empty() {
            return Ok(());
        }
        let format = *self.format.get_or_insert_with(|| looks_like(line));
        let (seconds, ids) = match format {
            Format::Mooncake => from_json(line, 1000.0)?,
            Format::Bailian => from_json(line, 1.0)?,
            Format::Plain => from_plain(line)?,
        };
        if !seconds.is_finite() {
            return Err("timestamp: must be finite".to_owned());
        }
        let mut seen = HashSet::new();
        let mut blocks = Vec::with_capacity(ids.len());
        for id in ids.into_iter().filter(|id| seen.insert(*id)) {
            let next = u32::try_from(self.numbers.len()).map_err(|_| "too many blocks")?;
            blocks.push(*self.numbers.entry(id).or_insert(next));
        }
        self.requests.push(Request { seconds, blocks });
        Ok(())
    }

    /// All requests. Those of one time keep their order.
    pub(super) fn finish(mut self, name: String) -> Trace {
        self.requests.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        Trace { name, requests: self.requests, blocks: self.numbers.len() }
    }
}

fn looks_like(line: &str) -> Format {
    match line.trim_start().starts_with('{') {
        true if line.contains("\"chat_id\"") => Format::Bailian,
        true => Format::Mooncake,
        false => Format::Plain,
    }
}

fn from_json(line: &str, units_per_second: f64) -> Result<(f64, Vec<u64>), String> {
    let fields: Value = serde_json::from_str(line).map_err(|error| format!("not JSON: {error}"))?;
    let field = |name: &str| fields.get(name).ok_or_else(|| format!("{name}: missing"));
    let time = field("timestamp")?;
    let time = time.as_f64().ok_or_else(|| format!("timestamp: {time} is not a number"))?;
    let ids = field("hash_ids")?;
    let ids = ids.as_array().ok_or_else(|| "hash_ids: not a list".to_owned())?;
    let id = |(at, id): (usize, &Value)| {
        id.as_u64().ok_or_else(|| format!("hash_ids[{at}]: {id} is not an unsigned number"))
    };
    let ids: Result<_, _> = ids.iter().enumerate().map(id).collect();
    Ok((time / units_per_second, ids?))
}

fn from_plain(line: &str) -> Result<(f64, Vec<u64>), String> {
    let mut words = line.split_whitespace();
    let time = words.next().unwrap_or_default();
    let seconds = time.parse().map_err(|_| format!("timestamp: {time:?} is not a number"))?;
    let id = |(at, word): (usize, &str)| {
        word.parse().map_err(|_| format!("block {}: {word:?} is not an unsigned number", at + 1))
    };
    let ids: Result<_, _> = words.enumerate().map(id).collect();
    Ok((seconds, ids?))
}
