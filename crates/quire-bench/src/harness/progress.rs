//! A line on stderr after each turn, with an estimate of the time that is left.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use quire_cli::print::say;

use super::Turn;
use super::journal::Record;

/// Turns that are shorter are not said one by one.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

/// What turns took, by cell.
pub(crate) struct Progress {
    seconds: HashMap<(String, String, String), f64>,
    said: Option<Instant>,
}

fn cell(turn: &Turn) -> (String, String, String) {
    (turn.row.clone(), turn.part.clone(), turn.column.clone())
}

impl Progress {
    pub(crate) fn new<R>(turns: &[Turn], records: &[Record<R>]) -> Progress {
        let mut progress = Progress { seconds: HashMap::new(), said: None };
        for record in records {
            progress.note(&record.turn, record.took_seconds);
        }
        let found = turns.iter().filter(|turn| records.iter().any(|record| record.turn == **turn));
        let found = found.count();
        if found > 0 {
            say(&format!("{found} of {} results are there already", turns.len()));
        }
        progress
    }

    /// A turn took so long; the next one of its cell will.
    pub(crate) fn note(&mut self, turn: &Turn, seconds: f64) {
        self.seconds.insert(cell(turn), seconds);
    }

    /// Says that the turn at `index` is done, where there was nothing to say for a while.
    pub(crate) fn say(&mut self, index: usize, turns: &[&Turn]) {
        let (turn, left) = (turns[index], &turns[index + 1..]);
        if self.said.is_some_and(|said| said.elapsed() < BETWEEN_LINES) && !left.is_empty() {
            return;
        }
        self.said = Some(Instant::now());
        let took = self.seconds.get(&cell(turn)).copied().unwrap_or(0.0);
        let name = [&turn.row, &turn.part, &turn.column].map(String::as_str);
        let name: Vec<&str> = name.into_iter().filter(|word| !word.is_empty()).collect();
        say(&format!(
            "{}/{}: {}, round {}: {}; {} left",
            index + 1,
            turns.len(),
            name.join(" "),
            turn.round,
            in_words(took),
            in_words(self.left_seconds(left))
        ));
    }

    /// Turns of cells that ran take what these took, others what cells take on the average.
    fn left_seconds(&self, turns: &[&Turn]) -> f64 {
        let average = self.seconds.values().sum::<f64>() / self.seconds.len().max(1) as f64;
        let seconds = |turn: &Turn| self.seconds.get(&cell(turn)).copied().unwrap_or(average);
        turns.iter().map(|turn| seconds(turn)).fold(0.0, |sum, seconds| sum + seconds)
    }
}

/// `0.4 s`, `35 s`, `12 min`, `1 h 20 min`
pub(crate) fn in_words(seconds: f64) -> String {
    match seconds {
        ..9.95 => format!("{seconds:.1} s"),
        ..99.5 => format!("{seconds:.0} s"),
        ..3570.0 => format!("{:.0} min", seconds / 60.0),
        _ => {
            let minutes = (seconds / 60.0).round() as u64;
            format!("{} h {} min", minutes / 60, minutes % 60)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_follows_from_what_cells_took() {
        let turn = |column: &str, round| Turn {
            row: "sort".into(),
            part: String::new(),
            column: column.into(),
            round,
        };
        let mut progress = Progress::new::<()>(&[], &[]);
        assert_eq!(progress.left_seconds(&[&turn("bare", 1)]), 0.0);
        progress.note(&turn("bare", 1), 1.0);
        progress.note(&turn("quire", 1), 5.0);
        assert_eq!(progress.left_seconds(&[&turn("bare", 2), &turn("disk", 1)]), 4.0);
    }

    #[test]
    fn people_read_durations() {
        for (seconds, text) in
            [(0.44, "0.4 s"), (35.2, "35 s"), (130.0, "2 min"), (4805.0, "1 h 20 min")]
        {
            assert_eq!(in_words(seconds), text);
        }
    }
}
