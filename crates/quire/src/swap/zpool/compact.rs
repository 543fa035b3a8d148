//! Compaction: sparse slabs are emptied by moving their blobs into fuller ones.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::slab::{CLASS, CLASSES, ClassLists, Slab};
use super::{Handle, Payer, Spot, Zpool};
use crate::sys::memory::Table;
use crate::units::PageNum;

impl Zpool {
    /// Empties slabs whose blobs fit elsewhere, and gives slabs that are empty back. Tries at
    /// most `moves_max` blobs. Returns the pages given back.
    ///
    /// `relocate(owner, old, new)` tries the owner's page lock; if it has it and the page's word
    /// still says `old`, it sets `new` and returns true. `false` (the page is locked, or has changed)
    /// leaves the blob where it is. It is called with no lock of the pool held.
    pub fn compact(
        &self,
        moves_max: usize,
        mut relocate: impl FnMut(PageNum, Handle, Handle) -> bool,
        account: &impl Payer,
    ) -> usize {
        // Acquire pairs with the Release below: the `compact_next` of the last compaction is seen.
        if self.compacting.swap(true, Acquire) {
            return 0;
        }
        let first = self.compact_next.load(Relaxed);
        let (mut pages, mut moves) = (0, moves_max);
        for class in (first..first + CLASSES).map(|class| class % CLASSES) {
            self.compact_next.store(class, Relaxed);
            pages += self.give_back_all(class, ClassLists::take_empty, account);
            while moves > 0 {
                match self.empty_one(class, &mut moves, &mut relocate, account) {
                    0 => break,
                    given => pages += given,
                }
            }
            if moves == 0 {
                break;
            }
        }
        self.empty_sealed(&mut moves, &mut relocate, account);
        self.compacting.store(false, Release);
        pages
    }

    /// Pages that slabs of ours would not need if the blobs of each class lay together.
    pub fn fragments(&self) -> usize {
        (0..CLASSES).map(|class| self.classes[class].0.lock().fragments()).sum()
    }

    /// Gives back the slabs of a class that `take` takes out of it. Returns the pages given back.
    pub(super) fn give_back_all(
        &self,
        class: usize,
        take: fn(&mut ClassLists, &Table<Slab>) -> Option<u32>,
        account: &impl Payer,
    ) -> usize {
        let mut pages = 0;
        loop {
            // A statement of its own: the class's lock is dropped before the kernel is called.
            let empty = take(&mut self.classes[class].0.lock(), &self.slabs);
            let Some(slot) = empty else { return pages };
            pages += self.give_back(slot, class, account);
        }
    }

    /// Empties the sparsest slab of a class. Returns the pages given back, 0 if it could not.
    fn empty_one(
        &self,
        class: usize,
        moves: &mut usize,
        relocate: &mut impl FnMut(PageNum, Handle, Handle) -> bool,
        account: &impl Payer,
    ) -> usize {
        let isolated = self.classes[class].0.lock().isolate_sparsest(&self.slabs);
        let Some(slot) = isolated else {
            return 0;
        };
        let mut pages = 0;
        for index in 0..CLASS[class].objects {
            pages += self.move_out(Spot { slot, class, index }, moves, relocate, account);
            if *moves == 0 {
                break;
            }
        }
        let is_empty = self.classes[class].0.lock().end_isolation(&self.slabs, slot);
        if is_empty {
            pages += self.give_back(slot, class, account);
        }
        pages
    }

    /// Moves a blob into the fullest slab, if there is one and its page lets it go. Returns the pages
    /// given back.
    pub(super) fn move_out(
        &self,
        old: Spot,
        moves: &mut usize,
        relocate: &mut impl FnMut(PageNum, Handle, Handle) -> bool,
        account: &impl Payer,
    ) -> usize {
        let Some((owner, new)) = self.copy_out(old) else { return 0 };
        let (Some(from), Some(to)) = (old.handle(), new.handle()) else { return 0 };
        let dead = if relocate(owner, from, to) { old } else { new };
        *moves -= 1;
        self.free_spot(dead, account)
    }

    /// Copies a blob into the fullest slab. `None` where there is no blob, or no room.
    fn copy_out(&self, from: Spot) -> Option<(PageNum, Spot)> {
        let mut lists = self.classes[from.class].0.lock();
        let slab = &self.slabs[from.slot as usize];
        if slab.class() != Some(from.class) || !slab.is_live(from.index) {
            return None;
        }
        let header = self.header(from)?;
        let bytes = self.bytes(from, header.length)?;
        let slot = lists.fullest()?;
        let index = lists.take(&self.slabs, slot)?;
        let to = Spot { slot, class: from.class, index };
        // The old place has room for as many bytes, so this one of the same class has too.
        let target = self.bytes(to, header.length)?;
        // SAFETY: both places are of this length at least (`bytes`). The old one holds a live blob,
        // which is written and freed under the lock of the class only, and that is held; the new
        // one was free until `take`, so they differ.
        unsafe { target.copy_from_nonoverlapping(bytes, header.length) };
        self.set_header(to, header);
        Some((header.owner, to))
    }
}
