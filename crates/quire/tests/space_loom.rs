//! Model checking: the sequence counts of the VMAs with a record's life, and the space's lock, by
//! their own code.
//!
//! Two threads are checked without a bound where they do one thing each, else with at most
//! [`PREEMPTIONS_OF_TWO`] preemptions a run; three with at most `PREEMPTIONS`.
//!
//! Loom treats SeqCst accesses as acquire and release only. Where a protocol rests on them
//! (Dekker), the model has SeqCst fences in their place.

mod loom_page;

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;
use quire::page::{Snapshot, State};
use quire::space::seqcount::{SeqCount, SeqWord};
use quire::space::turnstile::{Turnstile, TurnstileWord};

use self::loom_page::{Futex, LoomWord, PREEMPTIONS, Page, check, check_with, must_fail};

/// Preemptions of a run with two threads that do more than one thing.
const PREEMPTIONS_OF_TWO: usize = 3;

#[derive(Default)]
struct LoomSeq(AtomicU32);

impl SeqWord for LoomSeq {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }
    fn bump(&self, order: Ordering) {
        self.0.fetch_add(1, order);
    }
    fn fence(order: Ordering) {
        fence(order);
    }
}

/// A VMA record as `space::vma` has it: a slot that is one VMA's after the other.
#[derive(Default)]
struct Record {
    start: AtomicU64,
    end: AtomicU64,
    sequence: SeqCount<LoomSeq>,
}

impl Record {
    fn change(&self, start: u64, end: u64) {
        self.sequence.change(|| {
            self.start.store(start, Ordering::Relaxed);
            self.end.store(end, Ordering::Relaxed);
        });
    }

    /// Start, end and count, if they belong together.
    fn view(&self) -> Option<(u64, u64, u32)> {
        let seen = self.sequence.begin()?;
        let start = self.start.load(Ordering::Relaxed);
        let end = self.end.load(Ordering::Relaxed);
        self.sequence.ends(seen).then_some((start, end, seen))
    }
}

#[test]
fn a_view_of_a_record_is_never_torn() {
    check(2, || {
        let record = Arc::new(Record::default());
        let other = record.clone();
        let thread = thread::spawn(move || {
            other.change(10, 20);
            other.change(30, 40);
        });
        if let Some((start, end, _)) = record.view() {
            assert!(matches!((start, end), (0, 0) | (10, 20) | (30, 40)), "{start}..{end}");
        }
        thread.join().unwrap();
    });
}

/// Its life: a VMA's, free, another VMA's. A thread with a copy of the old one sees that it is over,
/// even where the new one begins and ends at the same places.
#[test]
fn a_slot_that_became_another_vmas_is_not_taken_for_the_old_one() {
    check(2, || {
        let record = Arc::new(Record::default());
        record.change(0, 8);
        let (_, _, old) = record.view().unwrap();
        // Published by a lock in between, as a page lock is.
        let is_reused = Arc::new(Mutex::new(false));
        let (other, reused) = (record.clone(), is_reused.clone());
        let thread = thread::spawn(move || {
            other.change(0, 0);
            other.change(0, 8);
            *reused.lock().unwrap() = true;
        });
        if *is_reused.lock().unwrap() {
            assert!(!record.sequence.is_still(old), "the old VMA's copy passes for the new one's");
        }
        thread.join().unwrap();
    });
}

/// A fault against an unmap: the record's count, the page lock, and the mapping between them.
#[test]
fn a_fault_that_checked_under_the_page_lock_maps_nothing_into_an_unmapped_range() {
    check_with(Some(PREEMPTIONS_OF_TWO), || {
        let (record, page) = (Arc::new(Record::default()), Page::<LoomWord>::new());
        record.change(0, 8);
        let (faulting, word) = (record.clone(), page.clone());
        let fault = thread::spawn(move || {
            let Some((start, end, seen)) = faulting.view() else { return };
            if start == end || word.word.lock_or_park().is_none() {
                return;
            }
            if faulting.sequence.is_still(seen) {
                // Maps the page.
                word.touch();
                word.unlock_with(Snapshot::new(State::Mapped, 0));
            } else {
                word.unlock();
            }
        });
        // The unmap: the count first, the page's lock afterwards.
        record.change(0, 0);
        page.lock();
        page.unlock_with(Snapshot::new(State::None, 0));
        fault.join().unwrap();
        assert_eq!(page.word.load().state(), State::None, "mapped behind the unmap");
    });
}

/// `use_block` against a change that skips unused blocks.
#[test]
fn a_block_that_is_skipped_as_unused_gets_no_page_under_the_old_record() {
    check_with(Some(PREEMPTIONS_OF_TWO), || {
        let (record, page) = (Arc::new(Record::default()), Page::<LoomWord>::new());
        let is_used = Arc::new(AtomicU64::new(0));
        record.change(0, 8);
        let (faulting, word, used) = (record.clone(), page.clone(), is_used.clone());
        let fault = thread::spawn(move || {
            let Some((start, end, seen)) = faulting.view() else { return };
            if start == end {
                return;
            }
            used.swap(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if word.word.lock_or_park().is_none() {
                return;
            }
            let is_current = faulting.sequence.is_still(seen);
            let after = if is_current { State::Mapped } else { State::None };
            word.unlock_with(Snapshot::new(after, 0));
        });
        record.change(0, 0);
        fence(Ordering::SeqCst);
        if is_used.load(Ordering::SeqCst) != 0 {
            page.lock();
            page.unlock_with(Snapshot::new(State::None, 0));
        }
        fault.join().unwrap();
        assert_eq!(page.word.load().state(), State::None, "mapped behind the unmap");
    });
}

/// The turnstile's word with a model of the futex.
#[derive(Default)]
struct Word {
    bits: AtomicU32,
    futex: Futex,
    /// The mistake that the model must find: no thread is told of the last one that leaves.
    forgets_wakes: bool,
}

impl TurnstileWord for Word {
    fn load(&self, order: Ordering) -> u32 {
        self.bits.load(order)
    }
    fn exchange(&self, old: u32, new: u32, order: Ordering) -> Result<u32, u32> {
        self.bits.compare_exchange_weak(old, new, order, Ordering::Relaxed)
    }
    fn set(&self, bits: u32, order: Ordering) -> u32 {
        self.bits.fetch_or(bits, order)
    }
    fn subtract(&self, order: Ordering) -> u32 {
        self.bits.fetch_sub(1, order)
    }
    fn swap(&self, new: u32, order: Ordering) -> u32 {
        self.bits.swap(new, order)
    }
    fn sleep(&self, expected: u32) {
        // Relaxed: the kernel's plain load, under the queue's lock.
        self.futex.wait(|| self.bits.load(Ordering::Relaxed) == expected);
    }
    fn wake(&self) {
        if !self.forgets_wakes {
            self.futex.wake_all();
        }
    }
}

/// The space's lock: a layout, and the list of the faults that were deferred of it.
struct Lock {
    turnstile: Turnstile<Word>,
    layout: UnsafeCell<u32>,
    deferred: Mutex<u32>,
    answered: Mutex<u32>,
}

impl Lock {
    fn new(forgets_wakes: bool) -> Arc<Lock> {
        Arc::new(Lock {
            turnstile: Turnstile::new(Word { forgets_wakes, ..Word::default() }),
            layout: UnsafeCell::new(0),
            deferred: Mutex::new(0),
            answered: Mutex::new(0),
        })
    }

    /// A fault that goes the classic way: whether it was served, or waits for its answer.
    fn fault(&self) -> bool {
        loop {
            if self.turnstile.try_enter() {
                // SAFETY: nothing changes it meanwhile; loom checks just that.
                self.layout.with(|layout| assert_ne!(unsafe { *layout }, 1, "half a change"));
                self.turnstile.leave();
                return true;
            }
            *self.deferred.lock().unwrap() += 1;
            if self.turnstile.try_sign() {
                return false;
            }
        }
    }

    fn change(&self) {
        self.turnstile.lock();
        self.layout.with_mut(|layout| {
            // SAFETY: no fault is inside; loom checks just that.
            unsafe { *layout = 2 }
        });
        if self.turnstile.unlock() {
            let taken = std::mem::take(&mut *self.deferred.lock().unwrap());
            *self.answered.lock().unwrap() += taken;
        }
    }

    fn finish(&self, waiting: u32) {
        let answered = *self.answered.lock().unwrap();
        assert!(answered >= waiting, "{waiting} faults wait, {answered} were answered");
    }
}

fn one_fault_and_one_change(forgets_wakes: bool) {
    check(2, move || {
        let lock = Lock::new(forgets_wakes);
        let other = lock.clone();
        let fault = thread::spawn(move || u32::from(!other.fault()));
        lock.change();
        let waiting = fault.join().unwrap();
        lock.finish(waiting);
    });
}

#[test]
fn a_classic_fault_sees_no_half_change_and_is_answered_where_it_was_deferred() {
    one_fault_and_one_change(false);
}

#[test]
fn two_classic_faults_are_both_served_or_answered() {
    check_with(Some(PREEMPTIONS), || {
        let lock = Lock::new(false);
        let faults = [lock.clone(), lock.clone()]
            .map(|lock| thread::spawn(move || u32::from(!lock.fault())));
        lock.change();
        let waiting = faults.map(|fault| fault.join().unwrap()).iter().sum();
        lock.finish(waiting);
    });
}

#[test]
fn the_model_finds_a_writer_that_the_last_fault_does_not_wake() {
    must_fail("the_model_finds_a_writer_that_the_last_fault_does_not_wake", "deadlock", || {
        one_fault_and_one_change(true);
    });
}
