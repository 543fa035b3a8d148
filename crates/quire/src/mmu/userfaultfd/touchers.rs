//! Threads that have the kernel touch pages whose locks they have.
//!
//! The program may have dropped such a page by a bare system call, of which the engine knows nothing. Then
//! the kernel sends the fault to a handler, where nobody could serve it: the page is locked by the thread that
//! waits for the answer, and a fork may wait for that thread as well. So it is listed here with its pages for as
//! long as it touches them, and its faults are answered where they are read.
//!
//! Locks: a listed thread's call ends only after an answer to it has.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys::thread::ThreadId;
use crate::units::{BLOCK_ORDER, PageNum, PageRange};

/// The most threads that touch at once; others wait for a moment.
const TOUCHERS: usize = 4;

#[derive(Default)]
pub(super) struct Touchers([Toucher; TOUCHERS]);

#[derive(Default)]
struct Toucher {
    /// The thread, or UNKNOWN: a free place.
    thread: AtomicU32,
    /// Which pages it touches, and [`ANSWERED`]; 0 are none.
    pages: AtomicU64,
}

/// A fault of the thread is being answered.
const ANSWERED: u64 = 1 << 63;
/// Bits for the number of pages: a block's at most.
const LEN_BITS: u32 = BLOCK_ORDER + 1;

const fn word_of(pages: PageRange) -> u64 {
    pages.start.0 << LEN_BITS | pages.len() as u64
}

fn holds(word: u64, page: PageNum) -> bool {
    page.0.wrapping_sub(word >> LEN_BITS) < word & ((1 << LEN_BITS) - 1)
}

impl Touchers {
    /// Makes a call by which the calling thread touches pages.
    pub fn during<T>(&self, thread: ThreadId, pages: PageRange, call: impl FnOnce() -> T) -> T {
        let free = ThreadId::UNKNOWN.0;
        let take = |place: &&Toucher| {
            let taken =
                place.thread.compare_exchange(free, thread.0, Ordering::Acquire, Ordering::Relaxed);
            taken.is_ok()
        };
        let place = loop {
            match self.0.iter().find(take) {
                Some(place) => break place,
                None => rustix::thread::sched_yield(),
            }
        };
        // SeqCst: a handler that is sent this thread's fault finds it listed.
        place.pages.store(word_of(pages), Ordering::SeqCst);
        let result = call();
        let (word, none) = (word_of(pages), 0);
        // Acquire pairs with the release in `answer`.
        while place
            .pages
            .compare_exchange_weak(word, none, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            core::hint::spin_loop();
        }
        place.thread.store(free, Ordering::Release);
        result
    }

    /// Has a fault answered by `act` where its thread is listed with the page; says whether it is.
    pub fn answer(&self, thread: ThreadId, page: PageNum, act: impl FnOnce()) -> bool {
        let is_its = |place: &&Toucher| {
            let word = place.pages.load(Ordering::SeqCst);
            holds(word, page)
                && place.thread.load(Ordering::Relaxed) == thread.0
                && place
                    .pages
                    .compare_exchange(word, word | ANSWERED, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
        };
        let Some(place) = self.0.iter().find(is_its) else { return false };
        act();
        place.pages.fetch_and(!ANSWERED, Ordering::Release);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_answered_for_its_pages_while_it_touches_them() {
        let touchers = Touchers::default();
        let (own, other) = (ThreadId(7), ThreadId(8));
        let pages = PageRange::new(PageNum(1 << 40), 512);
        let answers = |thread, page| {
            let mut is_answered = false;
            assert_eq!(touchers.answer(thread, PageNum(page), || is_answered = true), is_answered);
            is_answered
        };
        let (first, end) = (pages.start.0, pages.end.0);
        let seen = touchers.during(own, pages, || {
            [
                answers(own, first),
                answers(own, end - 1),
                answers(own, first - 1),
                answers(own, end),
                answers(other, first),
            ]
        });
        assert_eq!(seen, [true, true, false, false, false]);
        assert!(!answers(own, first), "it touches nothing any more");
    }

    #[test]
    fn a_call_ends_after_the_answer_to_its_fault() {
        let touchers = Touchers::default();
        let (thread, pages) = (ThreadId(7), PageRange::new(PageNum(3), 1));
        let has_ended = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let (begun, told) = std::sync::mpsc::channel();
            let (answering, go_on) = std::sync::mpsc::channel();
            let (touchers, has_ended) = (&touchers, &has_ended);
            scope.spawn(move || {
                touchers.during(thread, pages, || {
                    begun.send(()).unwrap();
                    go_on.recv().unwrap();
                });
                has_ended.store(1, Ordering::SeqCst);
            });
            told.recv().unwrap();
            let is_answered = touchers.answer(thread, PageNum(3), || {
                answering.send(()).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert_eq!(has_ended.load(Ordering::SeqCst), 0);
            });
            assert!(is_answered);
        });
    }
}
