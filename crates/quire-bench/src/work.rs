//! The programs that are measured: ordinary ones, that take memory from malloc and mmap and check
//! what they read. They print a JSON line for every phase.
//!
//! A page's words follow from its number, so that a wrong one is noticed at once. A part of them is
//! random, which decides how well it compresses.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use super::service;
use super::sys::Mapping;
use quire_cli::size::{Size, machine_memory_bytes};

const PAGE_WORDS: usize = 512;

#[derive(Args, Debug)]
pub(crate) struct WorkArgs {
    /// The program
    #[arg(value_enum)]
    program: Program,

    #[arg(long, default_value = "64M")]
    size: Size,

    /// Words of a page that are random
    #[arg(long, default_value_t = 256)]
    random_words: usize,

    #[arg(long, default_value_t = 1)]
    pub threads: usize,

    /// Repetitions
    #[arg(long, default_value_t = 1)]
    rounds: usize,

    /// Have another thread run all the time
    #[arg(long)]
    spin: bool,

    /// Serve the faults by a loop in this program
    #[arg(long)]
    pub own_loop: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum Program {
    /// Write, scan, read at random, update at random, scan again
    Memory,
    /// Sort numbers
    Sort,
    /// Allocate and free blocks of many sizes
    Malloc,
    /// Fill and madvise(MADV_PAGEOUT)
    Pageout,
    /// Touch every page once, in random order
    Touch,
}

/// Runs a program; 1 is returned where it read something wrong.
pub(crate) fn main(args: &WorkArgs) -> Result<u8> {
    let wrong = match args.program {
        Program::Memory => memory(args)?,
        Program::Sort => sort(args),
        Program::Malloc => malloc(args),
        Program::Pageout => pageout(args)?,
        Program::Touch => service::touch(args)?,
    };
    if wrong != 0 {
        eprintln!("{wrong} words are wrong");
        return Ok(1);
    }
    Ok(0)
}

pub(crate) fn bytes_of(args: &WorkArgs) -> usize {
    args.size.bytes_of(machine_memory_bytes()) as usize
}

pub(crate) fn say(phase: &str, started: Instant) {
    println!("{{\"phase\": \"{phase}\", \"seconds\": {:.6}}}", started.elapsed().as_secs_f64());
}

/// xorshift64*.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }
}

/// The word at `index` of page `page`; the first words of a page are random.
fn word_of(page: usize, index: usize, random_words: usize) -> u64 {
    let seed = (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    if index >= random_words {
        return seed;
    }
    let mut word = seed ^ (index as u64 + 1).wrapping_mul(0xd6e8_feb8_6659_fd93);
    word ^= word >> 32;
    word = word.wrapping_mul(0xd6e8_feb8_6659_fd93);
    word ^ word >> 29
}

/// A thread's pages: the number of the first, and their words.
type Slice<'a> = (usize, &'a mut [u64]);

/// Runs `work` on every slice in a thread of its own and adds up what it returns.
fn in_threads(slices: &mut [Slice<'_>], work: impl Fn(usize, &mut [u64]) -> u64 + Sync) -> u64 {
    if let [(first, words)] = slices {
        return work(*first, words);
    }
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = slices
            .iter_mut()
            .map(|(first, words)| scope.spawn(move || work(*first, words)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(1)).sum()
    })
}

fn memory(args: &WorkArgs) -> Result<u64> {
    let random_words = args.random_words;
    let slice_words = bytes_of(args) / 8 / PAGE_WORDS / args.threads * PAGE_WORDS;
    let mut mapping = Mapping::new(slice_words * args.threads * 8)?;
    let mut slices: Vec<Slice<'_>> = mapping
        .words()
        .chunks_mut(slice_words)
        .enumerate()
        .map(|(slice, words)| (slice * slice_words / PAGE_WORDS, words))
        .collect();

    let started = Instant::now();
    in_threads(&mut slices, |first, words| {
        for (page, words) in words.chunks_exact_mut(PAGE_WORDS).enumerate() {
            write_page(first + page, words, random_words);
        }
        0
    });
    say("write", started);

    let scan = |first: usize, words: &mut [u64]| {
        let pages = words.chunks_exact(PAGE_WORDS).enumerate();
        pages.map(|(page, words)| wrong_in_page(first + page, words, random_words)).sum()
    };
    let started = Instant::now();
    let mut wrong = in_threads(&mut slices, scan);
    say("scan", started);

    let touches = slice_words / PAGE_WORDS / 2;
    let started = Instant::now();
    wrong += in_threads(&mut slices, |first, words| {
        let (mut random, mut wrong) = (Random::new(first as u64 + 1), 0);
        for _ in 0..touches {
            let at = random.below(words.len());
            let (page, index) = (first + at / PAGE_WORDS, at % PAGE_WORDS);
            wrong += u64::from(words[at] != word_of(page, index, random_words));
        }
        wrong
    });
    say("random_read", started);

    // The same places twice over, so that what is changed is changed back.
    let started = Instant::now();
    in_threads(&mut slices, |first, words| {
        for change in [1, u64::MAX] {
            let mut random = Random::new(first as u64 + 2);
            for _ in 0..touches / 2 {
                let at = random.below(words.len());
                words[at] = words[at].wrapping_add(change);
            }
        }
        0
    });
    say("random_update", started);

    let started = Instant::now();
    wrong += in_threads(&mut slices, scan);
    say("scan_again", started);
    Ok(wrong)
}

fn write_page(page: usize, words: &mut [u64], random_words: usize) {
    for (index, word) in words.iter_mut().enumerate() {
        *word = word_of(page, index, random_words);
    }
}

/// 1 where a page does not have its content. Looks at every word, without a branch for each.
fn wrong_in_page(page: usize, words: &[u64], random_words: usize) -> u64 {
    let seed = word_of(page, random_words, random_words);
    let (random, same) = words.split_at(random_words.min(PAGE_WORDS));
    let different = same.iter().fold(0, |bits, word| bits | (word ^ seed));
    let expected = (0..random.len()).map(|index| word_of(page, index, random_words));
    let changed = random.iter().zip(expected).fold(0, |bits, (word, is)| bits | (word ^ is));
    u64::from(different | changed != 0)
}

fn sort(args: &WorkArgs) -> u64 {
    let mut wrong = 0;
    for round in 0..args.rounds {
        let mut random = Random::new(round as u64 + 1);
        let started = Instant::now();
        let mut numbers: Vec<u64> = (0..bytes_of(args) / 8).map(|_| random.next()).collect();
        numbers.sort_unstable();
        wrong += numbers.windows(2).filter(|pair| pair[0] > pair[1]).count() as u64;
        say("sort", started);
    }
    wrong
}

fn malloc(args: &WorkArgs) -> u64 {
    let started = Instant::now();
    let churn = |seed: usize| -> u64 {
        let mut random = Random::new(seed as u64 + 1);
        let mut kept: Vec<Vec<u8>> = (0..20_000).map(|_| Vec::new()).collect();
        let mut wrong = 0;
        for turn in 0..args.rounds * 1_000_000 {
            let slot = random.below(kept.len());
            let length = match random.below(100) {
                0 => 4096 + random.below(60_000),
                1..10 => 256 + random.below(3000),
                _ => 8 + random.below(200),
            };
            let old = &kept[slot];
            wrong += u64::from(old.first() != old.last());
            let mut block = Vec::with_capacity(length);
            block.resize(length, turn as u8);
            kept[slot] = black_box(block);
        }
        wrong
    };
    let wrong = thread::scope(|scope| {
        let churn = &churn;
        let threads: Vec<_> =
            (0..args.threads).map(|seed| scope.spawn(move || churn(seed))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(1)).sum()
    });
    say("malloc", started);
    wrong
}

/// mmap, fill, time madvise(MADV_PAGEOUT), read back.
fn pageout(args: &WorkArgs) -> Result<u64> {
    let bytes = bytes_of(args);
    if !bytes.is_multiple_of(PAGE_WORDS * 8) {
        bail!("the size is not whole pages");
    }
    let stop = AtomicBool::new(false);
    let (stop, mut wrong) = (&stop, 0);
    thread::scope(|scope| {
        if args.spin {
            scope.spawn(|| {
                // Relaxed: nothing is handed over with the flag.
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = pageout_rounds(args, bytes, &mut wrong);
        stop.store(true, Ordering::Relaxed);
        result
    })?;
    Ok(wrong)
}

fn pageout_rounds(args: &WorkArgs, bytes: usize, wrong: &mut u64) -> Result<()> {
    for _ in 0..args.rounds {
        let mut mapping = Mapping::new(bytes)?;
        let zero_filled = args.random_words == 0;
        for (page, words) in mapping.words().chunks_exact_mut(PAGE_WORDS).enumerate() {
            if zero_filled {
                words.fill(0);
            } else {
                write_page(page, words, args.random_words);
            }
        }
        let started = Instant::now();
        mapping.page_out()?;
        println!("{{\"phase\": \"pageout\", \"seconds\": {:.9}}}", started.elapsed().as_secs_f64());
        let started = Instant::now();
        for (page, words) in mapping.words().chunks_exact(PAGE_WORDS).enumerate() {
            *wrong += if zero_filled {
                u64::from(words.iter().any(|word| *word != 0))
            } else {
                wrong_in_page(page, words, args.random_words)
            };
        }
        say("pagein", started);
    }
    Ok(())
}
