//! A thread like the engine's own, which counts.

use std::sync::atomic::{AtomicU64, Ordering};

use quire::control::{Event, FaultKind, Member};
use quire::sys::clock::Moment;
use quire::sys::thread::{self, Files, SignalsBlocked, ThreadMemory};

/// A thread, and what it does.
pub struct Raw {
    member: *const Member,
    pub times: u64,
    /// Nanoseconds that it took; what is waited for.
    took_ns: AtomicU64,
}

/// Uses nothing of libc's, as it must not: no thread-local, no allocation.
extern "C" fn count_and_end(raw: usize) -> ! {
    // SAFETY: `run` waits for it.
    let raw = unsafe { &*(raw as *const Raw) };
    // SAFETY: control pages of tests are never unmapped.
    let member = unsafe { &*raw.member };
    let start = Moment::now();
    for _ in 0..raw.times {
        member.count(Event::Pswpin, 1);
    }
    member.count_fault_time(FaultKind::Limbo, 1500);
    // Release pairs with the acquire in `join`. No 0: that is "not yet".
    raw.took_ns.store(start.elapsed_ns() | 1, Ordering::Release);
    thread::exit_thread()
}

impl Raw {
    pub fn new(member: &Member, times: u64) -> Raw {
        Raw { member, times, took_ns: AtomicU64::new(0) }
    }

    pub fn start(&self, number: usize) {
        let place = ThreadMemory::new(number).unwrap();
        let _signals = SignalsBlocked::new();
        let argument = std::ptr::from_ref(self) as usize;
        // SAFETY: the place is new and never unmapped, and `join` keeps `self`.
        unsafe { place.spawn(Files::Shared, count_and_end, argument) }.unwrap();
    }

    pub fn join(&self) -> u64 {
        loop {
            match self.took_ns.load(Ordering::Acquire) {
                0 => std::thread::sleep(std::time::Duration::from_millis(1)),
                ns => return ns,
            }
        }
    }
}
