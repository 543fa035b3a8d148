//! `quire touch`, which `quire profile` runs to learn what faults cost here: it fills memory, touches it, and
//! leaves how long that took in a file.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use quire::units::PAGE_SIZE;
use xxhash_rust::xxh3::xxh3_64;

/// In what order pages are touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Order {
    Random,
    Sequential,
}

impl Order {
    pub(super) fn name(self) -> &'static str {
        match self {
            Order::Random => "random",
            Order::Sequential => "sequential",
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct TouchArgs {
    /// Where the nanoseconds are left
    pub report: PathBuf,
    /// Pages of memory
    pub pages: usize,
    /// Bytes of each that do not pack
    pub random_bytes: usize,
    #[arg(value_enum)]
    pub order: Order,
    /// Pages that are touched
    pub count: usize,
}

pub(crate) fn touch(args: &TouchArgs) -> Result<u8> {
    // Numbers that are as good as chance.
    let mut count = 0u64;
    let mut random = || {
        count += 1;
        xxh3_64(&count.to_ne_bytes())
    };
    let mut memory = vec![0u64; args.pages * PAGE_SIZE / size_of::<u64>()];
    let words = PAGE_SIZE / size_of::<u64>();
    for page in memory.chunks_exact_mut(words) {
        page[..args.random_bytes / size_of::<u64>()].fill_with(&mut random);
        page[words - 1] = 1;
    }
    let start = Instant::now();
    for at in 0..args.count {
        let page = match args.order {
            Order::Sequential => at % args.pages,
            Order::Random => random() as usize % args.pages,
        };
        // Every other one is written.
        let last = &mut memory[page * words + words - 1];
        *last += std::hint::black_box(*last) % 2;
    }
    let took = start.elapsed().as_nanos();
    fs::write(&args.report, took.to_string()).context("cannot leave the time")?;
    Ok(0)
}
