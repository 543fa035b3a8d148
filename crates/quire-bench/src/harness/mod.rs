//! What all suites have: turns, results that outlive an interruption, and reports.
//!
//! A suite is a list of *turns*: a row in a column, in a round. Rounds are outermost, so that there is
//! a whole table after the first one, and what the machine does meanwhile spreads over all columns.
//! The harness takes the turns in order, writes each result to the journal as it comes, passes over
//! those that the journal has already, says how far it is, and ends early where time is up or a signal
//! came. What a turn does and what its result is is left to the suite: most say it as tables of cells
//! ([`suite`]). All come to a [`Report`], which is shown as Markdown, JSON and HTML, beside an earlier one.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use quire_cli::end_with_reader;
use quire_cli::print::say;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

mod baseline;
pub(crate) mod beside;
mod html;
pub(crate) mod journal;
pub(crate) mod link;
pub(crate) mod markdown;
mod options;
mod plot;
mod progress;
pub(crate) mod report;
pub(crate) mod suite;

use super::{machine, sys};
use baseline::Baseline;
use journal::{Journal, Record};
pub(crate) use options::Options;
use progress::Progress;
pub(crate) use progress::in_words;
pub(crate) use report::Report;

/// The status of a program that was interrupted.
const INTERRUPTED: u8 = 130;

/// Runs a suite and shows what it found.
pub(crate) fn main(options: &Options, suite: impl FnOnce() -> Result<Report>) -> Result<u8> {
    sys::notice_signals();
    sys::notice_lost_reader();
    present(vec![suite()?], options)
}

/// Shows what suites found; returns the status to end with. All that they set up is gone by now: to print
/// may be the end, where there is no reader any more.
pub(crate) fn present(mut reports: Vec<Report>, options: &Options) -> Result<u8> {
    end_with_reader();
    let mut is_failed = reports.iter().any(|report| report.is_failed);
    if let Some(path) = &options.baseline {
        match Baseline::read(path) {
            Ok(baseline) => {
                for report in &mut reports {
                    let part = baseline.compare(report);
                    report.parts.push(part);
                }
            }
            Err(error) => {
                say(&format!("{error:#}"));
                is_failed = true;
            }
        }
    }
    match (options.json, &reports[..]) {
        (true, [one]) => println!("{}", one.json()),
        (true, many) => {
            let all: Vec<String> = many.iter().map(|report| report.json().to_string()).collect();
            println!("[{}]", all.join(",\n"));
        }
        (false, all) => {
            if all.len() > 1 {
                let words: Vec<String> = std::env::args().skip(1).collect();
                println!("# Benchmarks\n\n`quire bench {}`\n", words.join(" "));
            }
            machine::facts().iter().for_each(|(name, value)| println!("- {name}: {value}"));
            reports.iter().for_each(|report| print!("\n{}", report.markdown()));
        }
    }
    if let Some(path) = &options.html {
        let written = fs::write(path, html::page(&reports));
        written.with_context(|| format!("cannot write the report to {}", path.display()))?;
    }
    let is_interrupted = reports.iter().any(|report| report.ending == Some(Ending::Interrupted));
    Ok(if is_interrupted { INTERRUPTED } else { u8::from(is_failed) })
}

/// What is done once.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Turn {
    /// What the table has a row for: a program, and under which conditions it runs.
    pub row: String,
    /// A part of the row with figures of its own; may be empty.
    pub part: String,
    pub column: String,
    /// From 1.
    pub round: u32,
}

impl Turn {
    /// The same but for the round.
    pub(crate) fn is_of_cell(&self, other: &Turn) -> bool {
        (&self.row, &self.part, &self.column) == (&other.row, &other.part, &other.column)
    }
}

/// How the turns came to an end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    Complete,
    /// Time was up.
    OutOfTime,
    /// A signal came.
    Interrupted,
}

impl Ending {
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Ending::Complete => "complete",
            Ending::OutOfTime => "time was up",
            Ending::Interrupted => "interrupted",
        }
    }
}

/// Takes the turns that are not in the journal. `take` returns nothing where a turn has no result; it
/// gets what there is so far.
pub(crate) fn take_turns<R: Serialize + DeserializeOwned>(
    turns: &[Turn],
    journal: &mut Journal<R>,
    most: Option<Duration>,
    mut take: impl FnMut(&Turn, &[Record<R>]) -> Result<Option<R>>,
) -> Result<Ending> {
    let started = Instant::now();
    let mut progress = Progress::new(turns, journal.records());
    let left: Vec<&Turn> = turns.iter().filter(|turn| !journal.has(turn)).collect();
    for (index, turn) in left.iter().enumerate() {
        if sys::is_interrupted() {
            return Ok(Ending::Interrupted);
        }
        if most.is_some_and(|most| started.elapsed() > most) {
            return Ok(Ending::OutOfTime);
        }
        let turn_started = Instant::now();
        let result = match take(turn, journal.records()) {
            Err(_) if sys::is_interrupted() => return Ok(Ending::Interrupted),
            result => result?,
        };
        let Some(result) = result else { continue };
        let took_seconds = turn_started.elapsed().as_secs_f64();
        progress.note(turn, took_seconds);
        progress.say(index, &left);
        journal.add(Record { turn: (*turn).clone(), took_seconds, result })?;
    }
    Ok(Ending::Complete)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(rounds: u32) -> Vec<Turn> {
        let turn = |round, column: &str| Turn {
            row: "sort".into(),
            part: "1/2".into(),
            column: column.into(),
            round,
        };
        (1..=rounds).flat_map(|round| ["bare", "quire"].map(|column| turn(round, column))).collect()
    }

    #[test]
    fn turns_that_the_journal_has_are_passed_over() {
        let mut journal = Journal::in_memory();
        let ending = take_turns(&turns(1), &mut journal, None, |turn, _| Ok(Some(turn.round)));
        assert_eq!(ending.unwrap(), Ending::Complete);
        let mut taken = Vec::new();
        let ending = take_turns(&turns(2), &mut journal, None, |turn, before| {
            taken.push((turn.round, before.len()));
            Ok((turn.column == "bare").then_some(turn.round))
        });
        assert_eq!(ending.unwrap(), Ending::Complete);
        assert_eq!(taken, [(2, 2), (2, 3)]);
        assert_eq!(journal.records().len(), 3, "a turn without a result leaves nothing");
    }

    #[test]
    fn no_turn_begins_once_time_is_up() {
        let mut journal: Journal<u32> = Journal::in_memory();
        let none = Some(Duration::ZERO);
        let ending = take_turns(&turns(1), &mut journal, none, |_, _| panic!("time is up"));
        assert_eq!(ending.unwrap(), Ending::OutOfTime);
    }
}
