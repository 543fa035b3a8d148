//! The pool memfd: the supervisor makes it, seals it, and maps the table at its start.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::Result;
use quire::control::slabs::SlabTable;
use rustix::fs::FallocateFlags;
use rustix::io::retry_on_intr;

use super::memfd::{self, Access, SharedMap};

pub(crate) struct PoolMap {
    table: SlabTable,
    map: SharedMap,
}

impl PoolMap {
    /// A pool of so many slots, none of them used.
    pub(crate) fn create(slots: usize) -> Result<PoolMap> {
        PoolMap::map(memfd::create("pool", SlabTable::pool_bytes(slots))?, slots)
    }

    /// The same pool, mapped once more.
    #[cfg(test)]
    pub(crate) fn view(&self) -> Result<PoolMap> {
        PoolMap::map(self.map.memfd.try_clone()?, self.slots())
    }

    /// Maps a memfd that is such a pool and cannot shrink.
    fn map(memfd: OwnedFd, slots: usize) -> Result<PoolMap> {
        let map = SharedMap::new(memfd, SlabTable::bytes(slots), Access::Write, "pool")?;
        // SAFETY: just mapped, with this length, from a memfd that began as zeros and cannot shrink;
        // unmapped when `self` is dropped, which the table is only lent by.
        let table = unsafe { SlabTable::at(map.base, slots) };
        Ok(PoolMap { table, map })
    }

    /// Gives memory of the pool back to the kernel.
    pub(crate) fn punch(&self, offset: usize, bytes: usize) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Nothing else fails for a hole in shared memory; what stayed would be used again with its
        // slot.
        let _ = retry_on_intr(|| {
            rustix::fs::fallocate(&self.map.memfd, hole, offset as u64, bytes as u64)
        });
    }
}

impl Deref for PoolMap {
    type Target = SlabTable;

    fn deref(&self) -> &SlabTable {
        &self.table
    }
}

impl AsFd for PoolMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.memfd.as_fd()
    }
}
