//! The folio's order follows the access.
//!
//! A few streams are remembered: where each is expected to go on (in either direction) and how
//! large its folios have grown. A fault where a stream is expected makes its next folio twice as
//! large, and four times where that costs less; any other fault starts a stream of its own, small. So a
//! scan soon moves 2 MiB a fault, and random access gets little more than what it touches, where a scan
//! came by before as well: a stream whose faults pass over pages in swap gets smaller again.
//!
//! No locks: a stream's fields may be torn by two faults at once; the order is then a worse guess.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::control::along::{LONG_ORDER, STREAMS};
use crate::space::vma::{Pattern, Vma};
use crate::units::{PageNum, PageRange};

/// First folio of a stream over memory that was never touched: 16 KiB.
const FRESH_ORDER: u32 = 2;
/// A long one whose next fault passes over more of the pages in swap than this part of a folio does not go on as it
/// was: its folios get smaller by so many orders.
const PASSED_PART: usize = 8;
const SHRINK: u32 = 2;

/// What a stream leads through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Through {
    /// Anonymous memory that was never touched.
    Fresh,
    /// Anonymous memory that has been in swap.
    Swapped,
    /// The same, where the neighbours of pages are used.
    Dense,
    /// A memory object, whose store is read ahead of the stream.
    Object,
}

impl Through {
    /// How much larger each folio is than the one before, as a power of two.
    const fn growth(self) -> u32 {
        match self {
            Through::Fresh | Through::Dense | Through::Object => 2,
            Through::Swapped => 1,
        }
    }
}

#[derive(Default)]
struct Stream {
    /// The page behind its last folio, plus one (0: no stream).
    above: AtomicU64,
    /// The first page of its last folio, plus one.
    below: AtomicU64,
    order: AtomicU32,
    /// How often others are to take another place than this one.
    grace: AtomicU32,
}

#[derive(Default)]
pub struct Streams {
    streams: [Stream; STREAMS],
    hand: AtomicU32,
}

/// Where a fault belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Guess {
    pub order: u32,
    /// Whether its stream goes to lower pages.
    pub is_down: bool,
    stream: usize,
}

impl Guess {
    pub(super) fn folio(self, page: PageNum, vma: &Vma) -> PageRange {
        PageRange::new(page.align_down(self.order), 1 << self.order).intersect(vma.range)
    }
}

impl Streams {
    /// Guesses the order for a fault on `page`. Pages that `would_fault` are those that a stream which asks for
    /// every page would not have passed over.
    pub fn guess(
        &self,
        page: PageNum,
        through: Through,
        pattern: Pattern,
        order_max: u32,
        would_fault: impl Fn(PageNum) -> bool,
    ) -> Guess {
        for (index, stream) in self.streams.iter().enumerate() {
            let above = stream.above.load(Relaxed);
            if above == 0 {
                continue;
            }
            let order = stream.order.load(Relaxed);
            // A long one goes on where pages are passed over. And a thread runs on as soon as its page is
            // mapped: another handler may see its next fault before this one's folio is noted.
            let is_loose =
                matches!(through, Through::Dense | Through::Object) || order >= LONG_ORDER;
            let reach = if is_loose { 2u64 << order } else { 1 };
            let goes_up = (above..above + reach).contains(&(page.0 + 1));
            let below = stream.below.load(Relaxed);
            let goes_down = page.0 + 1 < below && page.0 + 1 + reach >= below;
            if goes_up || goes_down {
                let passed = if goes_up { above - 1..page.0 } else { page.0 + 1..below - 1 };
                let is_long = through != Through::Object && order >= LONG_ORDER;
                let missed = || passed.map(PageNum).filter(|&page| would_fault(page)).count();
                let order = match pattern {
                    Pattern::Random => 0,
                    _ if is_long && missed() * PASSED_PART > 1 << order => order - SHRINK,
                    _ => order + through.growth(),
                };
                let order = order.min(order_max);
                return Guess { order, is_down: goes_down, stream: index };
            }
        }
        let order = match pattern {
            Pattern::Random => 0,
            Pattern::Sequential => 4,
            Pattern::Normal if through == Through::Fresh => FRESH_ORDER,
            Pattern::Normal => 0,
        };
        Guess { order: order.min(order_max), is_down: false, stream: self.place_for_another() }
    }

    /// The place of a stream that has not gone on for a while: the longer it was, the longer that is.
    fn place_for_another(&self) -> usize {
        loop {
            let place = self.hand.fetch_add(1, Relaxed) as usize % STREAMS;
            let grace = &self.streams[place].grace;
            match grace.load(Relaxed) {
                0 => return place,
                left => grace.store(left - 1, Relaxed),
            }
        }
    }

    /// Notes what was filled after a guess.
    pub fn advance(&self, guess: Guess, filled: PageRange) {
        let stream = &self.streams[guess.stream];
        stream.order.store(guess.order, Relaxed);
        stream.grace.store(guess.order, Relaxed);
        stream.below.store(filled.start.0 + 1, Relaxed);
        stream.above.store(filled.end.0 + 1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(streams: &Streams, page: u64) -> u32 {
        let guess = streams.guess(PageNum(page), Through::Swapped, Pattern::Normal, 9, |_| true);
        let start = PageNum(page).align_down(guess.order);
        streams.advance(guess, PageRange::new(start, 1 << guess.order));
        guess.order
    }

    #[test]
    fn a_scan_soon_gets_large_folios() {
        let streams = Streams::default();
        let (mut page, mut faults) = (0, 0);
        while page < 4096 {
            let order = touch(&streams, page);
            page = (page >> order << order) + (1 << order);
            faults += 1;
        }
        assert!(faults < 20, "{faults} faults");
    }

    #[test]
    fn a_scan_that_is_ahead_of_what_was_noted_goes_on() {
        for is_down in [false, true] {
            let streams = Streams::default();
            let folio = |at: u64| PageNum(if is_down { (60 - at) << 9 } else { at << 9 });
            let first = |at| folio(at).add(if is_down { 511 } else { 0 });
            // What is passed over is held by the fault that is not noted yet.
            let guess =
                |at| streams.guess(first(at), Through::Swapped, Pattern::Normal, 9, |_| false);
            let note = |at, guess| streams.advance(guess, PageRange::new(folio(at), 512));
            (20..30).for_each(|at| note(at, guess(at)));
            let (late, early) = (guess(30), guess(31));
            assert_eq!((late.order, early.order), (9, 9), "down: {is_down}");
            // Noted in the wrong order.
            note(31, early);
            note(30, late);
            assert_eq!(guess(32).order, 9, "down: {is_down}");
        }
    }

    #[test]
    fn a_stream_goes_on_over_gaps_where_neighbours_are_used() {
        let next = |through| {
            let streams = Streams::default();
            let guess = |page| streams.guess(PageNum(page), through, Pattern::Normal, 9, |_| true);
            streams.advance(guess(64), PageRange::new(PageNum(64), 1));
            guess(66).order
        };
        assert_eq!([Through::Swapped, Through::Dense].map(next), [0, 2]);
    }

    #[test]
    fn a_long_stream_ends_where_faults_pass_over_what_is_in_swap() {
        // Every 700th page is asked for, where a scan came by.
        let filled = |is_in_swap: bool| -> u64 {
            let streams = Streams::default();
            let touch = |page| {
                let page = PageNum(page);
                let guess =
                    streams.guess(page, Through::Swapped, Pattern::Normal, 9, |_| is_in_swap);
                let start = page.align_down(guess.order);
                streams.advance(guess, PageRange::new(start, 1 << guess.order));
                1 << guess.order
            };
            let mut page = 0;
            while page < 10 << 9 {
                page += touch(page);
            }
            (page..page + (60 << 9)).step_by(700).map(touch).sum()
        };
        assert!(filled(true) < 1000, "{} pages for 44 touched", filled(true));
        assert!(filled(false) > 20_000, "pages in memory end no stream: {}", filled(false));
    }

    #[test]
    fn random_access_gets_single_pages() {
        let streams = Streams::default();
        let mut page = 12345u64;
        let mut filled = 0;
        for _ in 0..1000 {
            page = page.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            filled += 1u64 << touch(&streams, (page >> 20) % (1 << 24));
        }
        assert!(filled < 1100, "{filled} pages for 1000 touched");
    }

    #[test]
    fn scans_in_turn_do_not_disturb_each_other() {
        let streams = Streams::default();
        let mut at = [0u64, 1 << 20, 2 << 20, 3 << 20];
        let mut faults = 0;
        while at[0] < 2048 {
            for page in &mut at {
                let order = touch(&streams, *page);
                *page = (*page >> order << order) + (1 << order);
                faults += 1;
            }
        }
        assert!(faults < 60, "{faults} faults");
    }
}
