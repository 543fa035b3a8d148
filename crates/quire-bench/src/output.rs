//! How figures are printed.

use serde_json::Value;

use super::machine;
use crate::samples::Samples;

/// What most suites print of each figure.
pub(crate) const MEDIANS: &str = "medians, and of ratios the least and the most";

/// Prints what the figures hold for, how many rounds there are, and what is printed of them.
pub(crate) fn print_heading(rounds: u32, figures: &str) {
    for (name, value) in machine::facts() {
        println!("{name:>24}: {value}");
    }
    println!("{:>24}: {rounds}; {figures}", "rounds");
}

/// Prints what a suite found as JSON, with what the figures hold for.
pub(crate) fn print_json<'a>(suite: &str, members: impl IntoIterator<Item = (&'a str, Value)>) {
    let facts = machine::facts();
    let own = [("bench", Value::from(suite)), ("machine", Value::from_iter(facts))];
    println!("{}", Value::from_iter(own.into_iter().chain(members)));
}

/// `0.43x (0.40..0.51)`
pub(crate) fn ratio(samples: &Samples) -> String {
    if samples.is_empty() {
        return "-".into();
    }
    format!("{:.2}x ({:.2}..{:.2})", samples.median(), samples.min(), samples.max())
}
