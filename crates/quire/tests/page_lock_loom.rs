//! Model checking: the page lock's own code, and the gate's protocol.
//!
//! Two threads are checked without a bound, or with at most [`PREEMPTIONS_OF_TWO`] preemptions a run
//! where they do more than lock and unlock once; three with at most `PREEMPTIONS`, which is where
//! nearly all bugs of such size show. `page_wait_loom.rs` has the waiting.
//!
//! Loom treats SeqCst accesses as acquire and release only. Where a protocol rests on them
//! (Dekker), the model has SeqCst fences in their place.

mod loom_page;

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;
use quire::page::word::Word;
use quire::page::{Flags, Snapshot, State};

use self::loom_page::{Futex, LoomWord, Page, check, check_with, must_fail};

/// Preemptions of a run with two threads that do more than lock and unlock once.
const PREEMPTIONS_OF_TWO: usize = 3;

#[test]
fn two_threads_never_own_the_page_together_and_none_sleeps_for_ever() {
    check(2, || {
        let page = Page::<LoomWord>::new();
        let other = page.clone();
        let thread = thread::spawn(move || other.lock_and_touch());
        page.lock_and_change(Snapshot::new(State::Limbo, 3));
        thread.join().unwrap();
        page.finish(2, 0);
    });
}

#[test]
fn a_thread_that_takes_the_lock_twice_leaves_it_to_the_other_in_the_end() {
    check_with(Some(PREEMPTIONS_OF_TWO), || {
        let page = Page::<LoomWord>::new();
        let other = page.clone();
        let thread = thread::spawn(move || other.lock_and_touch());
        page.lock_and_change(Snapshot::new(State::Limbo, 3));
        page.lock_and_touch();
        thread.join().unwrap();
        page.finish(3, 0);
    });
}

#[test]
fn a_parked_fault_is_answered_by_the_thread_that_held_the_page() {
    check(2, || {
        let page = Page::<LoomWord>::new();
        let other = page.clone();
        let thread = thread::spawn(move || other.lock_and_touch());
        let parked = u32::from(page.fault());
        thread.join().unwrap();
        page.finish(2 - parked, parked);
    });
}

#[test]
fn a_fault_parked_under_the_lock_is_answered_by_the_unlock() {
    check(2, || {
        let page = Page::<LoomWord>::new();
        let other = page.clone();
        let thread = thread::spawn(move || {
            // As for a page in the swap file: parked by the owner itself.
            let Some(before) = other.word.lock_or_park() else { return 1 };
            other.word.park_under_lock();
            other.touch();
            other.word.set(Snapshot::new(State::Mapped, 1));
            let after = before.keep(Flags::WRITE_PROTECTED, Snapshot::new(State::Mapped, 1));
            other.unlock_with(after);
            assert!(*other.answers.lock().unwrap() > 0, "the sign was lost");
            0
        });
        page.lock_and_touch();
        let parked = thread.join().unwrap();
        page.finish(2 - parked, parked);
    });
}

#[test]
fn three_threads_that_lock_all_get_their_turn() {
    check(3, || {
        let page = Page::<LoomWord>::new();
        let threads: Vec<_> = (0..2)
            .map(|at| {
                let page = page.clone();
                thread::spawn(move || {
                    if at == 0 {
                        page.lock_and_touch();
                    } else {
                        page.lock_and_change(Snapshot::new(State::Pool, 9));
                    }
                })
            })
            .collect();
        page.lock_and_touch();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        page.finish(3, 0);
    });
}

#[test]
fn a_sleeper_and_a_parked_fault_on_one_page_are_both_answered() {
    check(3, || {
        let page = Page::<LoomWord>::new();
        let (locker, faulter) = (page.clone(), page.clone());
        let locker = thread::spawn(move || locker.lock_and_touch());
        let faulter = thread::spawn(move || u32::from(faulter.fault()));
        page.lock_and_change(Snapshot::new(State::Mapped, 0));
        locker.join().unwrap();
        let parked = faulter.join().unwrap();
        page.finish(3 - parked, parked);
    });
}

#[test]
fn a_thread_that_only_tries_never_sees_half_a_change() {
    check(3, || {
        let page = Page::<LoomWord>::new();
        let (first, second) = (page.clone(), page.clone());
        let change = |page: &Page, number| page.lock_and_change(Snapshot::new(State::Pool, number));
        let first = thread::spawn(move || change(&first, 5));
        let second = thread::spawn(move || change(&second, 6));
        let mut owned = 0;
        if let Some(before) = page.word.try_lock() {
            assert!(matches!(before.payload(), 0 | 5 | 6));
            assert_eq!(before.state() == State::None, before.payload() == 0);
            page.touch();
            owned = 1;
            page.unlock();
        }
        first.join().unwrap();
        second.join().unwrap();
        page.finish(2 + owned, 0);
    });
}

/// A lock with a mistake in it, for the test of the test.
struct Broken {
    word: LoomWord,
    futex: Futex,
}

const LOCKED: u64 = 1;
const WAITERS: u64 = 2;

impl Broken {
    fn lock(&self) {
        loop {
            let old = self.word.load(Ordering::Relaxed);
            if old & LOCKED == 0 {
                if self.word.compare_exchange(old, old | LOCKED, Ordering::Acquire).is_ok() {
                    return;
                }
                continue;
            }
            let waiting = old | WAITERS;
            if old != waiting
                && self.word.compare_exchange(old, waiting, Ordering::Relaxed).is_err()
            {
                continue;
            }
            self.futex.wait(|| self.word.load(Ordering::Relaxed) == waiting);
        }
    }
}

fn two_threads_on(unlock: fn(&Broken)) {
    check(2, move || {
        let lock = Arc::new(Broken { word: LoomWord(AtomicU64::new(0)), futex: Futex::default() });
        let other = lock.clone();
        let thread = thread::spawn(move || {
            other.lock();
            unlock(&other);
        });
        lock.lock();
        unlock(&lock);
        thread.join().unwrap();
    });
}

#[test]
fn the_model_finds_a_wake_that_comes_before_the_unlock() {
    must_fail("the_model_finds_a_wake_that_comes_before_the_unlock", "deadlock", || {
        two_threads_on(|lock| {
            if lock.word.load(Ordering::Relaxed) & WAITERS != 0 {
                lock.futex.wake_all();
            }
            lock.word.0.fetch_and(!(LOCKED | WAITERS), Ordering::Release);
        });
    });
}

#[test]
fn the_model_finds_a_waiters_bit_that_is_cleared_unseen() {
    must_fail("the_model_finds_a_waiters_bit_that_is_cleared_unseen", "deadlock", || {
        two_threads_on(|lock| {
            let old = lock.word.load(Ordering::Relaxed);
            lock.word.0.fetch_and(!(LOCKED | WAITERS), Ordering::Release);
            if old & WAITERS != 0 {
                lock.futex.wake_all();
            }
        });
    });
}

#[test]
fn the_same_lock_without_the_mistake_passes() {
    two_threads_on(|lock| {
        let old = lock.word.0.fetch_and(!(LOCKED | WAITERS), Ordering::Release);
        if old & WAITERS != 0 {
            lock.futex.wake_all();
        }
    });
}

/// The gate that a fork closes, as `process::gate` has it.
struct Gate {
    closed: AtomicU64,
    inside: AtomicU64,
    opened: Futex,
    left: Futex,
    work: UnsafeCell<u32>,
}

impl Gate {
    fn enter(&self) {
        loop {
            self.inside.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if self.closed.load(Ordering::SeqCst) == 0 {
                return;
            }
            self.leave();
            self.opened.wait(|| self.closed.load(Ordering::Relaxed) == 1);
        }
    }

    fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) != 0 {
            self.left.wake_all();
        }
    }

    fn close(&self) {
        self.closed.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        loop {
            let inside = self.inside.load(Ordering::SeqCst);
            if inside == 0 {
                return;
            }
            self.left.wait(|| self.inside.load(Ordering::Relaxed) == inside);
        }
    }

    fn open(&self) {
        self.closed.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.opened.wake_all();
    }
}

#[test]
fn no_thread_is_inside_a_closed_gate_and_none_stays_outside_an_open_one() {
    check(2, || {
        let gate = Arc::new(Gate {
            closed: AtomicU64::new(0),
            inside: AtomicU64::new(0),
            opened: Futex::default(),
            left: Futex::default(),
            work: UnsafeCell::new(0),
        });
        let worker = gate.clone();
        let thread = thread::spawn(move || {
            worker.enter();
            // SAFETY: the gate keeps the forking thread out; loom checks just that.
            worker.work.with_mut(|work| unsafe { *work += 1 });
            worker.leave();
        });
        gate.close();
        // SAFETY: closed and empty; loom checks just that.
        gate.work.with_mut(|work| unsafe { *work += 1 });
        gate.open();
        thread.join().unwrap();
    });
}
