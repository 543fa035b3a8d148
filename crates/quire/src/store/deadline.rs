//! A store with a deadline: its callers wait no longer than that for an answer.
//!
//! A call into the inner store that may never return cannot be ended, only left. So a *helper*, a
//! thread of the wrapper, makes the call, on a buffer of its own. The caller waits until the deadline
//! and then leaves, with [`Cause::Silent`]. A call that was left is *late*, and loses or invents no
//! byte:
//!
//! - The bytes of a late read go to a buffer that is not read. For one more deadline, other reads of
//!   the same bytes fail at once: many callers that want them wait for one read.
//! - The range of a late write may be written again, with newer bytes, which the late ones must not
//!   overwrite: until the late write has returned, every other write or read there fails at once. A
//!   late change of length keeps all writes and other changes of length away. Whether it was made is
//!   open until it has returned; [`Store::len`] tells then.
//! - A late sync counts as one that failed, and keeps other syncs away: the store may give the older
//!   one an error that belongs to the newer one. The next sync returns the error of a late one.
//!
//! Where several calls are late, and none has returned since, the store is *silent*: calls fail at
//! once, but for one attempt per deadline.
//!
//! When the wrapper goes it waits for nothing. A late call keeps its helper, its buffer and the inner
//! store until it has returned, for ever if it never does.
//!
//! Locks: two mutexes, leaves; none is held while the inner store is called.

use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Instant;
use std::vec::Vec;

use super::workers::{lock, start};
use super::{Cause, Operation, Store, StoreError};
use crate::units::PAGE_SIZE;

/// Helpers that are kept for the next call.
const IDLE_MAX: usize = 8;
/// With so many late calls the store is silent.
const LATE_FEW: usize = 2;
/// With so many late calls none is begun: each has a thread, which may never end.
const LATE_MAX: usize = 8;

/// A call of the inner store.
#[derive(Clone, Copy)]
struct StoreCall {
    operation: Operation,
    /// For a change of length, the new length.
    offset: u64,
    bytes: usize,
}

impl StoreCall {
    fn overlaps(self, other: StoreCall) -> bool {
        let end = |call: StoreCall| call.offset.saturating_add(call.bytes as u64);
        self.offset < end(other) && other.offset < end(self)
    }

    /// Makes the call; the number in the answer is a length.
    fn make(self, store: &dyn Store, bytes: &mut [u8]) -> Result<u64, StoreError> {
        let ask = || match self.operation {
            Operation::Read => store.read(self.offset, bytes).map(|()| 0),
            Operation::Write => store.write(self.offset, bytes).map(|()| 0),
            Operation::SetLen => store.set_len(self.offset).map(|()| 0),
            Operation::Sync => store.sync().map(|()| 0),
            _ => store.len(),
        };
        // A store that panics has returned: callers that wait for the return must not do so for ever.
        catch_unwind(AssertUnwindSafe(ask))
            .unwrap_or_else(|_| Err(self.error(store, Cause::Unanswered)))
    }

    fn error(self, store: &dyn Store, cause: Cause) -> StoreError {
        StoreError::new(self.operation, store.name(), self.offset, self.bytes as u64, cause)
    }
}

/// A call whose caller has left.
struct Late {
    thread: ThreadId,
    call: StoreCall,
    since: Instant,
}

impl Late {
    /// Whether `later` must not be begun, or need not.
    fn keeps_away(&self, later: StoreCall, deadline: Duration) -> bool {
        match (self.call.operation, later.operation) {
            (Operation::Read, Operation::Read) => {
                self.call.overlaps(later) && self.since.elapsed() < deadline
            }
            (Operation::Write, Operation::Write | Operation::Read) => self.call.overlaps(later),
            (Operation::Write, Operation::SetLen)
            | (Operation::SetLen, Operation::SetLen | Operation::Write)
            | (Operation::Sync, Operation::Sync) => true,
            _ => false,
        }
    }
}

/// What the inner store owes.
#[derive(Default)]
struct Owed {
    late: Vec<Late>,
    /// When a silent store fell silent, or was last tried.
    silent_since: Option<Instant>,
    late_sync: Option<StoreError>,
}

/// The bytes of a call, at a page's boundary, as direct I/O demands.
#[derive(Default)]
struct Buffer(Vec<u8>);

impl Buffer {
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        if len > 0 && self.0.len() < len + PAGE_SIZE {
            self.0.resize(len + PAGE_SIZE, 0);
        }
        let start = self.0.as_ptr().align_offset(PAGE_SIZE).min(self.0.len());
        &mut self.0[start..start + len]
    }
}

/// What a helper is sent: a call, and the buffer for it.
type CallJob = (Arc<dyn Store>, StoreCall, Buffer);
/// What it answers: the buffer, and the call's result.
type CallAnswer = (Buffer, Result<u64, StoreError>);

/// A thread that makes calls, one at a time. It ends once this is dropped.
struct Helper {
    thread: ThreadId,
    jobs: Sender<CallJob>,
    answers: Receiver<CallAnswer>,
    buffer: Buffer,
}

/// A store whose callers wait no longer than a deadline.
///
/// Its calls return [`Cause::Silent`] where the inner store has not answered by then; errors of the
/// inner store pass unchanged. [`Builder::store_deadline`] puts it around the store of every object.
/// Name and read-only state are asked of the inner store directly, without a deadline.
///
/// [`Builder::store_deadline`]: crate::library::Builder::store_deadline
pub struct DeadlineStore {
    store: Arc<dyn Store>,
    deadline: Duration,
    owed: Arc<Mutex<Owed>>,
    idle: Mutex<Vec<Helper>>,
}

impl DeadlineStore {
    /// Gives a store a deadline.
    pub fn new(store: impl Store + 'static, deadline: Duration) -> DeadlineStore {
        let (owed, idle) = (Arc::default(), Mutex::default());
        DeadlineStore { store: Arc::new(store), deadline, owed, idle }
    }

    /// Has a helper make a call, with the bytes of `from` or `into`, and waits for its answer.
    fn call(
        &self,
        operation: Operation,
        offset: u64,
        from: &[u8],
        into: &mut [u8],
    ) -> Result<u64, StoreError> {
        let call = StoreCall { operation, offset, bytes: from.len().max(into.len()) };
        self.may_begin(call)?;
        let helper = lock(&self.idle).pop();
        let mut helper = helper.map_or_else(|| self.start_helper(call), Ok)?;
        let mut buffer = core::mem::take(&mut helper.buffer);
        buffer.bytes(from.len()).copy_from_slice(from);
        let job = (Arc::clone(&self.store), call, buffer);
        helper.jobs.send(job).expect("a helper runs until it is dropped");
        let answer = helper.answers.recv_timeout(self.deadline).ok();
        let answer = answer.or_else(|| self.leave(call, &helper));
        let (mut buffer, result) = answer.ok_or_else(|| self.silent(call))?;
        into.copy_from_slice(buffer.bytes(into.len()));
        helper.buffer = buffer;
        let mut idle = lock(&self.idle);
        if idle.len() < IDLE_MAX {
            idle.push(helper);
        }
        result
    }

    /// Refuses a call that must not be begun beside what the store owes.
    fn may_begin(&self, call: StoreCall) -> Result<(), StoreError> {
        let mut owed = lock(&self.owed);
        let is_kept_away = owed.late.len() >= LATE_MAX
            || owed.late.iter().any(|late| late.keeps_away(call, self.deadline))
            || owed.silent_since.is_some_and(|since| since.elapsed() < self.deadline);
        if is_kept_away {
            return Err(self.silent(call));
        }
        // Where the store is silent, this call is the attempt.
        owed.silent_since = owed.silent_since.map(|_| Instant::now());
        match owed.late_sync.take_if(|_| call.operation == Operation::Sync) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// The deadline has come: the call is late, unless its answer has come just now.
    fn leave(&self, call: StoreCall, helper: &Helper) -> Option<CallAnswer> {
        // Under this lock the helper answers, or finds its call among the late ones.
        let mut owed = lock(&self.owed);
        let answer = helper.answers.try_recv().ok();
        if answer.is_none() {
            let now = Instant::now();
            owed.late.push(Late { thread: helper.thread, call, since: now });
            if owed.late.len() >= LATE_FEW {
                owed.silent_since = Some(now);
            }
        }
        answer
    }

    fn start_helper(&self, call: StoreCall) -> Result<Helper, StoreError> {
        let ((jobs, their_jobs), (their_answers, answers)) = (channel(), channel());
        let owed = Arc::clone(&self.owed);
        let builder = thread::Builder::new().name("quire-store-io".into());
        let started = start(builder, move || serve(&their_jobs, &their_answers, &owed));
        let handle = started.map_err(|errno| call.error(&*self.store, Cause::Os(errno)))?;
        let thread = handle.thread().id();
        Ok(Helper { thread, jobs, answers, buffer: Buffer::default() })
    }

    fn silent(&self, call: StoreCall) -> StoreError {
        call.error(&*self.store, Cause::Silent { after: self.deadline })
    }
}

/// A helper's life: it makes calls until its wrapper, or a caller that leaves, drops its [`Helper`].
fn serve(jobs: &Receiver<CallJob>, answers: &Sender<CallAnswer>, owed: &Mutex<Owed>) {
    let me = thread::current().id();
    for (store, call, mut buffer) in jobs {
        let result = call.make(&*store, buffer.bytes(call.bytes));
        // Before the answer: once nothing is late the store is dropped with the wrapper.
        drop(store);
        let mut owed = lock(owed);
        owed.silent_since = None;
        match owed.late.iter().position(|late| late.thread == me) {
            None => drop(answers.send((buffer, result))),
            Some(at) => {
                owed.late.swap_remove(at);
                if call.operation == Operation::Sync {
                    owed.late_sync = result.err();
                }
            }
        }
    }
}

impl Store for DeadlineStore {
    fn name(&self) -> &str {
        self.store.name()
    }

    fn len(&self) -> Result<u64, StoreError> {
        self.call(Operation::Len, 0, &[], &mut [])
    }

    fn is_read_only(&self) -> bool {
        self.store.is_read_only()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.call(Operation::Read, offset, &[], into).map(drop)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.call(Operation::Write, offset, from, &mut []).map(drop)
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.call(Operation::SetLen, bytes, &[], &mut []).map(drop)
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.call(Operation::Sync, 0, &[], &mut []).map(drop)
    }
}
