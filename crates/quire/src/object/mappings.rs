//! Numbers for mappings, and how much each has chosen to have mapped around a fault.

use core::sync::atomic::{AtomicU32, Ordering};

use super::FaultAround;
use super::numbers::Numbers;
use crate::sys::{Errno, memory::Table};
use crate::units::BLOCK_ORDER;

/// Most mappings of all objects of a space.
const MAPPINGS_MAX: usize = 1 << 18;

/// The mappings of a space by their numbers.
pub(super) struct Mappings {
    /// The order of what is mapped around a fault, plus one; 0 is what the faults suggest.
    orders: Table<AtomicU32>,
    /// A number is given back once no VMA and no tree has it any more.
    pub numbers: Numbers,
}

impl Mappings {
    pub fn new() -> Result<Mappings, Errno> {
        Ok(Mappings { orders: Table::new(MAPPINGS_MAX)?, numbers: Numbers::new(MAPPINGS_MAX)? })
    }

    pub fn take(&self, fault_around: FaultAround) -> Result<u32, Errno> {
        let number = self.numbers.take().ok_or(Errno::NOMEM)?;
        self.set_fault_around(number, fault_around);
        Ok(number)
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
