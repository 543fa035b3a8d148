//! Waiting awake: a thread that keeps its CPU while its read is under way.
//!
//! A CPU that has nothing to do halts, and to wake it costs a good part of what a fast disk's read takes,
//! most of all in a virtual machine. So a thread looks for its completion instead, and yields between
//! two looks. Where another thread took the CPU, or the disk is slow, that was in vain: it sleeps
//! as before, and does so for the next reads too, for twice as many each time, and for half as many after
//! a wait that paid. So it hardly tries where most of its waits are in vain.

use crate::sys::clock::Moment;
use rustix::thread::sched_yield;

/// What is waited for awake at most: a few reads of a fast disk.
const SPIN_NS: u64 = 200_000;
/// A yield that takes longer gave the CPU to another thread.
const YIELD_NS: u64 = 20_000;
/// Reads that are slept for between two waits, at most.
const SLEEPS_MAX: u32 = 1024;

/// Whether waiting awake has paid of late.
#[derive(Default)]
pub(super) struct Spin {
    /// Reads that are slept for between two waits, and how many of them are left.
    sleeps: u32,
    left: u32,
}

impl Spin {
    /// Whether the next read is to be waited for awake.
    pub fn is_due(&mut self) -> bool {
        let left = self.left.checked_sub(1);
        self.left = left.unwrap_or(0);
        left.is_none()
    }

    /// Whether waits awake pay just now.
    pub fn pays(&self) -> bool {
        self.left == 0
    }

    /// Lets other threads run between two looks, of which the first was at `since`; `false`: to go on is in vain.
    pub fn goes_on(&mut self, since: Moment) -> bool {
        let before = Moment::now();
        sched_yield();
        self.judge(before.elapsed_ns(), since.elapsed_ns())
    }

    fn judge(&mut self, yield_ns: u64, spin_ns: u64) -> bool {
        let goes_on = yield_ns < YIELD_NS && spin_ns < SPIN_NS;
        if !goes_on {
            self.sleeps = (self.sleeps * 2).clamp(1, SLEEPS_MAX);
            self.left = self.sleeps;
        }
        goes_on
    }

    /// What was waited for came.
    pub fn has_paid(&mut self) {
        self.sleeps /= 2;
        self.left = self.sleeps;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeps(spin: &mut Spin) -> u32 {
        let mut sleeps = 0;
        while !spin.is_due() {
            sleeps += 1;
        }
        sleeps
    }

    #[test]
    fn it_sleeps_more_often_after_each_wait_in_vain_and_less_after_each_that_paid() {
        let mut spin = Spin::default();
        assert_eq!(sleeps(&mut spin), 0);
        assert!(spin.judge(YIELD_NS / 2, SPIN_NS / 2));
        assert_eq!(sleeps(&mut spin), 0);
        for expected in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
            assert!(!spin.judge(YIELD_NS, SPIN_NS / 2), "another thread ran");
            assert_eq!(sleeps(&mut spin), expected);
        }
        for expected in [512, SLEEPS_MAX, SLEEPS_MAX] {
            assert!(!spin.judge(0, SPIN_NS), "the disk is slow");
            assert_eq!(sleeps(&mut spin), expected);
        }
        for expected in [512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 0, 0] {
            spin.has_paid();
            assert_eq!(sleeps(&mut spin), expected);
        }
        assert!(!spin.judge(YIELD_NS, 0));
        assert_eq!(sleeps(&mut spin), 1);
    }
}
