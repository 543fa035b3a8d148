//! System calls: all of the engine's `unsafe` that speaks to the kernel.
//!
//! Nothing here goes through libc: a call made on a handler thread must not touch `errno`, a
//! thread-local, or a symbol that the preload library interposes. Errors are the kernel's, where a
//! function says no more of them.

#[cfg(feature = "library")]
pub mod cachestat;
pub mod call;
pub mod clock;
mod cpu;
pub mod futex;
pub mod memory;
pub mod mutex;
pub mod probe;
pub mod rank;
pub(crate) mod rseq;
pub(crate) mod stack;
pub mod thread;
#[cfg(feature = "simulated")]
pub mod turns;
pub mod uffd;
pub(crate) mod yard;
pub mod zstd;

pub use rustix::io::Errno;

/// Time since some moment in the past, in nanoseconds. No system call. Among the actors of a
/// simulation it is their own, which the same seed has pass the same way.
#[must_use]
pub fn monotonic_ns() -> u64 {
    #[cfg(feature = "simulated")]
    if let Some(now_ns) = turns::now_ns() {
        return now_ns;
    }
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
