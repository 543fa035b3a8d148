//! Where slabs live: in private memory, or in the memfd of a tree, with the table that says which
//! member uses which slab ([`SlabTable`]).
//!
//! Owns the memory and this member's side of the table; leaves to the pool what the slabs hold, and
//! which account is charged. Private memory has the same table, with one member in it.
//!
//! # Which threads may give memory back
//!
//! A thread that is killed inside of a system call finishes the call. By then the supervisor may have
//! given the member's slots to others, and the hole that the thread punches would be in their memory.
//! The supervisor knows of a member's end once its *engine's* threads are gone, so only these threads
//! [give back](SlabHome::give_back). All else here is done by single instructions, of which a thread
//! that is killed does none.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fd::BorrowedFd;
use rustix::io::Errno;

use super::mapping::PoolMapping;
use crate::control::slabs::{SlabTable, SlabUse};
use crate::units::PAGE_SIZE;

/// A search for a free slot starts again at the first after so many: low slots that other members
/// let go are found again, and the table stays short.
const TAKES_PER_SWEEP: u32 = 64;

pub(super) struct SlabHome {
    /// The table, then the slots.
    memory: PoolMapping,
    table: SlabTable,
    /// This member's slot: changes at fork only, when no other thread is here (Relaxed).
    member: AtomicU32,
    /// Where the next search begins, and the searches so far. Hints (Relaxed).
    next_free: AtomicU32,
    takes: AtomicU32,
}

impl SlabHome {
    pub fn private(slots: usize) -> Result<SlabHome, Errno> {
        Ok(SlabHome::of(PoolMapping::private(SlabTable::pool_bytes(slots))?, slots, 0))
    }

    /// The memory that the tree shares.
    ///
    /// # Safety
    ///
    /// The memfd is a pool of so many slots, and can never shrink.
    pub unsafe fn shared(
        memfd: BorrowedFd<'_>,
        slots: usize,
        member: u32,
    ) -> Result<SlabHome, Errno> {
        let memory = PoolMapping::shared(memfd, SlabTable::pool_bytes(slots))?;
        Ok(SlabHome::of(memory, slots, member))
    }

    fn of(memory: PoolMapping, slots: usize, member: u32) -> SlabHome {
        // SAFETY: the mapping begins with the table (`pool_bytes`) and lives as long as the home,
        // beyond which the table is not used.
        let table = unsafe { SlabTable::at(memory.start(), slots) };
        let hint = AtomicU32::new(1);
        SlabHome { memory, table, member: AtomicU32::new(member), next_free: hint, takes: 0.into() }
    }

    pub fn slots(&self) -> usize {
        self.table.slots()
    }

    /// All slots ever taken lie below this one.
    pub fn slots_end(&self) -> u32 {
        self.table.slots_end() as u32
    }

    /// Whether a fork's child has the same memory.
    pub fn is_shared(&self) -> bool {
        self.memory.is_shared()
    }

    /// Becomes another member (a fork's child).
    pub fn set_member(&self, member: u32) {
        self.member.store(member, Relaxed);
    }

    /// Counts the supervisor's moves of pages between accounts: see [`SlabTable::moves`].
    pub fn moves(&self) -> u32 {
        self.table.moves()
    }

    /// Takes a slot with memory for a slab of so many pages, which the caller was charged for.
    pub fn take(&self, pages: usize) -> Option<u32> {
        let slots = self.table.slots() as u32;
        let is_new_sweep = self.takes.fetch_add(1, Relaxed).is_multiple_of(TAKES_PER_SWEEP);
        // Slot 0 stays unused, so that no handle is 0.
        let first = if is_new_sweep { 1 } else { self.next_free.load(Relaxed).clamp(1, slots) };
        let member = self.member.load(Relaxed);
        let slot =
            (first..slots).chain(1..first).find(|&slot| self.table.take(slot, member, pages))?;
        self.next_free.store(slot + 1, Relaxed);
        let start = self.table.offset_of(slot);
        if self.memory.populate(start..start + pages * PAGE_SIZE) {
            return Some(slot);
        }
        // What memory it has got goes with the slab that has it next, or with this member.
        let _ = self.table.change(slot, SlabUse::Own { member, pages }, SlabUse::Free);
        None
    }

    /// Whether a slot that this member uses is its own, on its account and writable by it alone.
    pub fn is_own(&self, slot: u32) -> bool {
        let member = self.member.load(Relaxed);
        matches!(self.table.slab_use(slot), SlabUse::Own { member: owner, .. } if owner == member)
    }

    /// Gives a slot back of which nothing is used any more. Where the memory is shared, only engine
    /// threads call this. Returns the pages that are ours to uncharge, for their memory is gone: none
    /// where other members may use the slab still, and the supervisor gives it back.
    #[must_use]
    pub fn give_back(&self, slot: u32, pages: usize) -> usize {
        let own = SlabUse::Own { member: self.member.load(Relaxed), pages };
        loop {
            if self.table.slab_use(slot) == own {
                let start = self.table.offset_of(slot);
                // SAFETY: the slab has no blob left, and only blobs are referred to. It is still
                // ours, so no other member has one there either.
                unsafe { self.memory.discard(start..start + pages * PAGE_SIZE) };
                if self.table.change(slot, own, SlabUse::Free) {
                    self.next_free.fetch_min(slot, Relaxed);
                    return pages;
                }
            }
            // A fork's child that is long dead may have come to share it, late.
            if self.let_go(slot) {
                return 0;
            }
        }
    }

    /// Lets go of a common slot of which nothing is used any more. `false` where the slot has become
    /// our own, and is to be given back.
    #[must_use]
    pub fn let_go(&self, slot: u32) -> bool {
        self.table.let_go(slot, self.member.load(Relaxed))
    }

    pub fn slot(&self, slot: u32) -> *mut u8 {
        debug_assert!((slot as usize) < self.slots());
        // SAFETY: inside the mapping, which has room for all slots (`pool_bytes`).
        unsafe { self.memory.start().as_ptr().add(self.table.offset_of(slot)) }
    }

    /// The table, for tests to play the supervisor.
    #[cfg(test)]
    pub fn table(&self) -> &SlabTable {
        &self.table
    }
}
