//! What one unlock costs by itself: to say from counts how much of a program's time unlocks take.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use quire::library::WaitCounts;
use quire::page::{Futexes, PageWord, Parked, WaitTable};

use super::{spread, table};
use crate::samples::Samples;
use serde_json::Value;

/// Words that are unlocked one after the other: as many as a block's.
const WORDS: usize = 512;
/// So long a waiter gets to fall asleep in the kernel once it is queued.
const FALL_ASLEEP: Duration = Duration::from_micros(50);

/// Nanoseconds for an unlock.
#[derive(Default)]
pub(super) struct Prices {
    /// An unlock that need not look for waiters.
    free_ns: Samples,
    /// An unlock that looks, and finds no waiter.
    look_ns: Samples,
    /// An unlock that wakes a sleeping thread, the look included.
    wake_ns: Samples,
}

impl Prices {
    /// A round: so many unlocks of each kind, of waking ones a thousandth.
    pub(super) fn measure(&mut self, times: u32) {
        self.free_ns.push(unlock_ns(&table(false), times));
        self.look_ns.push(unlock_ns(&table(true), times));
        self.wake_ns.push(wake_ns(times.div_ceil(1000)));
    }

    /// What the unlocks cost that were counted, in seconds.
    pub(super) fn seconds(&self, counts: &WaitCounts) -> f64 {
        let [free, look, wake] = [&self.free_ns, &self.look_ns, &self.wake_ns].map(Samples::median);
        let of = |count: u64, ns: f64| count as f64 * ns;
        // A look that wakes two is one look and two wakes.
        let ns = of(counts.avoided, free)
            + of(counts.looks, look)
            + of(counts.wakes, (wake - look).max(0.0));
        ns * 1e-9
    }

    pub(super) fn print(&self) {
        println!("\n  {:28}{:>24}", "an unlock by itself", "ns");
        for (name, ns) in [
            ("that need not look", &self.free_ns),
            ("that looks, no waiter", &self.look_ns),
            ("that wakes a thread", &self.wake_ns),
        ] {
            println!("  {name:28}{:>24}", spread(ns));
        }
    }

    pub(super) fn json(&self) -> Value {
        Value::from_iter([
            ("free_ns", Value::from(&self.free_ns)),
            ("look_ns", Value::from(&self.look_ns)),
            ("wake_ns", Value::from(&self.wake_ns)),
        ])
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
        let one = |ns: f64| std::iter::once(ns).collect::<Samples>();
        let prices = Prices { free_ns: one(10.0), look_ns: one(40.0), wake_ns: one(1040.0) };
        let counts = WaitCounts { avoided: 5, looks: 3, wakes: 2, ..WaitCounts::default() };
        assert!((prices.seconds(&counts) - 2170e-9).abs() < 1e-15);
        assert_eq!(prices.seconds(&WaitCounts::default()), 0.0);
    }

    #[test]
    fn every_kind_of_unlock_has_a_price() {
        let mut prices = Prices::default();
        prices.measure(10_000);
        for ns in [&prices.free_ns, &prices.look_ns, &prices.wake_ns] {
            assert!(ns.median() > 0.0);
        }
    }
}
