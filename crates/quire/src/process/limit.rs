//! RLIMIT_AS as the program means it.
//!
//! The arena was reserved before the program could set a limit, so the kernel would not refuse what
//! is mapped there. An engine thread asks for the limit, for the program's seccomp filter may not allow
//! that call, and this costs two switches of thread. So the answer is kept until the program changes a
//! limit by libc, and for `KEPT_NS` at most, for a limit may be changed in other ways.
//!
//! Locks: reading takes none; `learn` is called under the space's, by one thread at a time.

#![deny(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering};

use crate::sys::monotonic_ns;

/// How long an answer is used: 100 ms.
const KEPT_NS: u64 = 100_000_000;

pub(super) struct AddressLimit {
    /// In bytes; `u64::MAX` where there is none.
    bytes: AtomicU64,
    asked_ns: AtomicU64,
    /// Counts the known changes.
    changes: AtomicU64,
    /// The value of `changes` when it was asked for.
    changes_then: AtomicU64,
}

impl AddressLimit {
    pub const fn new() -> AddressLimit {
        AddressLimit {
            bytes: AtomicU64::new(0),
            asked_ns: AtomicU64::new(0),
            changes: AtomicU64::new(1),
            changes_then: AtomicU64::new(0),
        }
    }

    /// The limit, where the last answer can be used.
    pub fn known(&self) -> Option<u64> {
        // Acquire pairs with the release in `learn`: the answer was stored before. The changes may be
        // Relaxed: the thread that made one sees it, and so do threads that are ordered behind it.
        let is_of_now =
            self.changes_then.load(Ordering::Acquire) == self.changes.load(Ordering::Relaxed);
        let age_ns = monotonic_ns().saturating_sub(self.asked_ns.load(Ordering::Relaxed));
        (is_of_now && age_ns <= KEPT_NS).then(|| self.bytes.load(Ordering::Relaxed))
    }

    /// Keeps what `ask` returns, under the space's lock. A change meanwhile makes the answer stale.
    pub fn learn(&self, ask: impl FnOnce() -> Option<u64>) -> u64 {
        let changes = self.changes.load(Ordering::Acquire);
        let now = monotonic_ns();
        let limit = ask().unwrap_or(u64::MAX);
        self.bytes.store(limit, Ordering::Relaxed);
        self.asked_ns.store(now, Ordering::Relaxed);
        self.changes_then.store(changes, Ordering::Release);
        limit
    }

    /// Forgets the answer, for the limit may have changed.
    pub fn forget(&self) {
        // Release pairs with the acquire in `learn`: a thread that counts this change asks after it.
        self.changes.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_serves_until_it_is_forgotten() {
        let limit = AddressLimit::new();
        assert_eq!(limit.known(), None);
        assert_eq!(limit.learn(|| Some(100)), 100);
        assert_eq!(limit.known(), Some(100));
        limit.forget();
        assert_eq!(limit.known(), None);
        assert_eq!(limit.learn(|| None), u64::MAX);
        assert_eq!(limit.known(), Some(u64::MAX));
    }

    #[test]
    fn a_change_while_it_is_asked_for_is_not_lost() {
        let limit = AddressLimit::new();
        let asked = limit.learn(|| {
            // Another thread's, just after the kernel has answered.
            limit.forget();
            Some(1)
        });
        assert_eq!((asked, limit.known()), (1, None));
    }

    #[test]
    fn an_old_answer_is_not_taken() {
        let limit = AddressLimit::new();
        limit.learn(|| None);
        limit.asked_ns.store(monotonic_ns() - 2 * KEPT_NS, Ordering::Relaxed);
        assert_eq!(limit.known(), None);
    }
}
