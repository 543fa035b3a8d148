//! A suite whose tables are lists of cells: each is measured once a round, and has figures by name.
//!
//! The suite says which tables there are and measures a cell. Here the cells take turns, and become a
//! [`Report`]. A cell that fails keeps why and is not measured again; the others are none the worse.

use std::collections::HashMap;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::journal::Record;
use super::markdown::Table;
use super::plot::Plot;
use super::report::{Part, Report, mean, spread};
use super::{Options, Turn, take_turns};
use crate::samples::Samples;
use crate::sys;

/// What a cell came to in one round, by name.
pub(crate) type Figures = Vec<(String, f64)>;

/// Figures with names that are known here.
pub(crate) fn figures<const N: usize>(named: [(&str, f64); N]) -> Figures {
    named.map(|(name, value)| (name.to_owned(), value)).into()
}

/// What there is to know of a suite before anything is measured.
pub(crate) struct Head {
    pub name: &'static str,
    pub question: &'static str,
    /// Sizes and the like, by name.
    pub facts: Vec<(&'static str, String)>,
    pub rounds: u32,
    /// What cannot be measured here, and why.
    pub left_out: Vec<String>,
    /// What others measured of their own.
    pub published: Vec<Part>,
}

/// What a suite is.
pub(crate) trait Suite {
    /// What a cell is measured by.
    type Plan;

    fn head(&self) -> Head;

    fn sheets(&self) -> Vec<Sheet<Self::Plan>>;

    /// Measures a cell once.
    fn take(&mut self, plan: &Self::Plan, so_far: &Results<'_>) -> Result<Figures>;

    /// Whether it is Quire's failure where a cell of the column fails.
    fn is_ours(&self, _column: &str) -> bool {
        true
    }

    /// What holds of all that was measured, and what does not: a sentence each.
    fn words(&self, _results: &Results<'_>) -> Vec<String> {
        Vec::new()
    }
}

/// How a table is laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shape {
    /// A line for each cell, a column for each figure; a ratio for the first of them.
    Cells,
    /// A line for each figure of a row, a column for each way; ratios for all.
    Figures,
}

/// What lies along a plot's horizontal axis; the other makes its lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Along {
    Rows,
    Columns,
}

/// A cell before it is measured.
pub(crate) struct Planned<P> {
    pub row: String,
    pub column: String,
    pub plan: P,
}

/// A table before it is measured.
pub(crate) struct Sheet<P> {
    pub title: String,
    /// Row by row.
    pub cells: Vec<Planned<P>>,
    /// The column that the others are compared with.
    pub base: Option<String>,
    pub shape: Shape,
    /// Means with their deviation, instead of medians with the least and the most.
    pub has_means: bool,
    pub plot: Option<Along>,
    /// Other than the suite's.
    pub rounds: Option<u32>,
    /// What stands below the table.
    pub note: Option<String>,
}

impl<P> Sheet<P> {
    pub(crate) fn new(title: impl Into<String>, shape: Shape) -> Sheet<P> {
        Sheet {
            title: title.into(),
            cells: Vec::new(),
            base: None,
            shape,
            has_means: false,
            plot: None,
            rounds: None,
            note: None,
        }
    }

    pub(crate) fn base(mut self, column: impl Into<String>) -> Sheet<P> {
        self.base = Some(column.into());
        self
    }

    pub(crate) fn plot(mut self, along: Along) -> Sheet<P> {
        self.plot = Some(along);
        self
    }

    pub(crate) fn add(&mut self, row: impl Into<String>, column: impl Into<String>, plan: P) {
        self.cells.push(Planned { row: row.into(), column: column.into(), plan });
    }

    pub(crate) fn rows(&self) -> Vec<&str> {
        unique(self.cells.iter().map(|cell| cell.row.as_str()))
    }

    fn columns(&self) -> Vec<&str> {
        unique(self.cells.iter().map(|cell| cell.column.as_str()))
    }

    fn turn(&self, cell: &Planned<P>, round: u32) -> Turn {
        let (row, column) = (cell.row.clone(), cell.column.clone());
        Turn { row: self.title.clone(), part: row, column, round }
    }
}

/// Each once, in the order in which they come.
fn unique<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for one in all {
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

/// `1 thread`, `8 threads`
pub(crate) fn plural(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// What a turn came to.
#[derive(Serialize, Deserialize, Clone, Default, Debug)]
pub(crate) struct Taken {
    pub figures: Figures,
    pub failure: Option<String>,
}

/// All that was measured so far.
#[derive(Clone, Copy)]
pub(crate) struct Results<'a>(pub &'a [Record<Taken>]);

impl<'a> Results<'a> {
    fn of(self, sheet: &str, row: &str, column: &str) -> impl Iterator<Item = &'a Record<Taken>> {
        let is_of = move |record: &&Record<Taken>| {
            let turn = &record.turn;
            (turn.row.as_str(), turn.part.as_str(), turn.column.as_str()) == (sheet, row, column)
        };
        self.0.iter().filter(is_of)
    }

    /// A figure of a cell, in all rounds.
    pub(crate) fn samples(self, sheet: &str, row: &str, column: &str, figure: &str) -> Samples {
        self.of(sheet, row, column).filter_map(|record| record.result.figure(figure)).collect()
    }

    /// Round by round, a figure of a cell over that of another column.
    pub(crate) fn over(
        self,
        sheet: &str,
        row: &str,
        [column, base]: [&str; 2],
        figure: &str,
    ) -> Samples {
        let ratio = |record: &Record<Taken>| {
            let mut same = self.of(sheet, row, base);
            let same = same.find(|same| same.turn.round == record.turn.round)?;
            let ratio = record.result.figure(figure)? / same.result.figure(figure)?;
            // There may be nothing to compare with.
            ratio.is_finite().then_some(ratio)
        };
        self.of(sheet, row, column).filter_map(ratio).collect()
    }

    fn failure(self, sheet: &str, row: &str, column: &str) -> Option<&'a str> {
        self.of(sheet, row, column).find_map(|record| record.result.failure.as_deref())
    }

    /// The names of a cell's figures.
    pub(crate) fn names(self, sheet: &str, row: &str, column: &str) -> Vec<&'a str> {
        let figures = self.of(sheet, row, column).flat_map(|record| &record.result.figures);
        unique(figures.map(|(name, _)| name.as_str()))
    }
}

impl Taken {
    fn figure(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }
}

/// Has all cells take their turns, and makes a report of them.
pub(crate) fn measure<S: Suite>(suite: &mut S, options: &Options) -> Result<Report> {
    let (head, sheets) = (suite.head(), suite.sheets());
    let mut journal = options.journal(head.name, &head.facts)?;
    let mut plans = HashMap::new();
    for sheet in &sheets {
        for cell in &sheet.cells {
            plans.insert(
                (sheet.title.as_str(), cell.row.as_str(), cell.column.as_str()),
                &cell.plan,
            );
        }
    }
    let turns = turns(&sheets, head.rounds);
    let ending = take_turns(&turns, &mut journal, options.most(), |turn, records| {
        let (sheet, row, column) = (turn.row.as_str(), turn.part.as_str(), turn.column.as_str());
        let so_far = Results(records);
        if so_far.failure(sheet, row, column).is_some() {
            return Ok(None);
        }
        let plan = plans.get(&(sheet, row, column)).context("a turn of no cell")?;
        Ok(Some(match suite.take(plan, &so_far) {
            Ok(figures) => Taken { figures, failure: None },
            Err(error) if sys::is_interrupted() => return Err(error),
            Err(error) => Taken { failure: Some(format!("{error:#}")), ..Taken::default() },
        }))
    })?;
    let results = Results(journal.records());
    let parts = sheets.iter().map(|sheet| part(sheet, results)).collect();
    let cells = sheets.iter().flat_map(|sheet| json(sheet, results)).collect();
    let how = if sheets.iter().any(|sheet| sheet.has_means) {
        "medians, or means, with their spread"
    } else {
        "medians, with the least and the most"
    };
    let mut facts = vec![("rounds".to_owned(), format!("{}; {how}", head.rounds))];
    facts.extend(head.facts.into_iter().map(|(name, value)| (name.to_owned(), value)));
    Ok(Report {
        name: head.name.into(),
        question: head.question.into(),
        facts,
        ending: Some(ending),
        left_out: head.left_out,
        words: suite.words(&results),
        parts,
        published: head.published,
        is_failed: journal
            .records()
            .iter()
            .any(|record| record.result.failure.is_some() && suite.is_ours(&record.turn.column)),
        cells,
    })
}

/// Round by round. A row's cells come one after the other, in every second round the other way round:
/// each is the first as often as the last.
fn turns<P>(sheets: &[Sheet<P>], rounds: u32) -> Vec<Turn> {
    let rounds_of = |sheet: &Sheet<P>| sheet.rounds.unwrap_or(rounds);
    let most = sheets.iter().map(rounds_of).max().unwrap_or(0);
    let mut turns = Vec::new();
    for round in 1..=most {
        for sheet in sheets.iter().filter(|sheet| round <= rounds_of(sheet)) {
            for row in sheet.cells.chunk_by(|one, next| one.row == next.row) {
                let first = turns.len();
                turns.extend(row.iter().map(|cell| sheet.turn(cell, round)));
                if round % 2 == 0 {
                    turns[first..].reverse();
                }
            }
        }
    }
    turns
}

/// A table as it is shown.
fn part<P>(sheet: &Sheet<P>, results: Results<'_>) -> Part {
    let shown = Shown { sheet, results };
    let table = match sheet.shape {
        Shape::Cells => shown.cells(),
        Shape::Figures => shown.figures(),
    };
    let plot = sheet.plot.and_then(|along| shown.plot(along));
    Part { title: sheet.title.clone(), table, plot, note: sheet.note.clone() }
}

struct Shown<'a, P> {
    sheet: &'a Sheet<P>,
    results: Results<'a>,
}

impl<'a, P> Shown<'a, P> {
    fn samples(&self, row: &str, column: &str, figure: &str) -> Samples {
        self.results.samples(&self.sheet.title, row, column, figure)
    }

    fn written(&self, samples: &Samples) -> String {
        match self.sheet.has_means {
            true => mean(samples),
            false => spread(samples, ""),
        }
    }

    fn ratio(&self, row: &str, column: &str, figure: &str) -> String {
        let base = self.sheet.base.as_deref().unwrap_or_default();
        let ratio = self.results.over(&self.sheet.title, row, [column, base], figure);
        spread(&ratio, "x")
    }

    /// The names of all figures.
    fn names(&self) -> Vec<&'a str> {
        let cells = self.sheet.cells.iter();
        let names =
            cells.flat_map(|cell| self.results.names(&self.sheet.title, &cell.row, &cell.column));
        unique(names)
    }

    fn cells(&self) -> Table {
        let names = self.names();
        let mut head = vec![String::new(), "way".into()];
        for (index, name) in names.iter().enumerate() {
            head.push((*name).into());
            if let (0, Some(base)) = (index, &self.sheet.base) {
                head.push(format!("over {base}"));
            }
        }
        let mut table = Table::new(head);
        for cell in &self.sheet.cells {
            let mut line = vec![cell.row.clone(), cell.column.clone()];
            if let Some(why) = self.results.failure(&self.sheet.title, &cell.row, &cell.column) {
                line.push(format!("FAILED: {why}"));
                table.row(line);
                continue;
            }
            for (index, name) in names.iter().enumerate() {
                line.push(self.written(&self.samples(&cell.row, &cell.column, name)));
                if index == 0 && self.sheet.base.is_some() {
                    line.push(self.ratio(&cell.row, &cell.column, name));
                }
            }
            table.row(line);
        }
        table
    }

    fn figures(&self) -> Table {
        let columns = self.sheet.columns();
        let mut head = vec![String::new(), String::new()];
        head.extend(columns.iter().map(|column| (*column).to_owned()));
        let base = self.sheet.base.as_deref();
        let compared: Vec<&str> = match base {
            Some(base) => columns.iter().copied().filter(|column| *column != base).collect(),
            None => Vec::new(),
        };
        head.extend(compared.iter().map(|column| format!("{column} / {}", base.unwrap_or(""))));
        let mut table = Table::new(head);
        for row in self.sheet.rows() {
            for column in &columns {
                if let Some(why) = self.results.failure(&self.sheet.title, row, column) {
                    table.row(vec![row.into(), format!("{column} FAILED: {why}")]);
                }
            }
            let of_row = |column: &&str| self.results.names(&self.sheet.title, row, column);
            for name in unique(columns.iter().flat_map(of_row)) {
                let mut line = vec![row.to_owned(), name.to_owned()];
                let samples = columns.iter().map(|column| self.samples(row, column, name));
                line.extend(samples.map(|samples| self.written(&samples)));
                line.extend(compared.iter().map(|column| self.ratio(row, column, name)));
                table.row(line);
            }
        }
        table
    }

    /// The first figure, of cells that have any.
    fn plot(&self, along: Along) -> Option<Plot> {
        let figure = *self.names().first()?;
        let (x, lines) = match along {
            Along::Rows => (self.sheet.rows(), self.sheet.columns()),
            Along::Columns => (self.sheet.columns(), self.sheet.rows()),
        };
        let line = |line: &&str| {
            let points = x.iter().map(|x| {
                let [row, column] = if along == Along::Rows { [*x, *line] } else { [*line, *x] };
                let samples = self.samples(row, column, figure);
                (!samples.is_empty()).then(|| [samples.median(), samples.min(), samples.max()])
            });
            ((*line).to_owned(), points.collect())
        };
        let lines = lines.iter().map(line).collect();
        Some(Plot { y: figure.into(), x: x.iter().map(|x| (*x).to_owned()).collect(), lines })
    }
}

/// An object for each cell that was measured.
fn json<P>(sheet: &Sheet<P>, results: Results<'_>) -> Vec<Value> {
    let title = sheet.title.as_str();
    let cells = sheet.cells.iter().filter_map(|cell| {
        let (row, column) = (cell.row.as_str(), cell.column.as_str());
        results.of(title, row, column).next()?;
        let names = || results.names(title, row, column).into_iter();
        let figures =
            names().map(|name| (name, Value::from(&results.samples(title, row, column, name))));
        let mut members = vec![
            ("sheet", Value::from(title)),
            ("row", Value::from(row)),
            ("column", Value::from(column)),
            ("figures", Value::from_iter(figures)),
        ];
        if let Some(base) = &sheet.base {
            let over = |name| results.over(title, row, [column, base.as_str()], name);
            let ratios = names().map(|name| (name, over(name)));
            let ratios = ratios.filter(|(_, samples)| !samples.is_empty());
            let ratios = ratios.map(|(name, samples)| (name, Value::from(&samples)));
            members.push(("over", Value::from(base.as_str())));
            members.push(("ratios", Value::from_iter(ratios)));
        }
        if let Some(why) = results.failure(title, row, column) {
            members.push(("failure", Value::from(why)));
        }
        Some(Value::from_iter(members))
    });
    cells.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sheet() -> Sheet<u32> {
        let mut sheet = Sheet::new("touches", Shape::Cells).base("a").plot(Along::Rows);
        for (at, row) in ["1 thread", "2 threads"].into_iter().enumerate() {
            sheet.add(row, "a", at as u32);
            sheet.add(row, "b", at as u32 + 10);
        }
        sheet
    }

    struct Touches;

    impl Suite for Touches {
        type Plan = u32;

        fn head(&self) -> Head {
            let (facts, left_out, published) = (Vec::new(), Vec::new(), Vec::new());
            Head { name: "touches", question: "Which?", facts, rounds: 2, left_out, published }
        }

        fn sheets(&self) -> Vec<Sheet<u32>> {
            vec![sheet()]
        }

        fn take(&mut self, plan: &u32, so_far: &Results<'_>) -> Result<Figures> {
            anyhow::ensure!(*plan != 11, "there are no two");
            let rounds = so_far.samples("touches", "1 thread", "a", "seconds").values().len();
            Ok(figures([("seconds", f64::from(*plan) + 1.0), ("rounds", rounds as f64)]))
        }
    }

    #[test]
    fn in_every_second_round_a_rows_cells_come_the_other_way_round() {
        let turns = turns(&[sheet()], 2);
        let order: Vec<String> =
            turns.iter().map(|turn| format!("{}{}", &turn.part[..1], turn.column)).collect();
        assert_eq!(order, ["1a", "1b", "2a", "2b", "1b", "1a", "2b", "2a"]);
    }

    #[test]
    fn a_cell_that_fails_says_why_and_the_others_are_whole() {
        let report = measure(&mut Touches, &Options::default()).unwrap();
        assert!(report.is_failed);
        let table = report.parts[0].table.to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 6);
        assert!(lines[0].contains("| seconds ") && lines[0].contains("| over a"), "{table}");
        for written in ["| 11.0 (11.0..11.0) ", "| 11.0x (11.0..11.0) "] {
            assert!(lines[3].contains(written), "{table}");
        }
        assert!(lines[5].contains("FAILED: there are no two"), "{table}");
        assert_eq!(report.cells.len(), 4);
        assert_eq!(report.cells[3]["failure"], "there are no two");
        let plot = report.parts[0].plot.as_ref().unwrap();
        assert_eq!((plot.x.len(), plot.lines.len()), (2, 2));
        assert!(plot.lines[1].1[1].is_none());
    }

    #[test]
    fn figures_may_stand_below_each_other() {
        let mut sheet = sheet();
        sheet.shape = Shape::Figures;
        let record = |column: &str, seconds| Record {
            turn: sheet.turn(sheet.cells.iter().find(|cell| cell.column == column).unwrap(), 1),
            took_seconds: 0.0,
            result: Taken { figures: figures([("seconds", seconds)]), failure: None },
        };
        let records = [record("a", 2.0), record("b", 3.0)];
        let table = part(&sheet, Results(&records)).table.to_string();
        assert!(table.lines().nth(2).unwrap().contains("| 2.00 | 3.00 | 1.50x |"), "{table}");
    }
}
