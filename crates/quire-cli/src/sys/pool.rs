//! The pool memfd: the supervisor makes it, seals it, and maps the table at its start.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use anyhow::{Context as _, Result};
use quire::control::slabs::SlabTable;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// The pool memfd, its table mapped shared.
pub(crate) struct PoolMap {
    table: SlabTable,
    memfd: OwnedFd,
}

impl PoolMap {
    /// A pool of so many slots, none of them used. It is sparse: only what is written costs memory.
    pub(crate) fn create(slots: usize) -> Result<PoolMap> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd =
            rustix::fs::memfd_create("quire-pool", flags).context("cannot make the pool memfd")?;
        rustix::fs::ftruncate(&memfd, SlabTable::pool_bytes(slots) as u64)
            .context("cannot size the pool memfd")?;
        // A member that shrank it would kill all others by SIGBUS.
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .context("cannot seal the pool memfd")?;
        PoolMap::map(memfd, slots)
    }

    /// The same pool, mapped once more.
    #[cfg(test)]
    pub(crate) fn view(&self) -> Result<PoolMap> {
        PoolMap::map(self.memfd.try_clone()?, self.slots())
    }

    /// Maps a memfd that is such a pool and cannot shrink.
    fn map(memfd: OwnedFd, slots: usize) -> Result<PoolMap> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = SlabTable::bytes(slots);
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, &memfd, 0)
        }
        .context("cannot map the pool memfd")?;
        let base = NonNull::new(base.cast()).context("the pool memfd came at address 0")?;
        // SAFETY: just mapped, with this length, from a memfd that began as zeros and cannot shrink;
        // unmapped when `self` is dropped, which the table is only lent by.
        let table = unsafe { SlabTable::at(base, slots) };
        Ok(PoolMap { table, memfd })
    }

    /// Gives memory of the pool back to the kernel.
    pub(crate) fn punch(&self, offset: usize, bytes: usize) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Nothing else fails for a hole in shared memory; what stayed would be used again with its
        // slot.
        while rustix::fs::fallocate(&self.memfd, hole, offset as u64, bytes as u64)
            == Err(Errno::INTR)
        {}
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
        self.memfd.as_fd()
    }
}

impl Drop for PoolMap {
    fn drop(&mut self) {
        let bytes = SlabTable::bytes(self.table.slots());
        // SAFETY: `map` mapped exactly this; references to it borrow `self`, so none is left.
        // A failure leaves a mapping behind, no more.
        let _ = unsafe { rustix::mm::munmap(self.table.start().as_ptr().cast(), bytes) };
    }
}
