//! Sleeping on a 32-bit word.

use core::sync::atomic::AtomicU32;

use linux_raw_sys::general::{
    __NR_futex, __kernel_timespec, FUTEX_PRIVATE_FLAG, FUTEX_WAIT, FUTEX_WAKE,
};

use super::call::syscall;

/// Whether the word is seen by one process only or by a tree of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Private memory: the kernel needs no look at the mapping.
    Process,
    /// A shared mapping.
    Tree,
}

impl Reach {
    const fn flag(self) -> u32 {
        match self {
            Reach::Process => FUTEX_PRIVATE_FLAG,
            Reach::Tree => 0,
        }
    }
}

/// Sleeps while `word` is `expected`; returns on a wake, a signal, the timeout, or for no reason.
pub fn wait(word: &AtomicU32, expected: u32, reach: Reach, timeout_ms: Option<u64>) {
    let timeout = timeout_ms.map(|ms| __kernel_timespec {
        tv_sec: (ms / 1000) as i64,
        tv_nsec: (ms % 1000 * 1_000_000) as i64,
    });
    let pointer = timeout.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    let op = FUTEX_WAIT | reach.flag();
    // SAFETY: `word` and `timeout` outlive the call; the kernel writes to neither.
    let _ = unsafe {
        syscall(
            __NR_futex,
            [word.as_ptr() as usize, op as usize, expected as usize, pointer as usize, 0, 0],
        )
    };
}

/// Wakes up to `count` sleepers.
pub fn wake(word: &AtomicU32, count: u32, reach: Reach) {
    // The kernel takes a signed number, and a negative one for "one": all is not -1.
    let count = count.min(i32::MAX as u32);
    let op = FUTEX_WAKE | reach.flag();
    // SAFETY: the kernel only uses the address as a key.
    let _ = unsafe {
        syscall(__NR_futex, [word.as_ptr() as usize, op as usize, count as usize, 0, 0, 0])
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering;

    #[test]
    fn to_wake_all_is_to_wake_all() {
        let word = std::sync::Arc::new(AtomicU32::new(1));
        let sleepers: std::vec::Vec<_> = (0..4)
            .map(|_| {
                let word = word.clone();
                std::thread::spawn(move || {
                    while word.load(Ordering::SeqCst) == 1 {
                        wait(&word, 1, Reach::Process, None);
                    }
                })
            })
            .collect();
        // All of them asleep, as a rule; the test is none where they are not.
        std::thread::sleep(std::time::Duration::from_millis(50));
        word.store(0, Ordering::SeqCst);
        wake(&word, u32::MAX, Reach::Process);
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    }
}
