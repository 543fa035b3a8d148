//! What a suite found, as it is shown: tables, plots and sentences, as Markdown, JSON or HTML.

use std::fmt::Write as _;

use serde_json::Value;

use super::Ending;
use super::markdown::Table;
use super::plot::Plot;
use crate::machine;
use crate::samples::Samples;

/// A table with what belongs to it.
pub(crate) struct Part {
    pub title: String,
    pub table: Table,
    pub plot: Option<Plot>,
    /// What stands below.
    pub note: Option<String>,
}

/// All that a suite found.
#[derive(Default)]
pub(crate) struct Report {
    pub name: String,
    pub question: String,
    pub facts: Vec<(String, String)>,
    /// How it ended; nothing where it could not begin, which `left_out` says.
    pub ending: Option<Ending>,
    /// What was not measured, and why.
    pub left_out: Vec<String>,
    /// What holds, and what does not.
    pub words: Vec<String>,
    pub parts: Vec<Part>,
    /// What others measured of their own.
    pub published: Vec<Part>,
    /// An object for each cell: `sheet`, `row`, `column`, `figures`.
    pub cells: Vec<Value>,
    /// Something that was to be measured failed.
    pub is_failed: bool,
}

impl Report {
    /// Of a suite that could not begin.
    pub(crate) fn not_run(name: &str, why: &str) -> Report {
        Report {
            name: name.into(),
            left_out: vec![format!("all of it: {why}")],
            is_failed: true,
            ..Report::default()
        }
    }

    /// What there is to say above the tables.
    pub(crate) fn remarks(&self) -> Vec<String> {
        let mut remarks: Vec<String> =
            self.facts.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        remarks.extend(self.left_out.iter().map(|what| format!("not run: {what}")));
        if let Some(ending) = self.ending.filter(|ending| *ending != Ending::Complete) {
            remarks.push(format!("{} before all of it was run", ending.in_words()));
        }
        remarks
    }

    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("## {}\n\n", self.name);
        if !self.question.is_empty() {
            let _ = writeln!(text, "{}\n", self.question);
        }
        for remark in self.remarks() {
            let _ = writeln!(text, "- {remark}");
        }
        for part in &self.parts {
            part.write_markdown(&mut text);
        }
        if !self.words.is_empty() {
            text.push('\n');
        }
        for sentence in &self.words {
            let _ = writeln!(text, "- {sentence}");
        }
        if !self.published.is_empty() {
            text.push_str("\nAs the design's authors measured it:\n");
        }
        for part in &self.published {
            part.write_markdown(&mut text);
        }
        text
    }

    pub(crate) fn json(&self) -> Value {
        let facts = self.facts.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        Value::from_iter([
            ("bench", Value::from(self.name.as_str())),
            ("machine", Value::from_iter(machine::facts())),
            ("facts", Value::from_iter(facts)),
            ("left_out", self.left_out.clone().into()),
            ("ending", self.ending.map(Ending::in_words).into()),
            ("words", self.words.clone().into()),
            ("cells", self.cells.clone().into()),
        ])
    }
}

impl Part {
    /// A table that was measured elsewhere.
    pub(crate) fn published(title: &str, lines: &[&[&str]]) -> Part {
        let mut lines = lines.iter();
        let mut table = Table::new(lines.next().copied().unwrap_or_default().iter().copied());
        lines.for_each(|line| table.row(line.iter().map(|cell| (*cell).to_owned()).collect()));
        Part { title: title.into(), table, plot: None, note: None }
    }

    fn write_markdown(&self, text: &mut String) {
        let _ = write!(text, "\n### {}\n\n{}", self.title, self.table);
        if let Some(note) = &self.note {
            let _ = writeln!(text, "\n{note}");
        }
    }
}

/// `33.0 s (32.1..34.0)`, `1.50x (1.45..1.60)`; of a single round without the spread.
pub(crate) fn spread(samples: &Samples, unit: &str) -> String {
    if samples.is_empty() {
        return "-".into();
    }
    let median = samples.median();
    let text = |value: f64| digits(value, median);
    match samples.values() {
        [_] => format!("{}{unit}", text(median)),
        _ => format!("{}{unit} ({}..{})", text(median), text(samples.min()), text(samples.max())),
    }
}

/// `33.0 (1.2)`: the mean, and the deviation.
pub(crate) fn mean(samples: &Samples) -> String {
    if samples.is_empty() {
        return "-".into();
    }
    let mean = samples.mean();
    format!("{} ({})", digits(mean, mean), digits(samples.deviation(), mean))
}

/// As many digits as three of `like` want; whole numbers as they are.
fn digits(value: f64, like: f64) -> String {
    let digits = match like.abs() {
        _ if like == 0.0 || (like.fract() == 0.0 && like.abs() >= 100.0) => 0,
        ..0.1 => 4,
        ..1.0 => 3,
        ..10.0 => 2,
        ..1000.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// `950`, `12.5k`, `3.1M`; small ones with a digit behind the point.
pub(crate) fn number(value: f64) -> String {
    match value {
        ..0.0 => format!("{value}"),
        ..0.1 if value != 0.0 => {
            // As many places as two digits want.
            let places = 1 - value.log10().floor() as i32;
            format!("{value:.*}", places.max(0) as usize)
        }
        ..10.0 if value.fract() != 0.0 => format!("{value:.2}"),
        ..1e4 => format!("{value:.0}"),
        ..1e6 => format!("{:.1}k", value / 1e3),
        _ => format!("{:.1}M", value / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_numbers() {
        for (value, text) in [
            (0.0, "0"),
            (0.001_23, "0.0012"),
            (0.25, "0.25"),
            (3.0, "3"),
            (950.0, "950"),
            (12_500.0, "12.5k"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn samples_are_written_with_their_spread() {
        let of = |values: &[f64]| values.iter().copied().collect::<Samples>();
        assert_eq!(spread(&of(&[1.5]), "x"), "1.50x");
        assert_eq!(spread(&of(&[32.0, 34.04, 33.0]), " s"), "33.0 s (32.0..34.0)");
        assert_eq!(spread(&of(&[4096.0]), ""), "4096");
        assert_eq!(spread(&of(&[0.0, 0.0]), ""), "0 (0..0)");
        assert_eq!(spread(&Samples::default(), "x"), "-");
        assert_eq!(mean(&of(&[1.0, 3.0])), "2.00 (1.41)");
    }

    #[test]
    fn a_report_says_what_is_missing() {
        let mut report = Report { ending: Some(Ending::Interrupted), ..Report::default() };
        report.left_out.push("zram: no right".into());
        assert_eq!(
            report.remarks(),
            ["not run: zram: no right", "interrupted before all of it was run"]
        );
        let report = Report::not_run("swap", "no root");
        assert!(report.markdown().contains("- not run: all of it: no root"));
        assert_eq!(report.json()["ending"], Value::Null);
    }
}
