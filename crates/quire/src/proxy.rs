//! Proxy calls: what program threads have an engine thread do.
//!
//! Only engine threads have the engine's descriptors. They are in the engine threads' own descriptor table,
//! and the program's copies are closed, so that the program can neither close the userfaultfd nor reach the
//! swap file by a number that is used again (docs/decisions/0006). The price: a call that maps or moves pages
//! for a program thread (mremap, mlock, populate, MADV_PAGEOUT, an unmap over a foreign mapping, a protect that
//! takes rights away) is executed by an engine thread while the program's thread waits. There is one such call
//! at a time, because the thread that sends it holds the space's lock.

use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use crate::sys::futex::{self, Reach};
use crate::sys::thread::Signal;

/// Where program threads leave proxy calls, and the proxy thread finds them.
#[derive(Default)]
pub struct ProxyCalls {
    /// Counts calls; the futex that the proxy thread sleeps on.
    calls: AtomicU32,
    run: AtomicUsize,
    argument: AtomicPtr<()>,
    done: Signal,
}

type CallFn = unsafe fn(*mut ());

struct ProxyCall<F, R> {
    act: Option<F>,
    result: Option<R>,
}

unsafe fn run<F: FnOnce() -> R, R>(argument: *mut ()) {
    // SAFETY: `send` passes its own proxy call, and waits until this is over.
    let proxy_call = unsafe { &mut *argument.cast::<ProxyCall<F, R>>() };
    proxy_call.result = proxy_call.act.take().map(|act| act());
}

impl ProxyCalls {
    /// Wakes the proxy thread.
    pub fn call(&self) {
        // Release pairs with the acquire in `calls`: the proxy thread finds what was left before.
        self.calls.fetch_add(1, Ordering::Release);
        futex::wake(&self.calls, 1, Reach::Process);
    }

    /// Has the proxy thread run `act`, and waits for it. The caller holds the space's lock, so
    /// that no other thread sends a call meanwhile.
    pub fn send<F: FnOnce() -> R, R>(&self, act: F) -> R {
        let mut proxy_call = ProxyCall { act: Some(act), result: None };
        self.argument.store(core::ptr::from_mut(&mut proxy_call).cast(), Ordering::Relaxed);
        self.run.store(run::<F, R> as CallFn as usize, Ordering::Release);
        self.call();
        self.done.wait();
        proxy_call.result.expect("the proxy thread ran it")
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u32 {
        // Acquire pairs with the release in `call`.
        self.calls.load(Ordering::Acquire)
    }

    /// Runs the call that was sent, if there is one. Only the proxy thread calls this.
    pub fn run_one(&self) {
        let run = self.run.swap(0, Ordering::Acquire);
        if run == 0 {
            return;
        }
        // SAFETY: `send` stored a function of this type; its argument stays valid until `done`.
        unsafe {
            let run = core::mem::transmute::<usize, CallFn>(run);
            run(self.argument.load(Ordering::Relaxed));
        }
        self.done.set(1);
    }

    /// Sleeps until there are more calls than the `seen` ones.
    pub fn wait(&self, seen: u32) {
        futex::wait(&self.calls, seen, Reach::Process, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_call_is_run_by_the_other_thread_while_the_sender_waits() {
        let proxy_calls = std::sync::Arc::new(ProxyCalls::default());
        let other = proxy_calls.clone();
        let runner = std::thread::spawn(move || {
            for _ in 0..100 {
                loop {
                    let seen = other.calls();
                    if other.run.load(Ordering::Relaxed) != 0 {
                        other.run_one();
                        break;
                    }
                    other.wait(seen);
                }
            }
        });
        let mut sum = 0;
        for at in 0..100 {
            sum += proxy_calls.send(|| at * 2);
        }
        runner.join().unwrap();
        assert_eq!(sum, 9900);
    }
}
