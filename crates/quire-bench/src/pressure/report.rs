//! The tables, as Markdown and as JSON.

use std::collections::HashMap;

use quire_cli::size::Human;
use serde_json::Value;

use super::Selected;
use super::columns::Column;
use super::measured::{Cell, End, Measured, Records};
use super::rows::Fraction;
use crate::harness::markdown::Table;
use crate::harness::report::{Part, Report, number, spread};
use crate::harness::{Ending, in_words};
use crate::samples::Samples;

/// A row of the kernel's swap file is as fast where Quire takes so many times as long at most.
const AS_FAST: f64 = 1.15;

/// All that was found.
pub(crate) struct Found<'a> {
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
    found: &'a Found<'a>,
    row: &'a str,
    fraction: Fraction,
}

impl Found<'_> {
    fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.rows.iter().flat_map(move |(row, fractions)| {
            let line =
                |fraction: &Fraction| Line { found: self, row: &row.name, fraction: *fraction };
            fractions.iter().map(line)
        })
    }

    /// The columns that were to be run.
    fn others(&self) -> impl Iterator<Item = Column> {
        self.columns.iter().copied().filter(|column| *column != Column::Bare)
    }

    pub(crate) fn report(&self) -> Report {
        let part = |title: &str, table, note: Option<&str>| Part {
            title: title.into(),
            table,
            plot: None,
            note: note.map(String::from),
        };
        let mut parts = vec![
            part(
                "time",
                self.seconds(),
                Some(
                    "Quire in seconds; the others as what they take over what Quire takes, in the same \
                     round: above 1 Quire is faster.",
                ),
            ),
            part("pages in; read from and written to the disk", self.paging(), None),
        ];
        let figures = self.figures();
        if !figures.is_empty() {
            parts.push(part("what the programs count themselves", figures, None));
        }
        let mut facts = vec![(
            "rounds".into(),
            format!("{}; medians, with the least and the most", self.rounds),
        )];
        facts.extend(self.note.iter().map(|note| ("the kernel's swap".into(), note.clone())));
        let columns = self.columns_not_run.iter().map(|(column, why)| (column.name(), why));
        let rows = self.missing.iter().map(|(row, why)| (row.clone(), why));
        let left_out = columns.chain(rows).map(|(what, why)| format!("{what}: {why}"));
        let mut of_quire =
            self.records.iter().filter(|record| record.turn.column == Column::Quire.name());
        Report {
            name: "pressure".into(),
            question: "What does a program take in a part of the memory that it wants, beside each of the kernel's swaps?".into(),
            facts,
            ending: Some(self.ending),
            left_out: left_out.collect(),
            words: self.words(),
            parts,
            published: Vec::new(),
            is_failed: of_quire.any(|record| matches!(record.result.end, End::Failed(_))),
            cells: self.lines().flat_map(|line| line.json()).collect(),
        }
    }

    /// How Quire stands against the swap file over all rows.
    fn words(&self) -> Vec<String> {
        let quire_over = |line: Line<'_>| {
            let ratio = line.cell(Column::Disk).over(&line.cell(Column::Quire)).median();
            (ratio > 0.0).then(|| 1.0 / ratio)
        };
        let ratios: Vec<f64> = self.lines().filter_map(quire_over).collect();
        if ratios.is_empty() {
            return Vec::new();
        }
        let logarithms: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
        let mean = (logarithms / ratios.len() as f64).exp();
        let fast = ratios.iter().filter(|ratio| **ratio <= AS_FAST).count();
        vec![format!(
            "Over {} rows the geometric mean of Quire's time over the swap file's is {mean:.2}; {fast} of \
             them take at most {AS_FAST} times as long.",
            ratios.len()
        )]
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
}

impl<'a> Line<'a> {
    fn cell(&self, column: Column) -> Cell<'a> {
        Cell::of(self.found.records, self.row, &self.fraction.to_string(), column)
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
        let is_not_run = self.found.columns_not_run.iter().any(|(not_run, _)| *not_run == column);
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
        let columns =
            self.found.columns.iter().filter(|column| self.cell(**column).runs().next().is_some());
        columns
            .map(|column| {
                let cell = self.cell(*column);
                let names = self.figures();
                let counted = names.iter().map(|name| (name.as_str(), self.figure(*column, name)));
                let figures =
                    [("seconds", cell.seconds())].into_iter().chain(sizes(&cell)).chain(counted);
                let figures = figures.filter(|(_, samples)| !samples.is_empty());
                let figures = figures.map(|(name, samples)| (name, Value::from(&samples)));
                let ratio = cell.over(&self.cell(Column::Quire));
                let ratios = (!ratio.is_empty()).then(|| ("seconds", Value::from(&ratio)));
                Value::from_iter([
                    ("sheet", Value::from("time")),
                    ("row", Value::from(self.name())),
                    ("column", Value::from(column.name())),
                    ("figures", Value::from_iter(figures)),
                    ("over", Value::from(Column::Quire.name())),
                    ("ratios", Value::from_iter(ratios)),
                    ("ends", cell.runs().map(|run| Value::from(in_word(run))).collect()),
                ])
            })
            .collect()
    }
}

/// What is told of a cell's runs beside their seconds.
fn sizes(cell: &Cell<'_>) -> [(&'static str, Samples); 9] {
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
    let stopped =
        stopped.map(|run| format!("timeout, stopped after {}", in_words(run.wall_seconds)));
    let failed = cell.runs().filter(|run| matches!(run.end, End::Failed(_))).count();
    let failed = cell.failure().and_then(|why| often(&format!("FAILED: {why}"), failed));
    let over = cell.runs().filter(|run| run.does_not_fit).count();
    [often("killed", count(&End::Killed)), stopped, failed, often("does not fit", over)]
        .into_iter()
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::measured::tests::record;
    use super::super::rows::{Selection, all};
    use super::*;
    use crate::harness::journal::Record;

    const COLUMNS: [Column; 4] = [Column::Bare, Column::Quire, Column::Disk, Column::ZramLz4];

    fn with_found(records: &mut [Record<Measured>], check: impl FnOnce(&Found<'_>)) {
        let only = ["sort-100M".to_owned()];
        let fractions = ["1/2".parse().unwrap()];
        let selection =
            Selection { is_full: false, is_quick: true, only: &only, fractions: &fractions };
        for record in records.iter_mut() {
            record.turn.row = "sort-100M".into();
        }
        let found = Found {
            rows: &selection.of(all(true)).unwrap(),
            columns: &COLUMNS,
            rounds: 2,
            records,
            ending: Ending::Interrupted,
            missing: HashMap::new(),
            columns_not_run: vec![(Column::ZramLz4, "no zram".into())],
            note: None,
        };
        check(&found);
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
        with_found(&mut records, |found| {
            let table = found.seconds().to_string();
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
            assert!(found.paging().to_string().contains("| 2500; 10 MiB, 20 MiB |"));
            assert!(found.figures().to_string().contains("p99 us"));
            let report = found.report();
            let text = report.markdown();
            assert!(text.contains("- not run: zram-lz4: no zram\n- interrupted"), "{text}");
            assert!(report.words[0].contains("is 0.67; 1 of them"), "{:?}", report.words);
            assert_eq!(report.cells[1]["column"], "quire");
            assert_eq!(report.cells[1]["figures"]["seconds"]["median"], 3.0);
        });
    }

    #[test]
    fn without_a_result_the_table_is_whole() {
        with_found(&mut [], |found| {
            assert_eq!(found.seconds().to_string().lines().count(), 3);
            assert!(found.figures().is_empty() && found.words().is_empty());
        });
    }

    #[test]
    fn what_was_stopped_says_when() {
        let mut records = [record(Column::Quire, 1, 20.0, End::Stopped)];
        records[0].result.does_not_fit = true;
        with_found(&mut records, |found| {
            let line = found.lines().next().unwrap();
            assert_eq!(line.time(Column::Quire), "timeout, stopped after 20 s; does not fit");
        });
    }
}
