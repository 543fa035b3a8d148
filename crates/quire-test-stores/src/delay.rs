//! Stores whose operations take time, or never end.

use core::time::Duration;
use std::sync::{Condvar, Mutex, PoisonError};

use quire::store::{Cause, Operation, Store, StoreError};

use super::lock;

#[derive(Default)]
struct State {
    /// Operations that wait here.
    held: Vec<Operation>,
    /// How many operations pass although they are held.
    permits: usize,
    delay: Duration,
    waiting: usize,
    is_cancelled: bool,
}

/// Holds operations of the kinds named to [`DelayStore::hold`] until they are released, or lets each
/// operation take a time. A held operation has not begun; a cancelled one never will.
pub struct DelayStore<S> {
    inner: S,
    state: Mutex<State>,
    /// Any change of `state`.
    changed: Condvar,
}

impl<S: Store> DelayStore<S> {
    /// Holds nothing yet.
    pub fn new(inner: S) -> DelayStore<S> {
        DelayStore { inner, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Has operations of this kind wait from now on.
    pub fn hold(&self, operation: Operation) {
        lock(&self.state).held.push(operation);
    }

    /// Has every operation take at least this long from now on, after it was released.
    pub fn set_delay(&self, delay: Duration) {
        lock(&self.state).delay = delay;
    }

    /// Releases `count` operations that wait or come next.
    pub fn release(&self, count: usize) {
        lock(&self.state).permits += count;
        self.changed.notify_all();
    }

    /// Holds nothing any more, and releases all that wait.
    pub fn release_all(&self) {
        lock(&self.state).held.clear();
        self.changed.notify_all();
    }

    /// Has every operation that waits or comes fail with [`Cause::Cancelled`].
    pub fn cancel(&self) {
        lock(&self.state).is_cancelled = true;
        self.changed.notify_all();
    }

    /// Operations that wait now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.state).waiting
    }

    /// Waits until `count` operations or more wait. False if they did not within `time`.
    #[must_use]
    pub fn wait_for(&self, count: usize, time: Duration) -> bool {
        let state = lock(&self.state);
        let waited = self.changed.wait_timeout_while(state, time, |state| state.waiting < count);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Waits as long as the operation is held or delayed.
    fn pass(&self, operation: Operation, offset: u64, bytes: usize) -> Result<(), StoreError> {
        let mut state = lock(&self.state);
        state.waiting += 1;
        self.changed.notify_all();
        while !state.is_cancelled && state.held.contains(&operation) {
            if state.permits > 0 {
                state.permits -= 1;
                break;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let deadline = std::time::Instant::now() + state.delay;
        // Against a clock: any change of the state wakes the waiters.
        while !state.is_cancelled {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.waiting -= 1;
        if state.is_cancelled {
            let name = self.inner.name();
            return Err(StoreError::new(operation, name, offset, bytes as u64, Cause::Cancelled));
        }
        Ok(())
    }
}

impl<S: Store> Store for DelayStore<S> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn len(&self) -> Result<u64, StoreError> {
        self.pass(Operation::Len, 0, 0)?;
        self.inner.len()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.pass(Operation::Read, offset, into.len())?;
        self.inner.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.pass(Operation::Write, offset, from.len())?;
        self.inner.write(offset, from)
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.pass(Operation::SetLen, bytes, 0)?;
        self.inner.set_len(bytes)
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.pass(Operation::Sync, 0, 0)?;
        self.inner.sync()
    }
}

/// A store that never answers: reads, writes, `set_len` and syncs wait until it is cancelled, and
/// then fail. It tells its name and length, without which it could not be mapped.
pub struct NeverStore<S>(DelayStore<S>);

impl<S: Store> NeverStore<S> {
    /// Has the name and length of `inner`.
    pub fn new(inner: S) -> NeverStore<S> {
        let store = DelayStore::new(inner);
        for operation in [Operation::Read, Operation::Write, Operation::SetLen, Operation::Sync] {
            store.hold(operation);
        }
        NeverStore(store)
    }

    /// Has all operations that wait or come fail with [`Cause::Cancelled`].
    pub fn cancel(&self) {
        self.0.cancel();
    }

    /// Waits until `count` operations or more wait. False if they did not within `time`.
    #[must_use]
    pub fn wait_for(&self, count: usize, time: Duration) -> bool {
        self.0.wait_for(count, time)
    }
}

impl<S: Store> Store for NeverStore<S> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn len(&self) -> Result<u64, StoreError> {
        self.0.inner.len()
    }

    fn is_read_only(&self) -> bool {
        self.0.is_read_only()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.0.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.0.write(offset, from)
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.0.set_len(bytes)
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.0.sync()
    }
}
