//! What is asked of private mappings beside accesses, by threads of the program, which may wait.

use super::requests::IoBuffer;
use super::{Objects, ReadError};
use crate::fault::Outcome;
use crate::mmu::object::ObjectMmu;
use crate::mmu::{Access, FrameId};
use crate::page::{Flags, Interrupted, Kill, Snapshot, State};
use crate::scratch::Scratch;
use crate::space::Advice;
use crate::space::vma::Kind;
use crate::swap::compress::PageBytes;
use crate::sys::Errno;
use crate::units::{PAGE_SIZE, PageNum, PageRange};

enum OwnBytes {
    /// They have been copied to where they were wanted.
    Loaded,
    /// It has none: its bytes are the object's.
    None,
    InFile,
    Lost,
}

impl<M: ObjectMmu> Objects<M> {
    /// Has all of a range of one private mapping mapped; waits for reads. What could not be had
    /// before is asked for again.
    ///
    /// # Errors
    /// Where a page cannot be read; what comes before it has been mapped.
    pub fn populate_private(
        &self,
        range: PageRange,
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<(), ReadError> {
        let Some((backing, object)) = self.backing_at(range.start, Kind::Private) else {
            return Ok(());
        };
        for page in range.pages() {
            let at = backing.object_page(page);
            let offset = at.offset();
            loop {
                let seen = self.space.snapshot(page);
                if seen.state() == State::Mapped {
                    break;
                }
                if has_no_bytes(seen) {
                    if at.index() >= object.pages() {
                        break;
                    }
                    self.fetch(object, at, scratch, buffer).map_err(ReadError::at(offset))?;
                    self.space.drop_refused(page);
                }
                let outcome = self.bring_in_private(page, scratch, buffer.kill());
                if outcome.map_err(ReadError::at(offset))? == Outcome::Poisoned {
                    return Err(ReadError { offset, errno: Errno::IO });
                }
            }
        }
        Ok(())
    }

    /// Serves a fault of the caller's own, and waits where the page is locked.
    fn bring_in_private(
        &self,
        page: PageNum,
        scratch: &mut Scratch,
        kill: Kill<'_>,
    ) -> Result<Outcome, Interrupted> {
        let outcome = self.handle_fault(page, Access::Read, scratch);
        if outcome == Outcome::Parked {
            self.space.lock_page_killable(page, kill)?.unlock();
            self.space.mmu().relax();
            if kill.is_due() {
                return Err(Interrupted);
            }
        }
        Ok(outcome)
    }

    /// Maps what is in memory already of a range of a private mapping, without waiting; returns
    /// how many pages of it are mapped then.
    pub fn populate_private_cached(&self, range: PageRange, scratch: &mut Scratch) -> usize {
        let Some((backing, object)) = self.backing_at(range.start, Kind::Private) else { return 0 };
        for page in range.pages() {
            let is_at_hand = match self.space.snapshot(page).state() {
                State::None => {
                    let at = backing.object_page(page);
                    let is_inside = at.index() < object.pages();
                    is_inside && self.snapshot(object, at).state() == State::Cached
                }
                State::Limbo | State::Same | State::Pool => true,
                _ => false,
            };
            if is_at_hand && self.space.available() > 0 {
                self.handle_fault(page, Access::Read, scratch);
            }
        }
        let is_mapped = |page: &PageNum| self.space.snapshot(*page).state() == State::Mapped;
        range.pages().filter(is_mapped).count()
    }

    /// How many pages of a range of the arena are mapped just now. Waits for faults that are under
    /// way: a thread goes on a moment before the words of its page, and of those that came along,
    /// say so.
    pub fn present_private_pages(&self, range: PageRange) -> usize {
        let is_mapped = |page: &PageNum| {
            let seen = self.space.snapshot(*page);
            let is_locked = seen.is_locked();
            let settled = if is_locked { self.space.lock_page(*page).content() } else { seen };
            settled.state() == State::Mapped
        };
        range.pages().filter(is_mapped).count()
    }

    /// Reads bytes of a private mapping from byte `from` of page `first` on: what was written
    /// there, and the object's else; returns how many there were before the object's end.
    ///
    /// # Errors
    /// Where a page cannot be read; what comes before it has been.
    pub fn read_private(
        &self,
        first: PageNum,
        from: usize,
        into: &mut [u8],
        scratch: &mut Scratch,
        buffer: &mut IoBuffer,
    ) -> Result<usize, ReadError> {
        let Some((backing, object)) = self.backing_at(first, Kind::Private) else { return Ok(0) };
        let mut done = 0;
        while done < into.len() {
            let page = first.add((from + done) / PAGE_SIZE);
            let within = (from + done) % PAGE_SIZE;
            let want = (into.len() - done).min(PAGE_SIZE - within);
            let offset = backing.object_page(page).offset() + within as u64;
            let part = &mut into[done..done + want];
            let kill = buffer.kill();
            let loaded = self.load_private(page, within, part, scratch.page, kill);
            match loaded.map_err(ReadError::at(offset))? {
                OwnBytes::Loaded => done += want,
                OwnBytes::None => {
                    let read = self.read_at(object, offset, part, scratch, buffer)?;
                    done += read;
                    if read < want {
                        break;
                    }
                }
                OwnBytes::InFile => {
                    let outcome = self.bring_in_private(page, scratch, kill);
                    outcome.map_err(ReadError::at(offset))?;
                }
                OwnBytes::Lost => return Err(ReadError { offset, errno: Errno::IO }),
            }
        }
        Ok(done)
    }

    /// Writes what a page has of its own, from byte `within` on, into `into`.
    fn load_private(
        &self,
        page: PageNum,
        within: usize,
        into: &mut [u8],
        place: &mut PageBytes,
        kill: Kill<'_>,
    ) -> Result<OwnBytes, Interrupted> {
        let locked = self.space.lock_page_killable(page, kill)?;
        let before = locked.content();
        let is_loaded = match before.state() {
            _ if has_no_bytes(before) => return Ok(OwnBytes::None),
            State::File => return Ok(OwnBytes::InFile),
            State::Mapped => self.space.mmu().read(page, place),
            State::Limbo => {
                let frame = self.space.mmu().frame(FrameId(before.payload()));
                // SAFETY: a frame in limbo holds its owner's bytes, and the owner is locked.
                place.copy_from_slice(unsafe { &*frame });
                true
            }
            // SAFETY: the page is locked.
            State::Same | State::Pool => unsafe {
                self.space.load_content(page, before, place).is_ok()
            },
            State::None | State::Poisoned | State::Cached => false,
        };
        if !is_loaded {
            let is_dropped =
                before.state() == State::Mapped && self.space.drop_if_missing(locked).is_none();
            return Ok(if is_dropped { OwnBytes::None } else { OwnBytes::Lost });
        }
        locked.unlock();
        into.copy_from_slice(&place[within..within + into.len()]);
        Ok(OwnBytes::Loaded)
    }

    /// Advises on pages of a private mapping: those that are not needed are as their object has them
    /// from now on; of those that are paged out, what was written goes to swap, and the rest altogether.
    pub fn advise_private(&self, range: PageRange, advice: Advice) {
        // The caller keeps the mapping: all of it is covered.
        let _ = self.space.advise(&mut self.space.lock(), range, advice);
    }
}

/// Whether a page has no content of its own, and has lost none.
fn has_no_bytes(word: Snapshot) -> bool {
    word.state() == State::None || (word.state() == State::Poisoned && word.has(Flags::ERROR))
}
