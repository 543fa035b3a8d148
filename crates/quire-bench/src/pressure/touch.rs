//! The program that touches pages: fills memory, then reads or writes a word of one page after the
//! other, in an order that is asked for, by one or many threads. A page with a wrong number is noticed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use quire_cli::size::{Size, machine_memory_bytes};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::Zipf;

use super::pages::{Data, Filler, PAGE_WORDS};
use crate::sys::Mapping;
use crate::work::say;

/// The exponent of Zipf's law, as caches are measured with it.
const ZIPF_EXPONENT: f64 = 0.99;
/// Page numbers times this one, modulo the number of pages, are each page once in no order: it is prime.
const SCATTER: usize = 2_654_435_761;
/// Of all pages, the part that a scan's hot set has.
const HOT_PARTS: usize = 8;

#[derive(Args, Debug)]
pub(crate) struct TouchArgs {
    #[arg(long, default_value = "256M")]
    size: Size,

    #[arg(long, value_enum, default_value = "1.0")]
    data: Data,

    #[arg(long, value_enum, default_value = "uniform")]
    pattern: Pattern,

    #[arg(long, value_enum, default_value = "read")]
    access: Access,

    #[arg(long, default_value_t = 1)]
    threads: usize,

    /// Of all threads together
    #[arg(long, default_value_t = 65_536)]
    accesses: usize,
}

/// The order in which pages are touched.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pattern {
    /// Each as often as any other
    Uniform,
    /// A few very often, by Zipf's law
    Zipf,
    /// One after the other, again and again
    Loop,
    /// One after the other, and in between at random in an eighth of them
    Scan,
}

/// What is done to a page.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Runs the program; 1 is returned where a page had a wrong number.
pub(crate) fn touch(args: &TouchArgs) -> Result<u8> {
    let pages = args.size.bytes_of(machine_memory_bytes()) as usize / (PAGE_WORDS * 8);
    ensure!(pages >= HOT_PARTS && args.threads > 0, "too few pages or threads");
    let mut mapping = Mapping::new(pages * PAGE_WORDS * 8)?;
    let started = Instant::now();
    let mut filler = Filler::new(args.data);
    for (number, page) in mapping.words().chunks_exact_mut(PAGE_WORDS).enumerate() {
        filler.fill(number, page);
    }
    say("fill", started);

    let words = mapping.shared_words();
    let started = Instant::now();
    let wrong = in_threads(args, words, pages)?;
    let seconds = started.elapsed().as_secs_f64();
    say("measured", started);
    let us_per_access = seconds * 1e6 / args.accesses as f64;
    println!("{{\"figure\": \"us an access\", \"value\": {us_per_access:.4}}}");
    let wrong = wrong + wrong_pages(words);
    if wrong > 0 {
        eprintln!("{wrong} pages are wrong");
    }
    Ok(u8::from(wrong > 0))
}

/// Touches pages in all threads; returns how many were wrong.
fn in_threads(args: &TouchArgs, words: &[AtomicU64], pages: usize) -> Result<u64> {
    let walks: Result<Vec<Walk>> = (0..args.threads)
        .map(|thread| Walk::new(args.pattern, pages, thread, args.threads))
        .collect();
    let accesses = args.accesses / args.threads;
    thread::scope(|scope| {
        let threads: Vec<_> = walks?
            .into_iter()
            .map(|walk| scope.spawn(move || touch_pages(words, walk, accesses, args.access)))
            .collect();
        anyhow::Ok(threads.into_iter().map(|thread| thread.join().unwrap_or(1)).sum())
    })
}

fn touch_pages(words: &[AtomicU64], mut walk: Walk, accesses: usize, access: Access) -> u64 {
    let mut wrong = 0;
    for _ in 0..accesses {
        let page = walk.next_page();
        let at = page * PAGE_WORDS;
        // Relaxed: a page's number never changes, and its count carries nothing.
        wrong += u64::from(words[at].load(Ordering::Relaxed) != page as u64);
        if access == Access::Write {
            words[at + 1].fetch_add(1, Ordering::Relaxed);
        }
    }
    wrong
}

/// Looks at every page once.
fn wrong_pages(words: &[AtomicU64]) -> u64 {
    let pages = words.chunks_exact(PAGE_WORDS).enumerate();
    pages.filter(|(page, words)| words[0].load(Ordering::Relaxed) != *page as u64).count() as u64
}

/// A thread's way over the pages.
struct Walk {
    pattern: Pattern,
    pages: usize,
    /// Of a loop, the page that is next.
    next: usize,
    /// Whether a scan's next page is one of the hot set.
    is_hot_turn: bool,
    zipf: Zipf<f64>,
    random: Xoshiro256PlusPlus,
}

impl Walk {
    fn new(pattern: Pattern, pages: usize, thread: usize, threads: usize) -> Result<Walk> {
        Ok(Walk {
            pattern,
            pages,
            next: pages * thread / threads,
            is_hot_turn: false,
            zipf: Zipf::new(pages as f64, ZIPF_EXPONENT).map_err(anyhow::Error::msg)?,
            random: Xoshiro256PlusPlus::seed_from_u64(thread as u64 + 2),
        })
    }

    fn next_page(&mut self) -> usize {
        match self.pattern {
            Pattern::Uniform => self.random.random_range(0..self.pages),
            Pattern::Zipf => {
                let rank = self.random.sample(self.zipf) as usize - 1;
                self.scattered(rank)
            }
            Pattern::Loop => self.in_order(),
            Pattern::Scan => {
                self.is_hot_turn = !self.is_hot_turn;
                if !self.is_hot_turn {
                    return self.in_order();
                }
                let hot = self.random.random_range(0..self.pages / HOT_PARTS);
                self.scattered(hot)
            }
        }
    }

    fn in_order(&mut self) -> usize {
        let page = self.next;
        self.next = (page + 1) % self.pages;
        page
    }

    /// The page of a rank: neighbours by rank are no neighbours in memory.
    fn scattered(&self, rank: usize) -> usize {
        rank * SCATTER % self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each of 1000 pages is touched.
    fn counts(pattern: Pattern, accesses: usize) -> Vec<usize> {
        let mut walk = Walk::new(pattern, 1000, 0, 1).unwrap();
        let mut counts = vec![0; 1000];
        for _ in 0..accesses {
            counts[walk.next_page()] += 1;
        }
        counts
    }

    #[test]
    fn patterns_touch_what_their_names_say() {
        let uniform = counts(Pattern::Uniform, 100_000);
        assert!(uniform.iter().all(|count| (40..180).contains(count)));
        assert!(counts(Pattern::Loop, 3000).iter().all(|count| *count == 3));
        let scan = counts(Pattern::Scan, 4000);
        assert!(scan.iter().all(|count| *count >= 2));
        assert_eq!(scan.iter().filter(|count| **count > 4).count(), 1000 / HOT_PARTS);
        let mut zipf = counts(Pattern::Zipf, 100_000);
        zipf.sort_unstable();
        let hottest: usize = zipf[900..].iter().sum();
        assert!((60_000..80_000).contains(&hottest), "a tenth has {hottest} of 100000 touches");
    }

    #[test]
    fn every_rank_has_a_page_of_its_own() {
        let walk = Walk::new(Pattern::Zipf, 1000, 0, 1).unwrap();
        let mut pages: Vec<usize> = (0..1000).map(|rank| walk.scattered(rank)).collect();
        pages.sort_unstable();
        assert!(pages.into_iter().eq(0..1000));
    }

    #[test]
    fn a_wrong_page_is_noticed() {
        let words: Vec<AtomicU64> =
            (0..8 * PAGE_WORDS).map(|word| AtomicU64::new((word / PAGE_WORDS) as u64)).collect();
        let walk = || Walk::new(Pattern::Loop, 8, 0, 1).unwrap();
        assert_eq!(touch_pages(&words, walk(), 16, Access::Write), 0);
        words[3 * PAGE_WORDS].store(7, Ordering::Relaxed);
        assert_eq!(touch_pages(&words, walk(), 16, Access::Read), 2);
        assert_eq!(wrong_pages(&words), 1);
    }
}
