//! The atomic under what loom checks here: a real one, or loom's.

use core::sync::atomic::{AtomicU64, Ordering, fence};

pub trait AtomicWord {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn fetch_add(&self, count: u64, order: Ordering) -> u64;
    /// Relaxed where it fails.
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64>;
    fn fence(order: Ordering);
}

impl AtomicWord for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }
    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }
    #[inline]
    fn fetch_add(&self, count: u64, order: Ordering) -> u64 {
        AtomicU64::fetch_add(self, count, order)
    }
    #[inline]
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        AtomicU64::compare_exchange(self, old, new, order, Ordering::Relaxed)
    }
    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }
}
