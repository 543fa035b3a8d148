//! Starts threads: one that stays, or a few for one batch. Locks mutexes.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::vec::Vec;

use crate::sys::Errno;
use crate::sys::thread::SignalsBlocked;

/// Starts a thread on which no signal handler of the program runs: it inherits the blocked signals.
pub(crate) fn start<T: Send + 'static>(
    builder: thread::Builder,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<thread::JoinHandle<T>, Errno> {
    let _signals = SignalsBlocked::of_others();
    builder.spawn(work).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
}

/// Locks a mutex, also after a thread that held it has panicked: every change that is made under
/// these mutexes is whole before anything that could panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does `work` on every item, on up to `threads` threads, the caller's among them. They end with
/// the batch: a pool would have to outlive forks, and starting a thread is cheap beside an I/O.
/// Where no further thread can be started, those that run do all of it.
pub(super) fn on_threads<T: Send>(threads: usize, items: &mut [T], work: impl Fn(&mut T) + Sync) {
    let count = threads.min(items.len());
    if count <= 1 {
        return items.iter_mut().for_each(work);
    }
    let items: Vec<Mutex<&mut T>> = items.iter_mut().map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let take_turns = || {
        // Relaxed: the count only hands items out; their mutexes and the end of the scope publish
        // what the items hold.
        while let Some(item) = items.get(next.fetch_add(1, Relaxed)) {
            work(&mut lock(item));
        }
    };
    thread::scope(|scope| {
        for _ in 1..count {
            if thread::Builder::new().spawn_scoped(scope, take_turns).is_err() {
                break;
            }
        }
        take_turns();
    });
}

/// The number of CPUs that this process may use.
pub(crate) fn cpus() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
