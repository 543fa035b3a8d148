//! Calls that do not wait for ever: a deadline, a token that another thread cancels, or both.
//!
//! A thread's *patience* limits all calls that it makes during [`Patience::during`], so no method
//! needs a second form.
//!
//! # What an interrupted call leaves behind
//!
//! What the call has begun goes on without it: a call into a store cannot be ended, only left.
//!
//! - Reads (`read_at`, `populate`, `pin`, `try_read`) wait for pages, which store workers then read;
//!   the pages are in the cache when the store has answered. Nothing stays pinned.
//! - Calls that write, sync or change a length run on a thread of their own, which the caller leaves. A
//!   flush goes on; the next flush reports its error, as it does for writes in the background. A length
//!   may still change later: `len` tells.
//! - The object, and the address space, end when that thread is done with them.
//!
//! Accesses to a mapping, and drops of handles, wait without a limit but for that of a
//! [`DeadlineStore`](crate::store::DeadlineStore).
//!
//! Locks: none; a thread's patience is its own.

use core::cell::RefCell;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use super::{Error, Object};
use crate::page::{Futexes, Kill, KillToken, Parking};
use crate::store::workers::start;
use crate::sys::{Errno, monotonic_ns};

std::thread_local! {
    static CURRENT: RefCell<Option<Patience>> = const { RefCell::new(None) };
}

/// Interrupts calls that wait, from any thread. Clones are the same token.
#[derive(Clone, Default)]
pub struct CancelToken(Arc<KillToken>);

impl CancelToken {
    /// A token that was not cancelled.
    #[must_use]
    pub fn new() -> CancelToken {
        CancelToken::default()
    }

    /// Interrupts all calls that wait with this token, now and later: [`Error::Interrupted`].
    pub fn cancel(&self) {
        self.0.cancel(&Futexes);
    }

    /// Whether it was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
}

impl core::fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CancelToken").field("is_cancelled", &self.is_cancelled()).finish()
    }
}

/// How long calls wait.
///
/// ```no_run
/// # fn main() -> Result<(), quire::library::Error> {
/// use core::time::Duration;
/// use quire::library::{AddressSpace, Patience};
///
/// let object = AddressSpace::builder().build()?.open("data.bin")?;
/// let mut bytes = [0; 512];
/// let patience = Patience::new().timeout(Duration::from_millis(50));
/// let read = patience.during(|| object.read_at(0, &mut bytes))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Patience {
    token: Option<CancelToken>,
    deadline_ns: Option<u64>,
}

impl Patience {
    /// Waits without a limit.
    #[must_use]
    pub fn new() -> Patience {
        Patience::default()
    }

    /// Waits until the token is cancelled.
    #[must_use]
    pub fn token(mut self, token: &CancelToken) -> Patience {
        self.token = Some(token.clone());
        self
    }

    /// Waits until a moment, whichever call is under way then.
    #[must_use]
    pub fn deadline(self, deadline: Instant) -> Patience {
        self.timeout(deadline.saturating_duration_since(Instant::now()))
    }

    /// Waits until some time from now, not from a call's beginning.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Patience {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.deadline_ns = Some(monotonic_ns().saturating_add(timeout_ns));
        self
    }

    /// Does some work during which this thread's calls into the library wait no longer than this:
    /// those that would wait longer end with [`Error::Interrupted`]. Of two, one inside of the other,
    /// the inner one counts.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let _before = Before(Patience::replace(Some(self.clone())));
        work()
    }

    /// Sets this thread's patience from now on, `None` for no limit; returns the patience before. It is
    /// for callers that cannot use [`Self::during`].
    pub fn replace(patience: Option<Patience>) -> Option<Patience> {
        // A thread that is past its thread-locals waits without a limit.
        CURRENT.try_with(|current| current.replace(patience)).unwrap_or_default()
    }

    /// This thread's patience; `None` where it has no limit.
    pub(super) fn current() -> Option<Patience> {
        let current = CURRENT.try_with(|current| current.borrow().clone()).unwrap_or_default();
        current.filter(|patience| !patience.kill().is_never())
    }

    /// Whether a call of this thread that fails with `errno` has been interrupted.
    pub(super) fn has_ended(errno: Errno) -> bool {
        errno == Errno::INTR && Patience::current().is_some_and(|now| now.kill().is_due())
    }

    fn kill(&self) -> Kill<'_> {
        Kill { token: self.token.as_ref().map(|token| &*token.0), deadline_ns: self.deadline_ns }
    }

    /// The same for the engine, which keeps it for the time of a call.
    ///
    /// # Safety
    /// The result is used no longer than `self` lives.
    pub(super) unsafe fn kill_for_a_call(&self) -> Kill<'static> {
        // SAFETY: the token lives as long as `self`; the rest is the caller's promise.
        let forever = |token: &CancelToken| unsafe { &*Arc::as_ptr(&token.0) };
        Kill { token: self.token.as_ref().map(forever), deadline_ns: self.deadline_ns }
    }
}

/// The patience that a thread had, which its drop restores, also after a panic.
struct Before(Option<Patience>);

impl Drop for Before {
    fn drop(&mut self) {
        Patience::replace(self.0.take());
    }
}

/// Not 0 once a call's thread has done its work, or has panicked.
#[derive(Default)]
struct Ended(Arc<AtomicU64>);

impl Drop for Ended {
    fn drop(&mut self) {
        // Release pairs with the acquire of the caller, which joins the thread then.
        self.0.store(1, Ordering::Release);
        Futexes.wake(Arc::as_ptr(&self.0));
    }
}

impl Object {
    /// Does work that may wait for the store in ways that cannot be ended: on this thread, or, where
    /// this thread's patience has a limit, on a thread of its own, which is left at the limit.
    ///
    /// # Errors
    /// [`Error::Interrupted`]: the work goes on, and its result is lost, or it was not begun;
    /// [`Error::NoMemory`] where no thread can be started for it.
    pub(super) fn interruptibly<T: Send + 'static>(
        &self,
        doing: &'static str,
        work: impl FnOnce(&Object) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let Some(patience) = Patience::current() else { return Ok(work(self)) };
        let kill = patience.kill();
        if kill.is_due() {
            return Err(self.interrupted(doing));
        }
        let (object, theirs) = (self.clone(), Ended::default());
        let ended = Arc::clone(&theirs.0);
        let begin = move || {
            let _ended = theirs;
            // Dropped before `_ended`: where the caller drops the object next, it ends there.
            let object = object;
            work(&object)
        };
        let call = start(std::thread::Builder::new().name("quire-call".into()), begin)
            .map_err(|errno| Error::NoMemory { doing: "start a thread for a call", errno })?;
        // Acquire pairs with the release of `Ended`.
        while ended.load(Ordering::Acquire) == 0 {
            if kill.is_due() {
                return Err(self.interrupted(doing));
            }
            Futexes.wait(&ended, 0, kill);
        }
        call.join().map_err(|panic| std::panic::resume_unwind(panic))
    }

    pub(super) fn interrupted(&self, doing: &'static str) -> Error {
        Error::Interrupted { path: self.name().into(), doing }
    }
}
