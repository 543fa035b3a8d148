//! `quire bench policies`: which page goes, played on the order in which programs ask for their pages.
//!
//! A trace is recorded by valgrind's lackey, which says every access of a program: pages, each of eight bytes,
//! without those that were among the last 32. Played are the best that is possible ([`best`]), least recently
//! used, and the engine's way: a clock by address, then a limbo from which a page comes back by a soft fault.
//! Of that: how much of memory is limbo, and how pages are inserted. A *miss* finds its page neither mapped nor
//! in limbo. What comes along with a page, what packs, and what a miss costs are not played.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

use super::harness;
use super::harness::report::Report;
use super::harness::suite::{Figures, Head, Results, Shape, Sheet, Suite, measure};

/// Pages that are said again within so many others are left out of a trace.
const LEFT_OUT: usize = 32;
/// Of the pages that miss, one in so many is kept by bimodal insertion.
const KEPT: u32 = 32;
/// Pages that have missed and are to go first, at most.
const PASSING: usize = 64;
/// The parts of a program's pages that are memory.
const PARTS: [(&str, usize, usize); 3] = [("3/4", 3, 4), ("1/2", 1, 2), ("1/4", 1, 4)];

#[derive(Args, Debug)]
pub(crate) struct PoliciesBench {
    #[command(flatten)]
    common: harness::Options,

    /// Run a program under valgrind, and record the pages that it asks for in FILE
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Traces to play; with --record the program and its arguments
    #[arg(required = true, value_name = "TRACE|PROGRAM", trailing_var_arg = true)]
    words: Vec<PathBuf>,
}

/// Runs the bench, or records.
pub(crate) fn main(options: &PoliciesBench) -> Result<u8> {
    match &options.record {
        Some(file) => record(file, &options.words),
        None => harness::main(&options.common, || report(options)),
    }
}

fn report(options: &PoliciesBench) -> Result<Report> {
    let read = |path: &PathBuf| {
        let trace = Trace::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
        Ok((name.into_owned(), trace))
    };
    let traces: Result<Vec<(String, Trace)>> = options.words.iter().map(read).collect();
    measure(&mut PoliciesSuite { traces: traces? }, &options.common)
}

struct PoliciesSuite {
    traces: Vec<(String, Trace)>,
}

impl Suite for PoliciesSuite {
    /// The trace, and the policy.
    type Plan = (usize, Policy);

    fn head(&self) -> Head {
        Head {
            name: "policies",
            question: "Which page goes, and how many are missed then?",
            facts: Vec::new(),
            rounds: 1,
            left_out: Vec::new(),
            published: Vec::new(),
        }
    }

    fn sheets(&self) -> Vec<Sheet<Self::Plan>> {
        let traces = self.traces.iter().enumerate();
        let sheets = traces.map(|(index, (name, trace))| {
            let title = format!("{name}: {} pages, {} accesses", trace.pages, trace.accesses.len());
            let mut sheet = Sheet::new(title, Shape::Cells);
            POLICIES.iter().for_each(|(policy, plan)| sheet.add("", *policy, (index, *plan)));
            sheet
        });
        sheets.collect()
    }

    fn take(&mut self, (trace, policy): &Self::Plan, _: &Results<'_>) -> Result<Figures> {
        let trace = &self.traces[*trace].1;
        let mut figures = Figures::new();
        for (part, parts, of) in PARTS {
            let faults = policy.play(trace, (trace.pages * parts / of).max(1));
            figures.push((format!("miss {part}"), faults.missed as f64));
            figures.push((format!("soft {part}"), faults.soft as f64));
        }
        Ok(figures)
    }
}

/// Which page goes.
#[derive(Clone, Copy)]
enum Policy {
    Best,
    LeastRecent,
    /// One part of memory in so many is limbo.
    Clock(usize, Insertion),
}

const POLICIES: [(&str, Policy); 7] = [
    ("the best possible", Policy::Best),
    ("least recently used", Policy::LeastRecent),
    ("clock, limbo a 16th", Policy::Clock(16, Insertion::Usual)),
    ("clock, limbo an 8th", Policy::Clock(8, Insertion::Usual)),
    ("clock, limbo a quarter", Policy::Clock(4, Insertion::Usual)),
    ("bimodal, limbo a 16th", Policy::Clock(16, Insertion::Bimodal)),
    ("bimodal, limbo a quarter", Policy::Clock(4, Insertion::Bimodal)),
];

impl Policy {
    fn play(self, trace: &Trace, frames: usize) -> Faults {
        match self {
            Policy::Best => best(trace, frames),
            Policy::LeastRecent => least_recent(trace, frames),
            Policy::Clock(limbo, insertion) => {
                Clock::new(trace.pages, frames, frames / limbo, insertion).play(trace)
            }
        }
    }
}

/// Runs the program under lackey and keeps what it says of its pages.
fn record(file: &Path, program: &[PathBuf]) -> Result<u8> {
    let mut valgrind = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--log-fd=1", "--"])
        .args(program)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run valgrind: install it, as the package valgrind")?;
    let lines = BufReader::new(valgrind.stdout.take().context("valgrind has no output")?);
    let file = File::create(file).with_context(|| format!("cannot make {}", file.display()))?;
    let mut file = BufWriter::new(file);
    let mut last = [u64::MAX; LEFT_OUT];
    let mut at = 0;
    for line in lines.split(b'\n') {
        let Some(page) = page_of(&line?) else { continue };
        if !last.contains(&page) {
            last[at % LEFT_OUT] = page;
            at += 1;
            file.write_all(&page.to_le_bytes())?;
        }
    }
    file.flush()?;
    let status = valgrind.wait()?;
    if !status.success() {
        bail!("the program ended with {status}");
    }
    Ok(0)
}

/// The page of a load, a store or both: ` L 1ffefff5a8,8`. What else there is, the program's own lines among
/// it, is none.
fn page_of(line: &[u8]) -> Option<u64> {
    let access = line.strip_prefix(b" ")?;
    let address = match access.split_at_checked(2)? {
        (b"L " | b"S " | b"M ", address) => std::str::from_utf8(address).ok()?.split_once(',')?.0,
        _ => return None,
    };
    Some(u64::from_str_radix(address.trim_start(), 16).ok()? >> 12)
}

/// The pages that a program asks for, numbered in the order of their addresses.
struct Trace {
    pages: usize,
    accesses: Vec<u32>,
}

impl Trace {
    fn read(path: &Path) -> Result<Trace> {
        let mut bytes = Vec::new();
        File::open(path)?.read_to_end(&mut bytes)?;
        let (words, rest) = bytes.as_chunks::<8>();
        ensure!(rest.is_empty() && !words.is_empty(), "it is no trace");
        Ok(Trace::new(words.iter().map(|word| u64::from_le_bytes(*word)).collect()))
    }

    fn new(asked: Vec<u64>) -> Trace {
        let mut pages = asked.clone();
        pages.sort_unstable();
        pages.dedup();
        let number = |page| pages.binary_search(&page).map_or(u32::MAX, |at| at as u32);
        Trace { pages: pages.len(), accesses: asked.into_iter().map(number).collect() }
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Faults {
    missed: usize,
    soft: usize,
}

/// The page goes that is asked for last of all: nobody could know.
fn best(trace: &Trace, frames: usize) -> Faults {
    let count = trace.accesses.len();
    let mut next = vec![count; count];
    let mut seen = vec![count; trace.pages];
    for (at, &page) in trace.accesses.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut seen[page as usize], at);
    }
    by_order(trace, frames, |at| next[at])
}

/// The page goes that was asked for longest ago.
fn least_recent(trace: &Trace, frames: usize) -> Faults {
    by_order(trace, frames, |at| usize::MAX - at)
}

/// The page goes whose last access has the highest number, as `number` has it.
fn by_order(trace: &Trace, frames: usize, number: impl Fn(usize) -> usize) -> Faults {
    let mut faults = Faults::default();
    let mut memory = BTreeSet::new();
    let mut numbers = vec![None; trace.pages];
    for (at, &page) in trace.accesses.iter().enumerate() {
        match numbers[page as usize].take() {
            Some(old) => {
                memory.remove(&(old, page));
            }
            None => {
                faults.missed += 1;
                if memory.len() == frames
                    && let Some((_, gone)) = memory.pop_last()
                {
                    numbers[gone as usize] = None;
                }
            }
        }
        numbers[page as usize] = Some(number(at));
        memory.insert((number(at), page));
    }
    faults
}

/// What becomes of a page that missed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Insertion {
    /// The hand passes it once.
    Usual,
    /// It is one of the next to go to limbo, but for one in [`KEPT`]. A soft fault makes it stay.
    Bimodal,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Swap,
    /// Mapped; whether it was asked for since the hand came by.
    Mapped(bool),
    /// Mapped, and to go first.
    Passing,
    Limbo,
}

/// The engine's way.
struct Clock {
    places: Vec<Place>,
    mapped: usize,
    mapped_max: usize,
    hand: usize,
    limbo: Queue,
    passing: Queue,
    frames: usize,
    insertion: Insertion,
    random: SmallRng,
}

impl Clock {
    fn new(pages: usize, frames: usize, limbo: usize, insertion: Insertion) -> Clock {
        Clock {
            places: vec![Place::Swap; pages],
            mapped: 0,
            mapped_max: (frames - limbo).max(1),
            hand: 0,
            limbo: Queue::new(pages),
            passing: Queue::new(pages),
            frames,
            insertion,
            random: SmallRng::seed_from_u64(1),
        }
    }

    fn play(mut self, trace: &Trace) -> Faults {
        let mut faults = Faults::default();
        for &page in &trace.accesses {
            match self.places[page as usize] {
                Place::Mapped(_) | Place::Passing => continue,
                Place::Limbo => {
                    faults.soft += 1;
                    self.limbo.remove(page);
                    self.evict();
                    self.places[page as usize] = Place::Mapped(true);
                }
                Place::Swap => {
                    faults.missed += 1;
                    if self.mapped + self.limbo.len >= self.frames
                        && let Some(gone) = self.limbo.pop_oldest()
                    {
                        self.places[gone as usize] = Place::Swap;
                    }
                    self.evict();
                    self.insert(page);
                }
            }
            self.mapped += 1;
        }
        faults
    }

    /// Has pages go to limbo until one more may be mapped.
    fn evict(&mut self) {
        while self.mapped >= self.mapped_max {
            let page = match self.passing.len {
                PASSING.. => self.passing.pop_oldest(),
                _ => self.turn(),
            };
            let Some(page) = page else { continue };
            self.places[page as usize] = Place::Limbo;
            self.limbo.push(page);
            self.mapped -= 1;
        }
    }

    /// Moves the hand by a page, which is returned if it can go.
    fn turn(&mut self) -> Option<u32> {
        let page = self.hand;
        self.hand = (page + 1) % self.places.len();
        match self.places[page] {
            Place::Mapped(true) => self.places[page] = Place::Mapped(false),
            Place::Mapped(false) => return Some(page as u32),
            // All that is mapped may be passing.
            Place::Passing if self.passing.len == self.mapped => return self.passing.pop_oldest(),
            _ => {}
        }
        None
    }

    fn insert(&mut self, page: u32) {
        // While there is room nothing need go first.
        let is_filling = self.mapped + 1 < self.mapped_max;
        if self.insertion == Insertion::Usual
            || is_filling
            || self.random.random_range(0..KEPT) == 0
        {
            self.places[page as usize] = Place::Mapped(true);
        } else {
            self.places[page as usize] = Place::Passing;
            self.passing.push(page);
        }
    }
}

/// Pages in the order in which they came, from which any can be taken.
struct Queue {
    /// Of each page those before and after it; of the last, which is none, the youngest and the oldest.
    links: Vec<[u32; 2]>,
    len: usize,
}

impl Queue {
    fn new(pages: usize) -> Queue {
        Queue { links: vec![[pages as u32; 2]; pages + 1], len: 0 }
    }

    fn push(&mut self, page: u32) {
        let none = self.links.len() - 1;
        let youngest = self.links[none][0];
        self.links[page as usize] = [youngest, none as u32];
        self.links[youngest as usize][1] = page;
        self.links[none][0] = page;
        self.len += 1;
    }

    fn remove(&mut self, page: u32) {
        let [before, after] = self.links[page as usize];
        self.links[before as usize][1] = after;
        self.links[after as usize][0] = before;
        self.len -= 1;
    }

    fn pop_oldest(&mut self) -> Option<u32> {
        let oldest = self.links[self.links.len() - 1][1];
        (self.len > 0).then(|| self.remove(oldest)).map(|()| oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missed(faults: Faults) -> usize {
        faults.missed
    }

    fn clock(trace: &Trace, frames: usize, limbo: usize, insertion: Insertion) -> Faults {
        Clock::new(trace.pages, frames, limbo, insertion).play(trace)
    }

    #[test]
    fn only_accesses_to_memory_are_recorded() {
        let said = |line: &str| page_of(line.as_bytes());
        assert_eq!(said(" L 1ffefff5a8,8"), Some(0x001f_fefff));
        assert_eq!(said(" S 04222000,4"), Some(0x4222));
        assert_eq!(said(" M 04222fff,1"), Some(0x4222));
        for other in ["I  04001090,3", "==12== done", " L ", " L x,1", "", " S 12"] {
            assert_eq!(said(other), None, "{other}");
        }
    }

    #[test]
    fn a_loop_misses_always_by_recency_and_seldom_by_bimodal_insertion() {
        let pages = 1000;
        let trace = Trace::new((0..20 * pages).map(|at| 7 * (at % pages)).collect());
        assert_eq!(trace.pages, 1000);
        let asked = trace.accesses.len();
        assert_eq!(missed(least_recent(&trace, 750)), asked);
        // Of every round after the first it misses what does not fit.
        assert_eq!(missed(best(&trace, 750)), 1000 + 19 * 250);
        assert!(missed(clock(&trace, 750, 46, Insertion::Usual)) > asked * 9 / 10);
        assert!(missed(clock(&trace, 750, 46, Insertion::Bimodal)) < asked * 6 / 10);
    }

    #[test]
    fn what_fits_misses_once_and_limbo_gives_pages_back() {
        let trace = Trace::new((0..50).flat_map(|_| 0..100).collect());
        for insertion in [Insertion::Usual, Insertion::Bimodal] {
            for (frames, limbo) in [(100, 25), (100, 6), (120, 7)] {
                let faults = clock(&trace, frames, limbo, insertion);
                assert_eq!(faults.missed, 100, "{insertion:?}, {frames} frames");
                assert_eq!(faults.soft > 0, frames - limbo < 100);
            }
        }
        assert_eq!(missed(best(&trace, 100)), 100);
        assert_eq!(missed(least_recent(&trace, 100)), 100);
    }
}
