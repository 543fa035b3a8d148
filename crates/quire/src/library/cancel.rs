//! Calls that do not wait for ever: a deadline, a token that another thread cancels, or both.
//!
//! Owns how long the calls of a thread wait, while [`Patience::during`] says so: like a signal that
//! is pending for a thread, it is about any call that the thread is in, so no method needs a second
//! form. Leaves to the engine's wait table that a waiter which leaves loses nothing: one that was
//! woken passes the wake on.
//!
//! # What an interrupted call leaves behind
//!
//! What it has begun goes on without it: a call into a store cannot be ended, only left.
//!
//! - Reads (`read_at`, `populate`, `pin`, `try_read`) wait for pages, which store workers read then;
//!   they are in the cache when the store has answered. Nothing stays pinned.
//! - Calls that write, sync or change a length run on a thread of their own, which the caller
//!   leaves. A flush goes on; its error is told by the next flush, as one of the background is. A
//!   length may have changed later: `len` says so.
//! - The object, and the address space, end when that thread is done with them.
//!
//! Accesses to a mapping, and the ends of handles, wait as long as it takes, or as long as a
//! [`DeadlineStore`](crate::store::DeadlineStore) lets them.
//!
//! Locks: none; a thread's patience is its own.

use core::cell::RefCell;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use super::{Error, Object};
use crate::page::{CancelToken as EngineToken, Futexes, Kill, Parking};
use crate::store::workers::start;
use crate::sys::{Errno, monotonic_ns};

std::thread_local! {
    static CURRENT: RefCell<Option<Patience>> = const { RefCell::new(None) };
}

/// Ends calls that wait, from any thread. Clones are the same token.
#[derive(Clone, Default)]
pub struct CancelToken(Arc<EngineToken>);

impl CancelToken {
    /// One that was not cancelled.
    #[must_use]
    pub fn new() -> CancelToken {
        CancelToken::default()
    }

    /// Ends all calls that wait with this token, now and later: [`Error::Interrupted`].
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
    /// Without an end.
    #[must_use]
    pub fn new() -> Patience {
        Patience::default()
    }

    /// Until the token is cancelled.
    #[must_use]
    pub fn token(mut self, token: &CancelToken) -> Patience {
        self.token = Some(token.clone());
        self
    }

    /// Until a moment, whichever call is under way then.
    #[must_use]
    pub fn deadline(self, deadline: Instant) -> Patience {
        self.timeout(deadline.saturating_duration_since(Instant::now()))
    }

    /// Until some time from now, not from a call's beginning.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Patience {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.deadline_ns = Some(monotonic_ns().saturating_add(timeout_ns));
        self
    }

    /// Does some work, all of whose calls into the library, of this thread, wait no longer than
    /// this: they end with [`Error::Interrupted`], but for those that need not wait. Of two, one
    /// inside of the other, the inner one counts.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let _before = Before(Patience::replace(Some(self.clone())));
        work()
    }

    /// Has the calls of this thread wait so from now on, `None` as long as it takes; returns how
    /// they did before. For who cannot say it around the calls, with [`Self::during`].
    pub fn replace(patience: Option<Patience>) -> Option<Patience> {
        // A thread that is past its thread-locals waits as long as it takes.
        CURRENT.try_with(|current| current.replace(patience)).unwrap_or_default()
    }

    /// How the calls of this thread wait; `None` as long as it takes.
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
    /// It is used no longer than `self` is there.
    pub(super) unsafe fn kill_for_a_call(&self) -> Kill<'static> {
        // SAFETY: the token lives as long as `self`, which the caller promises.
        let forever = |token: &CancelToken| unsafe { &*Arc::as_ptr(&token.0) };
        Kill { token: self.token.as_ref().map(forever), deadline_ns: self.deadline_ns }
    }
}

/// What the thread's patience was, and is again at the end, by a panic as well.
struct Before(Option<Patience>);

impl Drop for Before {
    fn drop(&mut self) {
        Patience::replace(self.0.take());
    }
}

/// Not 0 once a call's thread has done its work, be it by a panic.
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
    /// Does what may wait for the store in ways that cannot be ended: at once, or, where this
    /// thread's patience has an end, on a thread of its own, which is left when it comes.
    ///
    /// # Errors
    /// [`Error::Interrupted`]: it goes on, and its result is lost, or it was not begun;
    /// [`Error::NoMemory`] where there is no thread for it.
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
            // Dropped first: when the caller lets go of the object, it is to end there.
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
