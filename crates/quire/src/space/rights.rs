//! Rights that the kernel's mappings have where no VMA is: *open* stretches.
//!
//! mprotect takes the kernel's lock of all mappings for writing, which stops every fault of every
//! thread, and cuts kernel mappings in two. So an unmap takes the pages away and leaves the rights,
//! and a map over a stretch that is still open needs no call. What is touched there although it is
//! unmapped is a missing page and comes to a handler, which *seals* the stretch: the rights go, the
//! access is tried again, and is the SIGSEGV (or EFAULT) that it has to be.
//!
//! Owns the record of what is open, and the faults that wait for a seal. Leaves to `map`, `unmap`
//! and their kin when rights are needed, and to the kernel the rights inside of VMAs.
//!
//! A page of the arena is in one of three states:
//!
//! | | kernel's rights | an access |
//! |---|---|---|
//! | in a VMA | the VMA's | as the VMA has it |
//! | open | read and write, nothing mapped | faults, and is sealed |
//! | sealed | none | SIGSEGV |
//!
//! Where the kernel has no mapping to spare it may refuse to seal. Such a stretch is noted as open, so
//! that an access seals it or is tried again; but what rights its pages have is not known any more,
//! and from then on every map asks for them.
//!
//! Rights come 64 MiB at a time (docs/decisions/0020). PROT_NONE and read-only mappings have their mprotect at
//! each call. Where RLIMIT_DATA is set at the start nothing stays open, because that limit counts what can be
//! written; where another limit refuses a call, all that is open is given back and the call is tried once more.
//! The library keeps rights exact: its inline delivery must not take the space's lock in a signal handler.
//!
//! Locks: the record is the space's lock's. A handler only ever tries that lock; where it is taken
//! the fault stays in the list, for the thread that gives the lock back.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

use super::vma::{SpaceLocked, partition_point};
use super::{Layout, VmSpace};
use crate::fault::Outcome;
use crate::fault::fault_list::{Answer, FaultList};
use crate::mmu::{Mmu, Prot};
use crate::sys::{Errno, memory::Table, memory::Zeroed};
use crate::units::{PageNum, PageRange};

/// Most open stretches; what more there would be is sealed. As many as the kernel has mappings.
const STRETCHES_MAX: usize = 1 << 16;

struct Stretch {
    start: AtomicU64,
    end: AtomicU64,
}

// SAFETY: atomics, for which zero is valid.
unsafe impl Zeroed for Stretch {}

/// The open stretches, in order of address; no two touch.
pub(crate) struct Rights {
    stretches: Table<Stretch>,
    count: AtomicUsize,
    /// How many pages get their rights together; 0 while nothing stays open.
    step_pages: AtomicUsize,
    /// Whether the kernel has refused to seal any. For good: a program that was there will be there again.
    is_unsure: AtomicBool,
    strays: FaultList,
    has_strays: AtomicBool,
}

// The record is read and written under the space's lock alone: Relaxed throughout, the lock orders.
impl Rights {
    pub fn new() -> Result<Rights, Errno> {
        Ok(Rights {
            stretches: Table::new(STRETCHES_MAX)?,
            count: AtomicUsize::new(0),
            step_pages: AtomicUsize::new(0),
            is_unsure: AtomicBool::new(false),
            strays: FaultList::new(),
            has_strays: AtomicBool::new(false),
        })
    }

    fn is_lazy(&self) -> bool {
        // Relaxed: set before there is a second thread.
        self.step_pages.load(Ordering::Relaxed) > 0
    }

    fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn at(&self, position: usize) -> PageRange {
        let stretch = &self.stretches[position];
        PageRange {
            start: PageNum(stretch.start.load(Ordering::Relaxed)),
            end: PageNum(stretch.end.load(Ordering::Relaxed)),
        }
    }

    fn set(&self, position: usize, range: PageRange) {
        let stretch = &self.stretches[position];
        stretch.start.store(range.start.0, Ordering::Relaxed);
        stretch.end.store(range.end.0, Ordering::Relaxed);
    }

    /// First position whose stretch `is_behind`, which is true from some position on.
    fn search(&self, is_behind: impl Fn(PageRange) -> bool) -> usize {
        partition_point(self.len(), |at| !is_behind(self.at(at)))
    }

    /// The open stretch that holds `page`, or the first one behind it.
    fn next_from(&self, page: PageNum) -> Option<PageRange> {
        let position = self.search(|open| open.end > page);
        (position < self.len()).then(|| self.at(position))
    }

    pub fn stretch_of(&self, page: PageNum, _: &SpaceLocked) -> Option<PageRange> {
        self.next_from(page).filter(|open| open.contains(page))
    }

    pub fn covers(&self, range: PageRange, _: &SpaceLocked) -> bool {
        self.next_from(range.start)
            .is_some_and(|open| open.start <= range.start && range.end <= open.end)
    }

    pub fn overlaps(&self, range: PageRange, _: &SpaceLocked) -> bool {
        self.next_from(range.start).is_some_and(|open| open.start < range.end)
    }

    fn replace(&self, from: usize, to: usize, new: &[PageRange]) {
        let count = self.len();
        let behind = from + new.len();
        if behind < to {
            (to..count).for_each(|at| self.set(behind + at - to, self.at(at)));
        } else if behind > to {
            (to..count).rev().for_each(|at| self.set(behind + at - to, self.at(at)));
        }
        for (at, &range) in new.iter().enumerate() {
            self.set(from + at, range);
        }
        self.count.store(behind + count - to, Ordering::Relaxed);
    }

    /// Notes a range as open; `false` where there is no room to note it.
    #[must_use]
    pub fn add(&self, range: PageRange, _: &SpaceLocked) -> bool {
        if range.is_empty() {
            return true;
        }
        let from = self.search(|open| open.end >= range.start);
        let to = self.search(|open| open.start > range.end);
        if from == to && self.len() == STRETCHES_MAX {
            return false;
        }
        let mut whole = range;
        if from < to {
            whole.start = range.start.min(self.at(from).start);
            whole.end = range.end.max(self.at(to - 1).end);
        }
        self.replace(from, to, &[whole]);
        true
    }

    /// Forgets that a range is open. Returns what had to be forgotten with it, because there is no
    /// room to note both sides of it: that must be sealed.
    #[must_use]
    pub fn take(&self, range: PageRange, _: &SpaceLocked) -> Option<PageRange> {
        let from = self.search(|open| open.end > range.start);
        let to = self.search(|open| open.start >= range.end);
        if from >= to {
            return None;
        }
        let head = PageRange { start: self.at(from).start, end: range.start };
        let tail = PageRange { start: range.end, end: self.at(to - 1).end };
        match (head.start < head.end, tail.start < tail.end) {
            (false, false) => self.replace(from, to, &[]),
            (true, false) => self.replace(from, to, &[head]),
            (false, true) => self.replace(from, to, &[tail]),
            (true, true) if to - from == 1 && self.len() == STRETCHES_MAX => {
                self.replace(from, to, &[head]);
                return Some(tail);
            }
            (true, true) => self.replace(from, to, &[head, tail]),
        }
        None
    }

    #[cfg(test)]
    pub fn all(&self) -> std::vec::Vec<PageRange> {
        (0..self.len()).map(|position| self.at(position)).collect()
    }

    /// In a fork's child, before any other thread runs there: the threads whose faults wait exist
    /// in the parent only. The record is as true here as there.
    pub fn after_fork_in_child(&self) {
        self.strays.after_fork_in_child();
        // Relaxed: no other thread runs yet.
        self.has_strays.store(false, Ordering::Relaxed);
    }
}

impl<M: Mmu> VmSpace<M> {
    /// Seals what strayed faults have touched, unless another thread holds the space's lock: that one will then.
    pub(super) fn seal_strays(&self) {
        loop {
            // Pairs with itself on the other side (Dekker): a fault that strays notes it and then tries
            // the lock; a thread that unlocks does so first and then looks for notes. One of them sees the other.
            fence(Ordering::SeqCst);
            if !self.rights.has_strays.load(Ordering::Relaxed) {
                return;
            }
            // Classic faults may be inside: what is sealed is in no VMA.
            let Some((guard, locked)) = self.layout.try_lock_beside_faults() else { return };
            // Before the list is taken: a fault that comes later sets it again. Acquire pairs with the release
            // in `fault_outside`: a fault whose note is taken here is in the list.
            self.rights.has_strays.swap(false, Ordering::Acquire);
            self.rights.strays.answer_all(|answer| self.seal(answer, &locked));
            drop(guard);
        }
    }

    /// From now on rights stay behind where something is unmapped, and come in steps of so many
    /// pages: for a space whose faults outside of VMAs all come to [`Self::handle_fault`]. Before
    /// anything is mapped.
    pub fn keep_rights(&self, step_pages: usize) {
        // Relaxed: before there is a second thread.
        self.rights.step_pages.store(step_pages, Ordering::Relaxed);
    }

    /// A fault where no VMA is. Answered once the stretch is sealed, or something is mapped there.
    pub(crate) fn fault_outside(&self, page: PageNum) -> Outcome {
        if self.rights.is_lazy() {
            self.rights.strays.push(page);
            // Release: see `seal_strays`.
            self.rights.has_strays.store(true, Ordering::Release);
            self.seal_strays();
        } else {
            self.mmu.wake(PageRange::new(page, 1));
        }
        Outcome::NoVma
    }

    /// Seals where faults have strayed, and answers them. All of the stretch goes: page by page a
    /// program that looks for its memory would cut the kernel's mapping to pieces.
    fn seal(&self, answer: Answer, locked: &SpaceLocked) {
        match answer {
            Answer::Page(page) => {
                if let Some(open) = self.rights.stretch_of(page, locked) {
                    self.take_rights(open, locked);
                }
            }
            Answer::All => self.seal_all(locked),
        }
        self.answer_listed(answer);
    }

    /// Takes the rights of a range away that no VMA has. Where the kernel refuses, it is open.
    fn take_rights(&self, range: PageRange, locked: &SpaceLocked) {
        let is_sealed = self.mmu.protect(range, Prot::NONE).refusal.is_none();
        if is_sealed || !self.rights.is_lazy() {
            self.forget_open(range, locked);
        } else {
            // A part may have lost them, and a part never had all.
            self.rights.is_unsure.store(true, Ordering::Relaxed);
            self.note_open(range, locked);
        }
    }

    fn seal_all(&self, locked: &SpaceLocked) {
        let mut at = PageNum(0);
        while let Some(open) = self.rights.next_from(at) {
            at = open.end;
            self.take_rights(open, locked);
        }
    }

    /// Gives the kernel's mapping of a range that no VMA has the rights `prot`. The caller inserts
    /// the VMA, or takes them away again.
    ///
    /// # Errors
    /// `NOMEM` where the kernel refuses; the range is sealed then.
    pub(super) fn give_rights(
        &self,
        layout: &Layout<'_>,
        range: PageRange,
        prot: Prot,
    ) -> Result<(), Errno> {
        let locked = &layout.locked;
        let has_already = !self.rights.is_unsure.load(Ordering::Relaxed)
            && match prot {
                Prot::READ_WRITE => self.rights.covers(range, locked),
                Prot::NONE => !self.rights.overlaps(range, locked),
                _ => false,
            };
        if !has_already && prot == Prot::READ_WRITE && self.open_around(range, locked) {
            return Ok(());
        }
        self.forget_open(range, locked);
        if has_already || self.mmu.protect(range, prot).refusal.is_none() {
            return Ok(());
        }
        // What is open counts against limits on the process's data: without it there may be room.
        self.seal_all(locked);
        if self.mmu.protect(range, prot).refusal.is_none() {
            return Ok(());
        }
        // A part may have got them.
        self.take_rights(range, locked);
        Err(Errno::NOMEM)
    }

    /// Gives rights to the free stretch around a range, up to whole steps, so that what is mapped
    /// beside it next has them. `false` where the kernel refuses.
    fn open_around(&self, range: PageRange, locked: &SpaceLocked) -> bool {
        let step = self.rights.step_pages.load(Ordering::Relaxed) as u64;
        if step == 0 {
            return false;
        }
        let steps = PageRange {
            start: PageNum(range.start.0 / step * step),
            end: PageNum(range.end.0.next_multiple_of(step)),
        };
        let free = self.vmas.gap_around(range, self.arena(), locked).intersect(steps);
        let is_given = self.mmu.protect(free, Prot::READ_WRITE).refusal.is_none();
        if !is_given {
            // A part may have got them.
            self.take_rights(free, locked);
        } else {
            self.forget_open(free, locked);
            self.note_open(PageRange { start: free.start, end: range.start }, locked);
            self.note_open(PageRange { start: range.end, end: free.end }, locked);
        }
        is_given
    }

    /// A range has no VMA any more, and no page. Where all of it could be written the rights stay;
    /// else they go, from all of it: one call seals what was open between its VMAs as well.
    pub(super) fn leave_rights(&self, layout: &Layout<'_>, range: PageRange, is_writable: bool) {
        if is_writable && self.rights.is_lazy() {
            self.note_open(range, &layout.locked);
            return;
        }
        self.take_rights(range, &layout.locked);
    }

    fn note_open(&self, range: PageRange, locked: &SpaceLocked) {
        if !self.rights.add(range, locked) {
            let _ = self.mmu.protect(range, Prot::NONE);
        }
    }

    /// A range is not open any more: it has a VMA, or another mapping.
    pub(super) fn forget_open(&self, range: PageRange, locked: &SpaceLocked) {
        if let Some(rest) = self.rights.take(range, locked) {
            let _ = self.mmu.protect(rest, Prot::NONE);
        }
    }
}
