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

    /// `>= 0.9 met`, `<= 1.25 missed, floor 1.5 met`. A bound that lies inside the middle half of what was
    /// measured is `unclear`: neither reached nor missed.
    pub(crate) fn verdict(&self, reached: Spread) -> String {
        let holds = |value: f64, bound: f64| match self.at_least {
            true => value >= bound,
            false => value <= bound,
        };
        let judge = |bound| match (holds(reached.low, bound), holds(reached.high, bound)) {
            (true, true) => "met",
            (false, false) => "missed",
            _ => "unclear",
        };
        let sign = if self.at_least { ">=" } else { "<=" };
        let said = format!("{sign} {} {}", self.goal, judge(self.goal));
        match self.floor {
            Some(floor) if judge(self.goal) != "met" => {
                format!("{said}, floor {floor} {}", judge(floor))
            }
            _ => said,
        }
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
        assert_eq!(cpu.verdict(Spread::exactly(1.2)), "<= 1.25 met");
        assert_eq!(cpu.verdict(Spread::exactly(1.4)), "<= 1.25 missed, floor 1.5 met");
        assert_eq!(cpu.verdict(Spread::exactly(1.6)), "<= 1.25 missed, floor 1.5 missed");
    }

    /// A reference that collapsed in most pairs once made a goal look met: 4.62 (0.55-6.11).
    #[test]
    fn a_bound_inside_the_spread_is_neither_met_nor_missed() {
        let torn = Spread { low: 0.55, median: 4.62, high: 6.11 };
        assert_eq!(Goal::at_least(0.9).verdict(torn), ">= 0.9 unclear");
        assert_eq!(Goal::at_least(0.9).floor(0.5).verdict(torn), ">= 0.9 unclear, floor 0.5 met");
    }
}
