//! What a page's content can become: every change of a page word, by name.
//!
//! All are methods of `LockedPage`, so the page's lock is held. Most consume the guard: the change
//! and the unlock are one atomic operation. What else belongs to a change (what was in swap is let
//! go, a frame enters limbo, counts) is the caller's, before the transition.
//!
//! | from \ to | `None` | `Mapped` | `Limbo` | `Same` | `Pool` | `File` | `Poisoned` |
//! |---|---|---|---|---|---|---|---|
//! | `None` | | `map`, `map_clean` (of an object) | remap | remap | remap | | `refuse` |
//! | `Mapped` | `drop_content`, `store` (clean, of an object) | `write`, `replace`, `end_clean`, `rename` | `into_limbo` | `store` | `store` | `store` (clean) | `refuse` |
//! | `Limbo` | `drop_content` | `map` | | `store` | `store` | `store` | |
//! | `Same` | `drop_content` | `map`, `map_clean` | | | | | `poison` |
//! | `Pool` | `drop_content` | `map`, `map_clean` | | | `rename` | `store` | `poison` |
//! | `File` | `drop_content` | `map`, `map_clean` | | | | `rename` | `poison` |
//! | `Poisoned` | `drop_content` | | | | | | |
//!
//! remap is `move_to`: what any page but one in the swap file has is given to a page that has
//! `None`, and the first one is `None` afterwards.
//!
//! An object's page is `Cached` where one of the arena is `Mapped`, and never in limbo:
//!
//! | from | to | by |
//! |---|---|---|
//! | `None`, `Same`, `Pool`, `File` | `Cached` | `cache`, `cache_clean` |
//! | `Cached` | `Cached` | `dirty`, `rename`, `keep_stored`, `note_written` |
//! | `Cached` | `None`, `Same`, `Pool`, `File` | `uncache`: to what it keeps |
//! | any | `None` | `drop_content` |
//! | any but `Poisoned` | `Poisoned` | `fail`, which keeps what it has in swap |
//! | `Poisoned` | `None`, `Same`, `Pool`, `File` | `uncache`: to what it keeps |
//!
//! Which flags a state may have is in `may_have_flags`. WRITE_PROTECTED, the mark that a write is to be
//! noticed, is all that goes from one state to another. `set_flags` and `clear_flags` change flags and
//! nothing else. Debug builds check tables and flags at every transition.

use super::locked::{LockedPage, PageLocks};
use super::{Flags, Snapshot, State};
use crate::units::FrameId;

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

    /// The mark of a page whose writes are noticed goes on to what it becomes.
    const fn tracked_as(self, after: Snapshot) -> Snapshot {
        self.keep(Flags::WRITE_PROTECTED, after)
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
        self.become_unlocked(|_| Snapshot::new(State::Mapped, 0).with(flags));
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
        self.become_unlocked(|_| mapped.with(flags));
    }

    /// A write was noticed: it is writable, and keeps nothing in swap.
    pub fn write(self) {
        let written = Flags::DIRTY.or(Flags::ACCESSED);
        self.become_unlocked(|old| {
            old.without_kept().without(Flags::WRITE_PROTECTED).with(written)
        });
    }

    /// It is mapped anew, writable: what it was before the program has dropped by itself.
    pub fn replace(self) {
        self.become_unlocked(|old| old.without_kept().without(Flags::WRITE_PROTECTED));
    }

    /// It may be written unnoticed from now on, and keeps nothing in swap.
    pub fn end_clean(self) {
        self.become_unlocked(|old| old.without_kept());
    }

    /// Its bytes are in `frame`, and it is mapped no more. `flags` are added.
    #[inline]
    pub fn into_limbo(self, frame: FrameId, flags: Flags) {
        debug_assert!(!self.has(Flags::CLEAN), "{:?} keeps what it has in swap", self.page());
        self.become_unlocked(|old| {
            old.tracked_as(Snapshot::new(State::Limbo, frame.0)).with(flags)
        });
    }

    /// It leaves memory for swap, or its packed bytes were written to the swap file.
    #[inline]
    pub fn store(self, stored: Stored) {
        self.become_unlocked(|old| old.tracked_as(stored.content()));
    }

    /// What it has in swap has another handle, or another location.
    pub fn rename(self, number: u32) {
        // A write that is under way is of the old one.
        self.become_unlocked(|old| old.without(Flags::WRITEBACK).with_payload(number));
    }

    /// It reads as zeros, or as its object, and owns nothing.
    #[inline]
    pub fn drop_content(self) {
        self.become_unlocked(|_| Stored::Nothing.content());
    }

    /// Its content is lost.
    pub fn poison(self) {
        self.become_unlocked(|_| Snapshot::new(State::Poisoned, 0));
    }

    /// Its object cannot be read there: it has lost nothing, and can be asked for again.
    pub fn refuse(self) {
        self.become_unlocked(|_| Snapshot::new(State::Poisoned, 0).with(Flags::ERROR));
    }

    /// Its content is another page's from now on; `to` has none.
    pub fn move_to(self, to: LockedPage<'_, L>) {
        let moved = self.content.without(Flags::WRITEBACK);
        to.become_unlocked(|_| moved);
        self.drop_content();
    }

    /// Its writes are noticed from now on.
    pub fn track_writes(self) {
        self.become_unlocked(|old| old.without(Flags::DIRTY).with(Flags::WRITE_PROTECTED));
    }

    #[inline]
    pub fn set_flags(self, flags: Flags) {
        self.become_unlocked(|old| old.with(flags));
    }

    #[inline]
    pub fn clear_flags(self, flags: Flags) {
        self.become_unlocked(|old| old.without(flags));
    }

    #[inline]
    fn become_unlocked(self, next: impl FnOnce(Snapshot) -> Snapshot) {
        let after = next(self.content);
        self.check(after);
        self.unlock_changed(after);
    }

    /// A cached page, or one whose memory has failed, goes from memory to what it keeps in swap, or in
    /// its object's store.
    pub fn uncache(self) {
        debug_assert!(!self.has(Flags::DIRTY), "{:?} is dirty", self.page());
        self.become_unlocked(|old| old.stored().unwrap_or(Stored::Nothing).content());
    }

    /// Its memory has failed, and its bytes there are lost. What it keeps in swap stays its own.
    pub fn fail(self) {
        // Of an object with a store: what is under way was copied before.
        let is_cached = self.state() == State::Cached;
        let goes_on = if is_cached { Flags::WRITEBACK } else { Flags::EMPTY };
        let failed = Snapshot::new(State::Poisoned, 0);
        self.become_unlocked(|old| old.keep(goes_on, failed.keeping(old)));
    }
}

/// Changes that keep the lock.
impl<L: PageLocks> LockedPage<'_, L> {
    /// Its bytes are in its object's cache, and it keeps nothing in swap.
    pub fn cache(&mut self) {
        self.become_locked(|_| Snapshot::new(State::Cached, 0));
    }

    /// Its bytes are in its object's cache, and it keeps what it has in swap until it is written.
    pub fn cache_clean(&mut self) {
        self.become_locked(|old| Snapshot::new(State::Cached, 0).keeping(old));
    }

    /// It may be written from now on, and keeps nothing in swap.
    pub fn dirty(&mut self) {
        self.become_locked(|old| {
            let kept = if old.has(Flags::CLEAN) { old.without_kept() } else { old };
            kept.without(Flags::INCOMPRESSIBLE).with(Flags::DIRTY)
        });
    }

    /// What is cached was put into swap, and is there as it is in memory.
    pub fn keep_stored(&mut self, stored: Stored) {
        let stored = stored.content();
        self.become_locked(|old| old.without_kept().without(Flags::DIRTY).keeping(stored));
    }

    /// It was written to its object's store, and is durable with the sync of this number.
    pub fn note_written(&mut self, sync: u32) {
        self.become_locked(|old| old.with_payload(sync));
    }

    pub fn set_flags_locked(&mut self, flags: Flags) {
        self.become_locked(|old| old.with(flags));
    }

    pub fn clear_flags_locked(&mut self, flags: Flags) {
        self.become_locked(|old| old.without(flags));
    }

    pub fn end_clean_locked(&mut self) {
        self.become_locked(|old| old.without_kept());
    }

    pub fn rename_locked(&mut self, number: u32) {
        self.become_locked(|old| old.without(Flags::WRITEBACK).with_payload(number));
    }

    pub fn drop_content_locked(&mut self) {
        self.become_locked(|_| Stored::Nothing.content());
    }

    fn become_locked(&mut self, next: impl FnOnce(Snapshot) -> Snapshot) {
        let after = next(self.content);
        self.check(after);
        self.word().set(after);
        self.content = after;
    }

    /// Through here goes every change: the tables and the flags allow it.
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

/// The tables above.
const fn may_follow(before: State, after: State) -> bool {
    use State::{Cached, File, Limbo, Mapped, None, Poisoned, Pool, Same};
    match before {
        None => !matches!(after, File),
        Mapped => !matches!(after, Cached),
        Limbo => matches!(after, None | Mapped | Limbo | Same | Pool | File),
        Same => matches!(after, None | Mapped | Same | Poisoned | Cached),
        Pool => matches!(after, None | Mapped | Pool | File | Poisoned | Cached),
        File => matches!(after, None | Mapped | File | Poisoned | Cached),
        Poisoned => matches!(after, None | Same | Pool | File | Poisoned),
        Cached => !matches!(after, Mapped | Limbo),
    }
}

/// Whether a state may have its flags. ERROR of a page that is not poisoned, and WRITEBACK of one that
/// is, are of objects' pages alone.
const fn may_have_flags(word: Snapshot) -> bool {
    const MAPPED: Flags = Flags::ACCESSED
        .or(Flags::MLOCKED)
        .or(Flags::PINNED)
        .or(Flags::DIRTY)
        .or(Flags::WRITE_PROTECTED)
        .or(KEPT);
    const KEPT_IN_SWAP: Flags = KEPT.without(Flags::IN_OBJECT);
    const CACHED: Flags = MAPPED
        .without(Flags::WRITE_PROTECTED.or(Flags::IN_OBJECT))
        .or(Flags::WRITEBACK)
        .or(Flags::INCOMPRESSIBLE);
    let allowed = match word.state() {
        State::None | State::Same | State::File => Flags::WRITE_PROTECTED.or(Flags::ERROR),
        State::Mapped => MAPPED,
        State::Limbo => {
            let evicted = Flags::LAZYFREE.or(Flags::INCOMPRESSIBLE).or(Flags::WRITEBACK);
            evicted.or(Flags::WRITE_PROTECTED)
        }
        State::Pool => Flags::WRITE_PROTECTED.or(Flags::WRITEBACK).or(Flags::ERROR),
        State::Poisoned => Flags::ERROR.or(Flags::WRITEBACK).or(KEPT_IN_SWAP),
        State::Cached if word.has(Flags::DIRTY.or(Flags::CLEAN)) => return false,
        State::Cached => CACHED,
    };
    let kept = word.flags().0 & KEPT.without(Flags::CLEAN).0;
    word.flags().without(allowed).is_empty() && kept.count_ones() <= word.has(Flags::CLEAN) as u32
}

#[cfg(test)]
#[path = "transitions_tests.rs"]
mod tests;
