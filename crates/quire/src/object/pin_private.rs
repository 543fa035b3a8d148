//! Pins of private mappings.
//!
//! A pinned page's word in the arena has MLOCKED, as under mlock, and reclaim passes it by. It is
//! writable unless it is CLEAN, so that one that is pinned for write has that ended first. How often
//! it is pinned is in a table over the arena. What is pinned is the mapping's own: it stays when the
//! object is cut before it.

use core::sync::atomic::Ordering;

use super::pin::{Count, PinError, PinFor};
use super::requests::IoBuffer;
use super::{Objects, ReadError};
use crate::mmu::Access;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, State};
use crate::scratch::Scratch;
use crate::space::vma::Kind;
use crate::sys::Errno;
use crate::units::{PageNum, PageRange};

impl<M: ObjectMmu> Objects<M> {
    /// The same as [`Self::pin`] for a private mapping.
    pub fn pin_private(
        &self,
        range: PageRange,
        what: PinFor,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), PinError> {
        if range.len() > self.pins_max() {
            return Err(PinError::TooMuch);
        }
        let mut done = range.start;
        let result = range.pages().try_for_each(|page| {
            self.pin_private_page(page, what, scratch, buffer)?;
            done = page.add(1);
            Ok(())
        });
        if result.is_err() {
            self.unpin_private(PageRange { start: range.start, end: done }, what);
        }
        result
    }

    fn pin_private_page(
        &self,
        page: PageNum,
        what: PinFor,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), PinError> {
        let (backing, object) =
            self.backing_at(page, Kind::Private).ok_or(PinError::Refused(Errno::FAULT))?;
        let at = backing.object_page(page);
        loop {
            self.populate_private(PageRange::new(page, 1), scratch, buffer)?;
            let locked = self.space.lock_page_killable(page, buffer.kill());
            let locked = locked.map_err(ReadError::at(at.offset()))?;
            let old = locked.content();
            let is_protected = what == PinFor::Writing
                && (old.has(Flags::CLEAN) || old.has(Flags::WRITE_PROTECTED));
            if old.state() == State::Mapped && !is_protected {
                let count = self.private_pins(page);
                self.pins.take(&count, self.pins_max(), &self.pins.private_pages)?;
                count.add(what);
                locked.set_flags(Flags::MLOCKED);
                return Ok(());
            }
            locked.unlock();
            if is_protected && old.state() == State::Mapped {
                // As a write would: it is not CLEAN any more then.
                self.handle_fault(page, Access::WriteProtected, scratch);
                continue;
            }
            if old.state() == State::None && at.index() >= object.pages() {
                return Err(PinError::BehindEnd(at.offset()));
            }
        }
    }

    fn private_pins(&self, page: PageNum) -> Count<'_> {
        Count(&self.pins.privates[page.index()])
    }

    /// Lets pages go that [`Self::pin_private`] has pinned.
    pub fn unpin_private(&self, range: PageRange, what: PinFor) {
        for page in range.pages() {
            let locked = self.space.lock_page(page);
            let count = self.private_pins(page);
            count.sub(what);
            if count.all() == 0 {
                self.pins.give_back(1);
                self.pins.private_pages.fetch_sub(1, Ordering::Relaxed);
                locked.clear_flags(Flags::MLOCKED);
            }
        }
    }

    /// A private mapping is at another place, or shorter, with pins that were never let go: those of
    /// pages that are still there have gone with them, as the flags in their words have.
    pub(super) fn move_private_pins(&self, from: PageRange, to: PageRange) {
        // Relaxed, all of it: no thread pins what is being changed.
        if self.pins.private_pages.load(Ordering::Relaxed) == 0 {
            return;
        }
        let kept = from.len().min(to.len());
        if from.start != to.start {
            let counts = &self.pins.privates;
            for (from, to) in from.pages().zip(to.pages()) {
                let count = counts[from.index()].swap(0, Ordering::Relaxed);
                counts[to.index()].store(count, Ordering::Relaxed);
            }
        }
        self.forget_private_pins(PageRange { start: from.start.add(kept), end: from.end });
    }

    /// A private mapping goes, with pins that were never let go.
    pub(super) fn forget_private_pins(&self, range: PageRange) {
        // Relaxed: no thread pins what is being unmapped.
        if self.pins.private_pages.load(Ordering::Relaxed) == 0 {
            return;
        }
        let counts = &self.pins.privates[range.start.index()..range.end.index()];
        let pinned = counts.iter().filter(|count| count.swap(0, Ordering::Relaxed) != 0).count();
        self.pins.give_back(pinned);
        self.pins.private_pages.fetch_sub(pinned, Ordering::Relaxed);
    }
}
