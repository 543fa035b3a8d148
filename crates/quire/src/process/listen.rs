//! Who listens for faults: all handlers together, or one that follows the program.
//!
//! Many threads that fault are served best by a handler on each CPU. A single one is not: a fault
//! wakes every handler that listens, a thread on another CPU costs several times the fault itself
//! to wake, and the kernel wakes the program's thread on an idle CPU where the one that it slept
//! on is taken, by the handler. So where one thread faults alone, and often, the handlers step
//! back for the *follower*: it runs on that thread's CPU, and under SCHED_IDLE, which lets the
//! kernel take its CPU for free.
//!
//! A thread under SCHED_IDLE may be starved by whatever computes on its CPU. So it does nothing
//! that takes long (it neither reclaims nor reads the swap file), and a handler keeps *watch*
//! meanwhile: if the follower has served nothing for [`WATCH_MS`], all listen again, and a fault
//! that it may have read is answered, to be taken again. How soon the follower is tried again
//! depends on how much it was good for, and on how long ago it was starved in the middle of a
//! fault.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::sys::futex::{self, Reach};
use crate::sys::{monotonic_ns, thread};

/// All handlers listen.
const TOGETHER: u32 = 0;
/// Each handler steps back when it has served one more fault.
const LEAVING: u32 = 1;
/// The follower listens.
const ALONE: u32 = 2;

/// For so long a fault may wait for a follower that is starved.
const WATCH_MS: u64 = 2;
/// Faults in a row of one thread that call for the follower...
const RUN: u32 = 64;
/// ...if they come within this time: a handler more or less is nothing to a program that seldom
/// faults.
const RUN_NS: u64 = 20_000_000;
/// The follower looks where its thread is once in so many faults...
const LOOK: u32 = 256;
/// ...and where it waited for longer than this. On its thread's CPU it is run when that thread has
/// faulted, and so waits for nothing; a wake-up from another CPU takes longer.
const LOOK_NS: u64 = 15_000;
/// Runs that it takes at most, after the follower was called in vain.
const RUNS_MAX: u32 = 64;
/// After it was starved in the middle of a fault it is not called for so long, twice as long the
/// next time, and so on...
const REST_NS: u64 = 1_000_000_000;
/// ...up to so many doublings.
const RESTS_MAX: u32 = 6;
/// A follower that served so many was not called in vain.
const WORTH: u32 = 1024;

/// What the handlers and the follower share.
pub struct Listeners {
    /// [`TOGETHER`], [`LEAVING`] or [`ALONE`]; who does not listen sleeps on it.
    mode: AtomicU32,
    /// How many handlers there are.
    handlers: u32,
    /// How many of them listen.
    listening: AtomicU32,
    /// Faults that the follower has served.
    served: AtomicU32,
    /// Runs that call for the follower.
    runs: AtomicU32,
    /// The thread whose run a handler has seen last.
    last: AtomicU32,
    /// Whether the follower is in the middle of a fault.
    is_serving: AtomicBool,
    /// How often the follower was starved there, and when it may be called again.
    rests: AtomicU32,
    rests_until_ns: AtomicU64,
    /// The follower's CPU while it listens, and one more; 0: any.
    taken_cpu: AtomicU32,
}

/// A handler's view of who faults.
#[derive(Default)]
pub struct Run {
    thread: u32,
    faults: u32,
    /// Runs of this thread, with no other thread's in between.
    runs: u32,
    since_ns: u64,
}

impl Run {
    /// Notes a fault, and returns how many runs in a row have been this thread's.
    fn note(&mut self, thread: u32, last: &AtomicU32, now_ns: impl FnOnce() -> u64) -> u32 {
        if thread != self.thread {
            *self = Run { thread, ..Run::default() };
        }
        self.faults += 1;
        if self.faults < RUN {
            return 0;
        }
        let now_ns = now_ns();
        let is_often = now_ns - self.since_ns < RUN_NS;
        // Relaxed: a hint, about threads that fault on other CPUs.
        let is_alone = last.swap(thread, Ordering::Relaxed) == thread;
        self.runs = if is_often && is_alone { self.runs + 1 } else { 0 };
        self.faults = 0;
        self.since_ns = now_ns;
        self.runs
    }
}

impl Listeners {
    /// For so many handlers, all of which listen.
    #[must_use]
    pub const fn new(handlers: u32) -> Listeners {
        Listeners {
            mode: AtomicU32::new(TOGETHER),
            handlers,
            listening: AtomicU32::new(handlers),
            served: AtomicU32::new(0),
            runs: AtomicU32::new(1),
            last: AtomicU32::new(0),
            is_serving: AtomicBool::new(false),
            rests: AtomicU32::new(0),
            rests_until_ns: AtomicU64::new(0),
            taken_cpu: AtomicU32::new(0),
        }
    }

    /// In a fork's child, before its threads start.
    pub fn reset(&self) {
        self.mode.store(TOGETHER, Ordering::Relaxed);
        self.listening.store(self.handlers, Ordering::Relaxed);
        self.runs.store(1, Ordering::Relaxed);
        self.last.store(0, Ordering::Relaxed);
        self.is_serving.store(false, Ordering::Relaxed);
        self.taken_cpu.store(0, Ordering::Relaxed);
    }

    /// A handler has served a fault of `thread`. Returns when the handler is to listen again.
    /// `answer_all` answers all faults, so that they are taken again.
    #[inline]
    pub fn after_fault(&self, thread: u32, run: &mut Run, answer_all: impl Fn()) {
        // Relaxed: a handler that sees a change late listens once more.
        if self.mode.load(Ordering::Relaxed) == TOGETHER {
            let runs = run.note(thread, &self.last, monotonic_ns);
            let is_alone = self.handlers > 1 && runs >= self.runs.load(Ordering::Relaxed);
            if !is_alone || run.since_ns < self.rests_until_ns.load(Ordering::Relaxed) {
                return;
            }
            let _ = self.change(TOGETHER, LEAVING);
        }
        self.stand_by(answer_all);
        *run = Run::default();
    }

    /// SeqCst: these few words settle among all threads who listens.
    fn change(&self, from: u32, to: u32) -> bool {
        self.mode.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn wake_all(&self) {
        futex::wake(&self.mode, u32::MAX, Reach::Process);
    }

    /// Sleeps until all are to listen. The handlers leave one by one, each with a fault that it
    /// has served, because nothing else gets them out of their read. The last one calls the
    /// follower: somebody listens at every moment, or is about to.
    fn stand_by(&self, answer_all: impl Fn()) {
        let is_last = self.listening.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && self.change(LEAVING, ALONE) {
            self.wake_all();
            self.watch(answer_all);
        }
        loop {
            let mode = self.mode.load(Ordering::SeqCst);
            if mode == TOGETHER {
                break;
            }
            futex::wait(&self.mode, mode, Reach::Process, None);
        }
        self.listening.fetch_add(1, Ordering::SeqCst);
    }

    /// Looks after the follower until it serves nothing more.
    fn watch(&self, answer_all: impl Fn()) {
        let first = self.served.load(Ordering::Relaxed);
        let mut seen = first;
        while self.mode.load(Ordering::SeqCst) == ALONE {
            futex::wait(&self.mode, ALONE, Reach::Process, Some(WATCH_MS));
            let now = self.served.load(Ordering::Relaxed);
            if now == seen {
                self.end_alone();
                if self.is_serving.load(Ordering::Relaxed) {
                    // It has read a fault, and nobody knows when it will be run again.
                    answer_all();
                    self.rest();
                }
            }
            seen = now;
        }
        let runs = if seen.wrapping_sub(first) >= WORTH {
            1
        } else {
            (self.runs.load(Ordering::Relaxed) * 2).min(RUNS_MAX)
        };
        self.runs.store(runs, Ordering::Relaxed);
    }

    /// The follower is not called for a while.
    fn rest(&self) {
        let rests = self.rests.load(Ordering::Relaxed);
        self.rests.store((rests + 1).min(RESTS_MAX), Ordering::Relaxed);
        self.rests_until_ns.store(monotonic_ns() + (REST_NS << rests), Ordering::Relaxed);
    }

    /// Whether a handler that serves a fault now should be back soon: it is the last one that
    /// listens.
    #[inline]
    pub fn is_last_one(&self) -> bool {
        // Relaxed: one fault is served too slowly at worst.
        self.mode.load(Ordering::Relaxed) != TOGETHER
    }

    /// All listen again.
    pub fn end_alone(&self) {
        if self.change(ALONE, TOGETHER) {
            self.wake_all();
        }
    }

    /// The follower sleeps until it is called.
    pub fn wait_to_follow(&self) {
        loop {
            let mode = self.mode.load(Ordering::SeqCst);
            if mode == ALONE {
                return;
            }
            futex::wait(&self.mode, mode, Reach::Process, None);
        }
    }

    /// The CPU that other engine threads should leave to the follower.
    #[must_use]
    pub fn taken_cpu(&self) -> Option<usize> {
        // Relaxed: a hint.
        let taken = self.taken_cpu.load(Ordering::Relaxed);
        if self.is_followed() { (taken as usize).checked_sub(1) } else { None }
    }

    /// Whether the follower is to listen on.
    #[inline]
    pub fn is_followed(&self) -> bool {
        self.mode.load(Ordering::SeqCst) == ALONE
    }
}

/// The follower's view: whom it follows, and where.
#[derive(Default)]
pub struct Follower {
    thread: u32,
    faults: u32,
    cpu: Option<usize>,
}

impl Follower {
    /// The follower was called.
    pub fn begin(&mut self) {
        self.thread = 0;
        self.faults = 0;
    }

    /// A fault of `thread` has arrived: goes where that thread is. `false`: it is not this one's
    /// to serve, for it is another thread's, or all listen again; whoever does may have it.
    pub fn before_fault(&mut self, listeners: &Listeners, thread: u32, waited_ns: u64) -> bool {
        if self.thread == 0 {
            self.thread = thread;
        }
        if thread != self.thread {
            listeners.end_alone();
        }
        if !listeners.is_followed() {
            return false;
        }
        listeners.is_serving.store(true, Ordering::Relaxed);
        if self.faults.is_multiple_of(LOOK) || waited_ns > LOOK_NS {
            match thread::cpu_of(thread) {
                Some(cpu) if self.cpu != Some(cpu) => {
                    thread::pin_to_cpu(cpu);
                    self.cpu = Some(cpu);
                    listeners.taken_cpu.store(cpu as u32 + 1, Ordering::Relaxed);
                }
                Some(_) => {}
                None => listeners.end_alone(),
            }
        }
        self.faults = self.faults.wrapping_add(1);
        true
    }

    /// It was served.
    pub fn after_fault(&self, listeners: &Listeners) {
        // Relaxed, and no atomic addition: only the follower writes it.
        let served = listeners.served.load(Ordering::Relaxed);
        listeners.served.store(served.wrapping_add(1), Ordering::Relaxed);
        listeners.is_serving.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicBool;
    use std::collections::VecDeque;
    use std::sync::{Arc, Condvar, Mutex};
    use std::time::{Duration, Instant};

    use super::*;

    /// Feeds `count` faults, `step` ns apart, and returns the runs that are seen at the end.
    fn feed(run: &mut Run, last: &AtomicU32, thread: u32, count: u32, clock: &mut u64) -> u32 {
        let mut runs = 0;
        for _ in 0..count {
            *clock += 10_000;
            runs = run.note(thread, last, || *clock);
        }
        runs
    }

    #[test]
    fn a_thread_alone_makes_runs() {
        let (mut run, last, mut clock) = (Run::default(), AtomicU32::new(0), 1 << 40);
        // The first has no beginning, and the second follows none.
        assert_eq!(feed(&mut run, &last, 7, RUN, &mut clock), 0);
        assert_eq!(feed(&mut run, &last, 7, RUN, &mut clock), 1);
        assert_eq!(feed(&mut run, &last, 7, RUN, &mut clock), 2);
        assert_eq!(feed(&mut run, &last, 7, RUN - 1, &mut clock), 0);
        // Rare faults are no run.
        clock += u64::from(RUN) * 1_000_000;
        assert_eq!(feed(&mut run, &last, 7, 1, &mut clock), 0);
    }

    #[test]
    fn threads_on_two_handlers_are_not_alone() {
        let (last, mut clock) = (AtomicU32::new(0), 1 << 40);
        let mut runs = [Run::default(), Run::default()];
        for _ in 0..100 {
            for (run, thread) in runs.iter_mut().zip([7, 8]) {
                assert_eq!(feed(run, &last, thread, RUN, &mut clock), 0);
            }
        }
        let mut run = Run::default();
        for _ in 0..100 {
            assert_eq!(feed(&mut run, &last, 7, RUN / 2, &mut clock), 0);
            assert_eq!(feed(&mut run, &last, 8, RUN / 2, &mut clock), 0);
        }
    }

    /// Where the faults of a test arrive, and are awaited by any number of threads.
    #[derive(Default)]
    struct Faults {
        queue: Mutex<VecDeque<u32>>,
        arrived: Condvar,
        served: AtomicU32,
        /// The thread whose fault the follower has read and does not get to serve.
        stuck: AtomicU32,
        is_over: AtomicBool,
    }

    impl Faults {
        fn next(&self) -> Option<u32> {
            let mut queue = self.queue.lock().unwrap();
            loop {
                if self.is_over.load(Ordering::Relaxed) {
                    return None;
                }
                if let Some(thread) = queue.pop_front() {
                    return Some(thread);
                }
                queue = self.arrived.wait(queue).unwrap();
            }
        }

        fn push(&self, thread: u32) {
            self.queue.lock().unwrap().push_back(thread);
            self.arrived.notify_all();
        }

        /// What was answered without being served is a fault again.
        fn answer_all(&self) {
            let stuck = self.stuck.swap(0, Ordering::SeqCst);
            if stuck != 0 {
                self.push(stuck);
            }
        }

        /// Faults, and waits until it was served; returns how long that took.
        fn fault(&self, thread: u32) -> Duration {
            let before = self.served.load(Ordering::SeqCst);
            let start = Instant::now();
            self.push(thread);
            while self.served.load(Ordering::SeqCst) == before {
                assert!(start.elapsed() < Duration::from_secs(20), "nobody listens");
                std::thread::yield_now();
            }
            start.elapsed()
        }
    }

    /// Handlers and a follower as in a process; the latter is starved once in `starves` faults.
    fn with_listeners(handlers: u32, starves: u32, work: impl FnOnce(&Faults, &Listeners)) {
        let (faults, listeners) = (Arc::new(Faults::default()), Arc::new(Listeners::new(handlers)));
        for _ in 0..handlers {
            let (faults, listeners) = (faults.clone(), listeners.clone());
            std::thread::spawn(move || {
                let mut run = Run::default();
                while let Some(thread) = faults.next() {
                    faults.served.fetch_add(1, Ordering::SeqCst);
                    listeners.after_fault(thread, &mut run, || faults.answer_all());
                }
            });
        }
        let ends = (faults.clone(), listeners.clone());
        std::thread::spawn(move || {
            let (faults, listeners) = ends;
            let mut follower = Follower::default();
            let mut count = 0u32;
            loop {
                listeners.wait_to_follow();
                follower.begin();
                while listeners.is_followed() {
                    let Some(thread) = faults.next() else { return };
                    if !follower.before_fault(&listeners, thread, 0) {
                        faults.push(thread);
                        continue;
                    }
                    count += 1;
                    if count.is_multiple_of(starves) {
                        faults.stuck.store(thread, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_secs(1));
                    } else {
                        faults.served.fetch_add(1, Ordering::SeqCst);
                    }
                    follower.after_fault(&listeners);
                }
            }
        });
        work(&faults, &listeners);
        // Threads that sleep outside of `next` stay where they are until the test's process ends.
        faults.is_over.store(true, Ordering::Relaxed);
        faults.arrived.notify_all();
    }

    fn this_thread() -> u32 {
        rustix::thread::gettid().as_raw_nonzero().get() as u32
    }

    #[test]
    fn a_thread_that_faults_alone_is_followed() {
        with_listeners(3, u32::MAX, |faults, listeners| {
            for _ in 0..10 * RUN {
                faults.fault(this_thread());
            }
            assert!(listeners.served.load(Ordering::Relaxed) > RUN, "the follower was called");
            assert!(thread::cpu_of(this_thread()).is_some());
            // It goes when nothing comes any more.
            let start = Instant::now();
            while listeners.is_followed() {
                assert!(start.elapsed() < Duration::from_secs(20), "the watch ends it");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }

    #[test]
    fn every_fault_is_served_whoever_faults_and_whoever_is_starved() {
        with_listeners(2, 200, |faults, listeners| {
            for round in 0..40 {
                for fault in 0..8 * RUN {
                    let is_other = round % 4 == 1 && fault % 50 == 49;
                    let took = faults.fault(if is_other { u32::MAX } else { this_thread() });
                    // The follower is stuck for a second.
                    assert!(took < Duration::from_millis(900), "{took:?}");
                }
                if round % 8 == 7 {
                    std::thread::sleep(Duration::from_millis(3 * WATCH_MS));
                    // It has rested enough.
                    listeners.rests_until_ns.store(0, Ordering::Relaxed);
                }
            }
            assert!(listeners.runs.load(Ordering::Relaxed) > 1, "it was called in vain");
            assert!(listeners.rests.load(Ordering::Relaxed) > 0, "it was starved");
        });
    }
}
