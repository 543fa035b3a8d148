//! Figures beside those of an earlier run: what has moved further than chance moves it.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::markdown::Table;
use super::report::{Part, Report, number};

/// Ranges that are closer than this part of a figure touch.
const NEAR: f64 = 0.05;
/// Of one round, how far chance moves a figure is not known: this is taken for it.
const SPREAD_OF_ONE: f64 = 0.25;

/// Figures of an earlier run, a suite after the other.
pub(crate) struct Baseline(Vec<Value>);

impl Baseline {
    /// Reads what `--json` has printed.
    pub(crate) fn read(path: &Path) -> Result<Baseline> {
        let read = || -> Result<Vec<Value>> {
            let suites = match serde_json::from_str(&fs::read_to_string(path)?)? {
                Value::Array(suites) => suites,
                suite => vec![suite],
            };
            match suites.iter().all(|suite| suite["bench"].is_string() && suite["cells"].is_array())
            {
                true => Ok(suites),
                false => bail!("it has no figures that --json printed"),
            }
        };
        let read = read().map(Baseline);
        read.with_context(|| format!("cannot compare with {}", path.display()))
    }

    /// What has moved.
    pub(crate) fn compare(&self, report: &Report) -> Part {
        let mut table = Table::new(["", "figure", "then", "now", "now / then"]);
        let mut compared = 0;
        let suites = self.0.iter().filter(|suite| suite["bench"] == report.name.as_str());
        let before: Vec<&Value> =
            suites.flat_map(|suite| suite["cells"].as_array()).flatten().collect();
        for cell in &report.cells {
            let is_same = |other: &&&Value| {
                ["sheet", "row", "column"].iter().all(|name| other[name] == cell[name])
            };
            let Some(then) = before.iter().find(is_same) else { continue };
            for (figure, now) in cell["figures"].as_object().into_iter().flatten() {
                let (Some(then), Some(now)) = (Range::of(&then["figures"][figure]), Range::of(now))
                else {
                    continue;
                };
                compared += 1;
                if then.touches(&now) {
                    continue;
                }
                let place =
                    ["sheet", "row", "column"].map(|name| cell[name].as_str().unwrap_or(""));
                table.row(vec![
                    place.join("; "),
                    figure.clone(),
                    number(then.median),
                    number(now.median),
                    format!("{:.2}x", now.median / then.median),
                ]);
            }
        }
        let note =
            Some(format!("{compared} figures were compared; those that are here have moved."));
        Part { title: "against the baseline".into(), table, plot: None, note }
    }
}

struct Range {
    median: f64,
    min: f64,
    max: f64,
}

impl Range {
    fn of(samples: &Value) -> Option<Range> {
        let [median, min, max] = ["median", "min", "max"].map(|name| samples[name].as_f64());
        let (median, mut min, mut max) = (median?, min?, max?);
        if samples["rounds"].as_array().is_none_or(|rounds| rounds.len() < 2) {
            (min, max) = (median * (1.0 - SPREAD_OF_ONE), median * (1.0 + SPREAD_OF_ONE));
        }
        Some(Range { median, min, max })
    }

    fn touches(&self, other: &Range) -> bool {
        let near = NEAR * self.median.abs().max(other.median.abs());
        self.min - near <= other.max && other.min - near <= self.max
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::samples::Samples;

    fn cell(row: &str, seconds: &[f64]) -> Value {
        let samples: Samples = seconds.iter().copied().collect();
        json!({"sheet": "s", "row": row, "column": "c", "figures": {"seconds": Value::from(&samples)}})
    }

    fn report(cells: Vec<Value>) -> Report {
        Report { name: "swap".into(), cells, ..Report::default() }
    }

    #[test]
    fn what_moved_further_than_its_spread_is_said() {
        let before =
            report(vec![cell("a", &[1.0, 1.2]), cell("b", &[1.0, 1.2]), cell("c", &[1.0])]);
        let baseline = Baseline(vec![before.json()]);
        let now = report(vec![
            cell("a", &[1.1, 1.3]),
            cell("b", &[2.0, 2.4]),
            cell("c", &[1.3]),
            cell("d", &[9.0]),
        ]);
        let part = baseline.compare(&now);
        let table = part.table.to_string();
        assert_eq!(table.lines().count(), 3, "{table}");
        assert!(table.contains("| s; b; c | seconds | 1.10 | 2.20 | 2.00x"), "{table}");
        assert!(part.note.unwrap().starts_with("3 figures"));
        let other = Report { name: "rmap".into(), ..now };
        assert!(baseline.compare(&other).table.is_empty());
    }

    #[test]
    fn a_file_without_figures_is_refused_by_its_name() {
        let file = crate::data::Remove(crate::data::unused_path(&std::env::temp_dir()));
        for text in ["", "{}", "[{\"bench\": 1}]", "no"] {
            std::fs::write(&file.0, text).unwrap();
            let error = format!("{:#}", Baseline::read(&file.0).err().unwrap());
            assert!(error.contains("cannot compare with"), "{error}");
        }
        std::fs::write(&file.0, report(Vec::new()).json().to_string()).unwrap();
        assert!(Baseline::read(&file.0).is_ok());
    }
}
