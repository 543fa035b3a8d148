//! A running mean of what something costs, for choices that follow measurements.

#![deny(unsafe_code)]

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// In cycles; 0 until something was measured. Two threads that record at once may lose one of
/// their measurements, and nothing else.
#[derive(Default)]
pub(crate) struct Mean(AtomicU32);

impl Mean {
    pub const fn new() -> Mean {
        Mean(AtomicU32::new(0))
    }

    pub fn get(&self) -> u32 {
        self.0.load(Relaxed)
    }

    pub fn record(&self, cycles: u64) {
        self.record_as(1, cycles);
    }

    /// Notes a measurement that counts for `eighths` of the mean, and at most for twice what is known: of a
    /// pause meanwhile it says nothing.
    pub fn record_usual(&self, eighths: u32, cycles: u64) {
        let known = u64::from(self.get());
        self.record_as(eighths, if known == 0 { cycles } else { cycles.min(2 * known) });
    }

    /// Notes a measurement that counts for `eighths` of the mean.
    pub fn record_as(&self, eighths: u32, cycles: u64) {
        let old = self.get();
        // A measurement during which the thread was preempted says nothing: it is cut.
        let most = (u64::from(old.max(1 << 16)) * 8).min(u64::from(u32::MAX));
        let cycles = cycles.min(most) as u32;
        let new = if old == 0 { cycles } else { old - old / 8 * eighths + cycles / 8 * eighths };
        self.0.store(new.max(1), Relaxed);
    }
}
