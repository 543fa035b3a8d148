//! Slabs that a fork shares.
//!
//! A child inherits what the slabs hold, as it inherits the page words; the bytes are shared. So from
//! a fork on every slab that both processes have is *sealed*: it gets no new blob, nothing in it is
//! written, and each process frees its own blobs in its own descriptors. A process that has no blob left
//! in a slab lets go of it. Once all others have, the supervisor makes the slab ours again; this module
//! looks for such slabs.

use core::sync::atomic::Ordering::Relaxed;

use super::slab::{CLASS, CLASSES, ClassLists};
use super::{Handle, Payer, Spot, Zpool};
use crate::units::PageNum;

/// Compaction empties a sealed slab where at most one place in so many holds a blob: what the other
/// process still has in it is not known.
const SPARSE: usize = 4;
/// How often a fork looks whether the supervisor is done with an account.
const LOOKS_MAX: u32 = 100_000;

impl Zpool {
    /// Seals all slabs, which a fork is about to share; those that hold nothing are given back. No
    /// other thread is in the pool, and compaction does not run. Only engine threads call this.
    pub fn seal(&self, account: &impl Payer) {
        for class in 0..CLASSES {
            self.give_back_all(class, ClassLists::take_empty, account);
        }
        for slot in 1..self.home.slots_end() {
            let slab = &self.slabs[slot as usize];
            let Some(class) = slab.class().filter(|_| !slab.is_sealed()) else { continue };
            self.classes[class].0.lock().seal(&self.slabs, slot);
            self.own_pages.fetch_sub(CLASS[class].pages, Relaxed);
        }
    }

    /// In the parent, once the child has joined, or there is none: what it does not share is ours.
    pub fn after_fork_in_parent(&self) {
        self.unseal_own();
    }

    /// In the child, which is `member`, before another thread runs there.
    pub fn after_fork_in_child(&self, member: u32) {
        self.home.set_member(member);
        self.compacting.store(false, Relaxed);
    }

    /// Whether another process may have the blob as well.
    pub fn is_shared(&self, handle: Handle) -> bool {
        self.spot(handle).is_some_and(|spot| self.slabs[spot.slot as usize].is_sealed())
    }

    /// What `read` makes of our own pages at a moment when the supervisor does not move pages from
    /// one account to another: then they are on ours.
    pub fn at_rest<R>(&self, read: impl Fn(usize) -> R) -> R {
        let mut looks = 0;
        loop {
            let moves = self.home.moves();
            self.unseal();
            let result = read(self.own_pages());
            let is_at_rest = moves.is_multiple_of(2) && self.home.moves() == moves;
            looks += 1;
            // A supervisor that does not go on cannot welcome a child either.
            if is_at_rest || looks == LOOKS_MAX {
                return result;
            }
            rustix::thread::sched_yield();
        }
    }

    /// Gives slabs back that hold nothing, but for one in a class of some size. Returns the pages
    /// given back. Where the memory is shared, only engine threads call this.
    pub fn trim(&self, account: &impl Payer) -> usize {
        let give_back = |class| self.give_back_all(class, ClassLists::take_surplus, account);
        (0..CLASSES).map(give_back).sum()
    }

    /// Unseals the slabs that are ours again, if the supervisor has moved any since the last look.
    /// Returns whether it has.
    pub(super) fn unseal(&self) -> bool {
        let moves = self.home.moves();
        // Relaxed: a thread that looks too early finds them the next time.
        let is_new = self.moves_seen.swap(moves, Relaxed) != moves;
        if is_new {
            self.unseal_own();
        }
        is_new
    }

    fn unseal_own(&self) {
        for slot in 1..self.home.slots_end() {
            let slab = &self.slabs[slot as usize];
            let Some(class) = slab.class().filter(|_| slab.is_sealed()) else { continue };
            if !self.home.is_own(slot) {
                continue;
            }
            let mut lists = self.classes[class].0.lock();
            // Its last blob may have gone meanwhile.
            if slab.class() == Some(class) && slab.is_sealed() {
                self.unseal_locked(&mut lists, slot);
            }
        }
    }

    /// Lets go of a sealed slab that has lost its last blob, or keeps it, empty, where it is ours
    /// again. The lock of the class keeps other threads from unsealing it meanwhile.
    pub(super) fn let_go_locked(&self, lists: &mut ClassLists, slot: u32) {
        if self.home.let_go(slot) {
            self.slabs[slot as usize].clear();
            self.pages.fetch_sub(CLASS[lists.class()].pages, Relaxed);
        } else {
            self.unseal_locked(lists, slot);
        }
    }

    fn unseal_locked(&self, lists: &mut ClassLists, slot: u32) {
        lists.unseal(&self.slabs, slot);
        self.own_pages.fetch_add(CLASS[lists.class()].pages, Relaxed);
    }

    /// Moves blobs out of sealed slabs that have few left, so that the last process that uses such a
    /// slab has it alone, or the supervisor can free it.
    pub(super) fn empty_sealed(
        &self,
        moves: &mut usize,
        relocate: &mut impl FnMut(PageNum, Handle, Handle) -> bool,
        account: &impl Payer,
    ) {
        for slot in 1..self.home.slots_end() {
            let slab = &self.slabs[slot as usize];
            let Some(class) = slab.class().filter(|_| slab.is_sealed()) else { continue };
            if slab.used() * SPARSE > CLASS[class].objects {
                continue;
            }
            for index in 0..CLASS[class].objects {
                if *moves == 0 {
                    return;
                }
                self.move_out(Spot { slot, class, index }, moves, relocate, account);
            }
        }
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
