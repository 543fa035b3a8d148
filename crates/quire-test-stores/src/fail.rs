//! A store whose operations fail.

use std::collections::HashMap;
use std::sync::Mutex;

use quire::store::{Cause, Operation, Store, StoreError};
use rustix::io::Errno;

use super::lock;

/// Which operation fails, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    operation: Operation,
    nth: u64,
    errno: Errno,
    is_lasting: bool,
    part_bytes: usize,
}

impl Failure {
    /// The `nth` such operation, counted from 1 when the store was made, fails with `errno`, and
    /// nothing of it is done.
    #[must_use]
    pub fn nth(operation: Operation, nth: u64, errno: Errno) -> Failure {
        Failure { operation, nth, errno, is_lasting: false, part_bytes: 0 }
    }

    /// All that come after it fail as well.
    #[must_use]
    pub fn for_ever(self) -> Failure {
        Failure { is_lasting: true, ..self }
    }

    /// A read or write fails after this many of its bytes were transferred.
    #[must_use]
    pub fn after_bytes(self, part_bytes: usize) -> Failure {
        Failure { part_bytes, ..self }
    }
}

#[derive(Default)]
struct State {
    failures: Vec<Failure>,
    /// How often each operation came so far.
    counts: HashMap<Operation, u64>,
}

/// Fails as planned, and otherwise passes calls to the inner store.
pub struct FailStore<S> {
    inner: S,
    state: Mutex<State>,
}

impl<S: Store> FailStore<S> {
    /// Fails nothing yet.
    pub fn new(inner: S) -> FailStore<S> {
        FailStore { inner, state: Mutex::default() }
    }

    /// Plans a failure.
    pub fn fail(&self, failure: Failure) {
        lock(&self.state).failures.push(failure);
    }

    /// Forgets all planned failures: the device works again.
    pub fn mend(&self) {
        lock(&self.state).failures.clear();
    }

    /// How often such an operation came so far, failures included.
    #[must_use]
    pub fn count(&self, operation: Operation) -> u64 {
        lock(&self.state).counts.get(&operation).copied().unwrap_or_default()
    }

    /// Counts an operation, and returns the failure that is planned for it.
    fn planned(&self, operation: Operation) -> Option<Failure> {
        let mut state = lock(&self.state);
        let count = state.counts.entry(operation).or_default();
        *count += 1;
        let now = *count;
        let hits = |failure: &&Failure| {
            failure.operation == operation
                && (failure.nth == now || failure.is_lasting && failure.nth < now)
        };
        state.failures.iter().find(hits).copied()
    }

    /// Counts an operation that is done whole or not at all.
    fn pass(&self, operation: Operation, offset: u64) -> Result<(), StoreError> {
        match self.planned(operation) {
            Some(failure) => Err(self.error(failure, offset, 0)),
            None => Ok(()),
        }
    }

    fn error(&self, failure: Failure, offset: u64, bytes: usize) -> StoreError {
        let cause = Cause::Os(failure.errno);
        StoreError::new(failure.operation, self.inner.name(), offset, bytes as u64, cause)
    }
}

impl<S: Store> Store for FailStore<S> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn len(&self) -> Result<u64, StoreError> {
        self.pass(Operation::Len, 0)?;
        self.inner.len()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let Some(failure) = self.planned(Operation::Read) else {
            return self.inner.read(offset, into);
        };
        let part = failure.part_bytes.min(into.len());
        if part != 0 {
            self.inner.read(offset, &mut into[..part])?;
        }
        Err(self.error(failure, offset, into.len()))
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        let Some(failure) = self.planned(Operation::Write) else {
            return self.inner.write(offset, from);
        };
        let part = failure.part_bytes.min(from.len());
        if part != 0 {
            self.inner.write(offset, &from[..part])?;
        }
        Err(self.error(failure, offset, from.len()))
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.pass(Operation::SetLen, bytes)?;
        self.inner.set_len(bytes)
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.pass(Operation::Sync, 0)?;
        self.inner.sync()
    }
}
