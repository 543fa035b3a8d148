//! fork: what both sides need so that each can go on alone.
//!
//! All engine threads stand still meanwhile, and the forking thread holds the space's lock. The
//! page words, the tables and the compressed pool are private memory: the child inherits them
//! like any other, and its copies are as true as the parent's at that moment. The frame pool does
//! not come along, so limbo is emptied first.

use core::sync::atomic::Ordering;

use super::{AddressSpace, Layout};
use crate::budget::Purpose;
use crate::control::Event;
use crate::fault::Access;
use crate::frames::QueueEnd;
use crate::mmu::{FrameId, Mmu};
use crate::page::{Flags, Snapshot, State};
use crate::reclaim::Reclaimer;
use crate::sys::Errno;
use crate::units::BLOCK_ORDER;

impl<M: Mmu> AddressSpace<M> {
    /// Makes the space ready to be inherited and charges the child's share: all that this process
    /// holds, once more, because what either side copies on write is not seen. Returns the pages
    /// charged.
    ///
    /// # Errors
    /// `NOMEM` where the budget cannot hold both.
    pub fn prepare_fork(&self, layout: &mut Layout<'_>) -> Result<usize, Errno> {
        loop {
            self.empty_limbo();
            self.release_free_frames(0);
            let held = self.budget.member().held_pages.load(Ordering::Relaxed) as usize;
            if self.budget.try_charge(held, Purpose::Reclaim) {
                self.has_forked.store(true, Ordering::Relaxed);
                self.budget.count(Event::Fork, 1);
                return Ok(held);
            }
            let target = (held / 8).max(64);
            let before = held;
            self.reclaim(target, Reclaimer::Direct, &mut layout.scratch);
            let limbo = self.frames.limbo();
            self.shrink_limbo(limbo, &mut layout.scratch);
            self.release_free_frames(0);
            let now = self.budget.member().held_pages.load(Ordering::Relaxed) as usize;
            if now >= before {
                return Err(Errno::NOMEM);
            }
        }
    }

    /// Puts everything in limbo back into the program.
    fn empty_limbo(&self) {
        while let Some(window) = self.frames.oldest_window() {
            let bits = self.frames.limbo_bits(window);
            for at in 0..1u32 << BLOCK_ORDER {
                if bits[at as usize / 64] >> (at % 64) & 1 != 0 {
                    self.leave_limbo_for_fork(FrameId((window << BLOCK_ORDER) + at));
                }
            }
            self.frames.return_window(window, QueueEnd::Youngest);
        }
    }

    fn leave_limbo_for_fork(&self, frame: FrameId) {
        let page = self.frames.owner_of(frame);
        let before = self.lock_page(page);
        if before.state() != State::Limbo || before.payload() != frame.0 {
            // Its neighbour's move took it along.
            self.unlock_page(page);
            return;
        }
        let vma = self.find_vma(page);
        match vma {
            Some(vma) if !before.has(Flags::LAZYFREE) => {
                self.fault_from_limbo(page, before, &vma, Access::Read);
            }
            _ => {
                self.release_backing(before);
                self.unlock_page_with(page, Snapshot::new(State::None, 0));
            }
        }
    }

    /// In the child: the frame pool is empty, the account another member's.
    pub fn after_fork_in_child(&self, slot: u32) {
        self.frames.reset();
        self.budget.set_slot(slot);
        self.swap.after_fork_in_child(slot);
        self.starved.answer_all(|_| {});
    }
}
