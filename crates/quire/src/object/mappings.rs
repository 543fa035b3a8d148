//! Numbers for mappings, and what each mapping has chosen for itself.

use core::sync::atomic::{AtomicU32, Ordering};

use rustix_futex_sync::Mutex;

use super::FaultAround;
use crate::sys::{Errno, memory::Table};

/// Most mappings of all objects of a space.
const MAPPINGS_MAX: usize = 1 << 18;
const NONE: u32 = u32::MAX;

/// The mappings' numbers.
pub(super) struct Mappings {
    /// What is mapped around a fault; of a free number the next free one.
    choices: Table<AtomicU32>,
    free: Mutex<Free>,
}

struct Free {
    first: u32,
    /// One past the highest that was ever taken.
    used: u32,
}

impl Mappings {
    pub fn new() -> Result<Mappings, Errno> {
        let free = Mutex::new(Free { first: NONE, used: 0 });
        Ok(Mappings { choices: Table::new(MAPPINGS_MAX)?, free })
    }

    /// Takes a number.
    pub fn take(&self, fault_around: FaultAround) -> Result<u32, Errno> {
        let mut free = self.free.lock();
        let number = if free.first == NONE {
            let number = free.used;
            if number as usize >= MAPPINGS_MAX {
                return Err(Errno::NOMEM);
            }
            free.used += 1;
            number
        } else {
            let number = free.first;
            free.first = self.choices[number as usize].load(Ordering::Relaxed);
            number
        };
        self.set_fault_around(number, fault_around);
        Ok(number)
    }

    /// Gives a number back that no VMA and no tree has any more.
    pub fn give_back(&self, number: u32) {
        let mut free = self.free.lock();
        self.choices[number as usize].store(free.first, Ordering::Relaxed);
        free.first = number;
    }

    // Relaxed, both: a fault takes whatever it finds; a number outlives the faults that use it,
    // which hold a window's lock and have seen their VMA.

    pub fn set_fault_around(&self, number: u32, fault_around: FaultAround) {
        self.choices[number as usize].store(fault_around.to_bits(), Ordering::Relaxed);
    }

    pub fn fault_around(&self, number: u32) -> FaultAround {
        FaultAround::from_bits(self.choices[number as usize].load(Ordering::Relaxed))
    }
}
