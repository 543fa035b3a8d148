//! The mutex of what is held across calls of the MMU.
//!
//! As a rule it is the futex mutex, and nothing else. In a simulation a thread that slept in the
//! kernel would keep the baton, and nobody could ever unlock: there, whoever finds it locked gives
//! the baton away until it is unlocked. Leaf mutexes, under which nothing of the MMU is called, need
//! none of this and are plain futex mutexes.

#[cfg(not(feature = "simulated"))]
pub use rustix_futex_sync::{Mutex, Mutex as LayoutMutex, MutexGuard, MutexGuard as LayoutGuard};

#[cfg(feature = "simulated")]
pub use self::by_turns::{LayoutGuard, LayoutMutex, Mutex, MutexGuard};

#[cfg(feature = "simulated")]
mod by_turns {
    use rustix_futex_sync::RawMutex as Futex;
    use rustix_futex_sync::lock_api::{self, GuardNoSend};

    use crate::sys::turns;

    /// The futex mutex, for threads of which one runs at a time as well.
    /// With STEPS others may come in before it is taken and after it is given back.
    pub struct ByTurns<const STEPS: bool>(Futex);

    pub type Mutex<T> = lock_api::Mutex<ByTurns<true>, T>;
    pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, ByTurns<true>, T>;
    /// The space's lock: nobody but its holder looks at what it guards without a count.
    pub type LayoutMutex<T> = lock_api::Mutex<ByTurns<false>, T>;
    pub type LayoutGuard<'a, T> = lock_api::MutexGuard<'a, ByTurns<false>, T>;

    // SAFETY: every lock that is said to be taken is one of the futex mutex.
    unsafe impl<const STEPS: bool> lock_api::RawMutex for ByTurns<STEPS> {
        #[allow(clippy::declare_interior_mutable_const, reason = "how the trait has it")]
        const INIT: ByTurns<STEPS> = ByTurns(<Futex as lock_api::RawMutex>::INIT);
        type GuardMarker = GuardNoSend;

        fn lock(&self) {
            if !turns::lock(core::ptr::from_ref(self).addr(), STEPS, || self.try_lock()) {
                self.0.lock();
            }
        }

        fn try_lock(&self) -> bool {
            self.0.try_lock()
        }

        unsafe fn unlock(&self) {
            // SAFETY: the caller's promise.
            unsafe { self.0.unlock() };
            turns::unlocked(core::ptr::from_ref(self).addr(), STEPS);
        }
    }
}
