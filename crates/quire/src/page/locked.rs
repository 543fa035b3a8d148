//! A page whose lock is held, and a range of such pages.
//!
//! Owns the proof: a thread that has a [`LockedPage`] holds that page's lock, and dropping it gives
//! the lock back. What the page becomes while it is locked is in [`super::transitions`]. Leaves to
//! [`PageLocks`] where the words are, and what an unlock wakes and answers.

use core::mem::ManuallyDrop;

use super::{Flags, PageWord, Snapshot, State, Stored};
use crate::units::{BLOCK_PAGES, PageNum, PageRange};

pub trait PageLocks {
    fn word(&self, page: PageNum) -> &PageWord;
    /// Unlocks a page, unchanged, and wakes and answers what waited for that.
    fn unlock_unchanged(&self, page: PageNum);
    /// The same with a new content.
    fn unlock_changed(&self, page: PageNum, content: Snapshot);
}

/// A page whose lock the owner of this value holds. Dropping it unlocks the page, unchanged.
#[must_use = "the page is unlocked again where this is dropped"]
pub struct LockedPage<'a, L: PageLocks> {
    locks: &'a L,
    page: PageNum,
    pub(super) content: Snapshot,
}

impl<'a, L: PageLocks> LockedPage<'a, L> {
    /// Takes over a lock that was [left](Self::leave_locked), or that was taken by the word alone.
    /// The caller holds it, and there is no other guard for it. `content` is what the word says.
    #[inline]
    pub fn adopt(locks: &'a L, page: PageNum, content: Snapshot) -> Self {
        debug_assert!(locks.word(page).load().is_locked(), "{page:?} is not locked");
        LockedPage { locks, page, content }
    }

    /// Leaves the page locked; [`Self::adopt`] has it back.
    #[inline]
    pub fn leave_locked(self) -> PageNum {
        ManuallyDrop::new(self).page
    }

    /// Unlocks the page, unchanged.
    #[inline]
    pub fn unlock(self) {}

    #[inline]
    pub fn page(&self) -> PageNum {
        self.page
    }

    /// What its word says.
    #[inline]
    pub fn content(&self) -> Snapshot {
        self.content
    }

    #[inline]
    pub fn state(&self) -> State {
        self.content.state()
    }

    /// Where its bytes are in swap, if they are nowhere else, and not lost.
    pub fn in_swap(&self) -> Option<Stored> {
        let is_elsewhere = matches!(self.state(), State::Mapped | State::Cached | State::Poisoned);
        self.content.stored().filter(|_| !is_elsewhere)
    }

    #[inline]
    pub fn has(&self, flags: Flags) -> bool {
        self.content.has(flags)
    }

    /// Leaves a fault of this page unanswered until it is unlocked.
    pub fn park_fault(&self) {
        self.word().park_under_lock();
    }

    pub(super) fn word(&self) -> &'a PageWord {
        self.locks.word(self.page)
    }

    /// Unlocks the page with a new content: for [`super::transitions`] alone.
    #[inline]
    pub(super) fn unlock_changed(self, content: Snapshot) {
        let this = ManuallyDrop::new(self);
        this.locks.unlock_changed(this.page, content);
    }
}

impl<L: PageLocks> Drop for LockedPage<'_, L> {
    #[inline]
    fn drop(&mut self) {
        self.locks.unlock_unchanged(self.page);
    }
}

/// Neighbouring locked pages of one block, and what their words said when they were locked.
/// Dropping it unlocks those that it still has, unchanged.
#[must_use = "the pages are unlocked again where this is dropped"]
pub struct LockedRange<'a, L: PageLocks> {
    locks: &'a L,
    range: PageRange,
    contents: [Snapshot; BLOCK_PAGES],
}

impl<'a, L: PageLocks> LockedRange<'a, L> {
    #[inline]
    pub fn of(page: LockedPage<'a, L>) -> Self {
        let LockedPage { locks, page: number, content } = *ManuallyDrop::new(page);
        let mut contents = [Snapshot::new(State::None, 0); BLOCK_PAGES];
        contents[number.index() % BLOCK_PAGES] = content;
        LockedRange { locks, range: PageRange::new(number, 1), contents }
    }

    /// Takes over locks that were [left](Self::leave_locked), of pages of one block. The caller
    /// holds them, and there is no other guard for them.
    pub fn adopt(locks: &'a L, range: PageRange) -> Self {
        let mut contents = [Snapshot::new(State::None, 0); BLOCK_PAGES];
        for page in range.pages() {
            contents[page.index() % BLOCK_PAGES] = locks.word(page).load();
        }
        LockedRange { locks, range, contents }
    }

    /// Leaves the pages locked; [`Self::adopt`] has them back.
    pub fn leave_locked(self) -> PageRange {
        ManuallyDrop::new(self).range
    }

    #[inline]
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// What a page's word said when it was locked; also of a page that was taken out since.
    #[inline]
    pub fn content(&self, page: PageNum) -> Snapshot {
        self.contents[page.index() % BLOCK_PAGES]
    }

    /// Adds neighbours that `try_lock` gives, upwards and then downwards: inside of `bounds`, which
    /// lie in the block, and to `pages_max` pages at most.
    pub fn grow(
        &mut self,
        bounds: PageRange,
        pages_max: usize,
        mut try_lock: impl FnMut(PageNum) -> Option<LockedPage<'a, L>>,
    ) {
        while self.range.end < bounds.end && self.range.len() < pages_max {
            let Some(page) = try_lock(self.range.end) else { break };
            self.push(page);
        }
        while self.range.start > bounds.start && self.range.len() < pages_max {
            let Some(page) = try_lock(PageNum(self.range.start.0 - 1)) else { break };
            self.note(page);
            self.range.start.0 -= 1;
        }
    }

    /// Adds the page behind the last one, which is of the same block.
    pub fn push(&mut self, page: LockedPage<'a, L>) {
        debug_assert_eq!(page.page, self.range.end);
        self.range.end = self.range.end.add(1);
        self.note(page);
    }

    fn note(&mut self, page: LockedPage<'a, L>) {
        self.contents[page.page.index() % BLOCK_PAGES] = page.content;
        page.leave_locked();
    }

    #[inline]
    pub fn take_first(&mut self) -> Option<LockedPage<'a, L>> {
        if self.range.is_empty() {
            return None;
        }
        let page = self.range.start;
        self.range.start = page.add(1);
        Some(LockedPage { locks: self.locks, page, content: self.content(page) })
    }

    /// [`LockedPage::end_clean_locked`] of one of the pages.
    pub fn end_clean_locked(&mut self, page: PageNum) {
        debug_assert!(self.range.contains(page));
        let mut locked = LockedPage { locks: self.locks, page, content: self.content(page) };
        locked.end_clean_locked();
        self.note(locked);
    }

    /// Unlocks all pages but those of `kept`, which is a part of the range.
    pub fn cut_to(&mut self, kept: PageRange) {
        let whole = core::mem::replace(&mut self.range, kept);
        for page in whole.pages().filter(|&page| !kept.contains(page)) {
            self.locks.unlock_unchanged(page);
        }
    }
}

impl<L: PageLocks> Drop for LockedRange<'_, L> {
    #[inline]
    fn drop(&mut self) {
        for page in self.range.pages() {
            self.locks.unlock_unchanged(page);
        }
    }
}
