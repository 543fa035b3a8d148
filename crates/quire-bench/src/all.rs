//! `quire bench all`: all suites, one after the other, as one report.
//!
//! A suite that cannot run says why, and the others are none the worse.

use std::ffi::OsString;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::{Args, Parser as _};
use quire_cli::print::say;

use super::harness::{self, Ending, Options, Report};
use super::{BenchArgs, BenchCommand, data, sys};

/// The suites in the order of the designs, then what else there is, that which takes longest last.
const SUITES: [&str; 18] = [
    "fault-around",
    "fault-around-simulated",
    "swap",
    "swap-simulated",
    "waiters",
    "rmap",
    "rmap-simulated",
    "speculative",
    "speculative-simulated",
    "fault",
    "objects",
    "fork",
    "far",
    "url",
    "arrays",
    "handlers",
    "run",
    "pressure",
];

#[derive(Args, Debug)]
pub(crate) struct AllBench {
    #[command(flatten)]
    common: Options,

    /// Only these suites
    #[arg(long, value_name = "SUITE,SUITE", value_delimiter = ',', value_parser = SUITES)]
    only: Vec<String>,
}

/// Runs the suites.
pub(crate) fn main(options: &AllBench) -> Result<u8> {
    sys::notice_signals();
    sys::notice_lost_reader();
    let started = Instant::now();
    let mut reports: Vec<Report> = Vec::new();
    for name in SUITES {
        let is_chosen = options.only.is_empty() || options.only.iter().any(|only| only == name);
        if !is_chosen {
            continue;
        }
        if sys::is_interrupted() {
            break;
        }
        say(&format!("{name}:"));
        let report = report(name, &options.common, started).unwrap_or_else(|error| {
            let mut report = Report::not_run(name, &format!("{error:#}"));
            report.ending = sys::is_interrupted().then_some(Ending::Interrupted);
            report
        });
        reports.push(report);
    }
    harness::present(reports, &options.common)
}

/// Runs a suite as its own command line would.
fn report(name: &str, common: &Options, started: Instant) -> Result<Report> {
    let mut words: Vec<OsString> = vec!["quire-bench".into()];
    words.extend(command(name).into_iter().map(OsString::from));
    words.extend(common.quick.then(|| "--quick".into()));
    words.extend(common.full.then(|| "--full".into()));
    let mut option = |name: &str, value: OsString| words.extend([name.into(), value]);
    if let Some(rounds) = common.rounds {
        option("--rounds", rounds.to_string().into());
    }
    if let Some(file) = &common.resume {
        // The results of each have a file of their own.
        option("--resume", data::with_suffix(file, &format!("-{name}")).into());
    }
    if let Some(minutes) = common.minutes {
        let gone = (started.elapsed().as_secs() / 60) as u32;
        ensure!(gone < minutes, "time was up");
        option("--minutes", (minutes - gone).to_string().into());
    }
    if let Some(quire) = &common.quire {
        option("--quire", quire.into());
    }
    match BenchArgs::try_parse_from(words)?.command {
        BenchCommand::Suite(suite) => suite.report(),
        _ => unreachable!("all that are listed are suites"),
    }
}

/// The words of a suite's command line.
fn command(name: &str) -> Vec<&str> {
    match name.strip_suffix("-simulated") {
        Some(suite) => vec![suite, "--simulate"],
        None => vec![name],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_that_of_a_suite() {
        for name in SUITES {
            let words = ["quire-bench"].into_iter().chain(command(name)).chain(["--quick"]);
            let parsed = BenchArgs::try_parse_from(words).unwrap();
            let BenchCommand::Suite(suite) = parsed.command else { panic!("{name} is no suite") };
            assert!(suite.options().quick);
        }
    }

    #[test]
    fn a_suite_that_cannot_begin_says_why() {
        let common = Options { minutes: Some(0), ..Options::default() };
        let error = report("swap", &common, Instant::now()).err().unwrap();
        assert_eq!(error.to_string(), "time was up");
    }
}
