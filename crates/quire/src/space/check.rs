//! The space's invariants, as code. For tests; the letters are those of ARCHITECTURE.md.
//!
//! [`VmSpace::check_page`] holds at any moment for a page whose lock is free;
//! [`VmSpace::check`] for the whole space while no thread is in it.
//!
//! # What makes them true
//!
//! | | made true by |
//! |---|---|
//! | I1 | a thread that calls the MMU holds the page's lock, and sets the word before it unlocks |
//! | I2 | every path from lock to unlock; reads of the file unlock at their end |
//! | I3 | `count_mapped`, `count_unmapped`, `use_block` |
//! | I4 | `set_owner` comes before the unlock; handles change hands under the page lock |
//! | I5 | `frames/mod.rs`, under its mutex |
//! | I6 | a charge comes before the memory is taken, giving back after it is gone |
//! | I7 | in `map` the rights come before the VMA; in `unmap` the VMA goes (or dies) first, then the pages, then the stretch is noted as open |
//! | I8 | `try_charge`, one word a member; `charge_anyway` only for what is there already, and for the words of a block that `remap` moves to |
//! | I9 | references come before the bit at taking, the bit before the references at letting go |
//! | I10 | header and checksum in `swap/blob.rs` |
//! | I11 | `try_lock`, `lock_or_park`, `try_share`, queues |
//! | I12 | MADV_DONTFORK from the start |
//! | I13 | each `Err(Doubt)` comes after its unlocks |
//! | I14 | the supervisor sets the bits, then the word; the side that finds a bit set when it takes it away has decided |

use core::sync::atomic::Ordering;
use std::collections::BTreeSet;

use super::VmSpace;
use super::vma::{Kind, Vma};
use crate::mmu::{FrameId, Inspect, Prot};
use crate::page::{Flags, State};
use crate::units::{BLOCK_ORDER, PageNum, PageRange};

#[derive(Default)]
struct Census {
    mapped: usize,
    limbo: usize,
    wanted: usize,
    copies: usize,
    handles: BTreeSet<u32>,
    locations: BTreeSet<u32>,
}

impl Census {
    fn has_handle(&mut self, page: PageNum, number: u32) {
        assert!(number != 0, "{page:?} names no packed page");
        assert!(self.handles.insert(number), "{page:?} shares packed page {number:#x}");
    }

    fn has_location(&mut self, page: PageNum, number: u32) {
        assert!(self.locations.insert(number), "{page:?} shares its place in the swap file");
    }
}

impl<M: Inspect> VmSpace<M> {
    /// I1: an unlocked page's word says what is mapped.
    ///
    /// # Panics
    /// Where it does not.
    pub fn check_page(&self, page: PageNum) {
        let word = self.snapshot(page);
        if word.is_locked() {
            return;
        }
        let mapping = self.mmu.mapping(page);
        let is_mapped = word.state() == State::Mapped;
        let is_lost = word.state() == State::Poisoned;
        let is_protected = word.has(Flags::WRITE_PROTECTED) || word.has(Flags::CLEAN);
        let is_so = is_mapped == mapping.is_present
            && mapping.is_poisoned.is_none_or(|is_poisoned| is_poisoned == is_lost)
            && (!is_mapped || is_protected == mapping.is_write_protected);
        assert!(is_so, "{page:?} is {word:?}, but {mapping:?}");
    }

    /// Checks everything. No thread is in the space, and the caller does not hold its lock.
    ///
    /// # Panics
    /// Where something is wrong.
    pub fn check(&self) {
        self.check_beside(0);
    }

    /// The same, where objects hold so many pages of the account.
    pub(crate) fn check_beside(&self, objects: usize) {
        let mut found = Census::default();
        let arena = self.arena();
        arena.by_block().for_each(|range| self.check_block(range, &mut found));
        // I5: the pool's books agree with themselves, and every page in limbo is some page's.
        #[cfg(any(test, debug_assertions))]
        self.frames.check();
        assert_eq!(self.frames.limbo(), found.limbo, "pages in limbo");
        // I6: the account is what is there.
        let tables = self.used_parts(arena).count();
        let pool = self.frames.free() + self.frames.limbo();
        let held = found.mapped + pool + self.swap.zpool.own_pages() + tables;
        let member = self.budget.member();
        assert_eq!(
            self.budget.held(),
            held + objects,
            "held: {} mapped, {pool} in the pool, {} packed, {tables} of tables, {objects} of objects",
            found.mapped,
            self.swap.zpool.own_pages()
        );
        assert_eq!(member.wanted_pages.load(Ordering::Relaxed) as usize, found.wanted, "wanted");
        assert_eq!(self.swap.kept_copies(), found.copies, "kept copies");
        // I4: every packed page is named by one word or frame.
        assert_eq!(self.swap.zpool.blobs(), found.handles.len(), "packed pages without an owner");
        self.check_rights();
    }

    fn check_block(&self, range: PageRange, found: &mut Census) {
        let mut mapped = 0;
        for page in range.pages() {
            let word = self.snapshot(page);
            // I2: no thread holds a lock.
            assert!(!word.is_locked(), "{page:?} is {word:?}");
            let shows_object = |vma: Vma| vma.attributes.kind == Kind::Object;
            if word.state() == State::None && self.find_vma(page).is_some_and(shows_object) {
                // What is mapped there its object knows.
                continue;
            }
            self.check_page(page);
            match word.state() {
                State::None => continue,
                State::Mapped => {
                    mapped += 1;
                    if word.has(Flags::IN_POOL) {
                        found.copies += 1;
                        found.has_handle(page, word.payload());
                    } else if word.has(Flags::IN_FILE) {
                        found.has_location(page, word.payload());
                    }
                }
                State::Limbo => self.check_limbo(page, FrameId(word.payload()), found),
                State::Pool => found.has_handle(page, word.payload()),
                State::File => found.has_location(page, word.payload()),
                State::Same | State::Poisoned => {}
                State::Cached => panic!("{page:?} is {word:?}, which only words of objects are"),
            }
            found.wanted += 1;
        }
        // I3: a block's count is that of its mapped pages, and one that is in use is charged.
        let counted = self.block(range.start).mapped.load(Ordering::Relaxed);
        assert_eq!(counted, mapped, "mapped pages of {range:?}");
        assert!(mapped == 0 || self.is_block_used(range.start), "{range:?} is not charged");
        found.mapped += mapped as usize;
    }

    /// I4: a page in limbo and its frame name each other.
    fn check_limbo(&self, page: PageNum, frame: FrameId, found: &mut Census) {
        assert_eq!(self.frames.owner_of(frame), page, "{frame:?} is another page's");
        let mut in_limbo = self.frames.limbo_frames(frame.0 >> BLOCK_ORDER);
        assert!(in_limbo.any(|other| other == frame), "{frame:?} of {page:?} is not in limbo");
        assert!(self.mmu.has_memory(frame), "{frame:?} of {page:?} is a hole");
        found.limbo += 1;
    }

    /// I7: the MMU's rights are the VMAs'; outside of them nothing is mapped, and there are rights
    /// where that is noted.
    fn check_rights(&self) {
        let layout = self.lock();
        let mut at = PageNum(0);
        let end = self.arena().end;
        while at < end {
            let vma = self.next_vma(&layout, at);
            let gap_end = vma.map_or(end, |vma| vma.range.start);
            for page in (PageRange { start: at, end: gap_end }).pages() {
                assert_eq!(self.snapshot(page).state(), State::None, "{page:?} is in no VMA");
                let is_open = self.rights.stretch_of(page, &layout.locked).is_some();
                let expected = if is_open { Prot::READ_WRITE } else { Prot::NONE };
                let prot = self.mmu.mapping(page).prot;
                assert!(
                    prot.is_none_or(|prot| prot == expected),
                    "{page:?} is in no VMA, has {prot:?}, and should have {expected:?}"
                );
            }
            let Some(vma) = vma else { break };
            assert!(!self.rights.overlaps(vma.range, &layout.locked), "{vma:?} is open");
            for page in vma.range.pages().filter(|_| vma.attributes.kind.is_anonymous()) {
                let prot = self.mmu.mapping(page).prot;
                assert!(
                    prot.is_none_or(|prot| prot == vma.attributes.prot),
                    "{page:?} has {prot:?} in {vma:?}"
                );
            }
            at = vma.range.end;
        }
    }
}
