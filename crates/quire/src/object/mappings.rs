//! Numbers for mappings, and how much each has chosen to have mapped around a fault.

use core::sync::atomic::{AtomicU32, Ordering};

use super::FaultAround;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::sys::{Errno, memory::Table};
use crate::units::BLOCK_ORDER;

/// Most mappings of all objects of a space.
const MAPPINGS_MAX: usize = 1 << 18;
/// Ends the list of free numbers.
const NONE: u32 = u32::MAX;

/// The mappings of a space by their numbers.
pub(super) struct Mappings {
    /// The order of what is mapped around a fault, plus one; 0 is what the faults suggest.
    orders: Table<AtomicU32>,
    /// Of a free number the next free one.
    next: Table<AtomicU32>,
    free: Mutex<rank::MappingNumbers, FreeNumbers>,
}

struct FreeNumbers {
    first: u32,
    /// One past the highest that was ever taken.
    used: u32,
}

impl Mappings {
    pub fn new() -> Result<Mappings, Errno> {
        let free = Mutex::new(FreeNumbers { first: NONE, used: 0 });
        Ok(Mappings { orders: Table::new(MAPPINGS_MAX)?, next: Table::new(MAPPINGS_MAX)?, free })
    }

    /// Takes a number.
    pub fn take(&self, fault_around: FaultAround) -> Result<u32, Errno> {
        let mut free = self.free.lock();
        let number = if free.first != NONE { free.first } else { free.used };
        // Relaxed: under the lock.
        let next = self.next.get(number as usize).ok_or(Errno::NOMEM)?.load(Ordering::Relaxed);
        if number == free.first {
            free.first = next;
        } else {
            free.used += 1;
        }
        self.set_fault_around(number, fault_around);
        Ok(number)
    }

    /// Gives a number back that no VMA and no tree has any more.
    pub fn give_back(&self, number: u32) {
        let mut free = self.free.lock();
        self.next[number as usize].store(free.first, Ordering::Relaxed);
        free.first = number;
    }

    // Relaxed, both: a fault takes whatever it finds; a number outlives the faults that use it,
    // which hold a lock under which they have seen their VMA.

    pub fn set_fault_around(&self, number: u32, fault_around: FaultAround) {
        let order = match fault_around {
            FaultAround::Auto => 0,
            FaultAround::Off => 1,
            FaultAround::Order(order) => 1 + order.min(BLOCK_ORDER),
        };
        self.orders[number as usize].store(order, Ordering::Relaxed);
    }

    /// The order of what is mapped around a fault; `None`: what the faults suggest.
    pub fn order_around(&self, number: u32) -> Option<u32> {
        self.orders[number as usize].load(Ordering::Relaxed).checked_sub(1)
    }
}
