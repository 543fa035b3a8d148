//! The engine's mutex: a futex mutex with a rank in the [lock order](super::rank).
//!
//! A simulation runs one thread at a time. A thread that slept in the kernel would keep its turn, and
//! the holder could never unlock. So there a thread sleeps by `turns` for a mutex that is held across
//! calls of the MMU. Leaf mutexes, under which the MMU is not called, need none of this.

use core::marker::PhantomData;

use rustix_futex_sync::RawMutex as Futex;
use rustix_futex_sync::lock_api::{self, GuardNoSend};

use super::memory::Zeroed;
use super::rank::{self, Ranked};
#[cfg(feature = "simulated")]
use super::{rank::Rank, turns};

/// A futex mutex with a rank.
#[repr(transparent)]
pub struct RankedMutex<R>(Futex, PhantomData<fn() -> R>);

/// A mutex of a rank, and its data.
pub type Mutex<R, T> = lock_api::Mutex<RankedMutex<R>, T>;
/// It is held as long as this lives.
pub type MutexGuard<'a, R, T> = lock_api::MutexGuard<'a, RankedMutex<R>, T>;

// SAFETY: zero is an unlocked mutex, which the tests of windows and of buffers check.
unsafe impl<R, T: Zeroed> Zeroed for Mutex<R, T> {}

impl<R: Ranked> RankedMutex<R> {
    /// Whether it is held across calls of the MMU.
    #[cfg(feature = "simulated")]
    const BY_TURNS: bool = Self::HAS_STEPS || matches!(R::RANK, Rank::Layout);
    /// Whether others may run before it is taken and after it is given back. That makes no difference
    /// to the space's lock: what it guards is read without it only beside a sequence count.
    #[cfg(feature = "simulated")]
    const HAS_STEPS: bool =
        matches!(R::RANK, Rank::Resize | Rank::SyncTurn | Rank::Registry | Rank::Window);

    #[inline]
    fn sleep(&self) {
        #[cfg(feature = "simulated")]
        if Self::BY_TURNS {
            let address = core::ptr::from_ref(self).addr();
            let try_lock = || lock_api::RawMutex::try_lock(&self.0);
            if turns::lock(address, Self::HAS_STEPS, try_lock) {
                return;
            }
        }
        lock_api::RawMutex::lock(&self.0);
    }
}

// SAFETY: every lock that is said to be taken is one of the futex mutex.
unsafe impl<R: Ranked> lock_api::RawMutex for RankedMutex<R> {
    #[allow(clippy::declare_interior_mutable_const, reason = "how the trait has it")]
    const INIT: RankedMutex<R> = RankedMutex(<Futex as lock_api::RawMutex>::INIT, PhantomData);
    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        rank::sleeps_for(R::RANK);
        self.sleep();
        rank::taken(R::RANK, 1);
    }

    #[inline]
    fn try_lock(&self) -> bool {
        let is_taken = self.0.try_lock();
        rank::taken(R::RANK, usize::from(is_taken));
        is_taken
    }

    #[inline]
    unsafe fn unlock(&self) {
        rank::released(R::RANK, 1);
        // SAFETY: the caller's promise.
        unsafe { self.0.unlock() };
        #[cfg(feature = "simulated")]
        if Self::BY_TURNS {
            turns::unlocked(core::ptr::from_ref(self).addr(), Self::HAS_STEPS);
        }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        lock_api::RawMutex::is_locked(&self.0)
    }
}
