//! The page lock and its wait table on loom's atomics and locks, for the tests that check them: the
//! very code, with one queue. Sleeping is a model of the futex: it compares under a lock, and a
//! wake reaches only threads that sleep already.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use quire::control::AtomicWord;
use quire::page::wait::{QueueLock, WaitList};
use quire::page::word::Word;
use quire::page::{Flags, Kill, KillToken, PageWord, Parked, Parking, Snapshot, WaitTable};
use quire::units::PageNum;

/// Preemptions of a run with three threads.
pub const PREEMPTIONS: usize = 3;

pub struct LoomWord(pub AtomicU64);

impl Word for LoomWord {
    fn new(value: u64) -> LoomWord {
        LoomWord(AtomicU64::new(value))
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
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_sub(value, order)
    }
}

impl AtomicWord for LoomWord {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }
    fn fetch_add(&self, count: u64, order: Ordering) -> u64 {
        self.0.fetch_add(count, order)
    }
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        self.0.compare_exchange(old, new, order, Ordering::Relaxed)
    }
    fn fence(order: Ordering) {
        fence(order);
    }
}

/// A word without its fences.
pub struct Unfenced(pub LoomWord);

impl AtomicWord for Unfenced {
    fn load(&self, order: Ordering) -> u64 {
        AtomicWord::load(&self.0, order)
    }
    fn store(&self, value: u64, order: Ordering) {
        AtomicWord::store(&self.0, value, order);
    }
    fn fetch_add(&self, count: u64, order: Ordering) -> u64 {
        AtomicWord::fetch_add(&self.0, count, order)
    }
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        AtomicWord::compare_exchange(&self.0, old, new, order)
    }
    fn fence(_: Ordering) {}
}

/// A futex: the queue's lock and its sleepers.
#[derive(Default)]
pub struct Futex {
    pub wakes: Mutex<u64>,
    pub sleepers: Condvar,
}

impl Futex {
    /// Sleeps while `is_expected`, which is looked at under the lock.
    pub fn wait(&self, is_expected: impl FnOnce() -> bool) {
        let mut wakes = self.wakes.lock().unwrap();
        if !is_expected() {
            return;
        }
        let before = *wakes;
        while *wakes == before {
            wakes = self.sleepers.wait(wakes).unwrap();
        }
    }

    pub fn wake_all(&self) {
        *self.wakes.lock().unwrap() += 1;
        self.sleepers.notify_all();
    }
}

/// A queue's lock.
pub struct LoomQueue<A>(Mutex<WaitList<A>>);

impl<A> QueueLock<WaitList<A>> for LoomQueue<A> {
    fn with<R>(&self, act: impl FnOnce(&mut WaitList<A>) -> R) -> R {
        act(&mut self.0.lock().unwrap())
    }
}

/// A page with something under its lock, and the count of answered faults.
pub struct Page<A = LoomWord> {
    pub word: PageWord<A>,
    pub table: WaitTable<A, LoomQueue<A>, [LoomQueue<A>; 1]>,
    pub futex: Futex,
    content: UnsafeCell<u32>,
    /// Faults answered: what `wake` of the MMU does. Under a lock as in the kernel.
    pub answers: Mutex<u32>,
}

impl<A: Word> Parking<A> for Page<A> {
    fn wait(&self, word: &A, expected: u32, kill: Kill<'_, A>) {
        // Relaxed: the kernel's plain loads, under the queue's lock.
        let is_live = |token: &KillToken<A>| token.0.load(Ordering::Relaxed) == 0;
        self.futex.wait(|| {
            word.load(Ordering::Relaxed) as u32 == expected && kill.token.is_none_or(is_live)
        });
    }

    fn wake(&self, _: *const A) {
        self.futex.wake_all();
    }

    fn answer(&self, _: PageNum) {
        *self.answers.lock().unwrap() += 1;
    }
}

impl<A: Word> Page<A> {
    pub fn new() -> Arc<Page<A>> {
        Page::with(quire::page::wait::STEALS_MAX)
    }

    /// One on which a waiter loses the lock to a stealer `steals_max` times at most.
    pub fn with(steals_max: u32) -> Arc<Page<A>> {
        let queue = LoomQueue(Mutex::new(WaitList::default()));
        Arc::new(Page {
            word: PageWord(A::new(0)),
            table: WaitTable::with_queues([queue], steals_max),
            futex: Futex::default(),
            content: UnsafeCell::new(0),
            answers: Mutex::new(0),
        })
    }

    /// What the lock guards; loom reports two at once.
    pub fn touch(&self) {
        self.content.with_mut(|content| {
            // SAFETY: the page lock is held; loom checks just that.
            unsafe { *content += 1 }
        });
    }

    pub fn lock(&self) -> Snapshot {
        self.table.lock(&self.word, self)
    }

    pub fn unlock(&self) {
        self.answer_if(self.table.unlock(&self.word, self));
    }

    pub fn unlock_with(&self, content: Snapshot) {
        self.answer_if(self.table.unlock_with(&self.word, content, self));
    }

    /// What the engine does with parked faults.
    fn answer_if(&self, parked: Parked) {
        if parked == Parked::Yes {
            self.answer(PageNum(0));
        }
    }

    pub fn lock_and_touch(&self) {
        self.lock();
        self.touch();
        self.unlock();
    }

    pub fn lock_and_change(&self, content: Snapshot) {
        self.lock();
        self.touch();
        self.unlock_with(content);
    }

    /// Touches the page under its lock unless `token` is cancelled; how often it did.
    pub fn lock_and_touch_unless(&self, token: &KillToken<A>) -> u32 {
        let Ok(_) = self.table.lock_killable(&self.word, Kill::by(token), self) else { return 0 };
        self.touch();
        self.unlock();
        1
    }

    /// A fault: whether it was left unanswered.
    pub fn fault(&self) -> bool {
        match self.word.lock_or_park() {
            Some(before) => {
                self.touch();
                self.unlock_with(before.with(Flags::ACCESSED));
                false
            }
            None => true,
        }
    }

    /// At the end: no thread has the lock, none is queued, and no sign is left.
    pub fn finish(&self, owners: u32, parked: u32) {
        let word = self.word.load();
        assert!(word.is_free(), "the lock was left taken or promised: {word:?}");
        assert!(!word.has_waiters() && !word.has_parked(), "a sign was left: {word:?}");
        let answers = *self.answers.lock().unwrap();
        assert!(parked == 0 || answers > 0, "{parked} faults wait for ever");
        self.content.with(|content| {
            // SAFETY: all threads have ended.
            assert_eq!(unsafe { *content }, owners);
        });
    }
}

/// Every run of two threads; of more threads those with at most [`PREEMPTIONS`] preemptions.
pub fn check(threads: usize, model: impl Fn() + Sync + Send + 'static) {
    check_with((threads > 2).then_some(PREEMPTIONS), model);
}

/// Every run with at most so many preemptions, where there is a bound.
pub fn check_with(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 100_000;
    builder.check(model);
}

/// Runs a model that must fail in a process of its own: loom aborts where a deadlocked thread is
/// torn down.
pub fn must_fail(test: &str, with: &str, model: impl FnOnce()) {
    const INSIDE: &str = "QUIRE_LOOM_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return model();
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "the mistake was not found");
    assert!(text.contains(with), "another failure was found: {text}");
}
