//! A store with a deadline: its caller waits no longer than that for an answer.
//!
//! Owns the threads that call the inner store, and what that store still owes.
//!
//! A call that may never return cannot be ended, only left. So a thread of the wrapper makes it, on
//! a buffer of its own; the caller waits for the answer until the deadline and then leaves, with
//! [`Cause::Silent`]. A call that was left is *late*, and nothing is lost or invented by it:
//!
//! - The bytes of a late read go to a buffer that nobody looks at. For one more deadline other reads
//!   of the same bytes fail at once: many who wait for them wait for one read.
//! - The bytes of a late write may be written again, newer ones. The late ones must not come after
//!   those: until it has returned, every other write or read there fails at once. A late change of
//!   length keeps all writes and other such changes away. Whether it is made is open until it has
//!   returned: [`Store::len`] tells then.
//! - A late sync counts as one that failed, and keeps other syncs away: the store may tell the older
//!   one an error that is the newer one's. The next sync tells the error of a late one.
//!
//! Where several calls are late, and none has returned since, the store is *silent*: calls fail at
//! once, but for one in a deadline's time that tries.
//!
//! When the wrapper goes it waits for nothing. A late call keeps its thread, its buffer and the inner
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
/// So many late calls, and the store is silent.
const LATE_FEW: usize = 2;
/// So many late calls, and none is begun: each has a thread, which may never end.
const LATE_MAX: usize = 8;

/// What a store is asked.
#[derive(Clone, Copy)]
struct Call {
    operation: Operation,
    /// Of a change of length, the new one.
    offset: u64,
    bytes: usize,
}

impl Call {
    fn overlaps(self, other: Call) -> bool {
        self.offset < other.offset + other.bytes as u64
            && other.offset < self.offset + self.bytes as u64
    }

    /// Asks the store; a length is the answer's number.
    fn make(self, store: &dyn Store, bytes: &mut [u8]) -> Result<u64, StoreError> {
        let ask = || match self.operation {
            Operation::Read => store.read(self.offset, bytes).map(|()| 0),
            Operation::Write => store.write(self.offset, bytes).map(|()| 0),
            Operation::SetLen => store.set_len(self.offset).map(|()| 0),
            Operation::Sync => store.sync().map(|()| 0),
            _ => store.len(),
        };
        // A store that panics has returned: what waits for that must not wait for ever.
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
    call: Call,
    since: Instant,
}

impl Late {
    /// Whether `later` must not be begun, or need not.
    fn keeps_away(&self, later: Call, deadline: Duration) -> bool {
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
    /// Since when the store has been silent, or was tried last.
    silent_since: Option<Instant>,
    /// What a late sync said.
    late_sync: Option<StoreError>,
}

/// Bytes on their way, at a page's boundary, as direct I/O wants them.
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

struct Job {
    store: Arc<dyn Store>,
    call: Call,
    buffer: Buffer,
}

type Answer = (Buffer, Result<u64, StoreError>);

/// A thread that makes calls, one at a time. It ends once nobody has this.
struct Helper {
    thread: ThreadId,
    jobs: Sender<Job>,
    answers: Receiver<Answer>,
    buffer: Buffer,
}

/// A store that is waited for no longer than a deadline.
///
/// Its calls return [`Cause::Silent`] where the inner store has not answered by then; errors of the
/// inner store come through as they are. [`Builder::store_deadline`] puts it around the store of
/// every object. The inner store's name, whether it can be written, and its best read are asked
/// directly.
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

    /// Asks what needs no bytes.
    fn ask(&self, operation: Operation, offset: u64) -> Result<u64, StoreError> {
        self.call(Call { operation, offset, bytes: 0 }, &[], &mut [])
    }

    /// Has a helper make a call, with the bytes of `from`, and waits for its answer.
    fn call(&self, call: Call, from: &[u8], into: &mut [u8]) -> Result<u64, StoreError> {
        self.may_begin(call)?;
        let helper = lock(&self.idle).pop();
        let mut helper = helper.map_or_else(|| self.start_helper(call), Ok)?;
        let mut buffer = core::mem::take(&mut helper.buffer);
        buffer.bytes(from.len()).copy_from_slice(from);
        let job = Job { store: Arc::clone(&self.store), call, buffer };
        helper.jobs.send(job).expect("a helper is there as long as it is held");
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

    /// Whether a call may be begun beside what the store owes, as an error.
    fn may_begin(&self, call: Call) -> Result<(), StoreError> {
        let mut owed = lock(&self.owed);
        let is_kept_away = owed.late.len() >= LATE_MAX
            || owed.late.iter().any(|late| late.keeps_away(call, self.deadline))
            || owed.silent_since.is_some_and(|since| since.elapsed() < self.deadline);
        if is_kept_away {
            return Err(self.silent(call));
        }
        // Where it is silent, this call tries.
        owed.silent_since = owed.silent_since.map(|_| Instant::now());
        match owed.late_sync.take_if(|_| call.operation == Operation::Sync) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// The deadline has come: the call is late, unless its answer has come just now.
    fn leave(&self, call: Call, helper: &Helper) -> Option<Answer> {
        // The helper answers, or finds its call among the late ones, under this lock.
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

    fn start_helper(&self, call: Call) -> Result<Helper, StoreError> {
        let ((jobs, their_jobs), (their_answers, answers)) = (channel(), channel());
        let owed = Arc::clone(&self.owed);
        let builder = thread::Builder::new().name("quire-store-io".into());
        let started = start(builder, move || serve(&their_jobs, &their_answers, &owed));
        let handle = started.map_err(|errno| call.error(&*self.store, Cause::Os(errno)))?;
        let thread = handle.thread().id();
        Ok(Helper { thread, jobs, answers, buffer: Buffer::default() })
    }

    fn silent(&self, call: Call) -> StoreError {
        call.error(&*self.store, Cause::Silent { after: self.deadline })
    }
}

/// A helper's life: makes calls until its wrapper, or a caller that has left, lets go of it.
fn serve(jobs: &Receiver<Job>, answers: &Sender<Answer>, owed: &Mutex<Owed>) {
    let me = thread::current().id();
    for Job { store, call, mut buffer } in jobs {
        let result = call.make(&*store, buffer.bytes(call.bytes));
        // First: once nothing is late the store goes with the wrapper.
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
        self.ask(Operation::Len, 0)
    }

    fn is_read_only(&self) -> bool {
        self.store.is_read_only()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let call = Call { operation: Operation::Read, offset, bytes: into.len() };
        self.call(call, &[], into).map(drop)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        let call = Call { operation: Operation::Write, offset, bytes: from.len() };
        self.call(call, from, &mut []).map(drop)
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.ask(Operation::SetLen, bytes).map(drop)
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.ask(Operation::Sync, 0).map(drop)
    }

    fn best_read_bytes(&self) -> usize {
        self.store.best_read_bytes()
    }
}
