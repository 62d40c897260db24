//! How answers are written: tables for people, JSON for machines.
//!
//! Both are made from one value, so they say the same. In JSON sizes are bytes, times are milliseconds and
//! ids are whole; in tables sizes and times are rounded and ids are cut. Colour is used only on a terminal
//! and never carries what the words do not say. Text from other hosts is shown without control characters.

use crate::{cli::Format, error::CtlError};
use comfy_table::{CellAlignment, ContentArrangement, presets::NOTHING};
use serde::Serialize;
use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

/// Where answers go, and in which form.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    format: Format,
    colour: bool,
}

impl Output {
    /// Answers to standard output.
    pub(crate) fn new(format: Format) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
        Self { format, colour: wanted && io::stdout().is_terminal() }
    }

    /// The form.
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// Shows one of several answers that follow one another: as JSON each is one line. Whether anybody still
    /// reads them.
    pub(crate) fn show_next<T: Serialize>(
        &self,
        answer: &T,
        human: impl FnOnce(&T) -> Vec<Section>,
    ) -> Result<bool, CtlError> {
        match self.format {
            Format::Table => {
                self.show(answer, human)?;
                print_while_read(b"\n")
            }
            Format::Json => {
                let text = serde_json::to_string(answer).map_err(|error| CtlError::Terminal {
                    what: "write the answer",
                    source: error.into(),
                })?;
                print_while_read(format!("{text}\n").as_bytes())
            }
        }
    }

    /// Shows an answer: itself as JSON, or what `human` makes of it.
    pub(crate) fn show<T: Serialize>(
        &self,
        answer: &T,
        human: impl FnOnce(&T) -> Vec<Section>,
    ) -> Result<(), CtlError> {
        let text = match self.format {
            Format::Json => {
                let text = serde_json::to_string_pretty(answer).map_err(|error| {
                    CtlError::Terminal { what: "write the answer", source: error.into() }
                })?;
                format!("{text}\n")
            }
            Format::Table => {
                let sections: Vec<String> =
                    human(answer).iter().map(|section| section.render(self.colour)).collect();
                sections.join("\n")
            }
        };
        print(text.as_bytes())
    }
}

/// Writes to standard output. A reader that has seen enough (`| head`) is no failure.
pub(crate) fn print(bytes: &[u8]) -> Result<(), CtlError> {
    print_while_read(bytes).map(|_| ())
}

/// The same; whether anybody still reads.
fn print_while_read(bytes: &[u8]) -> Result<bool, CtlError> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(CtlError::Terminal { what: "write to standard output", source })
        }
        Err(_) => Ok(false),
        Ok(()) => Ok(true),
    }
}

/// What a row tells at a glance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Odd,
    Bad,
}

impl Tone {
    fn paint(self, line: &str) -> String {
        let code = match self {
            Self::Plain => return line.to_owned(),
            Self::Good => 32,
            Self::Odd => 33,
            Self::Bad => 31,
        };
        format!("\x1b[{code}m{line}\x1b[0m")
    }
}

/// A piece of an answer for people.
#[derive(Debug)]
pub(crate) enum Section {
    /// Rows under a heading.
    Table(Table),
    /// A sentence or two.
    Text(String),
}

impl Section {
    fn render(&self, colour: bool) -> String {
        match self {
            Self::Table(table) => table.render(colour),
            Self::Text(text) => {
                format!("{}\n", text.lines().map(clean).collect::<Vec<_>>().join("\n"))
            }
        }
    }
}

/// Rows under a heading.
#[derive(Debug)]
pub(crate) struct Table {
    title: Option<String>,
    header: Vec<&'static str>,
    /// Columns with numbers.
    right: Vec<usize>,
    rows: Vec<(Tone, Vec<String>)>,
    empty: &'static str,
}

impl Table {
    /// A table with these columns; a name that ends in `>` is one of numbers, which stand at the right.
    pub(crate) fn new(columns: &[&'static str], empty: &'static str) -> Self {
        let right = columns.iter().enumerate().filter(|(_, name)| name.ends_with('>'));
        Self {
            title: None,
            right: right.map(|(at, _)| at).collect(),
            header: columns.iter().map(|name| name.trim_end_matches('>')).collect(),
            rows: Vec::new(),
            empty,
        }
    }

    /// Puts a line above the table.
    #[must_use]
    pub(crate) fn titled(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into());
        self
    }

    /// Adds a row.
    pub(crate) fn row<const N: usize>(&mut self, tone: Tone, cells: [String; N]) {
        self.rows.push((tone, cells.into_iter().map(|cell| clean(&cell)).collect()));
    }

    /// Whether it has no rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn render(&self, colour: bool) -> String {
        let mut out = String::new();
        if let Some(title) = &self.title {
            out.push_str(&clean(title));
            out.push('\n');
        }
        if self.rows.is_empty() {
            out.push_str(self.empty);
            out.push('\n');
            return out;
        }
        let mut table = comfy_table::Table::new();
        table.load_style(NOTHING);
        table.set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(self.header.iter().map(|name| name.to_uppercase()));
        table.add_rows(self.rows.iter().map(|(_, cells)| cells));
        for (at, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, 2));
            if self.right.contains(&at) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        // Cells have no line breaks, so lines and rows correspond.
        let tones = std::iter::once(Tone::Plain).chain(self.rows.iter().map(|(tone, _)| *tone));
        for (line, tone) in table.lines().zip(tones) {
            let line = line.trim_end();
            out.push_str(&if colour { tone.paint(line) } else { line.to_owned() });
            out.push('\n');
        }
        out
    }
}

/// Text from elsewhere, on one line and without anything that a terminal would obey.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// A size, rounded: `1.5 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "rounded for people")]
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // At 1023.95 one decimal would round up to the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A share: `42 %`.
pub(crate) fn share(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => format!("{} %", u128::from(part) * 100 / u128::from(whole)),
    }
}

/// A time, rounded: `3d 4h`, `12s`, `250ms`.
pub(crate) fn time(ms: u64) -> String {
    let seconds = ms / 1000;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes, seconds % 60) {
        (0, 0, 0, 0) => format!("{ms}ms"),
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, s) => format!("{m}m {s}s"),
        (0, h, m, _) => format!("{h}h {m}m"),
        (d, h, _, _) => format!("{d}d {h}h"),
    }
}

/// The same of a duration.
pub(crate) fn span(duration: Duration) -> String {
    time(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

/// A number with its thousands apart: `12,345`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The start of an id: enough to tell a few apart.
pub(crate) fn short(id: &str) -> String {
    id.chars().take(12).collect()
}

/// `1 block`, `2 blocks`.
pub(crate) fn counted(number: usize, what: &str) -> String {
    let number = number as u64;
    format!("{} {what}{}", count(number), plural(number))
}

/// `s` where there is not just one.
pub(crate) fn plural(number: u64) -> &'static str {
    if number == 1 { "" } else { "s" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_for_people_are_rounded() {
        let sizes = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 30, u64::MAX].map(size);
        assert_eq!(
            sizes,
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "16.0 EiB"]
        );
        let times = [5, 59_999, 61_000, 3_660_000, 90_000_000].map(time);
        assert_eq!(times, ["5ms", "59s", "1m 1s", "1h 1m", "1d 1h"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        let counts = [0, 1, 2000].map(|number| counted(number, "block"));
        assert_eq!(counts, ["0 blocks", "1 block", "2,000 blocks"]);
        assert_eq!((share(1, 3), share(1, 0)), ("33 %".to_owned(), "-".to_owned()));
    }

    #[test]
    fn a_name_from_elsewhere_cannot_steer_the_terminal_or_break_the_table() {
        let mut table = Table::new(&["name", "parts>"], "none");
        table.row(Tone::Bad, ["a\x1b[2J\nb".to_owned(), "7".to_owned()]);
        table.row(Tone::Plain, ["c".to_owned(), "70".to_owned()]);
        let plain = table.render(false);
        assert_eq!(plain, "NAME     PARTS\na?[2J?b      7\nc           70\n");
        let coloured = table.render(true);
        assert!(coloured.contains("\n\x1b[31ma?[2J?b      7\x1b[0m\nc "), "{coloured:?}");
    }

    #[test]
    fn an_empty_table_says_what_is_not_there() {
        let table = Table::new(&["name"], "no nodes").titled("Nodes");
        assert_eq!(table.render(false), "Nodes\nno nodes\n");
    }
}
