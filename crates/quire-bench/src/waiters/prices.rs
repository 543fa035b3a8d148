//! What one unlock costs by itself: to say from counts how much of a program's time unlocks take.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use quire::library::WaitCounts;
use quire::page::{Futexes, PageWord, Parked, WaitTable};

use super::super::harness::suite::Results;
use super::table;

/// The table of the prices.
pub(super) const TITLE: &str = "an unlock by itself";
/// Words that are unlocked one after the other: as many as a block's.
const WORDS: usize = 512;
/// So long a waiter gets to fall asleep in the kernel once it is queued.
const FALL_ASLEEP: Duration = Duration::from_micros(50);

/// A kind of unlock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Price {
    /// It need not look for waiters.
    Free,
    /// It looks, and finds no waiter.
    Look,
    /// It wakes a sleeping thread, the look included.
    Wake,
}

impl Price {
    pub(super) const ALL: [Price; 3] = [Price::Free, Price::Look, Price::Wake];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Price::Free => "that need not look",
            Price::Look => "that looks, no waiter",
            Price::Wake => "that wakes a thread",
        }
    }

    /// Nanoseconds, of so many unlocks; of waking ones a thousandth.
    pub(super) fn measure(self, times: u32) -> f64 {
        match self {
            Price::Free => unlock_ns(&table(false), times),
            Price::Look => unlock_ns(&table(true), times),
            Price::Wake => wake_ns(times.div_ceil(1000)),
        }
    }
}

/// Nanoseconds for an unlock of each kind.
pub(super) struct Prices([f64; 3]);

impl Prices {
    /// As they were measured so far.
    pub(super) fn of(results: Results<'_>) -> Prices {
        let ns = |price: Price| results.samples(TITLE, "an unlock", price.name(), "ns").median();
        Prices(Price::ALL.map(ns))
    }

    /// What the unlocks cost that were counted, in seconds.
    pub(super) fn seconds(&self, counts: &WaitCounts) -> f64 {
        let [free, look, wake] = self.0;
        let of = |count: u64, ns: f64| count as f64 * ns;
        // A look that wakes two is one look and two wakes.
        let ns = of(counts.avoided, free)
            + of(counts.looks, look)
            + of(counts.wakes, (wake - look).max(0.0));
        ns * 1e-9
    }
}

/// Unlocks of words that one thread has locked before, without the time for locking.
fn unlock_ns(table: &WaitTable, times: u32) -> f64 {
    let words: Vec<PageWord> = (0..WORDS).map(|_| PageWord(AtomicU64::new(0))).collect();
    let rounds = times.div_ceil(WORDS as u32);
    let mut unlocking = Duration::ZERO;
    for _ in 0..rounds {
        for word in &words {
            let _ = table.lock(black_box(word), &Futexes);
        }
        let started = Instant::now();
        for word in &words {
            let parked = table.unlock(black_box(word), &Futexes);
            debug_assert_eq!(parked, Parked::No);
        }
        unlocking += started.elapsed();
    }
    unlocking.as_secs_f64() * 1e9 / (f64::from(rounds) * WORDS as f64)
}

/// Unlocks for which a thread sleeps.
fn wake_ns(times: u32) -> f64 {
    let (table, word) = (table(false), PageWord(AtomicU64::new(0)));
    let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut unlocking = Duration::ZERO;
    thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 1..=u64::from(times) {
                wait_for(&begun, turn);
                table.lock(&word, &Futexes);
                let _ = table.unlock(&word, &Futexes);
                // Release pairs with `wait_for`: the lock is free before the other goes on.
                ended.store(turn, Ordering::Release);
            }
        });
        for turn in 1..=u64::from(times) {
            table.lock(&word, &Futexes);
            // Release pairs with `wait_for`: it is locked when the other comes.
            begun.store(turn, Ordering::Release);
            while !word.load().has_waiters() {
                thread::yield_now();
            }
            thread::sleep(FALL_ASLEEP);
            let started = Instant::now();
            let _ = table.unlock(&word, &Futexes);
            unlocking += started.elapsed();
            wait_for(&ended, turn);
        }
    });
    assert_eq!(table.counts().wakes, u64::from(times), "an unlock woke no thread");
    unlocking.as_secs_f64() * 1e9 / f64::from(times)
}

fn wait_for(turns: &AtomicU64, turn: u64) {
    // Acquire pairs with the stores in `wake_ns`.
    while turns.load(Ordering::Acquire) < turn {
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_paid_at_the_prices() {
        let prices = Prices([10.0, 40.0, 1040.0]);
        let counts = WaitCounts { avoided: 5, looks: 3, wakes: 2, ..WaitCounts::default() };
        assert!((prices.seconds(&counts) - 2170e-9).abs() < 1e-15);
        assert_eq!(prices.seconds(&WaitCounts::default()), 0.0);
    }

    #[test]
    fn every_kind_of_unlock_has_a_price() {
        for price in Price::ALL {
            assert!(price.measure(10_000) > 0.0);
        }
    }
}
