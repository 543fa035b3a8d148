//! `quire bench pressure`: programs in a part of the memory that they want, bare, under Quire, and with
//! each of the kernel's swaps.
//!
//! A program's want is what it holds bare, measured by the run itself; for a tree of processes it is what
//! Quire counts where all fits. Rounds are outermost: each round runs every program bare once, then in
//! every part of its want under Quire and with the kernel's swaps, one right after the other.
//!
//! Owns the rows and columns, and what their figures mean. Leaves order, journal and progress to
//! [`crate::harness`].

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

mod columns;
mod counters;
mod measured;
mod options;
mod pages;
mod prepare;
mod redis;
mod report;
mod resp;
mod rows;
mod swaps;
mod touch;

pub(crate) use options::PressureBench;
pub(crate) use redis::{RedisArgs, load as redis_load};
pub(crate) use touch::{TouchArgs, touch};

use super::contestant::Stage;
use super::harness::{self, Turn, take_turns};
use super::{data, sys};
use columns::{Column, Runner};
use counters::Disk;
use measured::{Cell, End, Measured, Records};
use prepare::{Prepared, prepare};
use report::Found;
use rows::{Fraction, Row, Selection};
use swaps::Swaps;

/// The kernel's swap; a page that is not used takes little or nothing of it.
const SWAP_BYTES: u64 = 6 << 30;
const QUICK_SWAP_BYTES: u64 = 512 << 20;
/// No program runs in less.
const BUDGET_MIN_BYTES: u64 = 8 << 20;
/// A run may take so many times as long as the best of its row and part.
const STOPPED_AT: f64 = 10.0;
/// And this at least; and this where there is no other yet.
const RUN_SECONDS_MIN: f64 = 30.0;
const RUN_SECONDS_MAX: f64 = 900.0;

/// Rows with the parts of their wants.
type Selected = Vec<(Row, Vec<Fraction>)>;

/// Runs the bench.
pub(crate) fn report(options: &PressureBench) -> Result<harness::Report> {
    let is_quick = options.common.quick;
    let selection = Selection {
        is_full: options.common.full,
        is_quick,
        only: &options.only,
        fractions: &options.fraction,
    };
    let rows = selection.of(rows::all(is_quick))?;
    let mut journal = options.common.journal("pressure", &[])?;
    let columns = options.columns();
    let rounds = options.common.rounds(1, 3);
    let mut suite = Suite { runner: runner(options, &columns)?, prepared: HashMap::new() };
    let columns_not_run = suite.columns_not_run(&columns);
    let is_run = |column: &Column| columns_not_run.iter().all(|(not_run, _)| not_run != column);
    let run: Vec<Column> = columns.iter().copied().filter(is_run).collect();
    let turns = turns(&rows, &run, rounds);
    let ending = take_turns(&turns, &mut journal, options.most(), |turn, records| {
        suite.take(turn, &rows, records)
    })?;
    let (missing, note) = (suite.missing(), suite.runner.swaps.note());
    let (rows, columns, records) = (&rows, &columns[..], journal.records());
    let found = Found { rows, columns, rounds, records, ending, missing, columns_not_run, note };
    Ok(found.report())
}

fn runner(options: &PressureBench, columns: &[Column]) -> Result<Runner> {
    let directory = options.directory.clone().unwrap_or_else(data::disk_directory);
    let no_kernel = Err(anyhow::anyhow!("the suite has swaps of its own"));
    let stage = Stage::in_directory(&directory, options.common.quire.as_deref(), no_kernel)?;
    let bytes = if options.common.quick { QUICK_SWAP_BYTES } else { SWAP_BYTES };
    let swaps = Swaps::create(columns, stage.folder(), bytes);
    let disk = Disk::under(&directory);
    Ok(Runner { swaps, stage, disk })
}

/// Round by round: every row bare, then in each part in every other column.
fn turns(rows: &Selected, columns: &[Column], rounds: u32) -> Vec<Turn> {
    let mut turns = Vec::new();
    for round in 1..=rounds {
        for (row, fractions) in rows {
            let turn = |part: String, column: &Column| Turn {
                row: row.name.clone(),
                part,
                column: column.name(),
                round,
            };
            turns.push(turn(String::new(), &Column::Bare));
            let others = || columns.iter().filter(|column| **column != Column::Bare);
            for fraction in fractions {
                turns.extend(others().map(|column| turn(fraction.to_string(), column)));
            }
        }
    }
    turns
}

/// The name that the command line has for a value.
fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

struct Suite {
    runner: Runner,
    /// By the row's name; or why its program cannot be run.
    prepared: HashMap<String, Result<Prepared, String>>,
}

impl Suite {
    /// Takes a turn; nothing where it cannot be taken here.
    fn take(
        &mut self,
        turn: &Turn,
        rows: &Selected,
        records: Records<'_>,
    ) -> Result<Option<Measured>> {
        let find = |(row, _): &&(Row, Vec<Fraction>)| row.name == turn.row;
        let (row, _) = rows.iter().find(find).context("a turn of no row")?;
        let column = Column::from_str(&turn.column, false).ok();
        let column = column.context("a turn of no column")?;
        let runner = &self.runner;
        let prepared = self
            .prepared
            .entry(row.name.clone())
            .or_insert_with(|| prepare(row, &runner.stage).map_err(|error| format!("{error:#}")));
        if prepared.is_err() && sys::is_interrupted() {
            self.prepared.remove(&row.name);
            bail!("interrupted");
        }
        let Ok(program) = prepared else { return Ok(None) };
        let run = Run { runner, program, column, turn, records };
        let measured = match column {
            Column::Bare => run.bare().map(Some),
            _ => run.limited(),
        };
        match measured {
            // The other cells are none the worse for it.
            Err(error) if !sys::is_interrupted() => {
                Ok(Some(Measured::failed(format!("{error:#}"))))
            }
            measured => measured,
        }
    }

    /// Rows whose programs cannot be run here, and why.
    fn missing(&self) -> HashMap<String, String> {
        let missing = self.prepared.iter();
        missing
            .filter_map(|(row, made)| Some((row.clone(), made.as_ref().err()?.clone())))
            .collect()
    }

    fn columns_not_run(&self, columns: &[Column]) -> Vec<(Column, String)> {
        let swaps = &self.runner.swaps;
        let not_run = columns.iter().filter_map(|column| Some((*column, swaps.why_not(*column)?)));
        not_run.collect()
    }
}

/// One turn of a program.
struct Run<'a> {
    runner: &'a Runner,
    program: &'a Prepared,
    column: Column,
    turn: &'a Turn,
    records: Records<'a>,
}

impl Run<'_> {
    fn cell(&self, column: Column) -> Cell<'_> {
        Cell::of(self.records, &self.turn.row, &self.turn.part, column)
    }

    fn bare(&self) -> Result<Measured> {
        let most = Duration::from_secs_f64(RUN_SECONDS_MAX);
        let mut measured = self.runner.bare(self.program, most)?;
        if self.program.is_tree {
            let known = self.cell(Column::Bare).done().next().map(|run| run.want_bytes);
            measured.want_bytes = match known {
                Some(bytes) => bytes,
                None => self.runner.want_of_tree(self.program, most)?,
            };
        }
        Ok(measured)
    }

    /// Runs the program in a part of what it wants; nothing where it is not known what that is, or
    /// where such a run was stopped before.
    fn limited(&self) -> Result<Option<Measured>> {
        let bare = self.cell(Column::Bare);
        let Some(bare) = bare.done().next() else { return Ok(None) };
        if self.cell(self.column).has(&End::Stopped) {
            return Ok(None);
        }
        let fraction: Fraction = self.turn.part.parse()?;
        let budget = fraction.of(bare.want_bytes).max(BUDGET_MIN_BYTES) & !4095;
        let most = self.most();
        if self.column == Column::Quire {
            return self.runner.quire(self.program, budget, bare.digest, most).map(Some);
        }
        let unmanaged = self.cell(Column::Quire).runs().find_map(|run| run.unmanaged_bytes);
        let Some(unmanaged) = unmanaged else { return Ok(None) };
        let (limit, program) = (budget + unmanaged, self.program);
        self.runner.kernel(self.column, program, limit, bare.digest, most).map(Some)
    }

    /// How long the run may take.
    fn most(&self) -> Duration {
        let others = Column::value_variants().iter().filter(|column| **column != Column::Bare);
        let best = others
            .flat_map(|column| {
                self.cell(*column).done().map(|run| run.wall_seconds).min_by(f64::total_cmp)
            })
            .min_by(f64::total_cmp);
        let most = best.map_or(RUN_SECONDS_MAX, |best| (best * STOPPED_AT).max(RUN_SECONDS_MIN));
        Duration::from_secs_f64(most.min(RUN_SECONDS_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_has_every_row_bare_and_each_part_in_the_other_columns_in_turn() {
        let only = ["sort-100M".to_owned()];
        let fractions = ["1/2".parse().unwrap(), "1/4".parse().unwrap()];
        let selection =
            Selection { is_full: false, is_quick: true, only: &only, fractions: &fractions };
        let rows = selection.of(rows::all(true)).unwrap();
        let columns = [Column::Bare, Column::Quire, Column::Disk];
        let turns = turns(&rows, &columns, 2);
        let shown: Vec<String> = turns
            .iter()
            .map(|turn| format!("{}{} {}", turn.round, turn.part, turn.column))
            .collect();
        let round = [" bare", "1/2 quire", "1/2 disk", "1/4 quire", "1/4 disk"];
        let expected: Vec<String> =
            [1, 2].iter().flat_map(|number| round.map(|turn| format!("{number}{turn}"))).collect();
        assert_eq!(shown, expected);
    }
}
