//! The slabs of the compressed pool, as a tree shares them: which member uses which, and which
//! account is charged.
//!
//! The pool memfd holds this table, and behind it the slabs. The supervisor makes it, as long as
//! the budget asks for, and gives it to each member that joins; a fork's child inherits the mapping.
//! What a slab *holds* is not here: each member keeps that for itself (`swap/zpool`).
//!
//! # A slab's life
//!
//! | word | used by | charged to |
//! |---|---|---|
//! | [`SlabUse::Free`] | no member | no account |
//! | [`SlabUse::Own`] | the member that it names | that member's account |
//! | [`SlabUse::Common`] | the members whose bit is set in their map | `Control::common_pages` |
//!
//! ```text
//! Free   -- a member takes it: one compare-and-swap ----------->  Own
//! Own    -- its member gives its memory back, then the slab --->  Free
//! Own    -- a fork's child joins: the supervisor sets the bits
//!           of both, and then the word ------------------------>  Common
//! Common -- one member is left: the supervisor sets the word,
//!           then takes the bit away --------------------------->  Own
//! Common -- no bit is left: the supervisor gives the memory
//!           back, then the slab ------------------------------->  Free
//! ```
//!
//! A member lets go of a common slab by taking its own bit away. **The side that finds the bit set
//! when it takes it away decides**: if that was the member, it has let go; if it was the supervisor,
//! the slab is that member's own from then on.
//!
//! Nothing here is ever half done. A member that is killed leaves words that name it and bits in
//! its map; the supervisor, told by the connection's end, frees the ones and clears the others.
//! References are not counted, so none is lost, and no side waits for another.
//!
//! The bytes of a common slab are not written: the slab is *sealed*, until it is one member's own again.

use core::ptr::NonNull;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};

use super::MEMBERS_MAX;
use crate::units::PAGE_SIZE;

/// Address space of a slab: its pages, and then nothing.
pub const SLAB_PAGES_MAX: usize = 8;
/// The same in bytes.
pub const SLOT_BYTES: usize = SLAB_PAGES_MAX * PAGE_SIZE;
/// Fewest pages of a slab: with it, the pool's address space is at most twice its memory.
pub const SLAB_PAGES_MIN: usize = 4;
/// Most slabs that handles can name: they count 64 bytes each.
pub const SLOTS_MAX: usize = (1 << 32) / (SLOT_BYTES / 64);
/// What a pool may have beyond twice its budget, in bytes.
const SLACK_BYTES: usize = 64 << 20;

/// Slots of a pool under this budget, in bytes: twice what it can fill, for fragments cost
/// addresses, not memory. Slot 0 is never used.
pub const fn slots_for(budget_bytes: usize) -> usize {
    let bytes = budget_bytes.saturating_mul(2).saturating_add(SLACK_BYTES);
    let slots = bytes.div_ceil(SLAB_PAGES_MIN * PAGE_SIZE).saturating_add(1);
    if slots < SLOTS_MAX { slots } else { SLOTS_MAX }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlabUse {
    /// None: it has no memory.
    Free,
    /// The member in this slot, which is charged for it.
    Own { member: u32, pages: usize },
    /// The members whose bit for it is set.
    Common { pages: usize },
}

impl SlabUse {
    const PAGES_BITS: u32 = 4;
    const PAGES: u32 = (1 << Self::PAGES_BITS) - 1;

    /// Word: pages (low 4 bits; 0 is free), above them the member's slot plus one, or 0.
    const fn to_word(self) -> u32 {
        match self {
            SlabUse::Free => 0,
            SlabUse::Own { member, pages } => (member + 1) << Self::PAGES_BITS | pages as u32,
            SlabUse::Common { pages } => pages as u32,
        }
    }

    const fn of_word(word: u32) -> SlabUse {
        let pages = (word & Self::PAGES) as usize;
        match (pages, word >> Self::PAGES_BITS) {
            (0, _) => SlabUse::Free,
            (pages, 0) => SlabUse::Common { pages },
            (pages, member) => SlabUse::Own { member: member - 1, pages },
        }
    }
}

#[repr(C, align(64))]
struct Head {
    /// Slots that were ever taken lie below this one: a walk over the slots stops here.
    slots_end: AtomicU32,
    /// Counts bits that members took away: there may be slabs that no member uses.
    let_go: AtomicU32,
    /// Odd while the supervisor moves pages between accounts; changes with every such move.
    moves: AtomicU32,
}

/// The table of a pool's slabs, wherever it is mapped.
pub struct SlabTable {
    head: &'static Head,
    /// A [`SlabUse`] for each slot.
    words: &'static [AtomicU32],
    /// The maps of all members, one behind the other.
    maps: &'static [AtomicU64],
}

impl SlabTable {
    /// The table at the start of a mapped pool.
    ///
    /// # Safety
    ///
    /// [`SlabTable::bytes`] from `base` on, aligned to a page, are mapped to be read and written
    /// for as long as the table is used, were zero when the pool was made, and are used only as such
    /// a table of so many slots.
    pub unsafe fn at(base: NonNull<u8>, slots: usize) -> SlabTable {
        // SAFETY: the caller's promise, with the lengths that `bytes` adds up; zeros are a value of
        // each type.
        unsafe {
            let words = base.add(size_of::<Head>()).cast();
            let maps = base.add(Self::maps_offset(slots)).cast();
            SlabTable {
                head: base.cast().as_ref(),
                words: NonNull::slice_from_raw_parts(words, slots).as_ref(),
                maps: NonNull::slice_from_raw_parts(maps, MEMBERS_MAX * Self::map_words(slots))
                    .as_ref(),
            }
        }
    }

    /// Bytes of a table of so many slots, in whole pages; the first slot lies behind them.
    pub const fn bytes(slots: usize) -> usize {
        let maps = MEMBERS_MAX * Self::map_words(slots) * size_of::<AtomicU64>();
        (Self::maps_offset(slots) + maps).next_multiple_of(PAGE_SIZE)
    }

    /// Bytes of a pool of so many slots, table included.
    pub const fn pool_bytes(slots: usize) -> usize {
        Self::bytes(slots) + slots * SLOT_BYTES
    }

    /// Where a slot's memory begins in the pool.
    pub const fn offset_of(&self, slot: u32) -> usize {
        Self::bytes(self.slots()) + slot as usize * SLOT_BYTES
    }

    pub const fn slots(&self) -> usize {
        self.words.len()
    }

    /// The slots that were ever taken lie below this one.
    pub fn slots_end(&self) -> usize {
        // Acquire pairs with `take`: every slot that is used lies below.
        (self.head.slots_end.load(Acquire) as usize).min(self.slots())
    }

    pub fn slab_use(&self, slot: u32) -> SlabUse {
        // Acquire: a member that sees a slab as its own again sees that the others are done with it.
        self.words
            .get(slot as usize)
            .map_or(SlabUse::Free, |word| SlabUse::of_word(word.load(Acquire)))
    }

    /// Takes a free slot for a member that was charged for it.
    pub fn take(&self, slot: u32, member: u32, pages: usize) -> bool {
        let Some(word) = self.words.get(slot as usize) else { return false };
        // Before the word: a supervisor that looks for words of a dead member finds this one.
        if self.head.slots_end.load(Relaxed) <= slot {
            self.head.slots_end.fetch_max(slot + 1, Release);
        }
        let own = SlabUse::Own { member, pages }.to_word();
        // Acquire pairs with the release in `change`: the memory was given back before.
        word.load(Relaxed) == 0 && word.compare_exchange(0, own, AcqRel, Relaxed).is_ok()
    }

    /// Changes which members use a slot. `false` where the slot's use is not `from` any more.
    #[must_use]
    pub fn change(&self, slot: u32, from: SlabUse, to: SlabUse) -> bool {
        // Release: the next user of the slot comes after what was done before.
        self.words.get(slot as usize).is_some_and(|word| {
            word.compare_exchange(from.to_word(), to.to_word(), AcqRel, Relaxed).is_ok()
        })
    }

    /// Of slots `64 * word` and on, those that a member shares with others, a bit each.
    pub fn shared_slots(&self, member: u32, word: usize) -> u64 {
        // Acquire pairs with `forget`: a bit that is gone was taken away after the last use.
        self.map_word(member, word).map_or(0, |word| word.load(Acquire))
    }

    pub fn share(&self, member: u32, word: usize, bits: u64) {
        if let Some(word) = self.map_word(member, word) {
            word.fetch_or(bits, AcqRel);
        }
    }

    /// Takes bits of a member away; returns those that were set.
    #[must_use]
    pub fn forget(&self, member: u32, word: usize, bits: u64) -> u64 {
        // AcqRel: what the member read came before, what the supervisor does comes after.
        self.map_word(member, word).map_or(0, |word| word.fetch_and(!bits, AcqRel) & bits)
    }

    /// A member lets go of a common slab. `false` where the supervisor has made it that member's own.
    #[must_use]
    pub fn let_go(&self, slot: u32, member: u32) -> bool {
        let bit = 1 << (slot % 64);
        let has_let_go = self.forget(member, slot as usize / 64, bit) != 0;
        if has_let_go {
            // Release: the supervisor that sees the count sees the bit.
            self.head.let_go.fetch_add(1, Release);
        }
        has_let_go
    }

    /// Counts how often members have let go of common slabs.
    pub fn times_let_go(&self) -> u32 {
        self.head.let_go.load(Acquire)
    }

    /// Counts the supervisor's moves of pages from one account to another, twice each: odd while
    /// it moves some.
    pub fn moves(&self) -> u32 {
        self.head.moves.load(Acquire)
    }

    /// The supervisor begins to move pages between accounts, or is done.
    pub fn count_move(&self) {
        // AcqRel: what comes between two of these is not seen outside of them.
        self.head.moves.fetch_add(1, AcqRel);
    }

    /// The word of a member's map that has the bits of slots `64 * word` and on.
    fn map_word(&self, member: u32, word: usize) -> Option<&AtomicU64> {
        let map_words = Self::map_words(self.slots());
        let is_in_map = (member as usize) < MEMBERS_MAX && word < map_words;
        is_in_map.then(|| &self.maps[member as usize * map_words + word])
    }

    const fn maps_offset(slots: usize) -> usize {
        size_of::<Head>() + (slots * size_of::<AtomicU32>()).next_multiple_of(8)
    }

    const fn map_words(slots: usize) -> usize {
        slots.div_ceil(64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_says_which_members_use_a_slab_and_how_large_it_is() {
        assert_eq!(SlabUse::of_word(0), SlabUse::Free);
        for pages in SLAB_PAGES_MIN..=SLAB_PAGES_MAX {
            for member in [0, 1, MEMBERS_MAX as u32 - 1] {
                let own = SlabUse::Own { member, pages };
                assert_eq!(SlabUse::of_word(own.to_word()), own);
            }
            let common = SlabUse::Common { pages };
            assert_eq!(SlabUse::of_word(common.to_word()), common);
        }
    }

    #[test]
    fn handles_can_name_every_slot() {
        assert_eq!(slots_for(0), SLACK_BYTES / (SLAB_PAGES_MIN * PAGE_SIZE) + 1);
        assert_eq!(slots_for(usize::MAX), SLOTS_MAX);
    }
}
