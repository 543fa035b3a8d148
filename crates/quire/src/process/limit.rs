//! RLIMIT_AS as the program means it.
//!
//! The arena was reserved before the program could set a limit, so the kernel would not refuse what
//! is mapped there. Owns what is known of the limit. It is asked on an engine thread, for the
//! program's filter of system calls may not expect the question, and that costs two switches of
//! thread; so the answer is kept until the program changes a limit by libc, and for `KEPT_NS`, for
//! one that is changed in any other way. No locks.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::sys::monotonic_ns;

/// An answer serves so long: 100 ms.
const KEPT_NS: u64 = 100_000_000;

/// The limit as it was last asked for.
#[derive(Default)]
pub(super) struct AddressLimit {
    /// In bytes; `u64::MAX` where there is none.
    bytes: AtomicU64,
    /// When it was asked for; 0: it is to be asked for.
    asked_ns: AtomicU64,
}

impl AddressLimit {
    /// Whether `bytes` are within the limit, which `ask` knows.
    pub fn allows(&self, bytes: u64, ask: impl FnOnce() -> Option<u64>) -> bool {
        let now = monotonic_ns();
        // Acquire pairs with the release below: the limit that was stored before.
        let asked = self.asked_ns.load(Ordering::Acquire);
        if asked == 0 || now.saturating_sub(asked) > KEPT_NS {
            let limit = ask().unwrap_or(u64::MAX);
            self.bytes.store(limit, Ordering::Relaxed);
            // A limit that another thread changes meanwhile may be forgotten before this is stored:
            // the answer then stands for as long as one that nobody says is old.
            self.asked_ns.store(now, Ordering::Release);
            return bytes <= limit;
        }
        bytes <= self.bytes.load(Ordering::Relaxed)
    }

    /// The limit may be another now.
    pub fn forget(&self) {
        // Relaxed: the thread that changed it sees this, and others whatever orders them behind it.
        self.asked_ns.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_asked_for_once_until_it_is_forgotten() {
        let limit = AddressLimit::default();
        assert!(limit.allows(100, || Some(100)));
        assert!(!limit.allows(101, || panic!("asked again")));
        limit.forget();
        assert!(limit.allows(u64::MAX, || None));
        assert!(limit.allows(u64::MAX, || panic!("asked again")));
    }

    #[test]
    fn an_old_answer_is_not_taken() {
        let limit = AddressLimit::default();
        assert!(limit.allows(1, || None));
        limit.asked_ns.store(monotonic_ns() - 2 * KEPT_NS, Ordering::Relaxed);
        assert!(!limit.allows(1, || Some(0)));
    }
}
