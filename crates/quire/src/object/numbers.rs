//! Numbers that are taken and given back.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::sys::{Errno, memory::Table};

const NONE: u32 = u32::MAX;

pub(super) struct Numbers {
    /// Of a free number the next free one.
    next: Table<AtomicU32>,
    free: Mutex<rank::Numbers, Free>,
}

struct Free {
    first: u32,
    /// One past the highest that was ever taken.
    used: u32,
}

impl Numbers {
    pub fn new(count: usize) -> Result<Numbers, Errno> {
        Ok(Numbers { next: Table::new(count)?, free: Mutex::new(Free { first: NONE, used: 0 }) })
    }

    /// Takes one; `None`: there is none left.
    pub fn take(&self) -> Option<u32> {
        let mut free = self.free.lock();
        if free.first != NONE {
            let number = free.first;
            // Relaxed: under the lock.
            free.first = self.next[number as usize].load(Ordering::Relaxed);
            return Some(number);
        }
        let number = free.used;
        ((number as usize) < self.next.len()).then(|| {
            free.used += 1;
            number
        })
    }

    /// Gives one back that nobody uses any more.
    pub fn give_back(&self, number: u32) {
        let mut free = self.free.lock();
        self.next[number as usize].store(free.first, Ordering::Relaxed);
        free.first = number;
    }
}
