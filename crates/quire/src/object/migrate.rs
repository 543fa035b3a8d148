//! Cached pages get new memory, taken by the calling thread: of its NUMA node, and next to each other.
//!
//! A run of a block's pages is locked and unmapped everywhere, copied into a buffer, given back to
//! the kernel, and written into fresh memory of the memfd. Pinned pages stay where they are, for the
//! kernel may hold that very memory; so do poisoned and locked ones.

use super::pages::is_absent;
use super::requests::IoBuffer;
use super::rmap::Wait;
use super::{Objects, VmObject};
use crate::budget::Purpose;
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Snapshot, State};
use crate::reclaim::Room;
use crate::scratch::Scratch;
use crate::units::ObjectRange;

/// What became of pages that were to get new memory.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Migrated {
    pub success: usize,
    pub failed: usize,
}

impl<M: ObjectMmu> Objects<M> {
    /// Gives every cached page of an object new memory.
    pub fn migrate(
        &self,
        object: &VmObject,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Migrated {
        let budget = self.space.budget();
        let mut moved = Migrated::default();
        // A page of room: memory that is given back and taken again must not be the last there is.
        let mut make_room = || self.space.make_room(self, Room::Charge, 1, Some(scratch));
        if (0..8).any(|_| make_room() && self.space.budget().try_charge(1, Purpose::Fault)) {
            for block in object.range().by_block() {
                if object.has_words(block.start) {
                    self.migrate_block(object, block, &mut moved, buffer);
                }
            }
            budget.uncharge(1);
        } else {
            moved.failed = object.cached_pages();
        }
        budget.count(Event::PgmigrateSuccess, moved.success);
        budget.count(Event::PgmigrateFail, moved.failed);
        moved
    }

    /// Goes over the pages of one block, in runs that can be moved together.
    fn migrate_block(
        &self,
        object: &VmObject,
        block: ObjectRange,
        moved: &mut Migrated,
        buffer: &mut IoBuffer,
    ) {
        let mut run = ObjectRange { start: block.start, end: block.start };
        for page in block.pages() {
            let seen = self.snapshot(object, page);
            let is_movable =
                |word: Snapshot| word.state() == State::Cached && !word.has(Flags::MLOCKED);
            if self.try_lock_and_leave(object, page, is_movable) {
                run.end = page.add(1);
                continue;
            }
            moved.failed += usize::from(seen.is_locked() || !is_absent(seen));
            self.migrate_run(object, run, moved, buffer);
            run = ObjectRange { start: page.add(1), end: page.add(1) };
        }
        self.migrate_run(object, run, moved, buffer);
    }

    /// Moves a run of locked, cached pages of one block, and unlocks them as they were.
    fn migrate_run(
        &self,
        object: &VmObject,
        run: ObjectRange,
        moved: &mut Migrated,
        buffer: &mut IoBuffer,
    ) {
        if run.is_empty() {
            return;
        }
        let (mmu, offset) = (self.space.mmu(), run.start.offset());
        // Before they are copied: a write in between would be lost.
        self.try_to_unmap(object, run, Wait::Yes);
        let bytes = buffer.pages(run.len());
        if mmu.memfd_read(object.memfd, offset, bytes).is_ok() {
            // Where this is refused some may be gone all the same.
            let _ = mmu.memfd_punch(object.memfd, run);
            // Their memory was given back a moment ago: sooner or later there is some again.
            while mmu.memfd_write(object.memfd, offset, bytes).is_err() {
                mmu.relax();
            }
            moved.success += run.len();
        } else {
            moved.failed += run.len();
        }
        self.unlock_pages(object, run);
    }
}
