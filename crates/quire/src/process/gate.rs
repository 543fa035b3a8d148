//! The gate: engine threads pass it before each operation, and a fork closes it.
//!
//! Closed and empty means that no engine thread is in the middle of anything: no page lock is
//! held but by reads of the swap file, no mutex, no half-made move. What is copied by a fork then
//! is a whole.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys::futex::{self, Reach};
use crate::sys::rank::{self, Rank};

/// Counts who is inside, and can be closed.
pub struct Gate {
    closed: AtomicU32,
    inside: AtomicU32,
}

impl Default for Gate {
    fn default() -> Gate {
        Gate::new()
    }
}

impl Gate {
    /// An open gate.
    #[must_use]
    pub const fn new() -> Gate {
        Gate { closed: AtomicU32::new(0), inside: AtomicU32::new(0) }
    }

    /// Goes in, waiting while the gate is closed.
    pub fn enter(&self) {
        rank::sleeps_for(Rank::EngineGate);
        loop {
            // SeqCst on both sides (Dekker): either we see the gate closed, or the closer sees us
            // inside.
            self.inside.fetch_add(1, Ordering::SeqCst);
            if self.closed.load(Ordering::SeqCst) == 0 {
                rank::taken(Rank::EngineGate, 1);
                return;
            }
            self.go_out();
            futex::wait(&self.closed, 1, Reach::Process, None);
        }
    }

    /// Goes out.
    pub fn leave(&self) {
        rank::released(Rank::EngineGate, 1);
        self.go_out();
    }

    fn go_out(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) != 0 {
            futex::wake(&self.inside, u32::MAX, Reach::Process);
        }
    }

    /// Closes the gate and waits until nobody is inside.
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

    /// Opens it again.
    pub fn open(&self) {
        rank::released(Rank::EngineGate, 1);
        self.closed.store(0, Ordering::SeqCst);
        futex::wake(&self.closed, u32::MAX, Reach::Process);
    }

    /// In a fork's child, where nobody is inside.
    pub fn reset(&self) {
        self.inside.store(0, Ordering::SeqCst);
        self.closed.store(0, Ordering::SeqCst);
    }
}
