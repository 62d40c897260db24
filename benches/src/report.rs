//! How figures reach people and programs: progress on standard error, a table on standard output, rows in a
//! JSON file.

use crate::{error::BenchError, figures::Spread};
use comfy_table::{Cell, CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::{fs, path::Path};

/// A bar on standard error; nothing where that is no terminal.
pub(crate) fn progress(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} {wide_msg}");
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// A table whose columns, after the first `text_columns`, hold numbers.
pub(crate) fn table(headers: &[&str], text_columns: usize, rows: Vec<Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(headers.to_vec());
    rows.into_iter().for_each(|row| {
        table.add_row(row.into_iter().map(Cell::new));
    });
    for column in table.column_iter_mut().skip(text_columns) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// `0.93 (0.90-0.97)`: a median and its middle half.
pub(crate) fn with_spread(spread: Spread) -> String {
    format!("{:.2} ({:.2}-{:.2})", spread.median, spread.low, spread.high)
}

/// A figure to reach, and the floor of the first version where there is one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Goal {
    pub(crate) goal: f64,
    pub(crate) floor: Option<f64>,
    /// Whether more is better.
    pub(crate) at_least: bool,
}

impl Goal {
    /// A figure of at least `goal`.
    pub(crate) const fn at_least(goal: f64) -> Self {
        Self { goal, floor: None, at_least: true }
    }

    /// A figure of at most `goal`.
    pub(crate) const fn at_most(goal: f64) -> Self {
        Self { goal, floor: None, at_least: false }
    }

    /// With the floor of the first version.
    pub(crate) const fn floor(self, floor: f64) -> Self {
        Self { floor: Some(floor), ..self }
    }

    /// `>= 0.9 met`, `<= 1.25 floor met (1.5)`, `>= 0.9 missed`.
    pub(crate) fn verdict(&self, reached: f64) -> String {
        let holds = |bound: f64| if self.at_least { reached >= bound } else { reached <= bound };
        let sign = if self.at_least { ">=" } else { "<=" };
        let said = match self.floor {
            _ if holds(self.goal) => "met".to_owned(),
            Some(floor) if holds(floor) => format!("missed, floor {floor} met"),
            Some(floor) => format!("missed, and the floor {floor}"),
            None => "missed".to_owned(),
        };
        format!("{sign} {} {said}", self.goal)
    }
}

/// Writes rows as a JSON list.
pub(crate) fn write_json<T: Serialize>(path: &Path, rows: &[T]) -> Result<(), BenchError> {
    let write = || {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            fs::create_dir_all(dir)?;
        }
        fs::write(path, serde_json::to_vec_pretty(rows)?)
    };
    write().map_err(BenchError::io(format!("write {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_names_goal_and_floor() {
        let cpu = Goal::at_most(1.25).floor(1.5);
        assert_eq!(cpu.verdict(1.2), "<= 1.25 met");
        assert_eq!(cpu.verdict(1.4), "<= 1.25 missed, floor 1.5 met");
        assert_eq!(cpu.verdict(1.6), "<= 1.25 missed, and the floor 1.5");
        assert_eq!(Goal::at_least(0.9).verdict(0.8), ">= 0.9 missed");
    }
}
