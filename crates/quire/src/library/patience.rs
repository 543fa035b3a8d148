//! A store with a deadline: who waits for its answer waits no longer than that.
//!
//! Owns the threads that call such a store, and what it still owes. Leaves to the page cache what an
//! error means: one that came because of the deadline is an error like any other there.
//!
//! A call that may never return cannot be ended, only left. So it is made by a thread of the
//! object's own, on a buffer of that thread's; who asked waits for it, with a deadline, and goes
//! away with [`Cause::Silent`] where it passes. What comes later is *late*, and nothing is lost or
//! invented by it:
//!
//! - The bytes of a late read go to a buffer that nobody looks at. Who still wants the page reads it
//!   again.
//! - The page of a late write is dirty in the cache, and may be written again with newer bytes. The
//!   late ones must not come after those: while a write is overdue, no other one where it writes is
//!   begun; it fails at once. An overdue change of length keeps all writes and other such changes
//!   away. Whether it will be made is open until it has returned: `refresh_len` tells then.
//! - A late sync counts as one that failed. No other is begun before it has returned: the store may
//!   tell the older one an error that is the newer one's. What a late one says is told by the next.
//!
//! # States
//!
//! A call is queued, running, overdue, or done. Two overdue ones, and not one that has returned
//! since, and the store is *silent*: calls fail at once, but for one in a deadline's time that tries,
//! so that one silent store does not keep those busy who serve all objects.
//!
//! At the object's end nobody waits for what is overdue. Its thread, its buffer and the store stay
//! until the store has answered, for ever if it never does.
//!
//! Locks: one mutex, a leaf; not held while the store is called.

use core::time::Duration;
use std::boxed::Box;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::vec::Vec;

use crate::store::{Cause, Operation, Store, StoreError};
use crate::sys::Errno;
use crate::sys::thread::SignalsBlocked;
use crate::units::PAGE_SIZE;

/// Most threads for one store. Where all are left hanging, calls wait in the queue until they are
/// due.
const THREADS_MAX: usize = 8;
/// So many overdue calls, and the store may be silent.
const OVERDUE_MAX: usize = 2;
/// Buffers that are kept for the next call.
const SPARE_MAX: usize = 4;

/// What a store is asked.
#[derive(Clone, Copy)]
struct Call {
    operation: Operation,
    offset: u64,
    bytes: u64,
}

impl Call {
    fn overlaps(self, other: Call) -> bool {
        self.offset < other.offset + other.bytes && other.offset < self.offset + self.bytes
    }

    /// Whether this one, overdue, keeps `later` from being begun.
    fn keeps_away(self, later: Call) -> bool {
        match (self.operation, later.operation) {
            (Operation::Write, Operation::Write | Operation::Read) => self.overlaps(later),
            (Operation::Write, Operation::SetLen)
            | (Operation::SetLen, Operation::SetLen | Operation::Write)
            | (Operation::Sync, Operation::Sync) => true,
            _ => false,
        }
    }

    /// Asks the store; a length is the answer's number.
    fn make(self, store: &dyn Store, buffer: &mut [u8]) -> Result<u64, StoreError> {
        match self.operation {
            Operation::Read => store.read(self.offset, buffer).map(|()| 0),
            Operation::Write => store.write(self.offset, buffer).map(|()| 0),
            Operation::SetLen => store.set_len(self.offset).map(|()| 0),
            Operation::Sync => store.sync().map(|()| 0),
            _ => store.len(),
        }
    }
}

/// Bytes on their way, at a page's boundary: direct I/O wants that.
#[derive(Default)]
struct Buffer {
    room: Vec<u8>,
    len: usize,
}

impl Buffer {
    fn resize(&mut self, len: usize) {
        self.len = len;
        // What is there from before is overwritten, or not looked at.
        if len > 0 && self.room.len() < len + PAGE_SIZE {
            self.room.resize(len + PAGE_SIZE, 0);
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        let start = self.room.as_ptr().align_offset(PAGE_SIZE).min(self.room.len());
        &mut self.room[start..start + self.len]
    }
}

enum Phase {
    Queued(Buffer),
    Running,
    Overdue,
    Done(Buffer, Result<u64, StoreError>),
}

struct Job {
    number: u64,
    call: Call,
    phase: Phase,
}

#[derive(Default)]
struct State {
    jobs: Vec<Job>,
    next: u64,
    threads: usize,
    /// Threads that wait for a job.
    idle: usize,
    /// Since when the store has been silent, or was tried last.
    silent_since: Option<Instant>,
    /// What an overdue sync said.
    late_sync: Option<StoreError>,
    spare: Vec<Buffer>,
    is_closing: bool,
}

impl State {
    fn count(&self, is: impl Fn(&Phase) -> bool) -> usize {
        self.jobs.iter().filter(|job| is(&job.phase)).count()
    }

    fn overdue(&self) -> usize {
        self.count(|phase| matches!(phase, Phase::Overdue))
    }

    fn queued(&self) -> usize {
        self.count(|phase| matches!(phase, Phase::Queued(_)))
    }

    fn place(&self, number: u64) -> Option<usize> {
        self.jobs.iter().position(|job| job.number == number)
    }

    fn keep(&mut self, buffer: Buffer) {
        if self.spare.len() < SPARE_MAX && buffer.len > 0 {
            self.spare.push(buffer);
        }
    }
}

struct Shared {
    store: Box<dyn Store>,
    state: Mutex<State>,
    /// There is a job, or an end.
    work: Condvar,
    /// A job is done, or a thread has left.
    ended: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A store, and how long one waits for it.
pub(super) struct Patient {
    shared: Arc<Shared>,
    deadline: Duration,
}

impl Patient {
    pub fn new(store: Box<dyn Store>, deadline: Duration) -> Patient {
        let state = Mutex::new(State::default());
        let shared = Shared { store, state, work: Condvar::new(), ended: Condvar::new() };
        Patient { shared: Arc::new(shared), deadline }
    }

    pub const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Reads, for one who waits since `since`.
    pub fn read(&self, offset: u64, into: &mut [u8], since: Instant) -> Result<(), StoreError> {
        let call = Call { operation: Operation::Read, offset, bytes: into.len() as u64 };
        let (mut buffer, _) = self.ask(call, since, |buffer| buffer.resize(into.len()))?;
        into.copy_from_slice(buffer.bytes());
        self.shared.lock().keep(buffer);
        Ok(())
    }

    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        let call = Call { operation: Operation::Write, offset, bytes: from.len() as u64 };
        let (buffer, _) = self.ask(call, Instant::now(), |buffer| {
            buffer.resize(from.len());
            buffer.bytes().copy_from_slice(from);
        })?;
        self.shared.lock().keep(buffer);
        Ok(())
    }

    /// Asks what needs no bytes.
    pub fn ask_plain(&self, operation: Operation, offset: u64) -> Result<u64, StoreError> {
        let call = Call { operation, offset, bytes: 0 };
        self.ask(call, Instant::now(), |_| {}).map(|(_, number)| number)
    }

    /// Has the store called, and waits for its answer until the deadline.
    fn ask(
        &self,
        call: Call,
        since: Instant,
        fill: impl FnOnce(&mut Buffer),
    ) -> Result<(Buffer, u64), StoreError> {
        let due = since + self.deadline;
        let mut state = self.shared.lock();
        if Instant::now() >= due || !self.may_begin(&mut state, call) {
            return Err(self.silent(call));
        }
        if call.operation == Operation::Sync
            && let Some(error) = state.late_sync.take()
        {
            return Err(error);
        }
        let mut buffer = state.spare.pop().unwrap_or_default();
        buffer.resize(0);
        fill(&mut buffer);
        let number = state.next;
        state.next += 1;
        state.jobs.push(Job { number, call, phase: Phase::Queued(buffer) });
        self.call_a_thread(&mut state, call)?;
        loop {
            let at = state.place(number).expect("a job is there until its asker takes it");
            if let Phase::Done(..) = state.jobs[at].phase
                && let Phase::Done(buffer, result) = state.jobs.swap_remove(at).phase
            {
                return result.map(|length| (buffer, length));
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                match state.jobs[at].phase {
                    // It will never be.
                    Phase::Queued(_) => drop(state.jobs.swap_remove(at)),
                    _ => state.jobs[at].phase = Phase::Overdue,
                }
                if state.overdue() >= OVERDUE_MAX {
                    state.silent_since = Some(Instant::now());
                }
                return Err(self.silent(call));
            }
            let waited = self.shared.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether a call may be begun beside what the store still owes.
    fn may_begin(&self, state: &mut State, call: Call) -> bool {
        let is_overdue = |job: &&Job| matches!(job.phase, Phase::Overdue);
        if state.jobs.iter().filter(is_overdue).any(|job| job.call.keeps_away(call)) {
            return false;
        }
        let Some(since) = state.silent_since else { return true };
        if since.elapsed() < self.deadline {
            return false;
        }
        // This one tries.
        state.silent_since = Some(Instant::now());
        true
    }

    /// Sees to it that a thread takes the job that was just queued, now or when one is free.
    fn call_a_thread(&self, state: &mut State, call: Call) -> Result<(), StoreError> {
        if state.queued() > state.idle && state.threads < THREADS_MAX {
            // Inherited: no handler of the program runs on these threads.
            let _signals = SignalsBlocked::of_others();
            let shared = Arc::clone(&self.shared);
            let builder = std::thread::Builder::new().name("quire-store-io".into());
            match builder.spawn(move || serve(&shared)) {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads > 0 => {}
                Err(error) => {
                    state.jobs.pop();
                    let errno = Errno::from_raw_os_error(error.raw_os_error().unwrap_or(0));
                    return Err(self.error(call, Cause::Os(errno)));
                }
            }
        }
        self.shared.work.notify_one();
        Ok(())
    }

    fn silent(&self, call: Call) -> StoreError {
        self.error(call, Cause::Silent { after: self.deadline })
    }

    fn error(&self, call: Call, cause: Cause) -> StoreError {
        let Call { operation, offset, bytes } = call;
        StoreError::new(operation, self.shared.store.name(), offset, bytes, cause)
    }
}

impl Drop for Patient {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_closing = true;
        self.shared.work.notify_all();
        // The others have the store as their own, and end with it. These leave at once.
        while state.threads > state.overdue() {
            state = self.shared.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A thread's life: makes calls until the object ends.
fn serve(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        let queued = state.jobs.iter_mut().find(|job| matches!(job.phase, Phase::Queued(_)));
        let Some(job) = queued else {
            if state.is_closing {
                state.threads -= 1;
                shared.ended.notify_all();
                return;
            }
            state.idle += 1;
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            continue;
        };
        let (number, call) = (job.number, job.call);
        let phase = core::mem::replace(&mut job.phase, Phase::Running);
        let Phase::Queued(mut buffer) = phase else { unreachable!("it was looked at") };
        drop(state);
        let result = call.make(&*shared.store, buffer.bytes());
        state = shared.lock();
        state.silent_since = None;
        let at = state.place(number).expect("a job is there until it is done");
        if matches!(state.jobs[at].phase, Phase::Running) {
            state.jobs[at].phase = Phase::Done(buffer, result);
        } else {
            state.jobs.swap_remove(at);
            state.keep(buffer);
            if call.operation == Operation::Sync {
                state.late_sync = result.err();
            }
        }
        shared.ended.notify_all();
    }
}
