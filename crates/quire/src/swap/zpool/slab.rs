//! Slabs: runs of pages cut into places of one size, and the lists that keep them by fullness.
//!
//! Owns the size classes, the slab descriptors and a class's lists. All of it changes under the
//! lock of the slab's class ([`ClassLists`] is what that lock guards); descriptors are atomics only so
//! that a thread that knows a place to be live can look it up without the lock.

#![deny(unsafe_code)]

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU32, AtomicU64};

use super::super::blob::HEADER_BYTES;
use super::super::compress::PACKED_MAX;
use crate::control::slabs::{SLAB_PAGES_MAX, SLAB_PAGES_MIN, SLOT_BYTES};
use crate::sys::memory::{Table, zeroed};
use crate::units::PAGE_SIZE;

/// What a handle counts: places start at multiples of this.
pub(super) const GRANULE_BYTES: usize = 64;
pub(super) const SLOT_PAGES: usize = SLAB_PAGES_MAX;
pub(super) const SLOT_GRANULES: usize = SLOT_BYTES / GRANULE_BYTES;
/// Most places of a slab: what the bitmap of a descriptor holds.
const OBJECTS_MAX: usize = 256;

/// Slabs that a class must have for an empty one to be kept: at most a quarter then lies idle.
const SLABS_FOR_EMPTY: usize = 4;

/// Classes with the header in the place itself, 64 bytes apart.
const PACKED_CLASSES: usize = (PACKED_MAX + HEADER_BYTES).div_ceil(GRANULE_BYTES);
/// The class of whole pages, whose headers lie elsewhere: eight pages hold eight pages.
pub(super) const RAW_CLASS: usize = PACKED_CLASSES;
pub(super) const CLASSES: usize = PACKED_CLASSES + 1;

/// What the slabs of one class look like.
#[derive(Clone, Copy, Debug)]
pub(super) struct SizeClass {
    /// Bytes of a place, header included.
    pub bytes: usize,
    pub objects: usize,
    pub pages: usize,
}

/// The classes, by number.
pub(super) const CLASS: [SizeClass; CLASSES] = {
    let mut classes =
        [SizeClass { bytes: PAGE_SIZE, objects: SLOT_PAGES, pages: SLOT_PAGES }; CLASSES];
    let mut number = 0;
    while number < PACKED_CLASSES {
        classes[number] = best_fit((number + 1) * GRANULE_BYTES);
        number += 1;
    }
    classes
};

/// The slab that wastes least at its end; the smaller one where two do equally well.
const fn best_fit(bytes: usize) -> SizeClass {
    let mut best = SizeClass { bytes, objects: 0, pages: 1 };
    let mut pages = SLAB_PAGES_MIN;
    while pages <= SLOT_PAGES {
        let fit = pages * PAGE_SIZE / bytes;
        let objects = if fit < OBJECTS_MAX { fit } else { OBJECTS_MAX };
        // objects / pages > best.objects / best.pages
        if objects * best.pages > best.objects * pages {
            best = SizeClass { bytes, objects, pages };
        }
        pages += 1;
    }
    best
}

/// The class for a blob of `length` bytes; `None` where no page packs to so many.
pub(super) fn class_for(length: usize) -> Option<usize> {
    let number = (length + HEADER_BYTES).div_ceil(GRANULE_BYTES) - 1;
    match number {
        _ if number < PACKED_CLASSES => Some(number),
        _ if length <= PAGE_SIZE => Some(RAW_CLASS),
        _ => None,
    }
}

/// A slab's descriptor. [c] changes under the class's lock; [o] is set before the slab joins its
/// class and after it has left it.
#[repr(C, align(64))]
pub(super) struct Slab {
    /// Which places hold a blob [c].
    live: [AtomicU64; OBJECTS_MAX / 64],
    /// How many do [c].
    used: AtomicU32,
    /// Number of the class plus one; 0 where we use no slab [o].
    class: AtomicU32,
    /// A [`Fullness`] [c].
    fullness: AtomicU32,
    /// Neighbours in the list that `fullness` names [c].
    next: AtomicU32,
    prev: AtomicU32,
}

zeroed!(Slab { live, used, class, fullness, next, prev });

impl Slab {
    pub fn class(&self) -> Option<usize> {
        // Relaxed: the caller holds the lock of a page that owns a blob in this slab, and got its
        // handle under that lock, after the class was set.
        (self.class.load(Relaxed) as usize).checked_sub(1).filter(|class| *class < CLASSES)
    }

    /// Number of blobs in it. Exact under the class's lock.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed) as usize
    }

    pub fn is_live(&self, index: usize) -> bool {
        // Relaxed: as in `class`.
        self.live[index / 64].load(Relaxed) & 1 << (index % 64) != 0
    }

    /// Whether the slab is being emptied by compaction.
    pub fn is_isolated(&self) -> bool {
        self.fullness.load(Relaxed) == Fullness::Isolated as u32
    }

    /// Whether other members may read its bytes as well, since a fork. Then they are not written.
    pub fn is_sealed(&self) -> bool {
        self.fullness.load(Relaxed) == Fullness::Sealed as u32
    }

    /// We use no slab in this slot any more.
    pub fn clear(&self) {
        self.class.store(0, Relaxed);
    }
}

/// How full a slab is, and so which list it is in; or why it is in none.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Fullness {
    /// Up to a quarter of its places are taken.
    Quarter = 0,
    /// Up to a half.
    Half = 1,
    /// Up to three quarters.
    ThreeQuarters = 2,
    /// Not all.
    Most = 3,
    /// None: kept for the next blob.
    Empty = 4,
    /// In no list: all places are taken.
    Full = 5,
    /// In no list: compaction is emptying it.
    Isolated = 6,
    /// In no list: shared since a fork.
    Sealed = 7,
}

impl Fullness {
    const LISTS: usize = 5;
    /// Where to look for room: the fullest slab first, so that others run empty.
    const FULLEST_FIRST: [Fullness; 4] =
        [Fullness::Most, Fullness::ThreeQuarters, Fullness::Half, Fullness::Quarter];

    /// The list for a slab with this many blobs.
    fn of(used: usize, objects: usize) -> Fullness {
        match used {
            0 => Fullness::Empty,
            _ if used >= objects => Fullness::Full,
            _ => match used * 4 / objects {
                0 => Fullness::Quarter,
                1 => Fullness::Half,
                2 => Fullness::ThreeQuarters,
                _ => Fullness::Most,
            },
        }
    }

    fn has_list(fullness: u32) -> bool {
        fullness < Fullness::LISTS as u32
    }
}

/// The lists of one class; a slab's number stands for it, 0 for none.
pub(super) struct ClassLists {
    class: usize,
    heads: [u32; Fullness::LISTS],
    slabs: usize,
    used: usize,
}

/// Whether a slab that has no blob left may stay for the next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Keep {
    /// One of a class of some size.
    One,
    /// All of them: the thread that frees may not give memory back.
    All,
}

/// What a free left behind.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Freed {
    /// The slab stays.
    Kept,
    /// The slab has no blob left and is in no list: give it back.
    Unlisted,
    /// The slab is sealed and has no blob left: let go of it.
    Unsealed,
    /// There was no blob.
    NotLive,
}

impl ClassLists {
    pub const fn new(class: usize) -> ClassLists {
        ClassLists { class, heads: [0; Fullness::LISTS], slabs: 0, used: 0 }
    }

    pub fn class(&self) -> usize {
        self.class
    }

    /// The list for a slab with this many blobs.
    fn fullness_of(&self, used: usize) -> Fullness {
        Fullness::of(used, CLASS[self.class].objects)
    }

    /// A slab for the next blob: the fullest that has room, or the empty one.
    pub fn with_room(&self) -> Option<u32> {
        self.partial().chain([self.heads[Fullness::Empty as usize]]).find(|slot| *slot != 0)
    }

    /// The first slabs of the lists whose slabs have blobs and room, the fullest first; 0 for none.
    fn partial(&self) -> impl DoubleEndedIterator<Item = u32> {
        Fullness::FULLEST_FIRST.iter().map(|fullness| self.heads[*fullness as usize])
    }

    /// A new slab of this class joins, empty.
    pub fn add(&mut self, slabs: &Table<Slab>, slot: u32) {
        let slab = &slabs[slot as usize];
        slab.class.store(self.class as u32 + 1, Relaxed);
        slab.used.store(0, Relaxed);
        for word in &slab.live {
            word.store(0, Relaxed);
        }
        self.slabs += 1;
        self.link(slabs, slot, Fullness::Empty);
    }

    /// Takes a place of a slab that [`ClassLists::with_room`] named.
    pub fn take(&mut self, slabs: &Table<Slab>, slot: u32) -> Option<usize> {
        let slab = &slabs[slot as usize];
        let index = (0..slab.live.len())
            .map(|word| (word, slab.live[word].load(Relaxed)))
            .find(|(_, live)| *live != u64::MAX)
            .map(|(word, live)| word * 64 + live.trailing_ones() as usize)
            .filter(|index| *index < CLASS[self.class].objects)?;
        slab.live[index / 64].fetch_or(1 << (index % 64), Relaxed);
        slab.used.fetch_add(1, Relaxed);
        self.used += 1;
        self.relink(slabs, slot);
        Some(index)
    }

    pub fn release(&mut self, slabs: &Table<Slab>, slot: u32, index: usize, keep: Keep) -> Freed {
        let slab = &slabs[slot as usize];
        if index >= CLASS[self.class].objects || !slab.is_live(index) {
            return Freed::NotLive;
        }
        slab.live[index / 64].fetch_and(!(1 << (index % 64)), Relaxed);
        let left = slab.used.fetch_sub(1, Relaxed) - 1;
        if slab.is_sealed() {
            return if left == 0 { Freed::Unsealed } else { Freed::Kept };
        }
        self.used -= 1;
        if slab.is_isolated() {
            return Freed::Kept;
        }
        let has_empty = self.heads[Fullness::Empty as usize] != 0;
        if left == 0 && keep == Keep::One && (has_empty || self.slabs < SLABS_FOR_EMPTY) {
            self.remove(slabs, slot);
            return Freed::Unlisted;
        }
        self.relink(slabs, slot);
        Freed::Kept
    }

    /// Takes a slab out of the lists, because a fork is about to share it.
    pub fn seal(&mut self, slabs: &Table<Slab>, slot: u32) {
        self.remove(slabs, slot);
        let slab = &slabs[slot as usize];
        self.used -= slab.used();
        slab.fullness.store(Fullness::Sealed as u32, Relaxed);
    }

    /// A sealed slab is ours alone again.
    pub fn unseal(&mut self, slabs: &Table<Slab>, slot: u32) {
        let used = slabs[slot as usize].used();
        self.slabs += 1;
        self.used += used;
        self.link(slabs, slot, self.fullness_of(used));
    }

    /// Pages of slabs that the class would not need if its blobs lay together.
    pub fn fragments(&self) -> usize {
        (self.slabs - self.used.div_ceil(CLASS[self.class].objects)) * CLASS[self.class].pages
    }

    /// Takes the slab out that compaction should empty: the sparsest, if the other slabs have room
    /// for all that is in it.
    pub fn isolate_sparsest(&mut self, slabs: &Table<Slab>) -> Option<u32> {
        let slot = self.partial().rev().find(|slot| *slot != 0)?;
        let empty = usize::from(self.heads[Fullness::Empty as usize] != 0);
        let elsewhere = (self.slabs - 1 - empty) * CLASS[self.class].objects;
        if self.used > elsewhere {
            return None;
        }
        self.unlink(slabs, slot);
        slabs[slot as usize].fullness.store(Fullness::Isolated as u32, Relaxed);
        Some(slot)
    }

    /// The fullest slab that has room and is not empty: where compaction moves blobs to.
    pub fn fullest(&self) -> Option<u32> {
        self.partial().find(|slot| *slot != 0)
    }

    /// Ends the compaction of a slab. `true` where the slab is empty, and has left the class.
    pub fn end_isolation(&mut self, slabs: &Table<Slab>, slot: u32) -> bool {
        let slab = &slabs[slot as usize];
        if slab.used() == 0 {
            self.remove(slabs, slot);
            return true;
        }
        self.link(slabs, slot, self.fullness_of(slab.used()));
        false
    }

    /// Takes an empty slab out of the class, where there is one.
    pub fn take_empty(&mut self, slabs: &Table<Slab>) -> Option<u32> {
        let slot = self.heads[Fullness::Empty as usize];
        if slot == 0 {
            return None;
        }
        self.remove(slabs, slot);
        Some(slot)
    }

    /// The same, but for the one that may stay.
    pub fn take_surplus(&mut self, slabs: &Table<Slab>) -> Option<u32> {
        let slot = self.heads[Fullness::Empty as usize];
        let is_last = slot == 0 || slabs[slot as usize].next.load(Relaxed) == 0;
        if is_last && (slot == 0 || self.slabs >= SLABS_FOR_EMPTY) {
            return None;
        }
        self.take_empty(slabs)
    }

    fn remove(&mut self, slabs: &Table<Slab>, slot: u32) {
        self.unlink(slabs, slot);
        self.slabs -= 1;
    }

    /// Puts a slab into the list that its blobs call for.
    fn relink(&mut self, slabs: &Table<Slab>, slot: u32) {
        let slab = &slabs[slot as usize];
        let fullness = self.fullness_of(slab.used());
        if slab.fullness.load(Relaxed) != fullness as u32 {
            self.unlink(slabs, slot);
            self.link(slabs, slot, fullness);
        }
    }

    fn link(&mut self, slabs: &Table<Slab>, slot: u32, fullness: Fullness) {
        let slab = &slabs[slot as usize];
        slab.fullness.store(fullness as u32, Relaxed);
        if !Fullness::has_list(fullness as u32) {
            return;
        }
        let head = core::mem::replace(&mut self.heads[fullness as usize], slot);
        slab.next.store(head, Relaxed);
        slab.prev.store(0, Relaxed);
        if head != 0 {
            slabs[head as usize].prev.store(slot, Relaxed);
        }
    }

    fn unlink(&mut self, slabs: &Table<Slab>, slot: u32) {
        let slab = &slabs[slot as usize];
        let fullness = slab.fullness.load(Relaxed);
        if !Fullness::has_list(fullness) {
            return;
        }
        let (next, prev) = (slab.next.load(Relaxed), slab.prev.load(Relaxed));
        match prev {
            0 => self.heads[fullness as usize] = next,
            _ => slabs[prev as usize].next.store(next, Relaxed),
        }
        if next != 0 {
            slabs[next as usize].prev.store(prev, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_class_wastes_more_than_a_twentieth_at_the_end_of_a_slab() {
        for class in &CLASS {
            let bytes = class.pages * PAGE_SIZE;
            let waste = bytes - class.bytes * class.objects;
            assert!(waste * 20 <= bytes, "{class:?} wastes {waste} bytes");
            assert!(class.objects <= OBJECTS_MAX);
            assert!((SLAB_PAGES_MIN..=SLOT_PAGES).contains(&class.pages));
        }
    }

    #[test]
    fn every_length_has_the_smallest_class_that_holds_it() {
        for length in 1..=PAGE_SIZE {
            let class = class_for(length).unwrap();
            if class == RAW_CLASS {
                assert!(length + HEADER_BYTES > CLASS[RAW_CLASS - 1].bytes);
                continue;
            }
            assert!(CLASS[class].bytes >= length + HEADER_BYTES);
            assert!(class == 0 || CLASS[class - 1].bytes < length + HEADER_BYTES);
        }
        assert_eq!(class_for(PAGE_SIZE + 1), None);
    }
}
