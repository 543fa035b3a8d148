//! Fault-around: what can be had at once around a read fault is mapped with it.
//!
//! How much is mapped around is the mapping's choice, changeable at any time: an order from 0 to 9, or auto,
//! which follows the object's streams and how many faults the window has seen.

use super::pages::Locked;
use super::window::View;
use super::{Objects, VmObject};
use crate::control::Event;
use crate::fault::order::Guess;
use crate::mmu::object::ObjectMmu;
use crate::mmu::{Protection, Refusal};
use crate::page::{Flags, Snapshot, State};
use crate::units::{BLOCK_ORDER, ObjectPage, PageNum, PageRange};

impl<M: ObjectMmu> Objects<M> {
    /// Maps what can be had at once of the arena's pages `around`. What is not cached, locked, being
    /// written back, behind the end, or mapped already is skipped. Only `asked` counts as used.
    pub(super) fn map_pages(&self, view: &mut View<'_>, around: PageRange, asked: PageNum) {
        let mut run = PageRange { start: around.start, end: around.start };
        for page in around.pages() {
            if !view.window.is_present(page)
                && let Some(locked) = self.lock_mappable(view.object, view.object_page(page))
            {
                locked.leave_locked();
                run.end = page.add(1);
                continue;
            }
            self.map_run(view, run, asked);
            run = PageRange { start: page.add(1), end: page.add(1) };
        }
        self.map_run(view, run, asked);
    }

    /// Locks a page that can be mapped at once.
    pub(super) fn lock_mappable(&self, object: &VmObject, at: ObjectPage) -> Option<Locked<'_, M>> {
        if at.index() >= object.pages_max {
            return None;
        }
        // A look before: around a fault at random little is cached, and a lock that is taken for
        // nothing costs as much as twenty looks. The end is looked at page by page, and under the
        // page's lock: a change that shortens the object does so before it takes these locks.
        let may_be_mapped =
            |word: Snapshot| word.state() == State::Cached && !word.has(Flags::WRITEBACK);
        self.try_lock_if(object, at, may_be_mapped).filter(|_| at.index() < object.pages())
    }

    /// Maps a run of locked, cached pages and unlocks them; each enters the window, which is the
    /// reverse map's word for it, in the same step.
    fn map_run(&self, view: &mut View<'_>, run: PageRange, asked: PageNum) {
        if run.is_empty() {
            return;
        }
        let mut at = run.start;
        let mut mapped = 0;
        while at < run.end {
            // Whatever the mapping's rights: the first write must be noticed.
            let rest = PageRange { start: at, end: run.end };
            let done = self.space.mmu().map_cached(rest, Protection::WriteProtected);
            mapped += done.pages;
            let is_there = done.refusal == Some(Refusal::Exists);
            let there = PageRange::new(at, done.pages + usize::from(is_there));
            there.pages().for_each(|page| view.window.set(page, Protection::WriteProtected));
            at = there.end;
            if done.refusal.is_some() && !is_there {
                break;
            }
        }
        for page in run.pages() {
            let locked = self.adopt(view.object, view.object_page(page));
            if page == asked && page < at {
                locked.set_flags(Flags::ACCESSED);
            } else {
                locked.unlock();
            }
        }
        self.space.budget().count(Event::MapCached, mapped);
    }

    /// What is mapped around a read fault: the naturally aligned block of 2^order pages that holds
    /// it, cut to its VMA, its window, and the object.
    pub(super) fn around(&self, view: &View<'_>, page: PageNum, guess: Guess) -> PageRange {
        let backing = view.vma.attributes.backing;
        let order = self.mappings.order_around(backing.mapping);
        let order = order.unwrap_or_else(|| guess.order.max(order_by_density(view.window.faults)));
        let around = PageRange::new(page.align_down(order), 1 << order);
        let end = PageNum((view.object.pages() as u64).wrapping_sub(backing.delta));
        around.intersect(view.bounds(page)).intersect(PageRange { start: PageNum(0), end })
    }
}

/// How much is mapped around where the window has seen so many faults: the first few of a window
/// say nothing, and one page per window costs nothing more than itself; where they go on, the
/// window is wanted as a whole.
fn order_by_density(faults: u32) -> u32 {
    [0, 0, 2, 4, 6].get(faults as usize).copied().unwrap_or(BLOCK_ORDER)
}
