//! What pages have besides their mappings, let go of together: packed pages that follow each
//! other in a class under one lock, places in a segment of the swap file by one count, and what is wanted by another.
//!
//! The pages stay locked until it is gone, and their words forget it right after.

use super::VmSpace;
use crate::mmu::{FrameId, FrameRun, Mmu};
use crate::page::{Flags, Snapshot, State, Stored};
use crate::swap::file::{Location, Segment};
use crate::swap::zpool::FREED_AT_ONCE;

/// Gathered from the words of locked pages; nothing is let go of before [`VmSpace::release`].
pub(crate) struct Releases {
    /// Pages that had content.
    wanted: usize,
    /// Of those in memory, those that had a packed copy.
    copies: usize,
    /// Neighbouring frames of a window in limbo.
    frames: Option<FrameRun>,
    /// Places in one segment of the swap file.
    places: Option<(Segment, u32)>,
    /// Handles of packed pages, and how many.
    packed: [u32; FREED_AT_ONCE],
    count: usize,
}

impl Releases {
    pub const NONE: Releases = Releases {
        wanted: 0,
        copies: 0,
        frames: None,
        places: None,
        packed: [0; FREED_AT_ONCE],
        count: 0,
    };
}

impl<M: Mmu> VmSpace<M> {
    /// Adds all that a page has, which reads as zeros from then on.
    pub(crate) fn add_backing(&self, releases: &mut Releases, before: Snapshot) {
        match before.state() {
            State::None => return,
            State::Limbo => {
                let frame = FrameId(before.payload());
                match &mut releases.frames {
                    Some(run) if run.is_followed_by(frame) => run.len += 1,
                    frames => {
                        let last = frames.replace(FrameRun { start: frame, len: 1 });
                        last.into_iter().for_each(|run| self.drop_limbo(run));
                    }
                }
            }
            _ => {
                releases.copies += usize::from(before.has(Flags::IN_POOL));
                before.stored().into_iter().for_each(|stored| self.add_stored(releases, stored));
            }
        }
        releases.wanted += 1;
    }

    /// Adds what a page has in store.
    pub(crate) fn add_stored(&self, releases: &mut Releases, stored: Stored) {
        match stored {
            Stored::Pool(handle) => {
                if releases.count == FREED_AT_ONCE {
                    self.drop_packed_of(releases);
                }
                releases.packed[releases.count] = handle;
                releases.count += 1;
            }
            Stored::File(location) => {
                let Some(segment) = Location::new(location).map(Location::segment) else { return };
                match &mut releases.places {
                    Some((last, count)) if *last == segment => *count += 1,
                    last => {
                        let before = last.replace((segment, 1));
                        before.into_iter().for_each(|one| self.swap.free_locations(one.0, one.1));
                    }
                }
            }
            Stored::Nothing | Stored::Same(_) => {}
        }
    }

    /// Lets go of all of it.
    pub(crate) fn release(&self, mut releases: Releases) {
        releases.frames.take().into_iter().for_each(|run| self.drop_limbo(run));
        let places = releases.places.take();
        places.into_iter().for_each(|one| self.swap.free_locations(one.0, one.1));
        self.drop_packed_of(&mut releases);
        if releases.copies > 0 {
            self.swap.forget_copies(releases.copies);
        }
        self.budget.add_wanted(-(releases.wanted as isize));
    }

    fn drop_packed_of(&self, releases: &mut Releases) {
        let packed = &releases.packed[..core::mem::take(&mut releases.count)];
        // SAFETY: their pages are locked, and the words are about to forget them.
        unsafe { self.swap.zpool.free_all(packed, &self.budget) };
    }

    fn drop_limbo(&self, run: FrameRun) {
        self.frames.leave_limbo(run);
        self.frames.put(run);
    }
}
