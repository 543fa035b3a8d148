//! A clock for what takes microseconds: the processor's time-stamp counter, or the kernel's clock.
//!
//! To read the counter costs half of what the kernel's clock does. It is used where its rate is always
//! the same and it never stands still. Its rate is measured against the kernel's clock, beginning with
//! the first moment that is asked for, and settled when enough time has passed.
//!
//! Among the actors of a simulation it is their own time, as with `monotonic_ns`.
//!
//! No locks: each of the words below is right by itself.

use core::arch::x86_64::_rdtsc;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Time after which the rate is settled: it is off by less than a thousandth then.
const SETTLED_NS: u64 = 1_000_000;
/// Fraction bits of the rate.
const RATE_BITS: u32 = 32;

const UNKNOWN: u32 = 0;
const TSC: u32 = 1;
const KERNEL: u32 = 2;

/// Which clock it is. Relaxed everywhere: every thread that finds it unknown finds out the same.
static SOURCE: AtomicU32 = AtomicU32::new(UNKNOWN);
/// Nanoseconds a cycle, times 2^32; 0 until it is settled. Relaxed everywhere: every value is right.
static RATE: AtomicU64 = AtomicU64::new(0);
/// The moment from which the rate is measured: in cycles, and in nanoseconds of the kernel's clock,
/// which is stored last and is 0 until then.
static BASE_CYCLES: AtomicU64 = AtomicU64::new(0);
static BASE_NS: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy, Debug)]
pub struct Moment(u64);

impl Moment {
    #[inline]
    #[must_use]
    pub fn now() -> Moment {
        #[cfg(feature = "simulated")]
        if let Some(now_ns) = super::turns::now_ns() {
            return Moment(now_ns);
        }
        match SOURCE.load(Ordering::Relaxed) {
            // SAFETY: every x86-64 has the instruction, and `find_source` says that it is a clock.
            TSC => Moment(unsafe { _rdtsc() }),
            KERNEL => Moment(super::monotonic_ns()),
            _ => {
                find_source();
                Moment::now()
            }
        }
    }

    /// Nanoseconds from this moment to now.
    #[inline]
    #[must_use]
    pub fn elapsed_ns(self) -> u64 {
        // Threads may see clocks of two processors that differ a little: no time is negative.
        let passed = Moment::now().0.saturating_sub(self.0);
        if Self::is_ns() {
            return passed;
        }
        let rate = match RATE.load(Ordering::Relaxed) {
            0 => measure_rate(),
            rate => rate,
        };
        ((u128::from(passed) * u128::from(rate)) >> RATE_BITS) as u64
    }

    /// Whether the clock of this thread counts nanoseconds.
    fn is_ns() -> bool {
        #[cfg(feature = "simulated")]
        if super::turns::now_ns().is_some() {
            return true;
        }
        SOURCE.load(Ordering::Relaxed) == KERNEL
    }
}

#[cold]
fn find_source() {
    let is_clock = super::cpu::has_invariant_tsc();
    if is_clock {
        let (cycles, ns) = both();
        // The first thread stores both, which are of one moment.
        if BASE_CYCLES.compare_exchange(0, cycles, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // Release pairs with the acquire in `measure_rate`.
            BASE_NS.store(ns, Ordering::Release);
        }
    }
    SOURCE.store(if is_clock { TSC } else { KERNEL }, Ordering::Relaxed);
}

/// One moment by both clocks: of several tries the one in which least came in between.
fn both() -> (u64, u64) {
    const TRIES: usize = 4;
    let once = || {
        // SAFETY: see `Moment::now`.
        let before = unsafe { _rdtsc() };
        let ns = super::monotonic_ns();
        // SAFETY: as above.
        let after = unsafe { _rdtsc() };
        (after.saturating_sub(before), before + after.saturating_sub(before) / 2, ns)
    };
    let (_, cycles, ns) = (0..TRIES).map(|_| once()).min_by_key(|once| once.0).unwrap_or_default();
    (cycles, ns)
}

/// The rate as far as it is known, settled where that is far enough; 0 at the very beginning.
#[cold]
fn measure_rate() -> u64 {
    // Acquire: the cycles were stored before.
    let base_ns = BASE_NS.load(Ordering::Acquire);
    if base_ns == 0 {
        return 0;
    }
    let (cycles, ns) = both();
    let cycles = cycles.saturating_sub(BASE_CYCLES.load(Ordering::Relaxed));
    let ns = ns.saturating_sub(base_ns);
    if cycles == 0 {
        return 0;
    }
    let rate = ((u128::from(ns) << RATE_BITS) / u128::from(cycles)) as u64;
    if ns >= SETTLED_NS {
        RATE.store(rate, Ordering::Relaxed);
    }
    rate
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::monotonic_ns;

    #[test]
    fn it_goes_as_fast_as_the_kernels_clock() {
        // Another thread may take the processor between the two clocks, now and then.
        let differs = (0..20).find_map(|_| {
            let (start, start_ns) = (Moment::now(), monotonic_ns());
            std::thread::sleep(core::time::Duration::from_millis(20));
            let (passed, passed_ns) = (start.elapsed_ns(), monotonic_ns() - start_ns);
            (passed.abs_diff(passed_ns) < passed_ns / 50).then_some(passed_ns)
        });
        assert!(differs.is_some_and(|ns| ns >= 20_000_000), "it is another clock");
    }
}
