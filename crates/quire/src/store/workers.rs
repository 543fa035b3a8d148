//! Threads: how one is started, and a few for one batch, where nothing else keeps several requests
//! in flight.

use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::vec::Vec;

use crate::sys::Errno;
use crate::sys::thread::SignalsBlocked;

/// Starts a thread on which no signal handler of the program runs.
pub(crate) fn start<T: Send + 'static>(
    builder: thread::Builder,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<thread::JoinHandle<T>, Errno> {
    // The thread inherits them.
    let _signals = SignalsBlocked::of_others();
    builder.spawn(work).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
}

/// A mutex's lock, whatever became of the thread that held it before.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does `work` on every item, on up to `threads` threads, the caller's among them. They end with
/// the batch: a pool would have to outlive forks, and starting a thread is cheap beside an I/O.
/// Where no thread can be started, those there are do it all.
pub(super) fn on_threads<T: Send>(threads: usize, items: &mut [T], work: impl Fn(&mut T) + Sync) {
    if threads.min(items.len()) <= 1 {
        return items.iter_mut().for_each(work);
    }
    let count = threads.min(items.len());
    let items: Vec<Mutex<&mut T>> = items.iter_mut().map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let take_turns = || {
        // Relaxed: the count only deals items out; what they hold is passed on by their mutexes
        // and by the end of the scope.
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

/// CPUs that this process may use.
pub(super) fn cpus() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
