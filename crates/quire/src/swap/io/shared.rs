//! Rings for threads that are not ours: any thread, any file, one batch at a time.
//!
//! Owns the idle rings of the process. A ring is bound to no file, so a few serve all of them. A
//! fork's child finds the rings of its parent, whose memory both processes would write. Each ring
//! names the process that made it, and another process gives it up. The list's mutex is a leaf, held
//! for no call.

#![deny(unsafe_code)]

use std::sync::{Mutex, PoisonError};
use std::vec::Vec;

use rustix::fd::BorrowedFd;
use rustix::process::{Pid, getpid};

use super::uring::{Submitter, Uring};
use super::{BATCH_MAX, Job, run_batch};

/// Rings kept for the next batch: as many as may be busy at once and still pay for themselves.
const IDLE_MAX: usize = 8;

static IDLE: Mutex<Vec<SharedRing>> = Mutex::new(Vec::new());

/// A ring that belongs to one holder at a time.
pub(crate) struct SharedRing {
    uring: Uring,
    maker: Pid,
}

impl SharedRing {
    /// An idle ring, or a new one. None where io_uring is forbidden.
    pub fn take() -> Option<SharedRing> {
        let maker = getpid();
        loop {
            let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some(ring) if ring.maker == maker => return Some(ring),
                // The parent's: closing our copy of its descriptor leaves its ring alone.
                Some(inherited) => drop(inherited),
                None => {
                    let uring = Uring::new(BATCH_MAX as u32, Submitter::AnyThread).ok()?;
                    return Some(SharedRing { uring, maker });
                }
            }
        }
    }

    /// Does all jobs on `file`, as [`Ring::run`](super::Ring::run) does.
    pub fn run(&mut self, file: BorrowedFd<'_>, jobs: &mut [Job<'_>]) {
        for batch in jobs.chunks_mut(BATCH_MAX) {
            run_batch(Some(&mut self.uring), file, batch);
        }
    }

    /// Leaves the ring to the next batch.
    pub fn put_back(self) {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(self);
        }
    }
}

/// Does a job without a ring.
pub(crate) fn run_alone(file: BorrowedFd<'_>, job: &mut Job<'_>) {
    run_batch(None, file, core::slice::from_mut(job));
}
