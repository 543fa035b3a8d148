//! Threads that touch pages whose locks they have, by a call.
//!
//! The program may have dropped such a page by a bare system call, of which the engine knows nothing. Then
//! the kernel sends the fault to a handler, which finds the page locked by the thread that waits for the
//! answer. So a thread is listed here for as long as its call lasts, and its fault is served without
//! the lock ([`Mmu::is_toucher`](super::Mmu::is_toucher)).
//!
//! Locks: none. A fork waits until the thread has ended its call, so a child finds nothing listed.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys::thread::ThreadId;
use crate::units::PageNum;

/// The most threads that touch at once; others wait for a moment.
const TOUCHERS: usize = 32;

/// No page was refused.
const NONE: u64 = u64::MAX;

pub(super) struct Touchers {
    /// How many there are, so that most faults look at nothing else.
    count: AtomicU32,
    /// Their numbers; UNKNOWN is a free place.
    threads: [AtomicU32; TOUCHERS],
    /// At which page each was refused.
    refused: [AtomicU64; TOUCHERS],
}

impl Default for Touchers {
    fn default() -> Touchers {
        Touchers {
            count: AtomicU32::new(0),
            threads: [const { AtomicU32::new(ThreadId::UNKNOWN.0) }; TOUCHERS],
            refused: [const { AtomicU64::new(NONE) }; TOUCHERS],
        }
    }
}

impl Touchers {
    /// Makes a call of the calling thread; says at which page it was refused.
    pub fn during<T>(&self, thread: ThreadId, call: impl FnOnce() -> T) -> (T, Option<PageNum>) {
        let (free, own) = (ThreadId::UNKNOWN.0, thread.0);
        // SeqCst, here and below: a handler that is sent this thread's fault finds it listed.
        self.count.fetch_add(1, Ordering::SeqCst);
        let at = loop {
            let take = |place: &AtomicU32| {
                place.compare_exchange(free, own, Ordering::SeqCst, Ordering::Relaxed).is_ok()
            };
            match self.threads.iter().position(take) {
                Some(at) => break at,
                None => {
                    rustix::thread::sched_yield();
                }
            }
        };
        let result = call();
        let refused = self.refused[at].swap(NONE, Ordering::SeqCst);
        self.threads[at].store(free, Ordering::SeqCst);
        self.count.fetch_sub(1, Ordering::SeqCst);
        (result, (refused != NONE).then_some(PageNum(refused)))
    }

    fn place_of(&self, thread: ThreadId) -> Option<usize> {
        if thread == ThreadId::UNKNOWN || self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        self.threads.iter().position(|place| place.load(Ordering::SeqCst) == thread.0)
    }

    pub fn has(&self, thread: ThreadId) -> bool {
        self.place_of(thread).is_some()
    }

    /// Notes that a listed thread's fault is answered with an error.
    pub fn refuse(&self, thread: ThreadId, page: PageNum) {
        if let Some(at) = self.place_of(thread) {
            self.refused[at].store(page.0, Ordering::SeqCst);
        }
    }
}
