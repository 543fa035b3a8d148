//! System calls: all of the engine's `unsafe` that speaks to the kernel.
//!
//! Nothing here goes through libc: a call made on a handler thread must not touch `errno`, a
//! thread-local, or a symbol that the preload library interposes.

pub mod call;
pub mod futex;
pub mod memory;
pub mod thread;
pub mod uffd;

pub use rustix::io::Errno;
