//! The options that all suites have.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use quire_cli::PROGRAM_VARIABLE;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::journal::{Journal, Origin};
use crate::machine;

#[derive(Args, Clone, Default, Debug)]
pub(crate) struct Options {
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,

    /// Write all of it as one HTML file, with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Say what has moved, beyond its spread, since the figures in FILE, which --json has printed
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,

    /// Append each result to FILE as it comes, and go on where the results stop that it has
    #[arg(long, value_name = "FILE")]
    pub resume: Option<PathBuf>,

    /// Begin nothing new after so many minutes, and print what there is
    #[arg(long, value_name = "N")]
    pub minutes: Option<u32>,

    /// Turns that everything gets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,

    /// Small sizes and few rounds: to see that it works
    #[arg(long)]
    pub quick: bool,

    /// The sizes that the designs were measured with, where the machine has them, and whatever else there
    /// is; takes hours
    #[arg(long, conflicts_with = "quick")]
    pub full: bool,

    /// The quire binary to measure [default: the one that runs the bench, or the one beside it]
    #[arg(long, value_name = "FILE", env = PROGRAM_VARIABLE, hide = true)]
    pub quire: Option<PathBuf>,
}

impl Options {
    /// So many rounds as were asked for, else as many as a quick or an ordinary run has.
    pub(crate) fn rounds(&self, quick: u32, ordinary: u32) -> u32 {
        self.rounds.unwrap_or(if self.quick { quick } else { ordinary })
    }

    /// One of three sizes.
    pub(crate) fn size<T>(&self, quick: T, ordinary: T, full: T) -> T {
        match (self.quick, self.full) {
            (true, _) => quick,
            (_, true) => full,
            _ => ordinary,
        }
    }

    /// After this nothing new begins.
    pub(crate) fn most(&self) -> Option<Duration> {
        self.minutes.map(|minutes| Duration::from_secs(u64::from(minutes) * 60))
    }

    /// The results so far of a suite with such sizes.
    pub(crate) fn journal<R: Serialize + DeserializeOwned>(
        &self,
        suite: &str,
        sizes: &[(&str, String)],
    ) -> Result<Journal<R>> {
        let Some(file) = &self.resume else { return Ok(Journal::in_memory()) };
        let facts: HashMap<_, _> = machine::facts().into_iter().collect();
        let fact = |name: &str| facts.get(name).cloned().unwrap_or_default();
        let sizes = sizes.iter().map(|(name, size)| format!("; {name}: {size}"));
        let origin = Origin {
            suite: suite.into(),
            sizes: self.size("quick", "ordinary", "full").to_owned() + &sizes.collect::<String>(),
            commit: fact("commit"),
            kernel: fact("kernel"),
            processor: fact("processor"),
        };
        Journal::resume(file, &origin)
    }
}
