//! Units as types: what an integer counts is in its type, so that pages are never added to bytes.

#![deny(unsafe_code)]

use core::fmt;

/// log2 of the page size in bytes.
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a page.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;
/// log2 of the pages in a block: what one kernel page table maps.
pub const BLOCK_ORDER: u32 = 9;
/// Pages in a block (2 MiB).
pub const BLOCK_PAGES: usize = 1 << BLOCK_ORDER;

/// A place for one page in the frame pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FrameId(pub u32);

impl FrameId {
    /// The frame `count` places further on.
    #[must_use]
    pub const fn add(self, count: usize) -> FrameId {
        FrameId(self.0 + count as u32)
    }
}

/// A number that counts pages, and a run of them.
macro_rules! pages {
    ($(#[$of_page:meta])* $Page:ident, $sign:literal, $(#[$of_range:meta])* $Range:ident) => {
        $(#[$of_page])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $Page(pub u64);

        impl $Page {
            /// The page `count` pages further on.
            #[must_use]
            pub const fn add(self, count: usize) -> $Page {
                $Page(self.0 + count as u64)
            }

            /// The page as an index into a table with one entry a page.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The block of 512 pages that holds this page.
            pub const fn block(self) -> usize {
                (self.0 >> BLOCK_ORDER) as usize
            }

            /// The first page of the naturally aligned run of 2^order pages that holds this page.
            pub const fn align_down(self, order: u32) -> $Page {
                $Page(self.0 >> order << order)
            }
        }

        impl fmt::Debug for $Page {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($sign, "{}"), self.0)
            }
        }

        $(#[$of_range])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
        pub struct $Range {
            pub start: $Page,
            pub end: $Page,
        }

        impl $Range {
            /// The run of `count` pages from `start` on.
            pub const fn new(start: $Page, count: usize) -> $Range {
                $Range { start, end: start.add(count) }
            }

            pub const fn len(self) -> usize {
                (self.end.0 - self.start.0) as usize
            }

            pub const fn is_empty(self) -> bool {
                self.end.0 <= self.start.0
            }

            pub const fn contains(self, page: $Page) -> bool {
                self.start.0 <= page.0 && page.0 < self.end.0
            }

            /// The pages in both runs; empty where they do not meet.
            pub fn intersect(self, other: $Range) -> $Range {
                let start = self.start.max(other.start);
                $Range { start, end: self.end.min(other.end).max(start) }
            }

            /// The `count` pages that come next, upwards or down.
            pub fn next(self, count: usize, is_down: bool) -> $Range {
                match is_down {
                    false => $Range::new(self.end, count),
                    true => {
                        let start = $Page(self.start.0.saturating_sub(count as u64));
                        $Range { start, end: self.start }
                    }
                }
            }

            /// The run with its neighbours in `within` that join it, upwards and then downwards.
            pub fn grow(mut self, within: $Range, mut joins: impl FnMut($Page) -> bool) -> $Range {
                while self.end < within.end && joins(self.end) {
                    self.end = self.end.add(1);
                }
                while self.start > within.start && joins($Page(self.start.0 - 1)) {
                    self.start.0 -= 1;
                }
                self
            }

            /// The pages, in order.
            pub fn pages(self) -> impl DoubleEndedIterator<Item = $Page> + Clone {
                (self.start.0..self.end.0).map($Page)
            }

            /// The run cut where blocks of 2 MiB end, in order.
            pub fn by_block(self) -> impl Iterator<Item = $Range> {
                let mut at = self.start;
                core::iter::from_fn(move || {
                    if at >= self.end {
                        return None;
                    }
                    let end = at.align_down(BLOCK_ORDER).add(BLOCK_PAGES).min(self.end);
                    let piece = $Range { start: at, end };
                    at = end;
                    Some(piece)
                })
            }
        }
    };
}

pages! {
    /// A page of the managed arena, counted from the arena's first page.
    PageNum, "p",
    /// A run of pages: `start` is in it, `end` is not.
    PageRange
}

pages! {
    /// A page of an object, counted from the object's first page.
    ObjectPage, "o",
    /// A run of an object's pages: `start` is in it, `end` is not.
    ObjectRange
}

impl ObjectPage {
    /// Where the page begins, in bytes from the object's start.
    pub const fn offset(self) -> u64 {
        self.0 << PAGE_SHIFT
    }
}

impl ObjectRange {
    /// All pages that an object can have.
    pub const ALL: ObjectRange = ObjectRange { start: ObjectPage(0), end: ObjectPage(u64::MAX) };
}
