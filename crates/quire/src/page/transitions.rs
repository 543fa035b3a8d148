//! What a page's content can become: every change of a page word, by name.
//!
//! All are methods of [`LockedPage`], so the page's lock is held. Most consume the guard: the change
//! and the unlock are one atomic operation. What else belongs to a change (what was in swap is let
//! go, a frame enters limbo, counts) is the caller's, before the transition.
//!
//! | from \ to | `None` | `Mapped` | `Limbo` | `Same` | `Pool` | `File` | `Poisoned` |
//! |---|---|---|---|---|---|---|---|
//! | `None` | | [`map`], [`map_clean`] (of an object) | remap | remap | remap | | [`refuse`] |
//! | `Mapped` | [`drop_content`], [`store`] (clean, of an object) | [`write`], [`replace`], [`end_clean`], [`rename`] | [`into_limbo`] | [`store`] | [`store`] | [`store`] (clean) | [`refuse`] |
//! | `Limbo` | [`drop_content`] | [`map`] | | [`store`] | [`store`] | | |
//! | `Same` | [`drop_content`] | [`map`], [`map_clean`] | | | | | [`poison`] |
//! | `Pool` | [`drop_content`] | [`map`], [`map_clean`] | | | [`rename`] | [`write_back`] | [`poison`] |
//! | `File` | [`drop_content`] | [`map`], [`map_clean`] | | | | [`rename`] | [`poison`] |
//! | `Poisoned` | [`drop_content`] | | | | | | |
//!
//! remap is [`move_to`]: what any page but one in the swap file has is given to a page that has
//! `None`, and the first one is `None` afterwards.
//!
//! An object's page is `Cached` where one of the arena is `Mapped`, and never in limbo:
//!
//! | from | to | by |
//! |---|---|---|
//! | `None`, `Same`, `Pool`, `File` | `Cached` | [`cache`], [`cache_clean`] |
//! | `Cached` | `Cached` | [`dirty`], [`rename`], [`keep_stored`], [`note_written`] |
//! | `Cached` | `None`, `Same`, `Pool`, `File` | [`uncache`]: to what it keeps |
//! | any | `None` | [`drop_content`] |
//! | any but `Poisoned` | `Poisoned` | [`fail`], which keeps what it has in swap |
//! | `Poisoned` | `None`, `Same`, `Pool`, `File` | [`unpoison`]: to what it keeps |
//!
//! | state | flags that it may have |
//! |---|---|
//! | `None`, `Same`, `File` | WRITE_PROTECTED; ERROR (of an object) |
//! | `Mapped` | ACCESSED, MLOCKED, PINNED, DIRTY, WRITE_PROTECTED; CLEAN, and with it at most one of IN_POOL, IN_FILE, IN_OBJECT |
//! | `Limbo` | WRITE_PROTECTED, LAZYFREE, INCOMPRESSIBLE |
//! | `Pool` | WRITE_PROTECTED, WRITEBACK; ERROR (of an object) |
//! | `Poisoned` | ERROR; of an object WRITEBACK; CLEAN, and with it at most one of IN_POOL, IN_FILE |
//! | `Cached` | ACCESSED, MLOCKED, PINNED, WRITEBACK, INCOMPRESSIBLE; DIRTY, or CLEAN, and with it at most one of IN_POOL, IN_FILE |
//!
//! WRITE_PROTECTED, the mark that a write is to be noticed, is all that goes from one state to
//! another. [`set_flags`] and [`clear_flags`] change flags and nothing else. Debug builds check both
//! tables at every transition.
//!
//! [`map`]: LockedPage::map
//! [`map_clean`]: LockedPage::map_clean
//! [`write`]: LockedPage::write
//! [`replace`]: LockedPage::replace
//! [`end_clean`]: LockedPage::end_clean
//! [`into_limbo`]: LockedPage::into_limbo
//! [`store`]: LockedPage::store
//! [`write_back`]: LockedPage::write_back
//! [`rename`]: LockedPage::rename
//! [`move_to`]: LockedPage::move_to
//! [`drop_content`]: LockedPage::drop_content
//! [`poison`]: LockedPage::poison
//! [`refuse`]: LockedPage::refuse
//! [`cache`]: LockedPage::cache
//! [`cache_clean`]: LockedPage::cache_clean
//! [`dirty`]: LockedPage::dirty
//! [`keep_stored`]: LockedPage::keep_stored
//! [`note_written`]: LockedPage::note_written
//! [`uncache`]: LockedPage::uncache
//! [`fail`]: LockedPage::fail
//! [`unpoison`]: LockedPage::unpoison
//! [`set_flags`]: LockedPage::set_flags
//! [`clear_flags`]: LockedPage::clear_flags

use super::locked::{LockedPage, LockedRange, PageLocks};
use super::{Flags, Snapshot, State};
use crate::units::{FrameId, PageNum};

/// Where the bytes of a page are that is not in memory, or would be if it were not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// Nowhere in swap: they are zeros, or in a private mapping its object's.
    Nothing,
    /// Every 32-bit word of the page is this pattern.
    Same(u32),
    /// In the compressed pool, under this handle.
    Pool(u32),
    /// In the swap file, at this location.
    File(u32),
}

impl Stored {
    /// The word of a page whose bytes are there.
    #[must_use]
    pub const fn content(self) -> Snapshot {
        match self {
            Stored::Nothing => Snapshot::new(State::None, 0),
            Stored::Same(pattern) => Snapshot::new(State::Same, pattern),
            Stored::Pool(handle) => Snapshot::new(State::Pool, handle),
            Stored::File(location) => Snapshot::new(State::File, location),
        }
    }
}

const KEPT: Flags = Flags::CLEAN.or(Flags::IN_POOL).or(Flags::IN_FILE).or(Flags::IN_OBJECT);

impl Snapshot {
    /// Where the bytes are of a page that is not in memory; where they are beside memory, of a
    /// clean one. `None`: in memory alone, or lost.
    #[must_use]
    pub const fn stored(self) -> Option<Stored> {
        match self.state() {
            State::None => Some(Stored::Nothing),
            State::Same => Some(Stored::Same(self.payload())),
            State::Pool => Some(Stored::Pool(self.payload())),
            State::File => Some(Stored::File(self.payload())),
            State::Limbo => None,
            _ if self.has(Flags::IN_POOL) => Some(Stored::Pool(self.payload())),
            _ if self.has(Flags::IN_FILE) => Some(Stored::File(self.payload())),
            _ if self.has(Flags::IN_OBJECT) => Some(Stored::Nothing),
            _ if self.has(Flags::CLEAN) => Some(Stored::Same(self.payload())),
            _ => None,
        }
    }

    /// The word of a page that goes from memory to what it keeps; zeros, or its store's bytes,
    /// where it keeps nothing.
    const fn kept_content(self) -> Snapshot {
        match self.stored() {
            Some(stored) => stored.content(),
            None => Stored::Nothing.content(),
        }
    }

    /// This with what `from` has in swap.
    const fn keeping(self, from: Snapshot) -> Snapshot {
        let flags = match from.stored() {
            None | Some(Stored::Nothing) => return self,
            Some(Stored::Same(_)) => Flags::CLEAN,
            Some(Stored::Pool(_)) => Flags::CLEAN.or(Flags::IN_POOL),
            Some(Stored::File(_)) => Flags::CLEAN.or(Flags::IN_FILE),
        };
        self.with(flags).with_payload(from.payload())
    }

    const fn without_kept(self) -> Snapshot {
        self.with_payload(0).without(KEPT)
    }
}

/// Changes that unlock the page.
impl<L: PageLocks> LockedPage<'_, L> {
    /// It is in memory and mapped, and keeps nothing in swap. `flags` are those of its word.
    #[inline]
    pub fn map(self, flags: Flags) {
        self.become_unlocked(Snapshot::new(State::Mapped, 0).with(flags));
    }

    /// It is mapped, write-protected, and keeps what it has in swap until it is written.
    #[inline]
    pub fn map_clean(self, flags: Flags) {
        let kept = match self.state() {
            State::Pool => Flags::IN_POOL,
            State::File => Flags::IN_FILE,
            State::None => Flags::IN_OBJECT,
            _ => Flags::EMPTY,
        };
        let flags = flags.or(kept).or(Flags::CLEAN);
        let mapped = Snapshot::new(State::Mapped, self.content.payload());
        self.become_unlocked(mapped.with(flags));
    }

    /// A write was noticed: it is writable, and keeps nothing in swap.
    pub fn write(self) {
        let written = Flags::DIRTY.or(Flags::ACCESSED);
        let after = self.content.without_kept().without(Flags::WRITE_PROTECTED).with(written);
        self.become_unlocked(after);
    }

    /// It is mapped anew, writable: what it was before the program has dropped by itself.
    pub fn replace(self) {
        let after = self.content.without_kept().without(Flags::WRITE_PROTECTED);
        self.become_unlocked(after);
    }

    /// It may be written unnoticed from now on, and keeps nothing in swap.
    pub fn end_clean(self) {
        let after = self.content.without_kept();
        self.become_unlocked(after);
    }

    /// Its bytes are in `frame`, and it is mapped no more. `flags` are added.
    #[inline]
    pub fn into_limbo(self, frame: FrameId, flags: Flags) {
        debug_assert!(!self.has(Flags::CLEAN), "{:?} keeps what it has in swap", self.page());
        let after = self.keep_tracked(Snapshot::new(State::Limbo, frame.0)).with(flags);
        self.become_unlocked(after);
    }

    /// It leaves memory for swap.
    #[inline]
    pub fn store(self, stored: Stored) {
        let after = self.keep_tracked(stored.content());
        self.become_unlocked(after);
    }

    /// Its packed bytes were written to the swap file.
    pub fn write_back(self, location: u32) {
        let after = self.keep_tracked(Stored::File(location).content());
        self.become_unlocked(after);
    }

    /// What it has in swap has another handle, or another location.
    pub fn rename(self, number: u32) {
        // A write that is under way is of the old one.
        let after = self.content.without(Flags::WRITEBACK).with_payload(number);
        self.become_unlocked(after);
    }

    /// It reads as zeros, or as its object, and owns nothing.
    #[inline]
    pub fn drop_content(self) {
        self.become_unlocked(Stored::Nothing.content());
    }

    /// Its content is lost.
    pub fn poison(self) {
        self.become_unlocked(Snapshot::new(State::Poisoned, 0));
    }

    /// Its object cannot be read there: it has lost nothing, and can be asked for again.
    pub fn refuse(self) {
        self.become_unlocked(Snapshot::new(State::Poisoned, 0).with(Flags::ERROR));
    }

    /// Its content is another page's from now on; `to` has none.
    pub fn move_to(self, to: LockedPage<'_, L>) {
        let moved = self.content.without(Flags::WRITEBACK);
        to.become_unlocked(moved);
        self.drop_content();
    }

    /// Its writes are noticed from now on.
    pub fn track_writes(self) {
        let after = self.content.without(Flags::DIRTY).with(Flags::WRITE_PROTECTED);
        self.become_unlocked(after);
    }

    /// Sets flags.
    #[inline]
    pub fn set_flags(self, flags: Flags) {
        let after = self.content.with(flags);
        self.become_unlocked(after);
    }

    /// Clears flags.
    #[inline]
    pub fn clear_flags(self, flags: Flags) {
        let after = self.content.without(flags);
        self.become_unlocked(after);
    }

    #[inline]
    fn become_unlocked(self, after: Snapshot) {
        self.check(after);
        self.unlock_changed(after);
    }
}

/// Changes of objects' pages that unlock the page.
impl<L: PageLocks> LockedPage<'_, L> {
    /// A cached page goes from memory to what it keeps in swap, or in its object's store.
    pub fn uncache(self) {
        debug_assert!(!self.has(Flags::DIRTY), "{:?} is dirty", self.page());
        let after = self.content.kept_content();
        self.become_unlocked(after);
    }

    /// Its memory has failed, and its bytes there are lost. What it keeps in swap stays its own.
    pub fn fail(self) {
        let failed = Snapshot::new(State::Poisoned, 0).keeping(self.content);
        // Of an object with a store: what is under way was copied before.
        let after = match self.state() {
            State::Cached => self.content.keep(Flags::WRITEBACK, failed),
            _ => failed,
        };
        self.become_unlocked(after);
    }

    /// A page whose memory has failed is as it is in swap, or in its object's store.
    pub fn unpoison(self) {
        let after = self.content.kept_content();
        self.become_unlocked(after);
    }
}

/// Changes of objects' pages that keep the lock.
impl<L: PageLocks> LockedPage<'_, L> {
    /// Its bytes are in its object's cache, and it keeps nothing in swap.
    pub fn cache(&mut self) {
        self.become_locked(Snapshot::new(State::Cached, 0));
    }

    /// Its bytes are in its object's cache, and it keeps what it has in swap until it is written.
    pub fn cache_clean(&mut self) {
        self.become_locked(Snapshot::new(State::Cached, 0).keeping(self.content));
    }

    /// It may be written from now on, and keeps nothing in swap.
    pub fn dirty(&mut self) {
        let kept = if self.has(Flags::CLEAN) { self.content.without_kept() } else { self.content };
        self.become_locked(kept.without(Flags::INCOMPRESSIBLE).with(Flags::DIRTY));
    }

    /// What is cached was put into swap, and is there as it is in memory.
    pub fn keep_stored(&mut self, stored: Stored) {
        let clean = self.content.without_kept().without(Flags::DIRTY);
        self.become_locked(clean.keeping(stored.content()));
    }

    /// It was written to its object's store, and is durable with the sync of this number.
    pub fn note_written(&mut self, sync: u32) {
        self.become_locked(self.content.with_payload(sync));
    }

    /// As [`Self::set_flags`].
    pub fn set_flags_locked(&mut self, flags: Flags) {
        self.become_locked(self.content.with(flags));
    }

    /// As [`Self::clear_flags`].
    pub fn clear_flags_locked(&mut self, flags: Flags) {
        self.become_locked(self.content.without(flags));
    }
}

/// Changes that keep the lock.
impl<L: PageLocks> LockedPage<'_, L> {
    /// As [`Self::end_clean`].
    pub fn end_clean_locked(&mut self) {
        self.become_locked(self.content.without_kept());
    }

    /// As [`Self::rename`].
    pub fn rename_locked(&mut self, number: u32) {
        self.become_locked(self.content.without(Flags::WRITEBACK).with_payload(number));
    }

    /// As [`Self::drop_content`].
    pub fn drop_content_locked(&mut self) {
        self.become_locked(Stored::Nothing.content());
    }

    fn become_locked(&mut self, after: Snapshot) {
        self.check(after);
        self.word().set(after);
        self.content = after;
    }

    /// The mark of a page whose writes are noticed goes on to what it becomes.
    fn keep_tracked(&self, after: Snapshot) -> Snapshot {
        self.content.keep(Flags::WRITE_PROTECTED, after)
    }

    /// Through here goes every change: it is one of the tables'.
    #[inline]
    fn check(&self, after: Snapshot) {
        if cfg!(debug_assertions) {
            let before = self.word().load();
            let is_same =
                before.state() == self.state() && before.payload() == self.content.payload();
            assert!(is_same, "{:?} is {before:?}, not {:?}", self.page(), self.content);
            let is_legal = may_follow(before.state(), after.state()) && may_have_flags(after);
            assert!(is_legal, "{:?} cannot go from {before:?} to {after:?}", self.page());
        }
    }
}

impl<L: PageLocks> LockedRange<'_, L> {
    /// [`LockedPage::end_clean_locked`] of one of the pages.
    pub fn end_clean_locked(&mut self, page: PageNum) {
        self.with_page(page, LockedPage::end_clean_locked);
    }
}

/// The first table.
const fn may_follow(before: State, after: State) -> bool {
    use State::{Cached, File, Limbo, Mapped, None, Poisoned, Pool, Same};
    match before {
        None => !matches!(after, File),
        Mapped => !matches!(after, Cached),
        Limbo => matches!(after, None | Mapped | Limbo | Same | Pool),
        Same => matches!(after, None | Mapped | Same | Poisoned | Cached),
        Pool => matches!(after, None | Mapped | Pool | File | Poisoned | Cached),
        File => matches!(after, None | Mapped | File | Poisoned | Cached),
        Poisoned => matches!(after, None | Same | Pool | File | Poisoned),
        Cached => !matches!(after, Mapped | Limbo),
    }
}

/// The second table.
const fn may_have_flags(word: Snapshot) -> bool {
    const MAPPED: Flags = Flags::ACCESSED
        .or(Flags::MLOCKED)
        .or(Flags::PINNED)
        .or(Flags::DIRTY)
        .or(Flags::WRITE_PROTECTED)
        .or(KEPT);
    const KEPT_IN_SWAP: Flags = KEPT.without(Flags::IN_OBJECT);
    const CACHED: Flags = Flags::ACCESSED
        .or(Flags::MLOCKED)
        .or(Flags::PINNED)
        .or(Flags::DIRTY)
        .or(Flags::WRITEBACK)
        .or(Flags::INCOMPRESSIBLE)
        .or(KEPT_IN_SWAP);
    let allowed = match word.state() {
        State::None | State::Same | State::File => Flags::WRITE_PROTECTED.or(Flags::ERROR),
        State::Mapped => MAPPED,
        State::Limbo => Flags::WRITE_PROTECTED.or(Flags::LAZYFREE).or(Flags::INCOMPRESSIBLE),
        State::Pool => Flags::WRITE_PROTECTED.or(Flags::WRITEBACK).or(Flags::ERROR),
        State::Poisoned => Flags::ERROR.or(Flags::WRITEBACK).or(KEPT_IN_SWAP),
        State::Cached if word.has(Flags::DIRTY.or(Flags::CLEAN)) => return false,
        State::Cached => CACHED,
    };
    let kept = word.has(Flags::IN_POOL) as u8
        + word.has(Flags::IN_FILE) as u8
        + word.has(Flags::IN_OBJECT) as u8;
    word.flags().without(allowed).is_empty() && kept <= word.has(Flags::CLEAN) as u8
}

#[cfg(test)]
#[path = "transitions_tests.rs"]
mod tests;
