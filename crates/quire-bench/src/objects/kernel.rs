//! The kernel's side of `quire bench objects`: a program of its own that reads a file through
//! mmap(2), in a memory cgroup that may hold no more than Quire may.
//!
//! The file is cold when it starts, so what it reads is charged to its cgroup; so are the program's
//! own pages, a MiB or two. It times itself, from before the mapping to after the last read.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};

use super::super::contestant::phases_of;
use super::super::data::{self, Data, Pattern};
use super::super::memory_limit::MemoryLimit;
use super::super::{sys, work};
use super::in_threads;

/// What the mapping is advised.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Advice {
    /// Nothing
    None,
    /// MADV_SEQUENTIAL
    Sequential,
    /// MADV_RANDOM
    Random,
}

/// What the program is told.
#[derive(Args, Debug)]
pub(crate) struct MmapArgs {
    #[arg(long)]
    file: PathBuf,

    #[arg(long)]
    bytes: usize,

    #[arg(long, value_enum, default_value = "none")]
    advice: Advice,

    #[arg(long, default_value_t = 1)]
    threads: usize,

    /// So many pages, in random order; in order, and all, where it is not there
    #[arg(long)]
    reads: Option<usize>,

    /// The sum of what is read
    #[arg(long)]
    expected: u64,
}

/// How a file is to be read.
#[derive(Clone, Copy)]
pub(super) struct Reading {
    pub advice: Advice,
    pub threads: usize,
    pub reads: Option<usize>,
}

/// The program.
pub(crate) fn main(args: &MmapArgs) -> Result<u8> {
    let order = args.reads.map(|reads| {
        let mut order = data::shuffled(args.bytes / data::PAGE_BYTES);
        order.truncate(reads);
        order
    });
    let started = Instant::now();
    let mapping = sys::FileMapping::new(&args.file, args.bytes)?;
    match args.advice {
        Advice::None => {}
        Advice::Sequential => mapping.advise(libc::MADV_SEQUENTIAL)?,
        Advice::Random => mapping.advise(libc::MADV_RANDOM)?,
    }
    let words = mapping.words();
    let sum = match &order {
        Some(order) => {
            in_threads(order, args.threads, |part| Ok(Pattern::Random.read(words, part)))?
        }
        None => Pattern::InOrder.read(words, &[]),
    };
    data::check(sum, args.expected)?;
    work::say("read", started);
    Ok(0)
}

/// A cgroup, and this binary.
pub(super) struct Kernel {
    limit: MemoryLimit,
    own: PathBuf,
}

impl Kernel {
    /// Makes the cgroup.
    pub(super) fn new(limit_bytes: u64) -> Result<Kernel> {
        let limit = MemoryLimit::create()?;
        limit.set(limit_bytes)?;
        let own = std::env::current_exe().context("cannot find this program's own file")?;
        Ok(Kernel { limit, own })
    }

    /// Which controller limits it, in words.
    pub(super) fn version(&self) -> &'static str {
        self.limit.version()
    }

    /// Reads a file that is cold; seconds.
    pub(super) fn read(&self, data: &Data, reading: Reading, expected: u64) -> Result<f64> {
        let mut command = self.limit.command();
        command.arg(&self.own).args(["mmap", "--file"]).arg(data.path());
        command.args(reading.words(data.bytes, expected));
        seconds_of(&mut command)
    }
}

impl Reading {
    fn words(self, bytes: usize, expected: u64) -> Vec<String> {
        let advice = self.advice.to_possible_value().expect("none is skipped");
        let mut words = vec![
            format!("--bytes={bytes}"),
            format!("--advice={}", advice.get_name()),
            format!("--threads={}", self.threads),
            format!("--expected={expected}"),
        ];
        words.extend(self.reads.map(|reads| format!("--reads={reads}")));
        words
    }
}

fn seconds_of(command: &mut Command) -> Result<f64> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    ensure!(!sys::is_interrupted(), "interrupted");
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ended with {}: {}", output.status, said.trim());
    match &phases_of(&String::from_utf8_lossy(&output.stdout))[..] {
        [(_, seconds)] => Ok(*seconds),
        _ => bail!("it did not say how long it took"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: MmapArgs,
    }

    #[test]
    fn the_program_reads_what_it_was_told_and_finds_a_wrong_sum() {
        let data = Data::new(&std::env::temp_dir(), 2 << 20).unwrap();
        let order = data.shuffled();
        let readings = [
            Reading { advice: Advice::None, threads: 1, reads: None },
            Reading { advice: Advice::Sequential, threads: 1, reads: None },
            Reading { advice: Advice::Random, threads: 3, reads: Some(100) },
        ];
        for reading in readings {
            let expected = match reading.reads {
                Some(reads) => data.expected(Pattern::Random, &order[..reads]),
                None => data.expected(Pattern::InOrder, &[]),
            };
            for (expected, is_right) in [(expected, true), (expected.wrapping_add(1), false)] {
                let file = format!("--file={}", data.path().display());
                let words = ["program".into(), file].into_iter();
                let program = Program::parse_from(words.chain(reading.words(data.bytes, expected)));
                assert_eq!(program.args.advice, reading.advice);
                assert_eq!(main(&program.args).is_ok(), is_right);
            }
        }
    }

    #[test]
    fn seconds_are_those_that_the_program_says() {
        let told = |text: &str| seconds_of(Command::new("/bin/echo").arg(text));
        let line = "{\"phase\": \"read\", \"seconds\": 0.250000}";
        assert_eq!(told(line).unwrap(), 0.25);
        assert!(told("").is_err());
        assert!(seconds_of(Command::new("/bin/false").arg(line)).is_err());
    }
}
