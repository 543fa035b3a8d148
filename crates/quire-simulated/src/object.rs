//! Objects on the simulated MMU: memfds as vectors of pages with holes, and what shows them.
//!
//! A page of a memfd is a physical page that belongs to the memfd, however often it is mapped. To
//! unmap it somewhere leaves it where it is. What the kernel would answer is answered here
//! (`tests/conformance_objects.rs` holds one against the other); what would spoil an object without
//! a word is a panic: bytes behind a memfd's end, which would make it longer, a part of a page that
//! is not there, a read of a hole, a memfd that is closed while something shows it.

use super::{Entry, Physical, Planted, Simulated, State};
use quire::mmu::object::{Alias, InspectObjects, Memfd, ObjectMmu, Shown};
use quire::mmu::{Done, Mmu, Prot, Protection, Refusal};
use quire::sys::Errno;
use quire::units::{ObjectPage, ObjectRange, PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange};

/// The pages of a memfd; 0 is a hole.
pub(super) type MemfdContent = Vec<Physical>;

impl State {
    fn memfd(&mut self, memfd: Memfd) -> &mut MemfdContent {
        let content = self.memfds.get_mut(memfd.number as usize).and_then(Option::as_mut);
        content.unwrap_or_else(|| panic!("{memfd:?} is not open"))
    }

    /// The physical page that a page of the arena would show; `None` behind the memfd's end.
    fn shown(&self, shown: Shown) -> Option<Physical> {
        let content = self.memfds[shown.memfd.number as usize].as_ref()?;
        content.get(shown.page.index()).copied()
    }

    pub(super) fn is_behind_end(&self, shown: Shown) -> bool {
        self.shown(shown).is_none()
    }

    /// Unmaps a physical page wherever it is mapped; write protection stays behind as a mark.
    fn unmap_everywhere(&mut self, physical: Physical) {
        let entries = self.entries.iter_mut();
        for entry in entries.filter(|entry| entry.physical == physical) {
            entry.physical = 0;
        }
    }
}

impl Simulated {
    /// Takes a page out of a memfd and out of every mapping.
    fn drop_from_memfd(&self, state: &mut State, memfd: Memfd, page: ObjectPage) {
        let Some(place) = state.memfd(memfd).get_mut(page.index()) else { return };
        let physical = core::mem::take(place);
        if physical != 0 {
            state.unmap_everywhere(physical);
            self.free(state, physical);
        }
    }

    /// The pages show no object any more.
    pub(super) fn hide_object(&self, pages: PageRange) {
        let mut state = self.state();
        for page in pages.pages() {
            let entry = &mut state.entries[page.index()];
            if entry.shows.is_some() {
                *entry = Entry { prot: entry.prot, ..Entry::default() };
            }
        }
    }

    /// The kernel swaps the page of a memfd out that is mapped at `page`: it is mapped nowhere then,
    /// and cached as before. Says whether there was one.
    pub fn swap_out(&self, page: PageNum) -> bool {
        let mut state = self.state();
        let entry = state.entries[page.index()];
        let is_there = entry.shows.is_some() && entry.physical != 0;
        if is_there {
            state.unmap_everywhere(entry.physical);
        }
        is_there
    }

    /// Pages of all memfds until their ends, cached or not.
    pub fn memfd_lengths(&self) -> usize {
        self.state().memfds.iter().flatten().map(Vec::len).sum()
    }

    /// Runs `act` with each page of a memfd that bytes lie in, and the part of them that does.
    fn each_part(
        &self,
        offset: u64,
        bytes: usize,
        mut act: impl FnMut(&mut State, ObjectPage, usize, core::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < bytes {
            let at = offset as usize + done;
            let within = at % PAGE_SIZE;
            let part = (PAGE_SIZE - within).min(bytes - done);
            let page = ObjectPage((at >> PAGE_SHIFT) as u64);
            act(&mut self.state(), page, within, done..done + part);
            done += part;
            self.next_page();
        }
    }
}

impl ObjectMmu for Simulated {
    fn memfd_open(&self, _pages_max: usize) -> Result<Memfd, Errno> {
        self.enter();
        let mut state = self.state();
        let free = state.memfds.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            state.memfds.push(None);
            state.memfds.len() - 1
        });
        state.memfds[number] = Some(Vec::new());
        Ok(Memfd { number: number as i32, alias: Alias::default() })
    }

    fn memfd_close(&self, memfd: Memfd) {
        self.enter();
        let mut state = self.state();
        let is_shown =
            state.entries.iter().any(|entry| entry.shows.is_some_and(|shown| shown.memfd == memfd));
        assert!(!is_shown, "{memfd:?} is closed while it is mapped");
        for physical in core::mem::take(state.memfd(memfd)) {
            if physical != 0 {
                self.free(&mut state, physical);
            }
        }
        state.memfds[memfd.number as usize] = None;
    }

    fn memfd_resize(&self, memfd: Memfd, pages: usize) -> Result<(), Errno> {
        self.enter();
        let mut state = self.state();
        let before = state.memfd(memfd).len();
        for page in pages..before {
            self.drop_from_memfd(&mut state, memfd, ObjectPage(page as u64));
        }
        state.memfd(memfd).resize(pages, 0);
        if pages < before {
            // A punch leaves marks where they are; the end takes them along.
            let is_behind = |shown: Shown| shown.memfd == memfd && shown.page.index() >= pages;
            for entry in state.entries.iter_mut().filter(|it| it.shows.is_some_and(is_behind)) {
                entry.is_poisoned = false;
            }
        }
        drop(state);
        self.step();
        Ok(())
    }

    fn memfd_write(&self, memfd: Memfd, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.enter();
        self.each_part(offset, bytes.len(), |state, page, within, part| {
            let place = state.memfd(memfd).get(page.index()).copied();
            let there = place.unwrap_or_else(|| panic!("{page:?} is behind the end of {memfd:?}"));
            let physical = if there == 0 { self.allocate(state) } else { there };
            assert!(there != 0 || part.len() == PAGE_SIZE, "{page:?} of {memfd:?} is a hole");
            // SAFETY: the memfd's page; the caller holds its page lock, and programs run by turns.
            let place = unsafe { &mut *self.bytes(physical) };
            place[within..within + part.len()].copy_from_slice(&bytes[part]);
            state.memfd(memfd)[page.index()] = physical;
        });
        Ok(())
    }

    fn memfd_read(&self, memfd: Memfd, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.enter();
        let mut result = Ok(());
        self.each_part(offset, into.len(), |state, page, within, part| {
            let Some(physical) = state.memfd(memfd).get(page.index()).copied() else {
                result = Err(Errno::INVAL);
                return;
            };
            assert!(physical != 0, "{page:?} of {memfd:?} is a hole");
            // SAFETY: the memfd's page; a program may be writing it, by turns.
            let place = unsafe { &*self.bytes(physical) };
            into[part.clone()].copy_from_slice(&place[within..within + part.len()]);
        });
        result
    }

    fn memfd_punch(&self, memfd: Memfd, pages: ObjectRange) -> Result<(), Errno> {
        self.enter();
        for page in pages.pages() {
            self.drop_from_memfd(&mut self.state(), memfd, page);
            self.next_page();
        }
        Ok(())
    }

    fn map_object(
        &self,
        pages: PageRange,
        memfd: Memfd,
        first: ObjectPage,
        prot: Prot,
    ) -> Result<(), Errno> {
        self.enter();
        // What was there goes with its marks, as under MAP_FIXED.
        self.reserve_again(pages);
        let mut state = self.state();
        for (at, page) in pages.pages().enumerate() {
            let shown = Shown { memfd, page: first.add(at) };
            state.entries[page.index()] = Entry { prot, shows: Some(shown), ..Entry::default() };
        }
        drop(state);
        self.step();
        Ok(())
    }

    fn map_cached(&self, pages: PageRange, protection: Protection) -> Done {
        self.enter();
        let is_forgotten = self.settings.planted == Some(Planted::ForgottenProtection);
        let done = self.each(pages, |state, page, _| {
            let entry = state.entries[page.index()];
            let Some(shown) = entry.shows else { return Some(Refusal::Unmapped) };
            let Some(physical) = state.shown(shown) else { return Some(Refusal::Unmapped) };
            if physical == 0 {
                return Some(Refusal::Hole);
            }
            if entry.physical != 0 {
                return Some(Refusal::Exists);
            }
            let is_write_protected = protection == Protection::WriteProtected && !is_forgotten;
            // Whatever mark there was goes.
            state.entries[page.index()] =
                Entry { physical, is_write_protected, is_poisoned: false, ..entry };
            None
        });
        // The kernel wakes once it is done with all of them.
        self.answer(&mut self.state(), PageRange::new(pages.start, done.pages));
        done
    }
}

impl InspectObjects for Simulated {
    fn shown_at(&self, page: PageNum) -> Option<Shown> {
        self.state().entries[page.index()].shows
    }

    fn is_in_memfd(&self, memfd: Memfd, page: ObjectPage) -> bool {
        self.state().shown(Shown { memfd, page }).is_some_and(|physical| physical != 0)
    }

    fn memfd_pages(&self) -> usize {
        let state = self.state();
        state.memfds.iter().flatten().flatten().filter(|&&physical| physical != 0).count()
    }
}
