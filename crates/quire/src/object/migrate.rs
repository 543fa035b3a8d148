//! Cached pages get new memory, taken by the calling thread: of its NUMA node, and next to each other.
//!
//! A run of a block's pages is locked and unmapped everywhere, copied into a buffer, given back to
//! the kernel, and written into fresh memory of the memfd. What is pinned stays where it is: somebody
//! may hold that very memory. So do poisoned pages, and those that somebody has locked.
//!
//! Locks: page locks of a run, tried; then `i_mmap` shared and the windows', by the walk that unmaps.

use core::sync::atomic::Ordering;

use super::requests::IoBuffer;
use super::rmap::Wait;
use super::{Object, Objects};
use crate::control::Event;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Snapshot, State};
use crate::scratch::Scratch;
use crate::units::{ObjectPage, ObjectRange};

/// What became of pages that were to get new memory.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Migrated {
    /// Pages that have it.
    pub success: usize,
    /// Pages that were left where they are.
    pub failed: usize,
}

impl<M: ObjectMmu> Objects<M> {
    /// Gives every cached page of an object new memory.
    pub fn migrate(
        &self,
        object: &Object,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Migrated {
        let budget = self.space.budget();
        let mut moved = Migrated::default();
        // A page of room: memory that is given back and taken again must not be the last there is.
        if (0..8).any(|_| self.make_room(1, Some(scratch)) && self.try_charge(1)) {
            for block in object.range().by_block() {
                // Relaxed: a page that comes just now has new memory.
                if object.block(block.start).is_used.load(Ordering::Relaxed) != 0 {
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
        object: &Object,
        block: ObjectRange,
        moved: &mut Migrated,
        buffer: &mut IoBuffer,
    ) {
        let mut run = ObjectRange { start: block.start, end: block.start };
        for page in block.pages() {
            let seen = object.word(page).load();
            if self.lock_movable(object, page) {
                run.end = page.add(1);
                continue;
            }
            moved.failed += usize::from(seen.is_locked() || seen.state() != State::None);
            self.migrate_run(object, run, moved, buffer);
            run = ObjectRange { start: page.add(1), end: page.add(1) };
        }
        self.migrate_run(object, run, moved, buffer);
    }

    fn lock_movable(&self, object: &Object, page: ObjectPage) -> bool {
        let word = object.word(page);
        let is_movable =
            |word: Snapshot| word.state() == State::Cached && !word.has(Flags::MLOCKED);
        if !is_movable(word.load()) {
            return false;
        }
        let Some(old) = word.try_lock() else { return false };
        if !is_movable(old) {
            self.space.unlock_word(word);
        }
        is_movable(old)
    }

    /// Moves a run of locked, cached pages of one block, and unlocks them as they were.
    fn migrate_run(
        &self,
        object: &Object,
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
        self.unlock_words(object, run);
    }
}
