//! Waiting for pages with real threads, and step by step: counts are exact, no thread is stuck, and how
//! often a waiter loses the lock to a stealer is counted, not timed.

mod common;

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use quire::control::Event;
use quire::mmu::Mmu as _;
use quire::page::wait::{Callback, Queue, STEALS_MAX, Waiter};
use quire::page::{
    Condition, Flags, Futexes, Interrupted, Kill, KillToken, PageWord, Parked, Parking, Snapshot,
    State, WaitTable,
};
use quire::space::VmSpace;
use quire::sys::monotonic_ns;
use quire::units::{BLOCK_PAGES, PageNum};
use quire_simulated::{Settings, Simulated};

use self::common::{Tree, space};

const WRITEBACK: Snapshot = Snapshot::new(State::Limbo, 1).with(Flags::WRITEBACK);
const WRITTEN: Condition = Condition::clear(Flags::WRITEBACK);

fn word() -> PageWord {
    PageWord(AtomicU64::new(0))
}

/// A word and what its lock guards.
struct Guarded {
    word: PageWord,
    owners: UnsafeCell<u64>,
}

// SAFETY: `owners` is touched under the word's lock only.
unsafe impl Sync for Guarded {}

impl Guarded {
    fn new() -> Guarded {
        Guarded { word: word(), owners: UnsafeCell::new(0) }
    }

    /// A read and a write that two owners at once would tear apart.
    fn touch(&self) {
        let owners = self.owners.get();
        // SAFETY: the caller holds the word's lock.
        unsafe { owners.write_volatile(owners.read_volatile() + 1) };
    }
}

fn unlock(table: &WaitTable, word: &PageWord) {
    assert_eq!(table.unlock(word, &Futexes), Parked::No);
}

/// No thread has the lock, none is queued, and no sign is left.
fn assert_unused(word: &PageWord) {
    assert_unlocked(word.load());
}

fn assert_unlocked(now: Snapshot) {
    assert!(now.is_free() && !now.has_waiters() && !now.has_parked(), "{now:?}");
}

#[test]
fn many_threads_on_few_words_each_have_their_turn_and_none_twice_at_once() {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 4000;
    for always_looks in [false, true] {
        let table = WaitTable::new().unwrap();
        table.set_always_looks(always_looks);
        let pages = [(); 3].map(|()| Guarded::new());
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (table, pages) = (&table, &pages);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let page = &pages[((thread + round) % 3) as usize];
                        table.lock(&page.word, &Futexes);
                        page.touch();
                        if round % 64 == 0 {
                            // Held over a switch, so that others queue.
                            std::thread::yield_now();
                        }
                        unlock(table, &page.word);
                    }
                });
            }
        });
        let owners: u64 = pages
            .into_iter()
            .map(|page| {
                assert_unused(&page.word);
                page.owners.into_inner()
            })
            .sum();
        assert_eq!(owners, THREADS * ROUNDS);
        let counts = table.counts();
        assert!(counts.wakes <= counts.waits, "{counts:?}");
        assert!(counts.looks <= owners && counts.handoffs <= counts.wakes, "{counts:?}");
        assert_eq!(always_looks, counts.looks == owners, "{counts:?}");
    }
}

#[test]
fn an_unlock_without_waiters_calls_nothing_and_says_so() {
    let (table, word) = (WaitTable::new().unwrap(), word());
    for _ in 0..100 {
        table.lock(&word, &Futexes);
        unlock(&table, &word);
    }
    let counts = table.counts();
    assert_eq!((counts.avoided, counts.looks, counts.wakes), (100, 0, 0));
    table.set_always_looks(true);
    for _ in 0..100 {
        table.lock(&word, &Futexes);
        unlock(&table, &word);
    }
    let counts = table.counts();
    assert_eq!((counts.avoided, counts.looks, counts.wakes), (100, 100, 0));
}

#[test]
fn a_storm_of_cancelled_waits_leaves_no_thread_stuck_and_no_sign() {
    const THREADS: usize = 6;
    const ROUNDS: usize = 1500;
    let (table, page) = (WaitTable::new().unwrap(), Guarded::new());
    let tokens: Vec<KillToken> = (0..64).map(|_| KillToken::default()).collect();
    let (owned, interrupted) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (table, page, tokens) = (&table, &page, &tokens);
        let (owned, interrupted) = (&owned, &interrupted);
        for thread in 0..THREADS {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let soon = monotonic_ns() + (round % 7) as u64 * 5_000;
                    let kill = match (thread + round) % 4 {
                        // Some wait for ever: they must not be forgotten.
                        0 => Kill::NEVER,
                        1 => Kill::at(soon),
                        2 => Kill::by(&tokens[round % tokens.len()]),
                        _ => Kill { deadline_ns: Some(soon), ..Kill::by(&tokens[0]) },
                    };
                    match table.lock_killable(&page.word, kill, &Futexes) {
                        Ok(_) => {
                            owned.fetch_add(1, Ordering::Relaxed);
                            page.touch();
                            if round % 16 == 0 {
                                std::thread::yield_now();
                            }
                            unlock(table, &page.word);
                        }
                        Err(Interrupted) => {
                            interrupted.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        scope.spawn(move || {
            for token in tokens {
                std::thread::sleep(Duration::from_micros(300));
                token.cancel(&Futexes);
            }
        });
    });
    let (owned, interrupted) = (owned.into_inner(), interrupted.into_inner());
    assert_eq!(owned + interrupted, (THREADS * ROUNDS) as u64);
    assert_eq!(page.owners.into_inner(), owned);
    // What a cancelled waiter may have left goes with the next unlock.
    table.lock(&page.word, &Futexes);
    unlock(&table, &page.word);
    assert_unused(&page.word);
}

#[test]
fn a_token_ends_every_wait_that_was_given_it_and_a_deadline_its_own() {
    let (table, word) = (WaitTable::new().unwrap(), word());
    let token = KillToken::default();
    table.lock_killable(&word, Kill::by(&token), &Futexes).unwrap();
    std::thread::scope(|scope| {
        let (table, word, token) = (&table, &word, &token);
        let wait = move |condition| {
            move || table.wait_on_killable(word, condition, Kill::by(token), &Futexes)
        };
        let threads = [
            scope.spawn(move || table.lock_killable(word, Kill::by(token), &Futexes)),
            scope.spawn(wait(Condition::UNLOCKED)),
            scope.spawn(wait(Condition::set(Flags::DIRTY))),
        ];
        std::thread::sleep(Duration::from_millis(20));
        token.cancel(&Futexes);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), Err(Interrupted));
        }
    });
    let deadline = monotonic_ns() + 5_000_000;
    assert_eq!(table.lock_killable(&word, Kill::at(deadline), &Futexes), Err(Interrupted));
    assert!(monotonic_ns() >= deadline);
    unlock(&table, &word);
    assert_unused(&word);
    // Cancelled or not: a lock that is free is taken.
    table.lock_killable(&word, Kill::by(&token), &Futexes).unwrap();
    unlock(&table, &word);
}

/// Sleeps by letting a greedy owner go on: it unlocks, which wakes the sleeper, and takes the lock
/// again before the sleeper looks, as often as it can.
struct Greedy<'a> {
    table: &'a WaitTable,
    word: &'a PageWord,
    has_lock: AtomicBool,
    stolen: AtomicU32,
}

impl Parking<AtomicU64> for Greedy<'_> {
    fn wait(&self, _: &AtomicU64, _: u32, _: Kill<'_>) {
        assert!(self.has_lock.load(Ordering::Relaxed), "no thread is there that could wake");
        unlock(self.table, self.word);
        let again = self.word.try_lock().is_some();
        self.has_lock.store(again, Ordering::Relaxed);
        self.stolen.fetch_add(u32::from(again), Ordering::Relaxed);
    }
    fn wake(&self, _: *const AtomicU64) {}
    fn answer(&self, _: PageNum) {}
}

#[test]
fn a_waiter_loses_the_lock_to_stealers_a_few_times_and_then_has_it_handed_over() {
    let (table, word) = (WaitTable::new().unwrap(), word());
    let greedy = Greedy {
        table: &table,
        word: &word,
        has_lock: AtomicBool::new(word.try_lock().is_some()),
        stolen: AtomicU32::new(0),
    };
    let owned = table.lock(&word, &greedy);
    assert!(owned.is_locked() && !owned.has_handoff());
    assert_eq!(greedy.stolen.into_inner(), STEALS_MAX);
    let counts = table.counts();
    assert_eq!((counts.steals, counts.handoffs), (u64::from(STEALS_MAX), 1));
    unlock(&table, &word);
    assert_unused(&word);
}

#[test]
fn a_waiter_cancelled_with_a_promise_takes_it_along() {
    let (table, word, token) = (WaitTable::new().unwrap(), word(), KillToken::default());
    /// As [`Greedy`], and cancels the wait once it is promised the lock.
    struct Cancels<'a>(Greedy<'a>, &'a KillToken);
    impl Parking<AtomicU64> for Cancels<'_> {
        fn wait(&self, word: &AtomicU64, expected: u32, kill: Kill<'_>) {
            if self.0.word.load().has_handoff() {
                return self.1.cancel(self);
            }
            self.0.wait(word, expected, kill);
        }
        fn wake(&self, _: *const AtomicU64) {}
        fn answer(&self, _: PageNum) {}
    }
    let has_lock = AtomicBool::new(word.try_lock().is_some());
    let greedy = Greedy { table: &table, word: &word, has_lock, stolen: AtomicU32::new(0) };
    let result = table.lock_killable(&word, Kill::by(&token), &Cancels(greedy, &token));
    assert_eq!(result, Err(Interrupted));
    assert!(word.load().is_locked() && !word.load().has_handoff() && !word.load().has_waiters());
    unlock(&table, &word);
    assert_unused(&word);
    assert!(word.try_lock().is_some(), "it is promised to no thread any more");
}

#[test]
fn a_greedy_thread_cannot_starve_another() {
    const LOCKS: u64 = 300;
    let (table, page) = (WaitTable::new().unwrap(), Guarded::new());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    table.lock(&page.word, &Futexes);
                    page.touch();
                    unlock(&table, &page.word);
                }
            });
        }
        for _ in 0..LOCKS {
            table.lock(&page.word, &Futexes);
            page.touch();
            // Held over a switch, so that the greedy ones queue, and steal from each other.
            std::thread::yield_now();
            unlock(&table, &page.word);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let counts = table.counts();
    // A waiter queues anew each time that it loses the lock to a stealer, which happens so often at
    // most.
    let first_waits = counts.waits - counts.steals;
    assert!(counts.steals <= first_waits * u64::from(STEALS_MAX), "{counts:?}");
    assert_unused(&page.word);
}

#[test]
fn a_wait_for_writeback_looks_again_after_it_was_woken() {
    let (table, word) = (WaitTable::new().unwrap(), word());
    /// Ends writeback, which wakes, and begins it again before the sleeper looks; then ends it.
    struct Writer<'a>(&'a WaitTable, &'a PageWord, AtomicU32);
    impl Parking<AtomicU64> for Writer<'_> {
        fn wait(&self, _: &AtomicU64, _: u32, _: Kill<'_>) {
            self.1.try_lock().unwrap();
            assert_eq!(
                self.0.unlock_with(self.1, Snapshot::new(State::Limbo, 1), self),
                Parked::No
            );
            if self.2.fetch_add(1, Ordering::Relaxed) == 0 {
                self.1.try_lock().unwrap();
                assert_eq!(self.0.unlock_with(self.1, WRITEBACK, self), Parked::No);
            }
        }
        fn wake(&self, _: *const AtomicU64) {}
        fn answer(&self, _: PageNum) {}
    }
    word.try_lock().unwrap();
    assert_eq!(table.unlock_with(&word, WRITEBACK, &Futexes), Parked::No);
    let writer = Writer(&table, &word, AtomicU32::new(0));
    let now = table.wait_on(&word, WRITTEN, &writer);
    assert!(WRITTEN.holds(now));
    assert_eq!(writer.2.into_inner(), 2, "the first end of writeback was over when it looked");
    assert_unused(&word);
}

static CALLED: AtomicU64 = AtomicU64::new(0);

fn note_call(argument: u64) {
    CALLED.fetch_add(argument, Ordering::Relaxed);
}

#[test]
fn hundreds_wait_for_one_page_and_each_is_called_once() {
    const WAITERS: u64 = 500;
    let (table, word) = (WaitTable::new().unwrap(), word());
    word.try_lock().unwrap();
    let records: Vec<Waiter> = (0..WAITERS).map(|_| Waiter::default()).collect();
    for (at, record) in records.iter().enumerate() {
        let condition =
            if at % 5 == 4 { Condition::state(State::Pool) } else { Condition::UNLOCKED };
        // SAFETY: the records outlive all unlocks of the word.
        assert!(unsafe {
            table.queue_callback(&word, record, condition, Callback::run(note_call, 1))
        });
    }
    // SAFETY: queued above, on this word.
    assert!(unsafe { table.take_back(&word, &records[7]) });
    // SAFETY: as above.
    assert!(!unsafe { table.take_back(&word, &records[7]) }, "it was taken back already");
    unlock(&table, &word);
    assert_eq!(CALLED.load(Ordering::Relaxed), WAITERS / 5 * 4 - 1);
    assert!(word.load().has_waiters(), "a fifth waits for a state");
    word.try_lock().unwrap();
    assert_eq!(table.unlock_with(&word, Snapshot::new(State::Pool, 1), &Futexes), Parked::No);
    assert_eq!(CALLED.load(Ordering::Relaxed), WAITERS - 1);
    assert_unused(&word);
    // SAFETY: queued above, and called by now.
    assert!(!unsafe { table.take_back(&word, &records[0]) });
}

#[test]
fn a_freed_word_carries_no_sign_of_its_waiters() {
    // One queue for all words, long enough that a cancelled waiter does not look through it.
    let table: WaitTable<AtomicU64, Queue, [Queue; 1]> =
        WaitTable::with_queues([Queue::default()], STEALS_MAX);
    let (crowded, freed) = (word(), word());
    crowded.try_lock().unwrap();
    let records: Vec<Waiter> = (0..200).map(|_| Waiter::default()).collect();
    for record in &records {
        let callback = Callback::run(|_| {}, 0);
        // SAFETY: the records outlive all unlocks of the word.
        assert!(unsafe { table.queue_callback(&crowded, record, Condition::UNLOCKED, callback) });
    }
    let leave_a_sign = || {
        freed.try_lock().unwrap();
        let soon = Kill::at(monotonic_ns());
        assert_eq!(table.lock_killable(&freed, soon, &Futexes), Err(Interrupted));
        assert!(freed.load().has_waiters(), "the test is none: nothing was left behind");
    };
    leave_a_sign();
    let none = Snapshot::new(State::None, 0);
    assert_eq!(table.unlock_with(&freed, none, &Futexes), Parked::No);
    assert_eq!(freed.0.load(Ordering::Relaxed), 0);
    leave_a_sign();
    table.clear_for_free(&freed);
    assert_eq!(freed.0.load(Ordering::Relaxed), 0);
    assert_eq!(table.unlock(&crowded, &Futexes), Parked::No);
    assert_unused(&crowded);
}

/// The page that is waited for. An object's, for all that its lock knows.
const PAGE: PageNum = PageNum(BLOCK_PAGES as u64 - 1);

fn simulated_space() -> VmSpace<Simulated> {
    let mmu = Simulated::new(BLOCK_PAGES, BLOCK_PAGES, Settings::default()).unwrap();
    space(mmu, Tree::default(), BLOCK_PAGES, BLOCK_PAGES).0
}

#[test]
fn faults_parked_on_an_objects_word_are_answered_by_its_unlock() {
    let space = simulated_space();
    assert!(!space.park_fault_on(PAGE, PageNum(1)), "it is not locked");
    let (is_open, done) = (AtomicBool::new(false), AtomicU32::new(0));
    let range = quire::units::PageRange::new(PageNum(0), 4);
    space.map_fixed(&mut space.lock(), range, quire::mmu::Prot::READ_WRITE).unwrap();
    let mut locked = space.lock_page(PAGE);
    std::thread::scope(|scope| {
        for page in range.pages() {
            let (space, is_open, done) = (&space, &is_open, &done);
            scope.spawn(move || {
                space.mmu().access(page, true).unwrap();
                assert!(is_open.load(Ordering::SeqCst), "served while the word was locked");
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        for _ in 0..range.len() {
            let (page, _) = space.mmu().next_fault();
            assert!(space.park_fault_on(PAGE, page));
        }
        is_open.store(true, Ordering::SeqCst);
        locked.cache();
        locked.unlock();
        // Each comes again, and is served now, several by one where they are neighbours.
        let mut scratch = quire::scratch::Scratch::new().unwrap();
        while done.load(Ordering::SeqCst) < range.len() as u32 {
            match space.mmu().try_next_fault() {
                Some((page, access)) => {
                    space.handle_fault(page, access, &mut scratch);
                }
                None => std::thread::yield_now(),
            }
        }
    });
    assert_unlocked(space.snapshot(PAGE));
    assert_eq!(space.wait_counts().callbacks, range.len() as u64);
}

#[test]
fn more_faults_than_there_are_records_are_left_to_the_caller_and_records_come_back() {
    let space = simulated_space();
    for _ in 0..2 {
        let locked = space.lock_page(PAGE);
        let parked = (0..1000).take_while(|&page| space.park_fault_on(PAGE, PageNum(page))).count();
        assert!((16..1000).contains(&parked), "{parked}");
        locked.unlock();
        assert_unlocked(space.snapshot(PAGE));
    }
    space.mmu().relax();
}

#[test]
fn words_of_objects_are_locked_and_waited_for_through_the_space() {
    let (space, page) = (simulated_space(), Guarded::new());
    std::thread::scope(|scope| {
        let mut locked = space.lock_page(PAGE);
        locked.cache();
        locked.set_flags(Flags::WRITEBACK);
        let waiter = scope.spawn(|| space.wait_on_page(PAGE, WRITTEN));
        let token = KillToken::default();
        let token = &token;
        let kill = Kill::by(token);
        std::thread::scope(|scope| {
            let killed = scope.spawn(|| space.wait_on_page_killable(PAGE, WRITTEN, kill));
            std::thread::sleep(Duration::from_millis(5));
            space.cancel(token);
            assert_eq!(killed.join().unwrap(), Err(Interrupted));
        });
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let locked = space.lock_page(PAGE);
                    page.touch();
                    locked.unlock();
                }
            });
        }
        let locked = space.lock_page(PAGE);
        assert!(locked.has(Flags::WRITEBACK));
        let now = Kill::at(monotonic_ns());
        assert!(matches!(space.lock_page_killable(PAGE, now), Err(Interrupted)));
        locked.clear_flags(Flags::WRITEBACK);
        assert!(WRITTEN.holds(waiter.join().unwrap()));
    });
    space.lock_page(PAGE).drop_content();
    assert_unlocked(space.snapshot(PAGE));
    assert_eq!(page.owners.into_inner(), 1500);
    let counted = |event| space.budget().counted(event);
    let wakes = space.wait_counts().wakes;
    // The cancelled one's wake is no unlock's.
    assert!((wakes..=wakes + 1).contains(&counted(Event::PageWake)));
    assert!(wakes > 0 && counted(Event::PageWait) >= wakes, "{:?}", space.wait_counts());
}
