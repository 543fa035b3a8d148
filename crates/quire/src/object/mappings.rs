//! Numbers for mappings, and what each mapping has chosen for itself.

use core::sync::atomic::{AtomicU32, Ordering};

use super::FaultAround;
use super::numbers::Numbers;
use crate::sys::{Errno, memory::Table};

/// Most mappings of all objects of a space.
const MAPPINGS_MAX: usize = 1 << 18;

/// The mappings' numbers.
pub(super) struct Mappings {
    /// What is mapped around a fault.
    choices: Table<AtomicU32>,
    numbers: Numbers,
}

impl Mappings {
    pub fn new() -> Result<Mappings, Errno> {
        Ok(Mappings { choices: Table::new(MAPPINGS_MAX)?, numbers: Numbers::new(MAPPINGS_MAX)? })
    }

    /// Takes a number.
    pub fn take(&self, fault_around: FaultAround) -> Result<u32, Errno> {
        let number = self.numbers.take().ok_or(Errno::NOMEM)?;
        self.set_fault_around(number, fault_around);
        Ok(number)
    }

    /// Gives a number back that no VMA and no tree has any more.
    pub fn give_back(&self, number: u32) {
        self.numbers.give_back(number);
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
