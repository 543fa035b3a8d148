//! VMAs: which ranges of the arena belong to the program, and with which rights.
//!
//! Records are type-stable: a slot of the table is a VMA record for the process's whole life, so
//! a reader that holds an old slot number reads an old or a new record, never something else. Two
//! sequence counts make reading without a lock safe: the index's, odd while the sorted order
//! changes, which a lookup checks around its search; and a record's own, bumped before and after
//! any change of it, which a fault checks once more under the page lock.
//!
//! A lookup writes nothing. Changes need the space's lock, which the caller proves by a guard.
//!
//! # A change against a fault
//!
//! A change of the layout bumps the record's count *first* and takes the page locks *afterwards*. A fault takes
//! the page lock first and looks at the count afterwards. So either the fault sees the change, or the change
//! finds what the fault mapped. The change skips blocks that were never touched; for that reason a block's
//! `is_used` and the count are SeqCst on both sides.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub use super::attributes::{Attributes, Backing, Kind, Pattern};
use super::seqcount::SeqCount;
use crate::sys::{Errno, memory::Table, memory::Zeroed};
use crate::units::{PageNum, PageRange};

pub const VMAS_MAX: usize = 1 << 18;

struct Record {
    start: AtomicU64,
    end: AtomicU64,
    attributes: [AtomicU64; 3],
    sequence: SeqCount,
    next: AtomicU32,
}

// SAFETY: atomics, for which zero is valid.
unsafe impl Zeroed for Record {}

/// A copy of a VMA, taken without a lock, with what is needed to check it again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vma {
    pub range: PageRange,
    pub attributes: Attributes,
    slot: u32,
    sequence: u32,
}

/// A lookup met a change of the order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Changed;

/// All VMAs of a space, in order of address.
pub struct VmaIndex {
    records: Table<Record>,
    order: Table<AtomicU32>,
    count: AtomicU32,
    /// Counts changes of the order.
    sequence: SeqCount,
    free: AtomicU32,
    used: AtomicU32,
    /// For each power of two: no gap of as many pages begins below. What a search for a gap need not
    /// walk over; under the space's lock.
    gap_hints: [AtomicU64; GAP_CLASSES],
}

/// Powers of two that a number of pages can have.
const GAP_CLASSES: usize = 64;

/// Proof that the caller holds the space's lock. Made by the space only.
pub struct SpaceLocked(pub(super) ());

/// The first of `len` positions that `is_before` is not true of; it is true of all positions before.
pub(super) fn partition_point(len: usize, is_before: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, len);
    while low < high {
        let middle = usize::midpoint(low, high);
        if is_before(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

impl VmaIndex {
    pub fn new() -> Result<VmaIndex, Errno> {
        Ok(VmaIndex {
            records: Table::new(VMAS_MAX)?,
            order: Table::new(VMAS_MAX)?,
            count: AtomicU32::new(0),
            sequence: SeqCount::default(),
            free: AtomicU32::new(u32::MAX),
            used: AtomicU32::new(0),
            gap_hints: [const { AtomicU64::new(0) }; GAP_CLASSES],
        })
    }

    fn at(&self, position: usize) -> &Record {
        &self.records[self.order[position].load(Ordering::Relaxed) as usize % VMAS_MAX]
    }

    /// First position whose VMA ends behind `page`.
    fn search(&self, page: PageNum) -> usize {
        partition_point(self.len(), |at| self.at(at).end.load(Ordering::Relaxed) <= page.0)
    }

    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed) as usize
    }

    fn view(&self, position: usize) -> Option<Vma> {
        let slot = self.order[position].load(Ordering::Relaxed);
        let record = &self.records[slot as usize % VMAS_MAX];
        let sequence = record.sequence.begin()?;
        let vma = Vma {
            range: PageRange {
                start: PageNum(record.start.load(Ordering::Relaxed)),
                end: PageNum(record.end.load(Ordering::Relaxed)),
            },
            attributes: Attributes::from_bits(
                record.attributes.each_ref().map(|word| word.load(Ordering::Relaxed)),
            ),
            slot,
            sequence,
        };
        record.sequence.ends(sequence).then_some(vma)
    }

    /// Finds the VMA that holds `page`, without a lock and without writing.
    ///
    /// # Errors
    /// [`Changed`] where a change of the order got in between: try again.
    pub fn lookup(&self, page: PageNum) -> Result<Option<Vma>, Changed> {
        let sequence = self.sequence.begin().ok_or(Changed)?;
        let position = self.search(page);
        let vma =
            if position < self.len() { Some(self.view(position).ok_or(Changed)?) } else { None };
        if !self.sequence.ends(sequence) {
            return Err(Changed);
        }
        Ok(vma.filter(|vma| vma.range.contains(page)))
    }

    /// Whether `vma` is still as it was when it was copied. Under the lock of a page in it, a yes
    /// holds until that lock is given back.
    pub fn is_current(&self, vma: &Vma) -> bool {
        self.records[vma.slot as usize].sequence.is_still(vma.sequence)
    }

    /// See [`VmSpace::next_vma`](super::VmSpace::next_vma).
    pub fn next_from(&self, page: PageNum, _: &SpaceLocked) -> Option<Vma> {
        let position = self.search(page);
        (position < self.len()).then(|| self.view(position).expect("the space is locked"))
    }

    fn change(&self, slot: u32, new: Option<(PageRange, Attributes)>) {
        let record = &self.records[slot as usize];
        record.sequence.change(|| {
            let Some((range, attributes)) = new else { return };
            record.start.store(range.start.0, Ordering::Relaxed);
            record.end.store(range.end.0, Ordering::Relaxed);
            for (word, bits) in record.attributes.iter().zip(attributes.to_bits()) {
                word.store(bits, Ordering::Relaxed);
            }
        });
    }

    fn set(&self, slot: u32, range: PageRange, attributes: Attributes) {
        self.sequence.change(|| self.change(slot, Some((range, attributes))));
    }

    /// Adds a VMA where there is none, joined to its neighbours where all is alike.
    ///
    /// # Errors
    /// `NOMEM` where the table is full.
    pub fn insert(
        &self,
        range: PageRange,
        attributes: Attributes,
        locked: &SpaceLocked,
    ) -> Result<(), Errno> {
        let position = self.search(range.start);
        let count = self.len();
        debug_assert!(
            position == count || self.at(position).start.load(Ordering::Relaxed) >= range.end.0
        );
        let before = position
            .checked_sub(1)
            .and_then(|p| self.view(p))
            .filter(|vma| vma.range.end == range.start && vma.attributes == attributes);
        let after = (position < count)
            .then(|| self.view(position))
            .flatten()
            .filter(|vma| vma.range.start == range.end && vma.attributes == attributes);
        let whole = PageRange {
            start: before.map_or(range.start, |before| before.range.start),
            end: after.map_or(range.end, |after| after.range.end),
        };
        if let Some(kept) = before.or(after) {
            if before.is_some() && after.is_some() {
                self.remove_at(position, locked);
            }
            self.set(kept.slot, whole, attributes);
            return Ok(());
        }
        let slot = self.take_slot().ok_or(Errno::NOMEM)?;
        self.sequence.change(|| {
            self.change(slot, Some((range, attributes)));
            for at in (position..count).rev() {
                let moved = self.order[at].load(Ordering::Relaxed);
                self.order[at + 1].store(moved, Ordering::Relaxed);
            }
            self.order[position].store(slot, Ordering::Relaxed);
            self.count.store(count as u32 + 1, Ordering::Relaxed);
        });
        Ok(())
    }

    fn remove_at(&self, position: usize, _: &SpaceLocked) {
        let slot = self.order[position].load(Ordering::Relaxed);
        let count = self.len();
        self.sequence.change(|| {
            self.change(slot, None);
            for at in position..count - 1 {
                let moved = self.order[at + 1].load(Ordering::Relaxed);
                self.order[at].store(moved, Ordering::Relaxed);
            }
            self.count.store(count as u32 - 1, Ordering::Relaxed);
        });
        self.records[slot as usize]
            .next
            .store(self.free.load(Ordering::Relaxed), Ordering::Relaxed);
        self.free.store(slot, Ordering::Relaxed);
    }

    fn take_slot(&self) -> Option<u32> {
        let free = self.free.load(Ordering::Relaxed);
        if free != u32::MAX {
            let next = self.records[free as usize].next.load(Ordering::Relaxed);
            self.free.store(next, Ordering::Relaxed);
            return Some(free);
        }
        let used = self.used.load(Ordering::Relaxed);
        if used as usize >= VMAS_MAX - 1 {
            return None;
        }
        self.used.store(used + 1, Ordering::Relaxed);
        Some(used)
    }

    /// Takes `range` out of all VMAs, splitting those that reach over its ends.
    ///
    /// # Errors
    /// `NOMEM` where a split finds the table full; nothing has changed then.
    pub fn remove(&self, range: PageRange, locked: &SpaceLocked) -> Result<(), Errno> {
        let first = self.next_from(range.start, locked);
        if first.is_some_and(|vma| vma.range.start < range.start && range.end < vma.range.end) {
            self.check_room()?;
        }
        self.cut_out(range, locked)?;
        // The range has no VMA any more.
        let everything = PageRange { start: PageNum(0), end: PageNum(u64::MAX) };
        let gap = self.gap_around(range, everything, locked);
        for hint in &self.gap_hints[..=gap.len().max(1).ilog2() as usize] {
            hint.fetch_min(gap.start.0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether there is room for a split, and for what is put between its parts.
    fn check_room(&self) -> Result<(), Errno> {
        if self.len() + 2 >= VMAS_MAX { Err(Errno::NOMEM) } else { Ok(()) }
    }

    /// Puts one VMA where others were, or nothing, that joins no neighbour: none is like it.
    ///
    /// # Errors
    /// `NOMEM` where the table is full; nothing has changed then.
    pub fn replace(
        &self,
        range: PageRange,
        attributes: Attributes,
        locked: &SpaceLocked,
    ) -> Result<(), Errno> {
        let first = self.next_from(range.start, locked);
        if let Some(vma) = first.filter(|vma| vma.range == range) {
            self.set(vma.slot, range, attributes);
            return Ok(());
        }
        self.check_room()?;
        self.cut_out(range, locked)?;
        self.insert(range, attributes, locked)
    }

    /// Does what [`Self::remove`] does, without a note of the gap: the range may be filled again at once.
    fn cut_out(&self, range: PageRange, locked: &SpaceLocked) -> Result<(), Errno> {
        while let Some(vma) = self.next_from(range.start, locked) {
            if vma.range.start >= range.end {
                break;
            }
            let position = self.search(range.start);
            let head = PageRange { start: vma.range.start, end: range.start };
            let tail = PageRange { start: range.end, end: vma.range.end };
            match (head.is_empty(), tail.is_empty()) {
                (true, true) => self.remove_at(position, locked),
                (false, true) => self.set(vma.slot, head, vma.attributes),
                (true, false) => self.set(vma.slot, tail, vma.attributes),
                (false, false) => {
                    self.set(vma.slot, head, vma.attributes);
                    self.insert(tail, vma.attributes, locked)?;
                }
            }
        }
        Ok(())
    }

    /// Gives the VMAs inside `range` other attributes.
    ///
    /// # Errors
    /// `NOMEM` where a split finds the table full.
    pub fn change_attributes(
        &self,
        range: PageRange,
        locked: &SpaceLocked,
        change: impl Fn(Attributes) -> Attributes,
    ) -> Result<(), Errno> {
        let mut at = range.start;
        while at < range.end {
            let next = self.next_from(at, locked);
            let Some(vma) = next.filter(|vma| vma.range.start < range.end) else { break };
            let part = vma.range.intersect(range);
            at = part.end;
            let attributes = change(vma.attributes);
            if attributes != vma.attributes {
                self.check_room()?;
                self.cut_out(part, locked)?;
                self.insert(part, attributes, locked)?;
            }
        }
        Ok(())
    }

    /// Whether every page of `range` is in a VMA.
    pub fn covers(&self, range: PageRange, locked: &SpaceLocked) -> bool {
        let mut at = range.start;
        while at < range.end {
            match self.next_from(at, locked) {
                Some(vma) if vma.range.contains(at) => at = vma.range.end,
                _ => return false,
            }
        }
        true
    }

    /// The stretch around `range`, in which there is none, that no VMA of `limits` has.
    pub fn gap_around(&self, range: PageRange, limits: PageRange, _: &SpaceLocked) -> PageRange {
        let position = self.search(range.start);
        let before = position.checked_sub(1).map(|before| self.at(before));
        let after = (position < self.len()).then(|| self.at(position));
        let start = before.map_or(limits.start.0, |vma| vma.end.load(Ordering::Relaxed));
        let end = after.map_or(limits.end.0, |vma| vma.start.load(Ordering::Relaxed));
        PageRange { start: PageNum(start), end: PageNum(end) }
    }

    /// Finds `pages` neighbouring pages below `limit` that no VMA has, aligned to `align` pages;
    /// at `hint` where that is free.
    pub fn find_gap(
        &self,
        pages: usize,
        align: u64,
        hint: Option<PageNum>,
        limit: u64,
        locked: &SpaceLocked,
    ) -> Option<PageNum> {
        if let Some(hint) = hint
            && hint.0 + pages as u64 <= limit
            && self.next_from(hint, locked).is_none_or(|vma| vma.range.start >= hint.add(pages))
        {
            return Some(hint);
        }
        let class = pages.max(1).ilog2();
        let hint = &self.gap_hints[class as usize];
        let mut start = hint.load(Ordering::Relaxed);
        let mut position = self.search(PageNum(start));
        let mut first = None;
        let found = loop {
            let record = (position < self.len()).then(|| self.at(position));
            let next = record.map_or(limit, |record| record.start.load(Ordering::Relaxed));
            if first.is_none() && start + (1 << class) <= next {
                first = Some(start);
            }
            let aligned = start.next_multiple_of(align);
            if aligned + pages as u64 <= next {
                break Some(PageNum(aligned));
            }
            let Some(record) = record else { break None };
            start = record.end.load(Ordering::Relaxed);
            position += 1;
        };
        // Gaps that are too small or do not fit the alignment stay for others.
        hint.store(first.unwrap_or(start), Ordering::Relaxed);
        found
    }
}
