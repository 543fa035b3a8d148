//! Slabs that a fork shares.
//!
//! What the slabs hold is inherited as the page words are; the bytes are shared. So from a fork on
//! every slab that both have is *sealed*: it gets no new blob, nothing in it is written, and each
//! side frees its own blobs in its own descriptors. Who has no blob left in a slab lets go of it.
//! Once the others have, the supervisor makes it ours again, which is found out here.

use core::sync::atomic::Ordering::Relaxed;

use super::slab::{CLASS, CLASSES, Lists};
use super::{Account, Handle, Spot, Zpool};
use crate::units::PageNum;

/// Of a sealed slab's places, one in so many at most holds a blob when compaction empties it: what
/// the other side does with it is not known.
const SPARSE: usize = 4;
/// How often a fork looks whether the supervisor is done with an account.
const LOOKS_MAX: u32 = 100_000;

impl Zpool {
    /// All slabs are about to be a fork's child's as well; those that hold nothing are given back.
    /// Nobody else is in the pool, and compaction does not run. Engine threads only.
    pub fn seal(&self, account: &impl Account) {
        for class in 0..CLASSES {
            self.give_back_empty(class, account);
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
            // A supervisor that does not go on is not there to welcome a child either.
            if is_at_rest || looks == LOOKS_MAX {
                return result;
            }
            rustix::thread::sched_yield();
        }
    }

    /// Gives slabs back that hold nothing, but for one in a class of some size. Returns the pages
    /// given back. Engine threads only, where the memory is shared.
    pub fn trim(&self, account: &impl Account) -> usize {
        let mut pages = 0;
        for class in 0..CLASSES {
            loop {
                // A statement of its own: the lock is dropped before the kernel is called.
                let surplus = self.classes[class].0.lock().take_surplus(&self.slabs);
                let Some(slot) = surplus else { break };
                pages += self.give_back(slot, class, account);
            }
        }
        pages
    }

    /// Finds slabs that are ours again, if the supervisor has been at it; whether it may have.
    pub(super) fn unseal(&self) -> bool {
        let moves = self.home.moves();
        // Relaxed: who comes too late finds them the next time.
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
                self.unseal_locked(&mut lists, slot, class);
            }
        }
    }

    /// A sealed slab has lost its last blob: lets go of it, or keeps it, empty, where it is ours
    /// again. Under the lock of the class, so that nobody unseals it meanwhile.
    pub(super) fn let_go_locked(&self, lists: &mut Lists, slot: u32, class: usize) {
        if self.home.let_go(slot) {
            self.slabs[slot as usize].clear();
            self.pages.fetch_sub(CLASS[class].pages, Relaxed);
        } else {
            self.unseal_locked(lists, slot, class);
        }
    }

    fn unseal_locked(&self, lists: &mut Lists, slot: u32, class: usize) {
        lists.unseal(&self.slabs, slot, &CLASS[class]);
        self.own_pages.fetch_add(CLASS[class].pages, Relaxed);
    }

    /// Moves blobs out of sealed slabs that have few left, into room that there is, so that whoever
    /// else is in them, or the supervisor, has them alone.
    pub(super) fn empty_sealed(
        &self,
        moves: &mut usize,
        relocate: &mut impl FnMut(PageNum, Handle, Handle) -> bool,
        account: &impl Account,
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
