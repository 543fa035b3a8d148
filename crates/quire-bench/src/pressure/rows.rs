//! The rows: programs, and the fractions of their wants that they are run in.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum as _;

use super::name_of;
use super::pages::Data;
use super::touch::{Access, Pattern};

/// A part of what a program wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fraction {
    numerator: u64,
    denominator: u64,
}

const THREE_QUARTERS: Fraction = Fraction { numerator: 3, denominator: 4 };
const HALF: Fraction = Fraction { numerator: 1, denominator: 2 };
const QUARTER: Fraction = Fraction { numerator: 1, denominator: 4 };
pub(crate) const FRACTIONS: [Fraction; 3] = [THREE_QUARTERS, HALF, QUARTER];

impl Fraction {
    pub(crate) fn of(self, bytes: u64) -> u64 {
        bytes * self.numerator / self.denominator
    }
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.numerator, self.denominator)
    }
}

impl FromStr for Fraction {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Fraction> {
        let parse = || {
            let (numerator, denominator) = text.trim().split_once('/')?;
            Some((numerator.parse().ok()?, denominator.parse().ok()?))
        };
        match parse() {
            Some((numerator, denominator)) if 0 < numerator && numerator < denominator => {
                Ok(Fraction { numerator, denominator })
            }
            _ => bail!("a fraction is written 1/2, and is less than one"),
        }
    }
}

/// What a row runs, with its sizes.
#[derive(Clone, Debug)]
pub(crate) enum Program {
    Sort { bytes: u64 },
    Compile { classes: usize },
    Database { parts: u32 },
    Redis { keys: usize, commands: usize },
    Collector { objects: usize },
    Arrays { what: &'static str, count: usize },
    Build { is_quick: bool },
    Touch { bytes: u64, data: Data, pattern: Pattern, access: Access, threads: usize },
}

/// A row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub name: String,
    pub program: Program,
    /// What the core runs it in; nothing where it is none of the core's.
    core: Vec<Fraction>,
    is_quick: bool,
}

/// The touches of the core: name and fractions.
const CORE_TOUCHES: [(&str, &[Fraction]); 16] = [
    ("touch-1.0-uniform-read-1", &[HALF]),
    ("touch-1.0-uniform-write-1", &[HALF]),
    ("touch-1.0-uniform-write-2", &[HALF, QUARTER]),
    ("touch-1.0-uniform-read-8", &[HALF]),
    ("touch-1.0-loop-read-1", &[THREE_QUARTERS, HALF]),
    ("touch-1.0-loop-write-1", &[HALF]),
    ("touch-1.6-uniform-read-2", &[HALF]),
    ("touch-1.6-uniform-write-2", &[HALF]),
    ("touch-1.6-zipf-read-2", &[HALF, QUARTER]),
    ("touch-1.6-zipf-write-2", &[HALF, QUARTER]),
    ("touch-1.6-scan-read-2", &[HALF]),
    ("touch-4.0-uniform-read-2", &[HALF]),
    ("touch-4.0-uniform-write-1", &[HALF]),
    ("touch-4.0-uniform-write-2", &[HALF, QUARTER]),
    ("touch-4.0-zipf-write-8", &[HALF]),
    ("touch-4.0-scan-write-2", &[HALF]),
];
const QUICK_TOUCHES: [&str; 3] =
    ["touch-1.0-uniform-write-2", "touch-1.6-zipf-read-2", "touch-4.0-scan-write-2"];
const THREADS: [usize; 3] = [1, 2, 8];

/// Every row, in the order of the table; tiny ones where the run is to be quick.
pub(crate) fn all(is_quick: bool) -> Vec<Row> {
    let size = |full: usize, quick: usize| if is_quick { quick } else { full };
    let bytes = |full: u64, quick: u64| if is_quick { quick << 20 } else { full * 1_000_000 };
    let real: [(&str, Program, &[Fraction]); 10] = [
        ("sort-100M", Program::Sort { bytes: bytes(100, 12) }, &[HALF, QUARTER]),
        ("sort-400M", Program::Sort { bytes: bytes(400, 16) }, &[]),
        ("g++-570M", Program::Compile { classes: size(40, 1) }, &[HALF, QUARTER]),
        ("g++-1270M", Program::Compile { classes: size(100, 2) }, &[]),
        (
            "cpython-database",
            Program::Database { parts: if is_quick { 100 } else { 1 } },
            &[HALF, QUARTER],
        ),
        (
            "redis",
            Program::Redis { keys: size(120_000, 16_000), commands: size(100_000, 4_000) },
            &[HALF, QUARTER],
        ),
        (
            "cpython-gc",
            Program::Collector { objects: size(300_000, 50_000) },
            &[THREE_QUARTERS, HALF],
        ),
        ("numpy-sort", Program::Arrays { what: "sort", count: size(32 << 20, 2 << 20) }, &[HALF]),
        (
            "numpy-gather",
            Program::Arrays { what: "gather", count: size(32 << 20, 2 << 20) },
            &[HALF],
        ),
        ("build-zstd", Program::Build { is_quick }, &[HALF]),
    ];
    let mut rows: Vec<Row> = real
        .into_iter()
        .map(|(name, program, core)| Row {
            name: name.into(),
            program,
            core: core.into(),
            is_quick: !core.is_empty(),
        })
        .collect();
    rows.extend(touches(if is_quick { 32 << 20 } else { 256 << 20 }));
    rows
}

/// Every combination of the touches.
fn touches(bytes: u64) -> Vec<Row> {
    let mut rows = Vec::new();
    for data in Data::value_variants() {
        for pattern in Pattern::value_variants() {
            for access in Access::value_variants() {
                let [one, two, three] = [name_of(data), name_of(pattern), name_of(access)];
                rows.extend(THREADS.map(|threads| {
                    let name = format!("touch-{one}-{two}-{three}-{threads}");
                    let (data, pattern, access) = (*data, *pattern, *access);
                    let core = CORE_TOUCHES.iter().find(|(core, _)| *core == name);
                    Row {
                        core: core.map(|(_, fractions)| fractions.to_vec()).unwrap_or_default(),
                        is_quick: QUICK_TOUCHES.contains(&name.as_str()),
                        name,
                        program: Program::Touch { bytes, data, pattern, access, threads },
                    }
                }));
            }
        }
    }
    rows
}

/// Which of the rows are run, and in what.
#[derive(Debug)]
pub(crate) struct Selection<'a> {
    pub is_full: bool,
    pub is_quick: bool,
    /// Parts of names.
    pub only: &'a [String],
    pub fractions: &'a [Fraction],
}

impl Selection<'_> {
    /// The rows that are selected, each with its fractions.
    pub(crate) fn of(&self, rows: Vec<Row>) -> Result<Vec<(Row, Vec<Fraction>)>> {
        for part in self.only {
            ensure!(
                rows.iter().any(|row| row.name.contains(part.as_str())),
                "no row has {part} in its name; there are {}",
                names(&rows)
            );
        }
        let is_selected = |row: &Row| match self.only {
            [] => self.is_full || if self.is_quick { row.is_quick } else { !row.core.is_empty() },
            only => only.iter().any(|part| row.name.contains(part.as_str())),
        };
        let selected = rows.into_iter().filter(is_selected);
        let selected: Vec<_> = selected.map(|row| (self.fractions_of(&row), row)).collect();
        selected.first().context("no row is selected")?;
        Ok(selected.into_iter().map(|(fractions, row)| (row, fractions)).collect())
    }

    fn fractions_of(&self, row: &Row) -> Vec<Fraction> {
        match self.fractions {
            [] if self.is_full => FRACTIONS.into(),
            [] if self.is_quick => vec![HALF],
            [] if row.core.is_empty() => FRACTIONS.into(),
            [] => row.core.clone(),
            fractions => fractions.into(),
        }
    }
}

/// The names of rows, the touches as a pattern.
fn names(rows: &[Row]) -> String {
    let real = rows.iter().filter(|row| !matches!(row.program, Program::Touch { .. }));
    let real: Vec<&str> = real.map(|row| row.name.as_str()).collect();
    format!(
        "{}, and touch-DATA-PATTERN-ACCESS-THREADS, with DATA 1.0, 1.6 or 4.0, PATTERN uniform, \
         zipf, loop or scan, ACCESS read or write, THREADS 1, 2 or 8",
        real.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(selection: &Selection<'_>) -> Vec<(Row, Vec<Fraction>)> {
        selection.of(all(selection.is_quick)).unwrap()
    }

    const CORE: Selection<'_> =
        Selection { is_full: false, is_quick: false, only: &[], fractions: &[] };

    #[test]
    fn the_core_is_small_and_has_all_that_it_names() {
        let core = select(&CORE);
        let cells: usize = core.iter().map(|(_, fractions)| fractions.len()).sum();
        assert!(cells <= 40, "{cells}");
        for (name, _) in CORE_TOUCHES {
            assert!(core.iter().any(|(row, _)| row.name == name), "{name}");
        }
        let quick = select(&Selection { is_quick: true, ..CORE });
        for name in QUICK_TOUCHES {
            assert!(quick.iter().any(|(row, _)| row.name == name), "{name}");
        }
    }

    #[test]
    fn all_of_it_is_every_row_in_every_fraction() {
        let full = select(&Selection { is_full: true, ..CORE });
        assert_eq!(full.len(), 10 + 3 * 4 * 2 * 3);
        assert!(full.iter().all(|(_, fractions)| fractions[..] == FRACTIONS));
    }

    #[test]
    fn names_are_found_by_a_part_and_unknown_ones_say_which_there_are() {
        let only = ["sort-400".to_owned(), "1.6-zipf".to_owned()];
        let found = select(&Selection { only: &only, fractions: &[HALF], ..CORE });
        assert_eq!(found.len(), 1 + 2 * 3);
        assert!(found.iter().all(|(_, fractions)| fractions[..] == [HALF]));
        let only = ["sort".to_owned(), "gizp".to_owned()];
        let error = Selection { only: &only, ..CORE }.of(all(false)).unwrap_err().to_string();
        assert!(error.starts_with("no row has gizp in its name; there are sort-100M, "), "{error}");
    }

    #[test]
    fn fractions_are_less_than_one() {
        assert_eq!("1/2".parse::<Fraction>().unwrap(), HALF);
        assert_eq!(THREE_QUARTERS.of(400), 300);
        for text in ["", "1", "1/0", "0/2", "3/2", "2/2", "a/b", "-1/2"] {
            assert!(text.parse::<Fraction>().is_err(), "{text}");
        }
    }
}
