//! Model checking of the wait table: its own code on loom's atomics and locks, with one queue.
//!
//! Two threads are checked without a bound, unless a test says otherwise; three with at most
//! `PREEMPTIONS` preemptions a run. Where a waiter is to have the lock handed over, the table is one
//! that promises at once: to lose the lock to a stealer first needs more switches than a model can walk
//! through.

mod loom_page;

use std::sync::atomic::Ordering;

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use quire::page::wait::{Callback, Waiter};
use quire::page::word::Word;
use quire::page::{Condition, Flags, KillToken, Snapshot, State};
use quire::units::PageNum;

use self::loom_page::{LoomWord, Page, check, must_fail};

type Token = KillToken<LoomWord>;

const AT_ONCE: u32 = 0;
const WRITEBACK: Snapshot = Snapshot::new(State::Limbo, 1).with(Flags::WRITEBACK);

fn lock_and_unlock_in_two_threads(page: &Arc<Page>) {
    let other = page.clone();
    let thread = thread::spawn(move || other.lock_and_touch());
    page.lock_and_touch();
    thread.join().unwrap();
    page.finish(2, 0);
}

#[test]
fn a_lock_that_is_handed_over_has_one_owner_and_is_never_lost() {
    check(2, || lock_and_unlock_in_two_threads(&Page::with(AT_ONCE)));
}

#[test]
fn a_table_whose_unlocks_always_look_is_no_other() {
    check(2, || {
        let page = Page::new();
        page.table.set_always_looks(true);
        lock_and_unlock_in_two_threads(&page);
    });
}

#[test]
fn three_threads_have_a_lock_that_is_handed_over_each_once() {
    check(3, || {
        let page = Page::<LoomWord>::with(AT_ONCE);
        page.lock();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let page = page.clone();
                thread::spawn(move || page.lock_and_touch())
            })
            .collect();
        page.touch();
        page.unlock();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        page.finish(3, 0);
    });
}

/// Two wait for a lock that is taken; one of them is cancelled, before the unlock or after it.
fn one_of_two_is_cancelled(steals_max: u32, is_cancelled_first: bool) {
    check(3, move || {
        let (page, token) = (Page::with(steals_max), Arc::new(Token::default()));
        page.lock();
        let (staying, leaving, kill) = (page.clone(), page.clone(), token.clone());
        let staying = thread::spawn(move || staying.lock_and_touch());
        let leaving = thread::spawn(move || leaving.lock_and_touch_unless(&kill));
        if is_cancelled_first {
            token.cancel(&*page);
            page.unlock();
        } else {
            page.unlock();
            token.cancel(&*page);
        }
        staying.join().unwrap();
        let owners = leaving.join().unwrap();
        page.finish(1 + owners, 0);
    });
}

#[test]
fn a_waiter_cancelled_before_the_unlock_keeps_no_other_waiting() {
    one_of_two_is_cancelled(4, true);
}

#[test]
fn a_waiter_cancelled_after_it_was_woken_passes_the_wake_on() {
    one_of_two_is_cancelled(4, false);
}

#[test]
fn a_waiter_cancelled_before_a_promised_lock_is_handed_over_takes_the_promise_along() {
    one_of_two_is_cancelled(AT_ONCE, true);
}

#[test]
fn a_waiter_cancelled_while_the_lock_is_handed_over_to_it_gives_it_back() {
    one_of_two_is_cancelled(AT_ONCE, false);
}

#[test]
fn a_fault_that_parks_on_a_promised_lock_is_answered_even_if_the_promise_is_dropped() {
    check(3, || {
        let (page, token) = (Page::with(AT_ONCE), Arc::new(Token::default()));
        page.lock();
        let (leaving, kill, faulting) = (page.clone(), token.clone(), page.clone());
        let leaving = thread::spawn(move || leaving.lock_and_touch_unless(&kill));
        let faulting = thread::spawn(move || u32::from(faulting.fault()));
        token.cancel(&*page);
        page.unlock();
        let owners = leaving.join().unwrap();
        let parked = faulting.join().unwrap();
        page.finish(owners + 1 - parked, parked);
    });
}

#[test]
fn a_waiter_for_the_end_of_writeback_sees_it() {
    check(2, || {
        let page = Page::<LoomWord>::new();
        page.lock_and_change(WRITEBACK);
        let other = page.clone();
        let thread = thread::spawn(move || {
            let done = Condition::clear(Flags::WRITEBACK);
            let now = other.table.wait_on(&other.word, done, &*other);
            assert!(!now.has(Flags::WRITEBACK));
        });
        page.lock_and_change(WRITEBACK.without(Flags::WRITEBACK));
        thread.join().unwrap();
        page.finish(2, 0);
    });
}

#[test]
fn a_waiter_for_a_free_lock_waits_beside_one_that_wants_the_lock() {
    for steals_max in [AT_ONCE, 4] {
        check(3, move || {
            let page = Page::<LoomWord>::with(steals_max);
            page.lock();
            let (looking, locking) = (page.clone(), page.clone());
            let looking = thread::spawn(move || {
                looking.table.wait_on(&looking.word, Condition::UNLOCKED, &*looking);
            });
            let locking = thread::spawn(move || locking.lock_and_touch());
            page.unlock();
            looking.join().unwrap();
            locking.join().unwrap();
            page.finish(1, 0);
        });
    }
}

#[test]
fn a_callback_that_was_queued_is_called_once_by_the_unlock() {
    check(2, || {
        let page = Page::<LoomWord>::new();
        let other = page.clone();
        let thread = thread::spawn(move || other.lock_and_touch());
        let record = Waiter::default();
        let callback = Callback::answer(PageNum(3));
        // SAFETY: the record outlives the thread that calls it.
        let is_queued = unsafe {
            page.table.queue_callback(&page.word, &record, Condition::UNLOCKED, callback)
        };
        thread.join().unwrap();
        page.finish(1, 0);
        assert_eq!(*page.answers.lock().unwrap(), u32::from(is_queued));
    });
}

#[test]
fn a_callback_is_either_taken_back_or_called() {
    check(2, || {
        let page = Page::<LoomWord>::new();
        page.lock();
        let record = Waiter::default();
        let callback = Callback::answer(PageNum(3));
        // SAFETY: the record outlives the thread that calls it.
        let is_queued = unsafe {
            page.table.queue_callback(&page.word, &record, Condition::UNLOCKED, callback)
        };
        assert!(is_queued, "the lock is taken");
        let other = page.clone();
        let thread = thread::spawn(move || other.unlock());
        // SAFETY: queued above, on this word.
        let is_taken_back = unsafe { page.table.take_back(&page.word, &record) };
        thread.join().unwrap();
        page.finish(0, 0);
        assert_eq!(*page.answers.lock().unwrap(), u32::from(!is_taken_back));
    });
}

/// An atomic whose subtraction publishes nothing: an unlock that is no release.
struct Unordered(AtomicU64);

impl Word for Unordered {
    fn new(value: u64) -> Unordered {
        Unordered(AtomicU64::new(value))
    }
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        self.0.compare_exchange_weak(old, new, order, Ordering::Relaxed)
    }
    fn fetch_sub(&self, value: u64, _: Ordering) -> u64 {
        self.0.fetch_sub(value, Ordering::Relaxed)
    }
}

#[test]
fn the_model_finds_an_unlock_that_is_no_release() {
    must_fail("the_model_finds_an_unlock_that_is_no_release", "Causality violation", || {
        check(2, || {
            let page = Page::<Unordered>::new();
            let other = page.clone();
            let thread = thread::spawn(move || other.lock_and_touch());
            page.lock_and_touch();
            thread.join().unwrap();
        });
    });
}

/// An atomic in which `WAITERS` does not stick: a sign that one thread clears while another sets it.
struct Forgetful(AtomicU64);

impl Word for Forgetful {
    fn new(value: u64) -> Forgetful {
        Forgetful(AtomicU64::new(value))
    }
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        const WAITERS: u64 = 2;
        self.0.compare_exchange_weak(old, new & !WAITERS, order, Ordering::Relaxed)
    }
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_sub(value, order)
    }
}

#[test]
fn the_model_finds_a_sign_that_is_lost() {
    must_fail("the_model_finds_a_sign_that_is_lost", "deadlock", || {
        check(2, || {
            let page = Page::<Forgetful>::new();
            let other = page.clone();
            let thread = thread::spawn(move || other.lock_and_touch());
            page.lock_and_touch();
            thread.join().unwrap();
        });
    });
}
