//! What is asked of private mappings beside accesses: pages brought in ahead, bytes read with an
//! error instead of a SIGBUS, pages given up.
//!
//! Called by threads of the program, which may wait.
//!
//! Locks: a page's in the arena, one at a time; those of the object's pages as in `access`.

use super::requests::IoBuffer;
use super::{Object, ObjectId, Objects, ReadError};
use crate::fault::Outcome;
use crate::mmu::Access;
use crate::mmu::FrameId;
use crate::mmu::object::ObjectMmu;
use crate::page::{Flags, Interrupted, Kill, Snapshot, State};
use crate::scratch::Scratch;
use crate::space::Advice;
use crate::space::vma::{Backing, Kind};
use crate::swap::compress::PageBytes;
use crate::sys::Errno;
use crate::units::{ObjectPage, PAGE_SIZE, PageNum, PageRange};

/// What a look at a page for its bytes found.
enum Content {
    /// They are written where they were wanted.
    Loaded,
    /// It has none of its own.
    Unfilled,
    /// They are in the swap file.
    Swapped,
    /// They are lost.
    Lost,
}

impl<M: ObjectMmu> Objects<M> {
    /// Where the pages of a private mapping that the caller keeps come from.
    pub(super) fn private_backing(&self, page: PageNum) -> Option<Backing> {
        let vma = self.vma_of_kind(page, Kind::Private)?;
        Some(vma.attributes.backing)
    }

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
        let Some(backing) = self.private_backing(range.start) else { return Ok(()) };
        let object = self.object(ObjectId(backing.object));
        for page in range.pages() {
            let at = backing.object_page(page);
            while self.space.snapshot(page).state() != State::Mapped {
                if !self.has_content(page) {
                    if at.index() >= object.pages() {
                        break;
                    }
                    let error = |errno| ReadError { offset: at.offset(), errno };
                    self.fetch(object, at, scratch, buffer).map_err(error)?;
                    self.space.drop_refused(page);
                }
                let error = |errno| ReadError { offset: at.offset(), errno };
                let outcome = self.bring_in_private(page, scratch, buffer.kill());
                if outcome.map_err(|Interrupted| error(Errno::INTR))? == Outcome::Poisoned {
                    return Err(error(Errno::IO));
                }
            }
        }
        Ok(())
    }

    /// Whether a page has content of its own, or has lost it.
    fn has_content(&self, page: PageNum) -> bool {
        let seen = self.space.snapshot(page);
        match seen.state() {
            State::None => false,
            State::Poisoned => !seen.has(Flags::ERROR),
            _ => true,
        }
    }

    /// Serves a fault of the caller's own, and waits for whoever it has to wait for.
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
        let Some(backing) = self.private_backing(range.start) else { return 0 };
        let object = self.object(ObjectId(backing.object));
        for page in range.pages() {
            let is_at_hand = match self.space.snapshot(page).state() {
                State::None => self.is_cached(object, backing.object_page(page)),
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
        let space = &self.space;
        let is_mapped = |page: &PageNum| {
            let seen = space.snapshot(*page);
            if !seen.is_locked() {
                return seen.state() == State::Mapped;
            }
            let settled = space.lock_page(*page).content();
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
        let Some(backing) = self.private_backing(first) else { return Ok(0) };
        let object = self.object(ObjectId(backing.object));
        let mut done = 0;
        while done < into.len() {
            let page = first.add((from + done) / PAGE_SIZE);
            let within = (from + done) % PAGE_SIZE;
            let want = (into.len() - done).min(PAGE_SIZE - within);
            let offset = backing.object_page(page).offset() + within as u64;
            let part = &mut into[done..done + want];
            let interrupted = |Interrupted| ReadError { offset, errno: Errno::INTR };
            let kill = buffer.kill();
            let loaded = self.load_private(page, within, part, scratch.page, kill);
            match loaded.map_err(interrupted)? {
                Content::Loaded => done += want,
                Content::Unfilled => {
                    let read = self.read_at(object, offset, part, scratch, buffer)?;
                    done += read;
                    if read < want {
                        break;
                    }
                }
                Content::Swapped => {
                    self.bring_in_private(page, scratch, kill).map_err(interrupted)?;
                }
                Content::Lost => return Err(ReadError { offset, errno: Errno::IO }),
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
    ) -> Result<Content, Interrupted> {
        let locked = self.space.lock_page_killable(page, kill)?;
        let content = self.load_locked(page, locked.content(), place);
        locked.unlock();
        if let Content::Loaded = content {
            into.copy_from_slice(&place[within..within + into.len()]);
        }
        Ok(content)
    }

    fn load_locked(&self, page: PageNum, before: Snapshot, into: &mut PageBytes) -> Content {
        let is_loaded = match before.state() {
            State::None => return Content::Unfilled,
            State::Poisoned if before.has(Flags::ERROR) => return Content::Unfilled,
            State::File => return Content::Swapped,
            State::Mapped => self.space.mmu().read(page, into),
            State::Limbo => {
                let frame = self.space.mmu().frame(FrameId(before.payload()));
                // SAFETY: a frame in limbo holds its owner's bytes, and the owner is locked.
                into.copy_from_slice(unsafe { &*frame });
                true
            }
            // SAFETY: the page is locked.
            State::Same | State::Pool => unsafe {
                self.space.load_content(page, before, into).is_ok()
            },
            State::Poisoned | State::Cached => false,
        };
        if is_loaded { Content::Loaded } else { Content::Lost }
    }

    /// Gives up what was written to pages of a private mapping: they are as their object has them.
    pub fn discard_private(&self, range: PageRange) {
        let mut layout = self.space.lock();
        // The caller keeps the mapping: all of it is covered.
        let _ = self.space.advise(&mut layout, range, Advice::DontNeed);
    }

    fn is_cached(&self, object: &Object, at: ObjectPage) -> bool {
        at.index() < object.pages() && self.snapshot(object, at).state() == State::Cached
    }

    /// Has pages of a private mapping go: what was written to swap, the rest altogether.
    pub fn page_out_private(&self, range: PageRange) {
        let mut layout = self.space.lock();
        let _ = self.space.advise(&mut layout, range, Advice::PageOut);
    }
}
