//! Model checking of the reverse map's lock, by its own code.
//!
//! `RwSem` is generic over its atomic and its waits; here both are loom's, the waits being a
//! model of the futex: it compares under the queue's lock, and a wake reaches only threads that sleep
//! already, and only those of the class it names. Two threads that come once are checked without a
//! bound; three, and those that come again, with at most [`PREEMPTIONS`] preemptions a run. No thread
//! spins: that would be the same steps, more often.
//!
//! The lock is barred after seven steals, more than a model can make. What happens then is checked
//! on locks that start so.

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use quire::object::i_mmap::lock::{Class, LockState, LockWord, RwSem, STEALS_MAX, Side, WaitOps};

/// Preemptions of a bounded run, and of one with very many orders.
const PREEMPTIONS: usize = 3;
const PREEMPTIONS_FEWEST: usize = 2;

// Words as the lock's documentation has them.
const READER: u32 = 1;
const WRITER: u32 = 1 << 8;
const BARRED: u32 = STEALS_MAX << 29;

struct LoomWord(AtomicU32);

impl LockWord for LoomWord {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }
    fn compare_exchange(&self, old: u32, new: u32, order: Ordering) -> Result<u32, u32> {
        self.0.compare_exchange_weak(old, new, order, Ordering::Relaxed)
    }
}

/// Mistakes of the world around the lock.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A thread falls asleep without a look whether the word is still the same.
    SleepsBlindly,
    /// A wake for writers reaches readers only.
    WakesReadersOnly,
}

/// A futex: the queue's lock, its sleepers, and how often each class was woken.
struct Futex {
    wakes: Mutex<[u32; 32]>,
    sleepers: Condvar,
    mistake: Mistake,
}

impl WaitOps<LoomWord> for Futex {
    const SPINS: u32 = 0;

    fn wait(&self, word: &LoomWord, expected: u32, class: Class) {
        let class = class.0.trailing_zeros() as usize;
        let mut wakes = self.wakes.lock().unwrap();
        // Relaxed: the kernel's plain load, under the queue's lock.
        let found = word.0.load(Ordering::Relaxed);
        if found != expected && self.mistake != Mistake::SleepsBlindly {
            return;
        }
        let before = wakes[class];
        while wakes[class] == before {
            wakes = self.sleepers.wait(wakes).unwrap();
        }
    }

    fn wake(&self, _: &LoomWord, class: Class) {
        let is_lost = self.mistake == Mistake::WakesReadersOnly && class != Class::READERS;
        if !is_lost {
            self.wakes.lock().unwrap()[class.0.trailing_zeros() as usize] += 1;
            self.sleepers.notify_all();
        }
    }

    fn yield_now(&self) {
        thread::yield_now();
    }
}

/// A lock with something under it.
struct Guarded {
    lock: RwSem<LoomWord>,
    futex: Futex,
    content: UnsafeCell<u32>,
}

impl Guarded {
    fn new(word: u32, mistake: Mistake) -> Arc<Guarded> {
        let wakes = Mutex::new([0; 32]);
        Arc::new(Guarded {
            lock: RwSem(LoomWord(AtomicU32::new(word))),
            futex: Futex { wakes, sleepers: Condvar::new(), mistake },
            content: UnsafeCell::new(0),
        })
    }

    /// As the writer; loom reports any thread that is in beside it.
    fn touch(&self) {
        self.content.with_mut(|content| {
            // SAFETY: the lock is held for writing; loom checks just that.
            unsafe { *content += 1 }
        });
    }

    /// As a reader; loom reports a writer beside it.
    fn look(&self) -> u32 {
        self.content.with(|content| {
            // SAFETY: the lock is held; loom checks just that.
            unsafe { *content }
        })
    }

    fn write(&self) {
        self.lock.lock(Side::Writer, &self.futex);
        self.touch();
        self.lock.unlock(Side::Writer, &self.futex);
    }

    fn read(&self) {
        self.lock.lock(Side::Reader, &self.futex);
        self.look();
        self.lock.unlock(Side::Reader, &self.futex);
    }

    fn finish(&self, writes: u32) {
        let word = self.lock.load();
        assert!(word.readers() == 0 && !word.has_writer(), "the lock was left taken: {word:?}");
        let in_line = (word.in_line(Side::Reader), word.in_line(Side::Writer));
        assert_eq!(in_line, (0, 0), "{word:?}");
        assert_eq!(self.look(), writes);
    }
}

/// Whether all orders of a run are checked, or those with few preemptions.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Orders {
    All,
    Few,
    Fewest,
}

fn check(orders: Orders, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = match orders {
        Orders::All => None,
        Orders::Few => Some(PREEMPTIONS),
        Orders::Fewest => Some(PREEMPTIONS_FEWEST),
    };
    builder.max_branches = 100_000;
    builder.check(model);
}

type Step = fn(&Guarded);

/// A thread for each of `others`, and this one, which may start inside.
fn run(orders: Orders, word: u32, own: Step, others: &'static [Step], writes: u32) {
    check(orders, move || {
        let guarded = Guarded::new(word, Mistake::None);
        let threads: Vec<_> = others
            .iter()
            .map(|&step| {
                let guarded = guarded.clone();
                thread::spawn(move || step(&guarded))
            })
            .collect();
        own(&guarded);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        guarded.finish(writes);
    });
}

fn read_twice(guarded: &Guarded) {
    guarded.read();
    guarded.read();
}

fn write_twice(guarded: &Guarded) {
    guarded.write();
    guarded.write();
}

#[test]
fn a_reader_and_a_writer_are_never_in_together_and_neither_sleeps_for_ever() {
    run(Orders::All, 0, Guarded::read, &[Guarded::write], 1);
    run(Orders::Few, 0, read_twice, &[Guarded::write], 1);
    run(Orders::Few, 0, write_twice, &[Guarded::read], 2);
}

#[test]
fn two_writers_are_never_in_together_and_neither_sleeps_for_ever() {
    run(Orders::All, 0, Guarded::write, &[Guarded::write], 2);
    run(Orders::Few, 0, write_twice, &[Guarded::write], 3);
}

#[test]
fn two_readers_and_a_writer_all_get_their_turn() {
    run(Orders::Few, 0, Guarded::read, &[Guarded::read, Guarded::write], 1);
}

#[test]
fn two_writers_and_a_reader_all_get_their_turn() {
    run(Orders::Few, 0, Guarded::write, &[Guarded::write, Guarded::read], 2);
}

#[test]
fn three_writers_all_get_their_turn() {
    run(Orders::Fewest, 0, Guarded::write, &[Guarded::write, Guarded::write], 3);
}

fn try_read(guarded: &Guarded) {
    if guarded.lock.try_lock(Side::Reader) {
        guarded.look();
        guarded.lock.unlock(Side::Reader, &guarded.futex);
    }
}

/// Returns how often it wrote.
fn try_write(guarded: &Guarded) -> u32 {
    let is_in = guarded.lock.try_lock(Side::Writer);
    if is_in {
        guarded.touch();
        guarded.lock.unlock(Side::Writer, &guarded.futex);
    }
    u32::from(is_in)
}

#[test]
fn a_reader_that_only_tries_is_never_in_beside_a_writer() {
    run(Orders::All, 0, try_read, &[Guarded::write], 1);
    run(Orders::Fewest, 0, try_read, &[Guarded::write, Guarded::write], 2);
    check(Orders::Fewest, || {
        let guarded = Guarded::new(0, Mistake::None);
        let (reader, writer) = (guarded.clone(), guarded.clone());
        let reader = thread::spawn(move || reader.read());
        let writer = thread::spawn(move || writer.write());
        let writes = 1 + try_write(&guarded);
        reader.join().unwrap();
        writer.join().unwrap();
        guarded.finish(writes);
    });
}

fn leave_as_reader(guarded: &Guarded) {
    guarded.look();
    guarded.lock.unlock(Side::Reader, &guarded.futex);
}

fn leave_as_writer(guarded: &Guarded) {
    guarded.touch();
    guarded.lock.unlock(Side::Writer, &guarded.futex);
}

#[test]
fn a_barred_lock_is_handed_to_the_writer_in_line_and_then_to_the_readers() {
    run(Orders::Few, READER | BARRED, leave_as_reader, &[Guarded::write], 1);
    run(Orders::Few, READER | BARRED, leave_as_reader, &[Guarded::write, Guarded::read], 1);
    run(Orders::Fewest, READER | BARRED, leave_as_reader, &[Guarded::write, Guarded::write], 2);
}

#[test]
fn a_barred_lock_that_a_writer_leaves_goes_to_all_in_line() {
    run(Orders::Few, WRITER | BARRED, leave_as_writer, &[Guarded::write], 2);
    run(Orders::Fewest, WRITER | BARRED, leave_as_writer, &[Guarded::write, Guarded::read], 2);
    run(Orders::Fewest, WRITER | BARRED, leave_as_writer, &[Guarded::write, Guarded::write], 3);
    run(Orders::Few, WRITER, leave_as_writer, &[Guarded::read, Guarded::read], 1);
}

/// Runs a model that must fail in a process of its own: loom aborts where a deadlocked thread is
/// torn down.
fn must_fail(test: &str, with: &str, model: impl FnOnce()) {
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

fn two_writers_with(mistake: Mistake) {
    check(Orders::All, move || {
        let guarded = Guarded::new(0, mistake);
        let other = guarded.clone();
        let thread = thread::spawn(move || other.write());
        guarded.write();
        thread.join().unwrap();
    });
}

#[test]
fn the_model_finds_a_sleep_that_does_not_compare() {
    must_fail("the_model_finds_a_sleep_that_does_not_compare", "deadlock", || {
        two_writers_with(Mistake::SleepsBlindly);
    });
}

#[test]
fn the_model_finds_a_wake_that_goes_to_the_wrong_class() {
    must_fail("the_model_finds_a_wake_that_goes_to_the_wrong_class", "deadlock", || {
        two_writers_with(Mistake::WakesReadersOnly);
    });
}

/// Changes the word and nothing else: what an unlock must not do.
fn clear(guarded: &Guarded, bits: u32, order: Ordering) -> LockState {
    let seen = guarded.lock.load();
    let mut old = guarded.lock.0.load(Ordering::Relaxed);
    while let Err(found) = guarded.lock.0.compare_exchange(old, old & !bits, order) {
        old = found;
    }
    seen
}

#[test]
fn the_model_finds_an_unlock_that_looks_for_waiters_too_early() {
    let test = "the_model_finds_an_unlock_that_looks_for_waiters_too_early";
    must_fail(test, "deadlock", || {
        check(Orders::All, || {
            let guarded = Guarded::new(WRITER, Mistake::None);
            let other = guarded.clone();
            let thread = thread::spawn(move || other.write());
            guarded.touch();
            // It wakes the thread that it saw: with the unlock of one more turn.
            if clear(&guarded, WRITER, Ordering::Release).in_line(Side::Writer) > 0 {
                guarded.write();
            }
            thread.join().unwrap();
        });
    });
}

#[test]
fn the_model_finds_an_unlock_that_does_not_publish() {
    let test = "the_model_finds_an_unlock_that_does_not_publish";
    must_fail(test, "Causality violation", || {
        check(Orders::All, || {
            let guarded = Guarded::new(WRITER, Mistake::None);
            let other = guarded.clone();
            let thread = thread::spawn(move || {
                if other.lock.try_lock(Side::Reader) {
                    other.look();
                    other.lock.unlock(Side::Reader, &other.futex);
                }
            });
            guarded.touch();
            clear(&guarded, WRITER, Ordering::Relaxed);
            thread.join().unwrap();
        });
    });
}
