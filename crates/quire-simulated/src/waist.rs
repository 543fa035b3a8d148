//! The calls of the waist, as the kernel answers them.
//!
//! What they stand on (the page table, faults and their answers, pins, refusals) is in
//! [`super::Simulated`].

use core::sync::atomic::{AtomicU64, Ordering};

use super::{Entry, Planted, Simulated, Wait, baton};
use quire::mmu::{Done, FrameId, FrameRun, Holes, Mmu, Prot, Protection, Refusal, Sharer};
use quire::page::{Futexes, Kill, Parking as _};
use quire::sys::thread::ThreadId;
use quire::units::{PAGE_SIZE, PageNum, PageRange};

impl Mmu for Simulated {
    fn move_in(&self, pages: PageRange, frames: FrameId) -> Done {
        self.enter();
        if !self.is_movable(&self.state(), pages) {
            return Done { pages: 0, refusal: Some(Refusal::Unmapped) };
        }
        self.each(pages, |state, page, at| {
            let place = frames.add(at).0 as usize;
            let entry = state.entries[page.index()];
            if entry.physical != 0 || entry.is_poisoned {
                return Some(Refusal::Exists);
            }
            if state.places[place] == 0 {
                return Some(Refusal::Hole);
            }
            if self.is_refused(state) {
                return Some(Refusal::Busy);
            }
            let physical = core::mem::take(&mut state.places[place]);
            state.entries[page.index()] =
                Entry { physical, is_write_protected: false, is_shared: false, ..entry };
            self.answer(state, PageRange::new(page, 1));
            None
        })
    }

    fn move_out(&self, pages: PageRange, frames: FrameId, holes: Holes) -> Done {
        self.enter();
        if !self.is_movable(&self.state(), pages) {
            return Done { pages: 0, refusal: Some(Refusal::Unmapped) };
        }
        let stale = self.plant_lost_write(pages);
        self.each(pages, |state, page, at| {
            let place = frames.add(at).0 as usize;
            let entry = state.entries[page.index()];
            assert_eq!(state.places[place], 0, "frame {place} is used while it holds content");
            if entry.is_poisoned {
                return Some(Refusal::Hole);
            }
            if entry.physical == 0 {
                return (holes == Holes::Refuse).then_some(Refusal::Hole);
            }
            let refusal = self.why_busy(state, entry);
            if refusal.is_some() {
                return refusal;
            }
            state.places[place] = entry.physical;
            state.entries[page.index()] = Entry { prot: entry.prot, ..Entry::default() };
            if let Some(Some(bytes)) = stale.get(at) {
                // SAFETY: the page was just taken away; no other thread has it.
                unsafe { *self.bytes(entry.physical) = *bytes };
            }
            None
        })
    }

    fn move_within(&self, from: PageRange, to: PageNum) -> Done {
        self.enter();
        let target = PageRange::new(to, from.len());
        if !self.is_movable(&self.state(), from) || !self.is_movable(&self.state(), target) {
            return Done { pages: 0, refusal: Some(Refusal::Unmapped) };
        }
        self.each(from, |state, page, at| {
            let to = to.add(at);
            let (source, target) = (state.entries[page.index()], state.entries[to.index()]);
            if target.physical != 0 || target.is_poisoned {
                return Some(Refusal::Exists);
            }
            if source.physical == 0 {
                return Some(Refusal::Hole);
            }
            let refusal = self.why_busy(state, source);
            if refusal.is_some() {
                return refusal;
            }
            state.entries[to.index()] = Entry { physical: source.physical, ..target };
            state.entries[page.index()] = Entry { prot: source.prot, ..Entry::default() };
            self.answer(state, PageRange::new(to, 1));
            None
        })
    }

    unsafe fn copy_in(&self, pages: PageRange, source: *const u8, protection: Protection) -> Done {
        self.enter();
        let is_forgotten = self.settings.planted == Some(Planted::ForgottenProtection);
        if protection == Protection::WriteProtected
            && self.is_protection_refused.load(Ordering::Relaxed)
        {
            return Done { pages: 0, refusal: Some(Refusal::NoMemory) };
        }
        self.each(pages, |state, page, at| {
            let entry = state.entries[page.index()];
            assert!(entry.shows.is_none(), "{page:?} is an object's: a copy would enter its memfd");
            if entry.physical != 0 {
                return Some(Refusal::Exists);
            }
            let physical = self.allocate(state);
            // SAFETY: the caller answers for `source`; no other thread has the new page yet.
            unsafe {
                let from = source.add(at * PAGE_SIZE);
                core::ptr::copy_nonoverlapping(from, self.bytes(physical).cast(), PAGE_SIZE);
            }
            let is_write_protected = protection == Protection::WriteProtected && !is_forgotten;
            let entry = Entry { physical, is_write_protected, is_poisoned: false, ..entry };
            state.entries[page.index()] = entry;
            self.answer(state, PageRange::new(page, 1));
            None
        })
    }

    fn unmap(&self, pages: PageRange) {
        self.enter();
        let _ = self.each(pages, |state, page, _| {
            let entry = state.entries[page.index()];
            if entry.shows.is_some() {
                // The memfd keeps the page, and the mapping the mark of a protection.
                let unmapped = Entry { physical: 0, is_poisoned: false, ..entry };
                state.entries[page.index()] = unmapped;
                return None;
            }
            state.entries[page.index()] = Entry { prot: entry.prot, ..Entry::default() };
            if entry.physical != 0 {
                self.free(state, entry.physical);
            }
            None
        });
    }

    fn look(&self, pages: PageRange, is_mapped: &mut [bool]) {
        self.enter();
        let state = self.state();
        for (page, is_mapped) in pages.pages().zip(is_mapped) {
            *is_mapped = state.entries[page.index()].physical != 0;
        }
    }

    fn find_missing(&self, pages: PageRange, is_missing: &mut [bool]) {
        self.enter();
        let state = self.state();
        for (page, is_missing) in pages.pages().zip(is_missing) {
            *is_missing &= state.entries[page.index()].physical == 0;
        }
    }

    fn find_empty(&self, frames: FrameRun, is_empty: &mut [bool]) {
        // Its time is in that of a call that unmaps, as it is measured.
        self.step();
        let state = self.state();
        for (at, is_empty) in is_empty.iter_mut().enumerate() {
            *is_empty &= state.places[frames.start.add(at).0 as usize] == 0;
        }
    }

    fn look_at_sharers(&self, pages: PageRange, sharers: &mut [Sharer]) -> bool {
        self.enter();
        let state = self.state();
        for (page, sharer) in pages.pages().zip(sharers) {
            let entry = state.entries[page.index()];
            *sharer = match entry.physical {
                0 => Sharer::Missing,
                _ if entry.is_shared => Sharer::Others,
                _ => Sharer::None,
            };
        }
        true
    }

    fn make_exclusive(&self, pages: PageRange) -> Done {
        self.enter();
        self.each(pages, |state, page, _| {
            let entry = &mut state.entries[page.index()];
            assert!(entry.physical != 0, "{page:?} is missing: the engine faults on itself");
            if !entry.prot.is_writable() {
                return Some(Refusal::Hole);
            }
            assert!(
                !entry.is_write_protected,
                "{page:?} is protected: the engine faults on itself"
            );
            entry.is_shared = false;
            None
        })
    }

    fn write_protect(&self, pages: PageRange, protection: Protection) -> Done {
        self.enter();
        let is_write_protected = protection == Protection::WriteProtected;
        self.each(pages, |state, page, _| {
            let entry = &mut state.entries[page.index()];
            let leaves_mark = entry.physical != 0 || entry.shows.is_some() && !entry.is_poisoned;
            entry.is_write_protected = is_write_protected && leaves_mark;
            if !is_write_protected {
                self.answer(state, PageRange::new(page, 1));
            }
            None
        })
    }

    fn poison(&self, page: PageNum) -> Done {
        self.enter();
        self.each(PageRange::new(page, 1), |state, page, _| {
            let entry = state.entries[page.index()];
            if entry.shows.is_some_and(|shown| state.is_behind_end(shown)) {
                return Some(Refusal::Hole);
            }
            // The mark of a protection is in the way as a page would be.
            if entry.physical != 0 || entry.is_poisoned || entry.is_write_protected {
                return Some(Refusal::Exists);
            }
            state.entries[page.index()].is_poisoned = true;
            self.answer(state, PageRange::new(page, 1));
            None
        })
    }

    fn wake(&self, pages: PageRange) {
        self.enter();
        self.answer(&mut self.state(), pages);
        self.step();
    }

    fn read(&self, page: PageNum, into: &mut [u8; PAGE_SIZE]) -> bool {
        self.enter();
        let state = self.state();
        let entry = state.entries[page.index()];
        if entry.physical != 0 {
            // SAFETY: a page of the buffer; the program may be writing it, as with real memory.
            unsafe { *into = *self.bytes(entry.physical) };
        }
        drop(state);
        self.step();
        entry.physical != 0
    }

    fn protect(&self, pages: PageRange, prot: Prot) -> Done {
        self.enter();
        {
            let mut state = self.state();
            for page in pages.pages() {
                state.entries[page.index()].prot = prot;
            }
        }
        self.step();
        Done::all(pages.len())
    }

    fn reserve_again(&self, pages: PageRange) {
        self.enter();
        self.hide_object(pages);
        self.unmap(pages);
        let _ = self.protect(pages, Prot::NONE);
    }

    fn frames_release(&self, frames: FrameRun) {
        self.enter();
        let mut state = self.state();
        for at in 0..frames.len {
            let place = frames.start.add(at).0 as usize;
            let physical = core::mem::take(&mut state.places[place]);
            if physical != 0 {
                self.free(&mut state, physical);
            }
        }
    }

    fn cycles(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    fn frame(&self, frame: FrameId) -> *mut [u8; PAGE_SIZE] {
        let physical = self.state().places[frame.0 as usize];
        assert!(physical != 0, "{frame:?} is a hole");
        self.bytes(physical)
    }

    fn thread(&self) -> ThreadId {
        baton::actor()
    }

    fn step(&self) {
        if let Some(baton) = &self.settings.baton {
            baton.step();
        }
    }

    fn relax(&self) {
        match &self.settings.baton {
            Some(baton) => baton.relax(),
            None => std::thread::yield_now(),
        }
    }

    fn sleep_on(&self, word: &AtomicU64, expected: u32, kill: Kill<'_>) {
        let Some(baton) = &self.settings.baton else {
            return Futexes.wait(word, expected, kill);
        };
        // No other actor runs, so none can change the word in between, nor cancel.
        if word.load(Ordering::Relaxed) as u32 != expected || kill.is_due() {
            return;
        }
        let address = core::ptr::from_ref(word).addr();
        match (kill.deadline_ns, kill.token) {
            // Actors have no timers: one with a deadline looks now and then.
            (Some(_), _) => baton.relax(),
            (None, Some(token)) => {
                baton.block(Wait::Either(address, core::ptr::from_ref(&token.0).addr()));
            }
            (None, None) => baton.block(Wait::Word(address)),
        }
    }

    fn wake_sleepers(&self, word: *const AtomicU64) {
        match &self.settings.baton {
            Some(baton) => baton.unblock(Wait::Word(word.addr())),
            None => Futexes.wake(word),
        }
    }
}
