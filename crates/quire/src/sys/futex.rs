//! Sleeping on a 32-bit word.
//!
//! An actor of a simulation sleeps and is woken by `turns`, without the kernel.

use core::sync::atomic::AtomicU32;

use linux_raw_sys::general::{
    __NR_futex, __NR_futex_waitv, __kernel_timespec, CLOCK_MONOTONIC, FUTEX_32,
    FUTEX_BITSET_MATCH_ANY, FUTEX_PRIVATE_FLAG, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET, futex_waitv,
};

use super::call::syscall;
#[cfg(feature = "simulated")]
use super::turns;

/// Whether the word is seen by one process only or by a tree of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Private memory: the kernel needs no look at the mapping.
    Process,
    /// A shared mapping.
    Tree,
}

impl Reach {
    const fn flag(self) -> u32 {
        match self {
            Reach::Process => FUTEX_PRIVATE_FLAG,
            Reach::Tree => 0,
        }
    }
}

/// Sleeps while `word` is `expected`; returns on a wake, a signal, the timeout, or for no reason.
pub fn wait(word: &AtomicU32, expected: u32, reach: Reach, timeout_ms: Option<u64>) {
    let deadline = |ms: u64| super::monotonic_ns().saturating_add(ms.saturating_mul(1_000_000));
    wait_until(word, expected, reach, timeout_ms.map(deadline));
}

/// Sleeps while `word` is `expected`, until a moment of [`monotonic_ns`](super::monotonic_ns) at
/// most; returns on a wake, a signal, or for no reason.
pub(crate) fn wait_until(word: &AtomicU32, expected: u32, reach: Reach, deadline_ns: Option<u64>) {
    sleep(word, expected, FUTEX_BITSET_MATCH_ANY, reach, deadline_ns);
}

/// Sleeps while `word` is `expected`, as one of `classes` (not none): only a wake that names one of
/// them reaches the sleeper. Returns on such a wake, a signal, or for no reason.
pub(crate) fn wait_bitset(word: &AtomicU32, expected: u32, classes: u32, reach: Reach) {
    sleep(word, expected, classes, reach, None);
}

fn sleep(word: &AtomicU32, expected: u32, classes: u32, reach: Reach, deadline_ns: Option<u64>) {
    #[cfg(feature = "simulated")]
    if turns::futex_wait(word, expected, classes, deadline_ns.is_some()) {
        return;
    }
    let deadline = deadline_ns.map(moment);
    let pointer = deadline.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    let op = (FUTEX_WAIT_BITSET | reach.flag()) as usize;
    let word = word.as_ptr() as usize;
    let arguments = [word, op, expected as usize, pointer as usize, 0, classes as usize];
    // SAFETY: `word` and `deadline` outlive the call; the kernel writes to neither.
    let _ = unsafe { syscall(__NR_futex, arguments) };
}

fn moment(ns: u64) -> __kernel_timespec {
    let (seconds, ns) = (ns / 1_000_000_000, ns % 1_000_000_000);
    __kernel_timespec { tv_sec: seconds as i64, tv_nsec: ns as i64 }
}

/// As [`wait_until`] for two words: sleeps while both are as expected.
pub(crate) fn wait_either(words: [(&AtomicU32, u32); 2], reach: Reach, deadline_ns: Option<u64>) {
    #[cfg(feature = "simulated")]
    if turns::look_again() {
        return;
    }
    let deadline = deadline_ns.map(moment);
    let pointer = deadline.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    let waiters = words.map(|(word, expected)| futex_waitv {
        val: u64::from(expected),
        uaddr: word.as_ptr() as u64,
        flags: FUTEX_32 | reach.flag(),
        __reserved: 0,
    });
    let place = waiters.as_ptr() as usize;
    let clock = CLOCK_MONOTONIC as usize;
    // SAFETY: the words, `waiters` and `deadline` outlive the call; the kernel writes to none.
    let _ =
        unsafe { syscall(__NR_futex_waitv, [place, waiters.len(), 0, pointer as usize, clock, 0]) };
}

/// Wakes up to `count` sleepers. The word need not exist any more: a thread that sleeps on what is there
/// now wakes for no reason, which every sleeper expects.
pub fn wake(word: *const AtomicU32, count: u32, reach: Reach) {
    wake_as(word, count, FUTEX_BITSET_MATCH_ANY, reach);
}

/// Wakes all that sleep as one of `classes`.
pub(crate) fn wake_bitset(word: &AtomicU32, classes: u32, reach: Reach) {
    wake_as(word, u32::MAX, classes, reach);
}

fn wake_as(word: *const AtomicU32, count: u32, classes: u32, reach: Reach) {
    #[cfg(feature = "simulated")]
    if turns::futex_wake(word.addr(), count, classes) {
        return;
    }
    // The kernel takes a signed number, and a negative one for "one": all is not -1.
    let count = count.min(i32::MAX as u32) as usize;
    let op = (FUTEX_WAKE_BITSET | reach.flag()) as usize;
    // SAFETY: the kernel only uses the address as a key.
    let _ = unsafe { syscall(__NR_futex, [word as usize, op, count, 0, 0, classes as usize]) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::monotonic_ns;
    use core::sync::atomic::Ordering;

    #[test]
    fn a_wake_reaches_the_classes_it_names_and_no_other() {
        let word = std::sync::Arc::new(AtomicU32::new(0));
        let woken = std::sync::Arc::new(AtomicU32::new(0));
        let sleepers = [1, 2].map(|class| {
            let (word, woken) = (word.clone(), woken.clone());
            std::thread::spawn(move || {
                wait_bitset(&word, 0, class, Reach::Process);
                woken.fetch_or(class, Ordering::SeqCst);
            })
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        let wake_until = |class: u32| {
            // Again and again: nothing says when a thread sleeps.
            while woken.load(Ordering::SeqCst) & class == 0 {
                wake_bitset(&word, class, Reach::Process);
                std::thread::yield_now();
            }
        };
        wake_until(2);
        assert_eq!(woken.load(Ordering::SeqCst), 2, "another class was woken");
        wake_until(1);
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    }

    #[test]
    fn to_wake_all_is_to_wake_all() {
        let word = std::sync::Arc::new(AtomicU32::new(1));
        let sleepers: std::vec::Vec<_> = (0..4)
            .map(|_| {
                let word = word.clone();
                std::thread::spawn(move || {
                    while word.load(Ordering::SeqCst) == 1 {
                        wait(&word, 1, Reach::Process, None);
                    }
                })
            })
            .collect();
        // All of them asleep, as a rule; the test is none where they are not.
        std::thread::sleep(std::time::Duration::from_millis(50));
        word.store(0, Ordering::SeqCst);
        wake(&*word, u32::MAX, Reach::Process);
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    }

    #[test]
    fn a_sleep_on_two_words_ends_with_either_of_them() {
        let words = [const { AtomicU32::new(0) }; 2];
        for at in 0..2 {
            words.iter().for_each(|word| word.store(0, Ordering::SeqCst));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    words[at].store(1, Ordering::SeqCst);
                    wake(&words[at], u32::MAX, Reach::Process);
                });
                // Without an end of its own: a wake that did not reach it would hang the test.
                while words[at].load(Ordering::SeqCst) == 0 {
                    wait_either([(&words[0], 0), (&words[1], 0)], Reach::Process, None);
                }
            });
        }
    }

    #[test]
    fn a_sleep_with_a_deadline_lasts_until_it_comes() {
        let words = [const { AtomicU32::new(0) }; 2];
        let sleeps: [&dyn Fn(u64); 2] =
            [&|deadline| wait_until(&words[0], 0, Reach::Process, Some(deadline)), &|deadline| {
                wait_either([(&words[0], 0), (&words[1], 0)], Reach::Process, Some(deadline));
            }];
        for sleep in sleeps {
            let deadline = monotonic_ns() + 20_000_000;
            let mut rounds = 0;
            while monotonic_ns() < deadline {
                sleep(deadline);
                rounds += 1;
            }
            assert!(rounds < 100, "it returned at once, {rounds} times");
        }
    }
}
