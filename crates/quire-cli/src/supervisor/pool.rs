//! The pool memfd: the slabs of packed pages that the members share.
//!
//! Owns the memfd, and the supervisor's side of its table ([`quire::control::slabs`], which has the
//! protocol): a member that joins by a fork shares its parent's slabs, one that leaves lets go of all, a
//! slab that no member uses goes back to the kernel, and one that a single member uses is its own again. Pages move
//! with that between the members' accounts and [`Control::common_pages`], which from the first member on is changed
//! here only.
//! One thread does all of it, so nothing here meets itself.

use std::sync::atomic::Ordering::Relaxed;

use anyhow::Result;
use quire::control::slabs::{SLOT_BYTES, SlabUse, slots_for};
use quire::control::{Control, numbers_of};

use crate::sys::pool::PoolMap;

pub(super) struct Pool {
    pub table: PoolMap,
    /// Slots that are common, 64 a word: the table's words say the same, one slot each.
    common: Vec<u64>,
    /// How often members had let go of slabs when they were last looked over.
    let_go_seen: u32,
}

impl Pool {
    pub(super) fn create(budget_bytes: usize) -> Result<Pool> {
        let table = PoolMap::create(slots_for(budget_bytes))?;
        let common = vec![0; table.slots().div_ceil(64)];
        Ok(Pool { table, common, let_go_seen: 0 })
    }

    /// A fork's child has joined: it shares all that its parent uses. The parent waits, or it has
    /// given its child up for dead, and goes on; then the child has never been in a slab, and what
    /// the parent does is settled by which of the two changes a word or a bit first.
    pub(super) fn inherit(&mut self, control: &Control, parent: u32, child: u32) {
        self.table.count_move();
        for word in 0..self.words() {
            let shared = self.table.shared_slots(parent, word) & self.common[word];
            if shared != 0 {
                self.table.share(child, word, shared);
            }
        }
        for slot in 1..self.table.slots_end() as u32 {
            let SlabUse::Own { member, pages } = self.table.slab_use(slot) else { continue };
            if member == parent {
                self.make_common(control, slot, pages, [parent, child]);
            }
        }
        self.table.count_move();
    }

    fn make_common(&mut self, control: &Control, slot: u32, pages: usize, members: [u32; 2]) {
        let (word, bit) = place(slot);
        // The bits first: from the word on each member takes its own away.
        members.iter().for_each(|&member| self.table.share(member, word, bit));
        let own = SlabUse::Own { member: members[0], pages };
        if !self.table.change(slot, own, SlabUse::Common { pages }) {
            // Its member has given it back.
            for member in members {
                let _ = self.table.forget(member, word, bit);
            }
            return;
        }
        self.common[word] |= bit;
        control.common_pages.fetch_add(pages as u64, Relaxed);
        let payer = members[0] as usize;
        control.seats[payer].account.take_out(pages);
        // A member writes how many pages its pool has now and then only: it may be less than what moves.
        let less = |now: u64| Some(now.saturating_sub(pages as u64));
        let _ = control.members[payer].pool_pages.fetch_update(Relaxed, Relaxed, less);
    }

    /// A member is gone: frees what was its own, which is still on its account, and lets go of
    /// what was common.
    pub(super) fn leave(&mut self, control: &Control, gone: u32) {
        for word in 0..self.words() {
            if self.common[word] != 0 {
                let _ = self.table.forget(gone, word, u64::MAX);
            }
        }
        let is_its_own = |slot: &u32| match self.table.slab_use(*slot) {
            SlabUse::Own { member, .. } => member == gone,
            SlabUse::Free | SlabUse::Common { .. } => false,
        };
        let own: Vec<u32> = (1..self.table.slots_end() as u32).filter(is_its_own).collect();
        self.free(control, &own);
        self.settle(control);
    }

    /// Looks over the common slabs, if a member has let go of one since.
    pub(super) fn settle_if_let_go(&mut self, control: &Control) {
        if self.table.times_let_go() != self.let_go_seen {
            self.settle(control);
        }
    }

    /// Gives back slabs that no member uses, and makes those that one member uses its own.
    fn settle(&mut self, control: &Control) {
        // Before the bits: a member that lets go from now on is seen the next time.
        self.let_go_seen = self.table.times_let_go();
        let mut unused = Vec::new();
        let mut with_one = Vec::new();
        for word in 0..self.words() {
            if self.common[word] == 0 {
                continue;
            }
            let (mut once, mut twice) = (0, 0);
            for (member, _) in control.present() {
                let bits = self.table.shared_slots(member as u32, word);
                twice |= once & bits;
                once |= bits;
            }
            unused.extend(numbers_of(word, self.common[word] & !once).map(|slot| slot as u32));
            with_one.push((word, self.common[word] & once & !twice));
        }
        self.free(control, &unused);
        if with_one.iter().any(|&(_, bits)| bits != 0) {
            self.table.count_move();
            for (member, _) in control.present() {
                for &(word, bits) in &with_one {
                    let its = bits & self.table.shared_slots(member as u32, word);
                    numbers_of(word, its)
                        .for_each(|slot| self.give_to(control, member, slot as u32));
                }
            }
            self.table.count_move();
        }
    }

    /// Makes a common slab the own of the one member that uses it.
    fn give_to(&mut self, control: &Control, member: usize, slot: u32) {
        let common = self.table.slab_use(slot);
        let SlabUse::Common { pages } = common else { return };
        let own = SlabUse::Own { member: member as u32, pages };
        let (word, bit) = place(slot);
        let account = &control.seats[member].account;
        // Before it can give them back.
        account.put_in(pages);
        let is_own = self.table.change(slot, common, own);
        if is_own && self.table.forget(member as u32, word, bit) != 0 {
            self.common[word] &= !bit;
            control.common_pages.fetch_sub(pages as u64, Relaxed);
            control.members[member].pool_pages.fetch_add(pages as u64, Relaxed);
            return;
        }
        // It has let go just now, and will not look here again: the next look finds it unused.
        let _ = self.table.change(slot, own, common);
        account.take_out(pages);
    }

    /// Gives slots that no member uses, in order, back: first the memory, then the slots, then the
    /// charge of those that were common. Slots that follow each other go together.
    fn free(&mut self, control: &Control, slots: &[u32]) {
        for run in slots.chunk_by(|slot, next| slot + 1 == *next) {
            self.table.punch(self.table.offset_of(run[0]), run.len() * SLOT_BYTES);
        }
        for &slot in slots {
            let last = self.table.slab_use(slot);
            let (word, bit) = place(slot);
            self.common[word] &= !bit;
            let _ = self.table.change(slot, last, SlabUse::Free);
            if let SlabUse::Common { pages } = last {
                control.common_pages.fetch_sub(pages as u64, Relaxed);
            }
        }
        if !slots.is_empty() {
            control.wake_askers();
        }
    }

    fn words(&self) -> usize {
        self.table.slots_end().div_ceil(64)
    }
}

/// Word and bit of a slot in the maps.
fn place(slot: u32) -> (usize, u64) {
    (slot as usize / 64, 1 << (slot % 64))
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
