//! The tables, as Markdown and as JSON.

use std::collections::HashMap;

use quire_cli::size::Human;
use serde_json::Value;

use super::Selected;
use super::columns::Column;
use super::measured::{Cell, End, Measured, Records};
use super::rows::Fraction;
use crate::harness::Ending;
use crate::harness::markdown::Table;
use crate::output;
use crate::samples::Samples;
use crate::{harness, machine};

/// All that was found.
pub(crate) struct Report<'a> {
    pub rows: &'a Selected,
    pub columns: &'a [Column],
    pub rounds: u32,
    pub records: Records<'a>,
    pub ending: Ending,
    /// Rows whose programs cannot be run here, and why.
    pub missing: HashMap<String, String>,
    pub columns_not_run: Vec<(Column, String)>,
    /// What there is to know of the kernel's swaps.
    pub note: Option<String>,
}

/// A row in a part of what it wants.
#[derive(Clone, Copy)]
struct Line<'a> {
    report: &'a Report<'a>,
    row: &'a str,
    fraction: Fraction,
}

impl Report<'_> {
    fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.rows.iter().flat_map(move |(row, fractions)| {
            let line =
                |fraction: &Fraction| Line { report: self, row: &row.name, fraction: *fraction };
            fractions.iter().map(line)
        })
    }

    /// The columns that were to be run.
    fn others(&self) -> impl Iterator<Item = Column> {
        self.columns.iter().copied().filter(|column| *column != Column::Bare)
    }

    pub(crate) fn print(&self) {
        print!("{}", self.head());
        println!("\n{}", self.seconds());
        println!("Pages in; read from and written to the disk; medians.\n\n{}", self.paging());
        let figures = self.figures();
        if !figures.is_empty() {
            println!("What the programs count themselves; medians.\n\n{figures}");
        }
    }

    fn head(&self) -> String {
        let mut lines: Vec<String> =
            machine::facts().iter().map(|(name, value)| format!("- {name}: {value}")).collect();
        lines.push(format!(
            "- rounds: {}; medians, and the least and the most; Quire in seconds, the others as what they \
             take over what Quire takes, in the same round",
            self.rounds
        ));
        lines.extend(self.note.iter().map(|note| format!("- {note}")));
        lines.extend(
            self.columns_not_run
                .iter()
                .map(|(column, why)| format!("- {}: not run: {why}", column.name())),
        );
        if self.ending != Ending::Complete {
            lines.push(format!("- {} before all of it was run", self.ending.in_words()));
        }
        lines.join("\n") + "\n"
    }

    fn table(&self, head: &[&str], columns: impl Iterator<Item = Column>) -> Table {
        let head = head.iter().map(|name| (*name).to_owned());
        Table::new(head.chain(columns.map(Column::name)))
    }

    fn seconds(&self) -> Table {
        let head = ["program", "wants", "has, and beside it"];
        let mut table = self.table(&head, self.columns.iter().copied());
        for line in self.lines() {
            let mut cells = vec![line.name(), line.wants(), line.has()];
            match self.missing.get(line.row) {
                Some(why) => cells.push(format!("not run: {why}")),
                None => cells.extend(self.columns.iter().map(|column| line.time(*column))),
            }
            table.row(cells);
        }
        table
    }

    fn paging(&self) -> Table {
        let mut table = self.table(&["program"], self.others());
        for line in self.lines().filter(|line| !self.missing.contains_key(line.row)) {
            let mut cells = vec![line.name()];
            cells.extend(self.others().map(|column| line.paging(column)));
            table.row(cells);
        }
        table
    }

    fn figures(&self) -> Table {
        let mut table = self.table(&["program", "figure"], self.columns.iter().copied());
        for line in self.lines() {
            for name in line.figures() {
                let mut cells = vec![line.name(), name.clone()];
                cells.extend(self.columns.iter().map(|column| {
                    let samples = line.figure(*column, &name);
                    if samples.is_empty() { "-".into() } else { number(samples.median()) }
                }));
                table.row(cells);
            }
        }
        table
    }

    pub(crate) fn print_json(&self) {
        let not_run = self.columns_not_run.iter();
        let not_run = not_run.map(|(column, why)| (column.name(), why.as_str()));
        let missing = self.missing.iter().map(|(row, why)| (row.as_str(), why.as_str()));
        output::print_json(
            "pressure",
            [
                ("rounds", Value::from(self.rounds)),
                ("ending", Value::from(self.ending.in_words())),
                ("columns_not_run", Value::from_iter(not_run)),
                ("rows_not_run", Value::from_iter(missing)),
                ("cells", self.lines().flat_map(|line| line.json()).collect()),
            ],
        );
    }
}

impl<'a> Line<'a> {
    fn cell(&self, column: Column) -> Cell<'a> {
        Cell::of(self.report.records, self.row, &self.fraction.to_string(), column)
    }

    fn name(&self) -> String {
        format!("{}, {}", self.row, self.fraction)
    }

    /// What the program wants.
    fn wants(&self) -> String {
        let bare = self.cell(Column::Bare);
        bare.done().next().map_or("-".into(), |run| Human(run.want_bytes).to_string())
    }

    /// Quire's budget, and what the kernel gets in addition.
    fn has(&self) -> String {
        let quire = self.cell(Column::Quire);
        let Some(run) = quire.runs().next() else { return "-".into() };
        let unmanaged = run.unmanaged_bytes.map_or("-".into(), |bytes| Human(bytes).to_string());
        format!("{} + {unmanaged}", Human(run.limit_bytes))
    }

    /// Quire's seconds, or those of another over Quire's; and how it ended where it did not.
    fn time(&self, column: Column) -> String {
        let (cell, quire) = (self.cell(column), self.cell(Column::Quire));
        let is_not_run = self.report.columns_not_run.iter().any(|(not_run, _)| *not_run == column);
        if is_not_run && cell.runs().next().is_none() {
            return "not run".into();
        }
        let ratios = cell.over(&quire);
        let mut parts = Vec::new();
        if column != Column::Quire && !ratios.is_empty() {
            parts.push(spread(&ratios, "x"));
        } else if !cell.seconds().is_empty() {
            parts.push(spread(&cell.seconds(), " s"));
        }
        parts.extend(remarks(&cell));
        if parts.is_empty() { "-".into() } else { parts.join("; ") }
    }

    fn paging(&self, column: Column) -> String {
        let cell = self.cell(column);
        let pages = cell.samples(|run| Some(run.page_ins as f64));
        if pages.is_empty() {
            return "-".into();
        }
        let disk = [0, 1].map(|index| {
            let bytes = cell.samples(|run| Some(run.disk_bytes?[index] as f64));
            if bytes.is_empty() { "-".into() } else { Human(bytes.median() as u64).to_string() }
        });
        format!("{}; {}, {}", number(pages.median()), disk[0], disk[1])
    }

    /// The names of what the program counts.
    fn figures(&self) -> Vec<String> {
        let run = self.cell(Column::Bare).done().next();
        let names = run.map(|run| run.figures.iter().map(|(name, _)| name.clone()).collect());
        names.unwrap_or_default()
    }

    fn figure(&self, column: Column, name: &str) -> Samples {
        let value = |run: &Measured| {
            let found = run.figures.iter().find(|(found, _)| found == name);
            found.map(|(_, value)| *value)
        };
        self.cell(column).samples(value)
    }

    /// An object for each column that was run.
    fn json(&self) -> Vec<Value> {
        let quire = self.cell(Column::Quire);
        let columns =
            self.report.columns.iter().filter(|column| self.cell(**column).runs().next().is_some());
        columns
            .map(|column| {
                let cell = self.cell(*column);
                let mut members = vec![
                    ("row", Value::from(self.row)),
                    ("fraction", Value::from(self.fraction.to_string())),
                    ("column", Value::from(column.name())),
                    ("ends", cell.runs().map(|run| Value::from(in_word(run))).collect()),
                    ("seconds", samples_json(&cell.seconds())),
                    ("over_quire", samples_json(&cell.over(&quire))),
                ];
                members.extend(sizes(&cell));
                let figures = self.figures();
                let figure = |name| samples_json(&self.figure(*column, name));
                members.extend(figures.iter().map(|name| (name.as_str(), figure(name))));
                Value::from_iter(members)
            })
            .collect()
    }
}

/// What is told of a cell's runs beside their seconds.
fn sizes(cell: &Cell<'_>) -> [(&'static str, Value); 9] {
    type Size = (&'static str, fn(&Measured) -> Option<f64>);
    let sizes: [Size; 9] = [
        ("want_bytes", |run| Some(run.want_bytes as f64)),
        ("limit_bytes", |run| Some(run.limit_bytes as f64)),
        ("unmanaged_bytes", |run| run.unmanaged_bytes.map(|bytes| bytes as f64)),
        ("most_bytes", |run| run.most_bytes.map(|bytes| bytes as f64)),
        ("store_bytes", |run| Some(run.store_bytes as f64)),
        ("page_ins", |run| Some(run.page_ins as f64)),
        ("major_faults", |run| run.major_faults.map(|faults| faults as f64)),
        ("disk_read_bytes", |run| Some(run.disk_bytes?[0] as f64)),
        ("disk_written_bytes", |run| Some(run.disk_bytes?[1] as f64)),
    ];
    sizes.map(|(name, size)| (name, cell.runs().filter_map(size).collect()))
}

fn samples_json(samples: &Samples) -> Value {
    if samples.is_empty() { Value::Null } else { Value::from(samples) }
}

fn in_word(run: &Measured) -> &str {
    match (&run.end, run.does_not_fit) {
        (End::Done, false) => "done",
        (End::Done, true) => "does not fit",
        (End::Killed, _) => "killed",
        (End::Stopped, _) => "timeout",
        (End::Failed(why), _) => why,
    }
}

/// What did not go well, with how often where it was not always.
fn remarks(cell: &Cell<'_>) -> Vec<String> {
    let all = cell.runs().count();
    let often = |text: &str, count: usize| match count {
        0 => None,
        count if count == all => Some(text.to_owned()),
        count => Some(format!("{text} in {count} of {all}")),
    };
    let count = |end: &End| cell.runs().filter(|run| run.end == *end).count();
    let stopped = cell.runs().find(|run| run.end == End::Stopped);
    let stopped = stopped
        .map(|run| format!("timeout, stopped after {}", harness::in_words(run.wall_seconds)));
    let failed = cell.runs().filter(|run| matches!(run.end, End::Failed(_))).count();
    let failed = cell.failure().and_then(|why| often(&format!("FAILED: {why}"), failed));
    let over = cell.runs().filter(|run| run.does_not_fit).count();
    [often("killed", count(&End::Killed)), stopped, failed, often("does not fit", over)]
        .into_iter()
        .flatten()
        .collect()
}

/// `33.0 s (32.1..34.0)`, `1.50x (1.45..1.60)`; of a single round without the spread.
fn spread(samples: &Samples, unit: &str) -> String {
    let median = samples.median();
    let digits = match median {
        ..0.1 => 4,
        ..1.0 => 3,
        ..10.0 => 2,
        _ => 1,
    };
    match samples.values() {
        [_] => format!("{median:.digits$}{unit}"),
        _ => {
            let (min, max) = (samples.min(), samples.max());
            format!("{median:.digits$}{unit} ({min:.digits$}..{max:.digits$})")
        }
    }
}

/// `950`, `12.5k`, `3.1M`; small ones with a digit behind the point.
fn number(value: f64) -> String {
    match value {
        ..0.0 => format!("{value}"),
        ..10.0 if value.fract() != 0.0 => format!("{value:.2}"),
        ..1e4 => format!("{value:.0}"),
        ..1e6 => format!("{:.1}k", value / 1e3),
        _ => format!("{:.1}M", value / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::super::measured::tests::record;
    use super::super::rows::{Selection, all};
    use super::*;
    use crate::harness::journal::Record;

    const COLUMNS: [Column; 4] = [Column::Bare, Column::Quire, Column::Disk, Column::ZramLz4];

    fn with_report(records: &mut [Record<Measured>], check: impl FnOnce(&Report<'_>)) {
        let only = ["sort-100M".to_owned()];
        let fractions = ["1/2".parse().unwrap()];
        let selection =
            Selection { is_full: false, is_quick: true, only: &only, fractions: &fractions };
        for record in records.iter_mut() {
            record.turn.row = "sort-100M".into();
        }
        let report = Report {
            rows: &selection.of(all(true)).unwrap(),
            columns: &COLUMNS,
            rounds: 2,
            records,
            ending: Ending::Interrupted,
            missing: HashMap::new(),
            columns_not_run: vec![(Column::ZramLz4, "no zram".into())],
            note: None,
        };
        check(&report);
    }

    #[test]
    fn a_cell_says_how_long_it_took_and_how_it_ended() {
        let mut records = [
            record(Column::Bare, 1, 1.0, End::Done),
            record(Column::Quire, 1, 2.0, End::Done),
            record(Column::Disk, 1, 3.0, End::Done),
            record(Column::Quire, 2, 4.0, End::Done),
            record(Column::Disk, 2, 1.0, End::Killed),
        ];
        with_report(&mut records, |report| {
            let table = report.seconds().to_string();
            let line = table.lines().nth(2).unwrap();
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            assert_eq!(
                cells[1..8],
                [
                    "sort-100M, 1/2",
                    "128 MiB",
                    "64 MiB + 4 MiB",
                    "0.500x",
                    "3.00 s (2.00..4.00)",
                    "1.50x; killed in 1 of 2",
                    "not run"
                ]
            );
            assert!(report.paging().to_string().contains("| 2500; 10 MiB, 20 MiB |"));
            assert!(report.figures().to_string().contains("p99 us"));
            assert!(report.head().contains("- zram-lz4: not run: no zram\n- interrupted"));
        });
    }

    #[test]
    fn without_a_result_the_table_is_whole() {
        with_report(&mut [], |report| {
            assert_eq!(report.seconds().to_string().lines().count(), 3);
            assert!(report.figures().is_empty());
        });
    }

    #[test]
    fn what_was_stopped_says_when() {
        let mut records = [record(Column::Quire, 1, 20.0, End::Stopped)];
        records[0].result.does_not_fit = true;
        with_report(&mut records, |report| {
            let line = report.lines().next().unwrap();
            assert_eq!(line.time(Column::Quire), "timeout, stopped after 20 s; does not fit");
        });
    }

    #[test]
    fn people_read_numbers() {
        for (value, text) in [(3.0, "3"), (0.25, "0.25"), (950.0, "950"), (12_500.0, "12.5k")] {
            assert_eq!(number(value), text);
        }
    }
}
