//! What members tell `quire profile` about the pages that they touch.
//!
//! Pages are looked at in groups of [`GROUP_PAGES`], and [`REGION_GROUPS`] that lie side by side are sampled together,
//! so that what comes along with a fault is seen. Which and how often is the reader's to say, in [`Sampling`]'s
//! words; at each look a member tells of each group what was touched since it
//! was last unmapped, and which pages have content ([`crate::reclaim`], `sample.rs`). All members write into one
//! ring of records, as [`super::trace`] has it: a reader that comes too late has lost what was written over.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::trace::{TraceRing, WORDS};
use crate::units::PageNum;

/// Pages of a group.
pub const GROUP_PAGES: usize = 1 << GROUP_ORDER;
const GROUP_ORDER: u32 = 3;
/// Groups of a region.
pub const REGION_GROUPS: usize = 1 << REGION_ORDER;
const REGION_ORDER: u32 = 2;
/// Records of the ring.
pub const SAMPLES: usize = 1 << 14;
/// Groups that a record has, in two words each.
pub const GROUPS: usize = (WORDS - 1) / 2;
/// Looks that a group is passed over at most, as a power of two.
pub const PATIENCE_MAX: u32 = 5;
/// A census, in which each group is told of, is every so many looks.
pub const CENSUS: u16 = 16;

const PRESENT_BITS: u32 = 16;
const TOUCHED_BITS: u32 = 16;
const PATIENCE_BITS: u32 = 3;
/// In place of a patience: the group was not looked at.
const NOT_LOOKED_AT: u64 = (1 << PATIENCE_BITS) - 1;
/// The bits that the number of a look has.
pub const LOOK_MASK: u16 = 0x7fff;
const KIND_SHIFT: u32 = 16;
const KIND_MASK: u64 = 3;
const KIND_GROUPS: u64 = 0;
const KIND_PACKED: u64 = 1;
const KIND_END: u64 = 2;

/// What is to be sampled, and what was seen.
#[repr(C, align(64))]
pub struct Sampling {
    /// One group in so many is sampled, as a power of two, plus one; 0: none is.
    one_in: AtomicU32,
    /// Milliseconds from one look to the next.
    period_ms: AtomicU32,
    ring: TraceRing<core::sync::atomic::AtomicU64, SAMPLES>,
}

/// A group as a member saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupSample {
    /// The number of its first page by its length.
    pub group: u64,
    /// The pages that were touched since the group was last unmapped, a bit each.
    pub touched: u16,
    /// How many looks ago each of these was touched first; the most there is where that is not known.
    pub ages: [u8; GROUP_PAGES],
    /// The pages that have content.
    pub present: u16,
    /// Looks for which it is left mapped, as a power of two; `None` where it was not looked at, because it
    /// still is.
    pub patience: Option<u32>,
}

impl GroupSample {
    fn to_words(self) -> [u64; 2] {
        let patience = self.patience.map_or(NOT_LOOKED_AT, u64::from);
        let group = self.group << PATIENCE_BITS | patience;
        let touched = group << TOUCHED_BITS | u64::from(self.touched);
        [touched << PRESENT_BITS | u64::from(self.present), u64::from_le_bytes(self.ages)]
    }

    /// `None` of a place that was left empty: a group without content would not be told of.
    fn of_words([word, ages]: [u64; 2]) -> Option<GroupSample> {
        let present = word as u16;
        let patience = word >> (PRESENT_BITS + TOUCHED_BITS) & NOT_LOOKED_AT;
        (present != 0).then_some(GroupSample {
            group: word >> (PRESENT_BITS + TOUCHED_BITS + PATIENCE_BITS),
            touched: (word >> PRESENT_BITS) as u16,
            ages: ages.to_le_bytes(),
            present,
            patience: (patience != NOT_LOOKED_AT).then_some(patience as u32),
        })
    }
}

/// A few groups, as a member saw them at a look, how one of its pages packs, or the look's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    pub pid: u32,
    /// The number of the look.
    pub look: u16,
    pub told: Told,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    Groups([Option<GroupSample>; GROUPS]),
    /// A page was packed to so many bytes, to see what that brings, and unpacked in so many nanoseconds.
    Packed {
        bytes: u64,
        unpack_ns: u64,
    },
    /// All was told of this look. The frame pool has used so many windows, each of which has a page table; so many
    /// pages have content.
    End {
        windows: u64,
        wanted: u64,
    },
}

impl Sample {
    pub fn new(pid: u32, look: u16) -> Sample {
        Sample { pid, look, told: Told::Groups([None; GROUPS]) }
    }

    /// Whether each group of the member's is told of at this look.
    pub fn is_census(&self) -> bool {
        self.look.is_multiple_of(CENSUS)
    }

    fn to_words(self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let kind = match self.told {
            Told::Groups(groups) => {
                for (words, group) in words[1..].as_chunks_mut().0.iter_mut().zip(groups) {
                    *words = group.map_or([0; 2], GroupSample::to_words);
                }
                KIND_GROUPS
            }
            Told::Packed { bytes, unpack_ns } => {
                (words[1], words[2]) = (bytes, unpack_ns);
                KIND_PACKED
            }
            Told::End { windows, wanted } => {
                (words[1], words[2]) = (windows, wanted);
                KIND_END
            }
        };
        words[0] =
            u64::from(self.pid) << 32 | kind << KIND_SHIFT | u64::from(self.look & LOOK_MASK);
        words
    }

    fn of_words(words: [u64; WORDS]) -> Sample {
        Sample {
            pid: (words[0] >> 32) as u32,
            look: words[0] as u16 & LOOK_MASK,
            told: match words[0] >> KIND_SHIFT & KIND_MASK {
                KIND_GROUPS => {
                    let words = |at: usize| [words[1 + 2 * at], words[2 + 2 * at]];
                    Told::Groups(core::array::from_fn(|at| GroupSample::of_words(words(at))))
                }
                KIND_PACKED => Told::Packed { bytes: words[1], unpack_ns: words[2] },
                _ => Told::End { windows: words[1], wanted: words[2] },
            },
        }
    }
}

/// The group that a page is in, and the first page of a group.
pub fn group_of(page: PageNum) -> u64 {
    page.0 >> GROUP_ORDER
}

pub fn first_page(group: u64) -> PageNum {
    PageNum(group << GROUP_ORDER)
}

/// Whether a member's group is one of those sampled, where one region in `1 << shift` is: of each so many that lie
/// side by side one, by chance. What is touched alike lies side by side, so that each kind has its part of the sample.
pub fn is_sampled(pid: u32, group: u64, shift: u32) -> bool {
    let region = group >> REGION_ORDER;
    // Of each two halves one is, from pairs of regions on: what is sampled rarely is sampled often, too.
    (0..shift).all(|level| {
        let parent = region >> (level + 1);
        let mixed = (parent ^ u64::from(level) << 58 ^ u64::from(pid) << 32)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40 & 1 == region >> level & 1
    })
}

impl Sampling {
    /// Has members sample one group in `1 << shift` each `period_ms` milliseconds.
    pub fn start(&self, shift: u32, period_ms: u32) {
        self.period_ms.store(period_ms, Relaxed);
        self.one_in.store(shift + 1, Relaxed);
    }

    /// Has them sample no more.
    pub fn stop(&self) {
        self.one_in.store(0, Relaxed);
    }

    #[inline]
    pub fn is_on(&self) -> bool {
        self.one_in.load(Relaxed) != 0
    }

    /// One group in so many is sampled, as a power of two.
    pub fn shift(&self) -> Option<u32> {
        self.one_in.load(Relaxed).checked_sub(1)
    }

    pub(crate) fn period_ms(&self) -> u64 {
        self.period_ms.load(Relaxed).max(1).into()
    }

    pub(crate) fn push(&self, sample: Sample) {
        self.ring.push_words(sample.to_words());
    }

    /// The position that is drawn next.
    pub fn head(&self) -> u64 {
        self.ring.head()
    }

    /// The sample of a position, where it has been written, and not over.
    pub fn read(&self, position: u64) -> Option<Sample> {
        self.ring.read_words(position).map(Sample::of_words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_read_as_it_was_written() {
        let ages = core::array::from_fn(|at| at as u8 * 9);
        let group = |group, patience| {
            Some(GroupSample { group, touched: 5, ages, present: 0xffff, patience })
        };
        for told in [
            Told::Groups([group(0, Some(0)), group((1 << 28) - 1, Some(PATIENCE_MAX))]),
            Told::Groups([None, group(7, None)]),
            Told::Groups([None; GROUPS]),
            Told::Packed { bytes: 4096, unpack_ns: u64::MAX },
            Told::End { windows: u64::MAX, wanted: 7 },
        ] {
            let sample = Sample { pid: u32::MAX, look: 0x7fff, told };
            assert_eq!(Sample::of_words(sample.to_words()), sample);
        }
    }

    #[test]
    fn one_group_in_so_many_is_sampled_and_what_is_sampled_rarely_is_sampled_often() {
        for pid in [1, 2, 40_000] {
            for shift in 0..8 {
                let sampled = (0..1 << 16).filter(|&group| is_sampled(pid, group, shift));
                let expected = (1 << 16) >> shift;
                let count = sampled.clone().count() as i64;
                assert!((count - expected).abs() <= expected / 8, "{count} of {expected}");
                assert!(
                    shift == 0 || sampled.clone().all(|group| is_sampled(pid, group, shift - 1))
                );
            }
        }
    }
}
