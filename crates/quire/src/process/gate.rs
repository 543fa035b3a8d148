//! The gate: engine threads pass it before each operation, and a fork closes it.
//!
//! While it is closed and empty no engine thread is in the middle of an operation: no page lock is
//! held but by reads of the swap file, no mutex is held, no move is half done. So a fork copies a
//! consistent state.

#![deny(unsafe_code)]

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys::futex::{self, Reach};
use crate::sys::rank::{self, Rank};

#[derive(Default)]
pub(super) struct Gate {
    closed: AtomicU32,
    /// Counts the threads inside.
    inside: AtomicU32,
}

impl Gate {
    pub fn enter(&self) {
        rank::sleeps_for(Rank::EngineGate);
        loop {
            // SeqCst on both sides (Dekker): either this thread sees the gate closed, or the closing
            // thread sees this one inside.
            self.inside.fetch_add(1, Ordering::SeqCst);
            if self.closed.load(Ordering::SeqCst) == 0 {
                rank::taken(Rank::EngineGate, 1);
                return;
            }
            self.step_out();
            futex::wait(&self.closed, 1, Reach::Process, None);
        }
    }

    pub fn leave(&self) {
        rank::released(Rank::EngineGate, 1);
        self.step_out();
    }

    fn step_out(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) != 0 {
            futex::wake(&self.inside, u32::MAX, Reach::Process);
        }
    }

    /// Closes the gate and waits until no thread is inside.
    pub fn close(&self) {
        rank::sleeps_for(Rank::EngineGate);
        self.closed.store(1, Ordering::SeqCst);
        loop {
            let inside = self.inside.load(Ordering::SeqCst);
            if inside == 0 {
                rank::taken(Rank::EngineGate, 1);
                return;
            }
            futex::wait(&self.inside, inside, Reach::Process, None);
        }
    }

    pub fn open(&self) {
        rank::released(Rank::EngineGate, 1);
        self.closed.store(0, Ordering::SeqCst);
        futex::wake(&self.closed, u32::MAX, Reach::Process);
    }

    /// Opens the gate in a fork's child, where no thread is inside.
    pub fn reset(&self) {
        self.inside.store(0, Ordering::SeqCst);
        self.closed.store(0, Ordering::SeqCst);
    }
}
