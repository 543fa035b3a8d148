//! What a suite needs that runs many programs in several ways, for a long time.
//!
//! A suite is a list of *turns*: a row in a column, in a round. Rounds are outermost, so that there is
//! a whole table after the first one, and what the machine does meanwhile spreads over all columns.
//! The harness takes the turns in order, writes each result to the journal as it comes, passes over
//! those that the journal has already, says how far it is, and ends early where time is up or a signal
//! came. What a turn does, what its result is and how results are shown is left to the suite.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(crate) mod beside;
pub(crate) mod journal;
pub(crate) mod markdown;
mod progress;

use super::sys;
use journal::{Journal, Record};
use progress::Progress;
pub(crate) use progress::in_words;

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
    for (index, turn) in turns.iter().enumerate() {
        if journal.has(turn) {
            continue;
        }
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
        progress.say(index, turn, turns);
        journal.add(Record { turn: turn.clone(), took_seconds, result })?;
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
