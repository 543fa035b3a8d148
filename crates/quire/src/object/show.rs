//! What a window shows: its object's own home, or the large frame that its block lives in.
//!
//! A window that holds a block of its mapping whole can show either. It is changed by the fault
//! that next maps something of it, under the window's lock and the locks of the pages to be
//! mapped, which pin where they live; nothing is mapped in a window that shows anything else than
//! where its block lives. So when a block moves nobody looks for its windows: it was unmapped
//! everywhere, and they are seen to when they are next used.
//!
//! A block that is mapped whole and cannot be written is *whole* in its window: the kernel maps
//! what is missing there by itself, and reports nothing. Before anything of the block goes, the
//! window is concealed; every walk of the reverse map does so first.
//!
//! Each window that shows a large frame may cost the kernel two mappings, of which a process has not
//! that many. So there is a bound: beyond half of it windows show their homes again as soon as
//! their blocks leave their frames, and at the bound blocks come home instead. Where the kernel has
//! none more, because the application has used them up, that is the bound: what was shown of long
//! ago shows its home again, for which the MMU needs none more than it has.
//!
//! Locks: the window's is held; page locks of what is to be mapped.

use super::large::LargeFrame;
use super::window::Mapped;
use super::{Object, Objects};
use crate::mmu::Prot;
use crate::mmu::object::ObjectMmu;
use crate::space::vma::Vma;
use crate::sys::Errno;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, ObjectPage, ObjectRange, PageNum, PageRange};

/// The block of the arena that holds a page.
fn block_of(page: PageNum) -> PageRange {
    PageRange::new(page.align_down(BLOCK_ORDER), BLOCK_PAGES)
}

/// What came of making a window show where a block lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shown {
    /// It does.
    Yes,
    /// All of it is mapped by now.
    Whole,
    /// It cannot: the block must come home first.
    Cannot,
    /// The kernel refuses.
    Refused(Errno),
}

impl<M: ObjectMmu> Objects<M> {
    /// Whether a window can show where the block of `at` lives, as far as can be told without a
    /// page's lock.
    pub(super) fn can_show(
        &self,
        object: &Object,
        vma: &Vma,
        window: &Mapped,
        page: PageNum,
    ) -> bool {
        let frame = object.block(vma.attributes.backing.object_page(page)).frame();
        frame.0 == window.shown
            || frame == LargeFrame::NONE
            || self.can_show_frames(vma, window, page)
    }

    /// Whether a window can show any large frame.
    fn can_show_frames(&self, vma: &Vma, window: &Mapped, page: PageNum) -> bool {
        holds_block(vma, page) && (window.shown != 0 || self.large.may_show_more())
    }

    /// Has a window show where the locked, cached pages `run` live, none of which is mapped.
    pub(super) fn show(
        &self,
        object: &Object,
        vma: &Vma,
        window: &mut Mapped,
        run: PageRange,
    ) -> Shown {
        let backing = vma.attributes.backing;
        let frame = object.block(backing.object_page(run.start)).frame();
        debug_assert!(!window.is_whole, "what is whole has nothing left to map");
        let block = block_of(run.start);
        let is_whole = frame != LargeFrame::NONE && run == block;
        if frame.0 == window.shown && !is_whole {
            return Shown::Yes;
        }
        let is_new = frame != LargeFrame::NONE && frame.0 != window.shown;
        if is_new && !self.can_show_frames(vma, window, run.start) {
            return Shown::Cannot;
        }
        debug_assert!(
            frame.0 == window.shown || window.count() == 0,
            "it was unmapped when it moved"
        );
        let prot = vma.attributes.prot;
        let mmu = self.space.mmu();
        if is_whole && !prot.is_writable() {
            let first = frame.pages().start;
            if mmu.show_whole(block, self.large.home(), first, prot).is_ok() {
                self.large.set_shown(window, frame);
                window.is_whole = true;
                block.pages().for_each(|page| window.set(page, false));
                return Shown::Whole;
            }
        }
        if frame.0 == window.shown {
            return Shown::Yes;
        }
        let at = backing.object_page(block.start);
        let result = if frame == LargeFrame::NONE {
            mmu.show(block, object.home, at, prot)
        } else {
            mmu.show_apart(block, self.large.home(), frame.pages().start, prot)
        };
        match result {
            Ok(()) => {
                self.large.set_shown(window, frame);
                Shown::Yes
            }
            Err(Errno::NOMEM) if frame != LargeFrame::NONE => {
                self.show_no_frame(object, prot, block, at, window)
            }
            Err(errno) => Shown::Refused(errno),
        }
    }

    /// The kernel has no mapping more: the block can come home, once the window shows that.
    fn show_no_frame(
        &self,
        object: &Object,
        prot: Prot,
        block: PageRange,
        at: ObjectPage,
        window: &mut Mapped,
    ) -> Shown {
        if window.shown != 0
            && let Err(errno) = self.space.mmu().show(block, object.home, at, prot)
        {
            return Shown::Refused(errno);
        }
        self.large.set_shown(window, LargeFrame::NONE);
        self.large.show_no_more();
        Shown::Cannot
    }

    /// Has the window of `part`, which shows `pages`, show the object's own home, where an access
    /// behind the end is a SIGBUS. As a rule nothing is mapped in it, or nothing happens.
    pub(super) fn show_home(
        &self,
        object: &Object,
        prot: Prot,
        pages: ObjectRange,
        window: &mut Mapped,
        part: PageRange,
    ) -> Result<(), Errno> {
        if window.shown == 0 || window.count() > 0 {
            return Ok(());
        }
        let block = block_of(part.start);
        // What shows a large frame is one block of one mapping.
        let first = ObjectPage(pages.start.0 - (part.start.0 - block.start.0));
        self.space.mmu().show(block, object.home, first, prot)?;
        self.large.set_shown(window, LargeFrame::NONE);
        Ok(())
    }

    /// What a window shows whole is unmapped, and accesses are reported again; `false`: there was
    /// no memory for it.
    pub(super) fn conceal(&self, window: &mut Mapped, page: PageNum) -> bool {
        if !window.is_whole {
            return true;
        }
        let block = block_of(page);
        if self.space.mmu().conceal(block).is_err() {
            return false;
        }
        window.is_whole = false;
        window.clear(block);
        true
    }
}

/// Whether the window of a page is one block of one mapping.
fn holds_block(vma: &Vma, page: PageNum) -> bool {
    let block = block_of(page);
    let first = vma.attributes.backing.object_page(block.start);
    vma.range.intersect(block) == block && first.index().is_multiple_of(BLOCK_PAGES)
}
