//! How figures are printed.

use quire_cli::print::json::Json;

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
pub(crate) fn print_json<'a>(suite: &str, members: impl IntoIterator<Item = (&'a str, Json)>) {
    let facts = machine::facts().into_iter();
    let facts = facts.map(|(name, value)| (name.to_owned(), Json::Text(value))).collect();
    let mut all =
        vec![("bench".to_owned(), Json::text(suite)), ("machine".to_owned(), Json::Object(facts))];
    all.extend(members.into_iter().map(|(name, value)| (name.to_owned(), value)));
    println!("{}", Json::Object(all));
}

/// `0.43x (0.40..0.51)`
pub(crate) fn ratio(samples: &Samples) -> String {
    if samples.is_empty() {
        return "-".into();
    }
    format!("{:.2}x ({:.2}..{:.2})", samples.median(), samples.min(), samples.max())
}
