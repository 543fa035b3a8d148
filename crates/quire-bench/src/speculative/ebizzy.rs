//! A program like ebizzy: threads that look up records the way a search engine does. Each picks a
//! chunk at random, copies it into fresh memory, finds a record in the copy, and frees it; that is
//! a record. So all of its threads map and unmap all the time, and all of them fault.
//!
//! Owns the program and what it prints. The options are the original's, with its defaults; two are
//! not there: its own memcpy (-l), and what keeps mappings from being joined (-p, -P).

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{ArgAction, Args};

use super::super::sys::{self, Mapping};
use super::super::work::Random;
use super::print_figure;
use quire_cli::size::{Size, machine_memory_bytes};

const PAGE_BYTES: usize = 4096;
const WORD_BYTES: usize = 8;
const PAGE_WORDS: usize = PAGE_BYTES / WORD_BYTES;

#[derive(Args, Debug)]
pub(crate) struct EbizzyArgs {
    /// Always map memory, never malloc
    #[arg(short = 'm', long, conflicts_with = "never_mmap")]
    always_mmap: bool,

    /// Have malloc map nothing
    #[arg(short = 'M', long)]
    never_mmap: bool,

    /// Only touch the pages of the copy
    #[arg(short = 'T', long)]
    touch_pages: bool,

    /// Threads [default: two for each CPU]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,

    /// Bytes of a chunk
    #[arg(short = 's', long, value_name = "SIZE", default_value = "512K")]
    chunk_size: Size,

    /// Chunks
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10)]
    chunks: usize,

    /// Seconds
    #[arg(short = 'S', long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,

    /// Copy a part of random size
    #[arg(short = 'R', visible_short_alias = 'r', long)]
    random_size: bool,

    /// Say more
    #[arg(short, long, action = ArgAction::Count)]
    verbose: u8,
}

/// Memory of a record, allocated as the options say.
enum Chunk {
    Mapped(Mapping),
    Allocated(Vec<u64>),
}

impl Chunk {
    fn new(words: usize, is_mapped: bool) -> Result<Chunk> {
        if is_mapped {
            return Ok(Chunk::Mapped(Mapping::new(words.div_ceil(PAGE_WORDS) * PAGE_BYTES)?));
        }
        Ok(Chunk::Allocated(Vec::with_capacity(words)))
    }

    /// Writes a word of each page.
    fn touch(&mut self) {
        match self {
            Chunk::Mapped(mapping) => {
                mapping.words().iter_mut().step_by(PAGE_WORDS).for_each(|word| *word = 0xff);
                black_box(mapping.words());
            }
            Chunk::Allocated(words) => {
                let spare = words.spare_capacity_mut();
                spare.iter_mut().step_by(PAGE_WORDS).for_each(|word| _ = word.write(0xff));
                black_box(spare);
            }
        }
    }

    /// Copies `from`, and shows the copy.
    fn fill(&mut self, from: &[u64]) -> &[u64] {
        match self {
            Chunk::Mapped(mapping) => {
                let words = &mut mapping.words()[..from.len()];
                words.copy_from_slice(from);
                black_box(words)
            }
            Chunk::Allocated(words) => {
                words.extend_from_slice(from);
                black_box(words)
            }
        }
    }
}

/// What all threads work on.
struct Ebizzy<'a> {
    args: &'a EbizzyArgs,
    chunks: Vec<&'a [u64]>,
    chunk_words: usize,
    is_over: AtomicBool,
}

/// Runs the program; 1 is returned where a record was not found.
pub(crate) fn main(args: &EbizzyArgs) -> Result<u8> {
    let chunk_words = args.chunk_size.bytes_of(machine_memory_bytes()) as usize / WORD_BYTES;
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(2 * cpus);
    ensure!(chunk_words > 0, "a chunk has one record at least, which is {WORD_BYTES} bytes");
    ensure!(args.chunks > 0 && threads > 0, "there is one chunk and one thread at least");
    if args.never_mmap {
        sys::never_map_in_malloc();
    }
    if args.verbose > 0 {
        eprintln!("{args:?}");
    }
    // A record is found at the place that is its value.
    let pattern: Vec<u64> = (0..chunk_words as u64).collect();
    let chunk = |_| Chunk::new(chunk_words, args.always_mmap);
    let mut memory: Vec<Chunk> = (0..args.chunks).map(chunk).collect::<Result<_>>()?;
    let chunks = memory.iter_mut().map(|chunk| chunk.fill(&pattern)).collect();
    let ebizzy = Ebizzy { args, chunks, chunk_words, is_over: AtomicBool::new(false) };
    let (records, seconds) = ebizzy.run(threads)?;
    print_figure("records_per_second", records as f64 / seconds);
    Ok(0)
}

impl Ebizzy<'_> {
    /// The records of all threads, and the time that they had.
    fn run(&self, threads: usize) -> Result<(u64, f64)> {
        thread::scope(|scope| {
            let started = Instant::now();
            let search = |seed| scope.spawn(move || self.search(seed as u64 + 1));
            let threads: Vec<_> = (0..threads).map(search).collect();
            thread::sleep(Duration::from_secs_f64(self.args.seconds));
            // Relaxed: nothing is handed over with the flag.
            self.is_over.store(true, Ordering::Relaxed);
            let seconds = started.elapsed().as_secs_f64();
            let mut records = 0;
            for (index, thread) in threads.into_iter().enumerate() {
                let found = thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
                if self.args.verbose > 1 {
                    eprintln!("thread {index}: {found} records");
                }
                records += found;
            }
            Ok((records, seconds))
        })
    }

    /// Looks up records until it is over; returns how many.
    fn search(&self, seed: u64) -> Result<u64> {
        let mut random = Random::new(seed);
        let mut records = 0;
        loop {
            let source = self.chunks[random.below(self.chunks.len())];
            let words = if self.args.random_size {
                random.below(self.chunk_words) + 1
            } else {
                self.chunk_words
            };
            let mut copy = Chunk::new(words, self.args.always_mmap)?;
            if self.args.touch_pages {
                copy.touch();
            } else {
                let key = random.below(words);
                let found = copy.fill(&source[..words]).binary_search(&(key as u64));
                ensure!(found == Ok(key), "record {key} of {words} is not in the copy");
            }
            records += 1;
            // At the end, so that there is one however short the time is.
            if self.is_over.load(Ordering::Relaxed) {
                return Ok(records);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CacheLine {
        #[command(flatten)]
        args: EbizzyArgs,
    }

    fn records(line: &str) -> u64 {
        let CacheLine { args } = CacheLine::parse_from(line.split(' '));
        let words = args.chunk_size.bytes_of(machine_memory_bytes()) as usize / WORD_BYTES;
        let pattern: Vec<u64> = (0..words as u64).collect();
        let chunks = vec![&pattern[..]; args.chunks];
        let is_over = AtomicBool::new(false);
        let ebizzy = Ebizzy { args: &args, chunks, chunk_words: words, is_over };
        let (records, seconds) = ebizzy.run(args.threads.unwrap()).unwrap();
        assert!(seconds >= args.seconds);
        records
    }

    #[test]
    fn the_options_can_be_written_as_the_original_has_them() {
        assert!(records("ebizzy -mTt 2 -s 8K -S 0.01") > 0);
        let both = CacheLine::try_parse_from("ebizzy -m -M -t 2".split(' '));
        assert!(both.is_err(), "always and never");
    }

    #[test]
    fn records_are_found_in_copies_of_any_size_by_mmap_and_by_malloc() {
        assert!(records("ebizzy -mRt 2 -s 16K -S 0.01") > 0);
        assert!(records("ebizzy -MRt 1 -s 16K -n 3 -S 0.01") > 0);
    }

    #[test]
    fn a_record_that_is_missing_is_found_out() {
        let CacheLine { args } = CacheLine::parse_from("ebizzy -t 1 -s 8".split(' '));
        let chunk: &[u64] = &[7];
        let is_over = AtomicBool::new(false);
        let ebizzy = Ebizzy { args: &args, chunks: vec![chunk], chunk_words: 1, is_over };
        assert!(ebizzy.search(1).is_err());
    }
}
