//! Which requests of a trace count.

use super::trace::Trace;
use std::{fmt, ops, str::FromStr};

/// A range of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Range {
    All,
    FirstHalf,
    SecondHalf,
    /// Seconds since the first request; the end is not in it.
    Seconds(f64, f64),
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => return Ok(Self::All),
            "first-half" => return Ok(Self::FirstHalf),
            "second-half" => return Ok(Self::SecondHalf),
            _ => {}
        }
        let ends = text.split_once("..").and_then(|(from, to)| {
            let ends: (f64, f64) = (from.parse().ok()?, to.parse().ok()?);
            (ends.0 >= 0.0 && ends.0 < ends.1).then_some(ends)
        });
        let (from, to) =
            ends.ok_or("must be all, first-half, second-half or A..B in seconds, A below B")?;
        Ok(Self::Seconds(from, to))
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::FirstHalf => f.write_str("first-half"),
            Self::SecondHalf => f.write_str("second-half"),
            Self::Seconds(from, to) => write!(f, "{from}..{to}"),
        }
    }
}

impl Range {
    /// Places of the requests that count.
    pub(super) fn of(self, trace: &Trace) -> ops::Range<usize> {
        let requests = &trace.requests;
        let (Some(first), Some(last)) = (requests.first(), requests.last()) else { return 0..0 };
        let place = |seconds: f64| requests.partition_point(|r| r.seconds < seconds);
        let middle = f64::midpoint(first.seconds, last.seconds);
        match self {
            Self::All => 0..requests.len(),
            Self::FirstHalf => 0..place(middle),
            Self::SecondHalf => place(middle)..requests.len(),
            Self::Seconds(from, to) => place(first.seconds + from)..place(first.seconds + to),
        }
    }
}
