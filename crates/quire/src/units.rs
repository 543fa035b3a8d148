//! Units as types: what an integer counts is in its type, so that pages are never added to bytes.

use core::fmt;

/// log2 of the page size in bytes.
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a page.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;
/// log2 of the pages in a block: what one kernel page table maps, and the largest folio.
pub const BLOCK_ORDER: u32 = 9;
/// Pages in a block (2 MiB).
pub const BLOCK_PAGES: usize = 1 << BLOCK_ORDER;

/// A page of the managed arena, counted from the arena's first page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageNum(pub u64);

impl PageNum {
    /// The page `count` pages further on.
    #[must_use]
    pub const fn add(self, count: usize) -> PageNum {
        PageNum(self.0 + count as u64)
    }

    /// The page as an index into a table with one entry a page.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The block of 512 pages that holds this page.
    #[must_use]
    pub const fn block(self) -> usize {
        (self.0 >> BLOCK_ORDER) as usize
    }

    /// The first page of the naturally aligned run of 2^order pages that holds this page.
    #[must_use]
    pub const fn align_down(self, order: u32) -> PageNum {
        PageNum(self.0 >> order << order)
    }
}

impl fmt::Debug for PageNum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{}", self.0)
    }
}

/// A run of pages: `start` is in it, `end` is not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct PageRange {
    /// First page.
    pub start: PageNum,
    /// One past the last page.
    pub end: PageNum,
}

impl PageRange {
    /// The run of `count` pages from `start` on.
    #[must_use]
    pub const fn new(start: PageNum, count: usize) -> PageRange {
        PageRange { start, end: start.add(count) }
    }

    /// Number of pages.
    #[must_use]
    pub const fn len(self) -> usize {
        (self.end.0 - self.start.0) as usize
    }

    /// Whether no page is in the run.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.end.0 <= self.start.0
    }

    /// Whether `page` is in the run.
    #[must_use]
    pub const fn contains(self, page: PageNum) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }

    /// The pages in both runs; empty where they do not meet.
    #[must_use]
    pub fn intersect(self, other: PageRange) -> PageRange {
        let start = self.start.max(other.start);
        PageRange { start, end: self.end.min(other.end).max(start) }
    }

    /// The pages, in order.
    pub fn pages(self) -> impl DoubleEndedIterator<Item = PageNum> + Clone {
        (self.start.0..self.end.0).map(PageNum)
    }

    /// The run cut where blocks of 2 MiB end, in order.
    pub fn by_block(self) -> impl Iterator<Item = PageRange> {
        let mut at = self.start;
        core::iter::from_fn(move || {
            if at >= self.end {
                return None;
            }
            let end = at.align_down(BLOCK_ORDER).add(BLOCK_PAGES).min(self.end);
            let piece = PageRange { start: at, end };
            at = end;
            Some(piece)
        })
    }
}

/// A page of an object, counted from the object's first page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ObjectPage(pub u64);

impl ObjectPage {
    /// The page `count` pages further on.
    #[must_use]
    pub const fn add(self, count: usize) -> ObjectPage {
        ObjectPage(self.0 + count as u64)
    }

    /// The page as an index into a table with one entry a page.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Where the page begins, in bytes from the object's start.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0 << PAGE_SHIFT
    }
}

impl fmt::Debug for ObjectPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o{}", self.0)
    }
}

/// A run of an object's pages: `start` is in it, `end` is not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct ObjectRange {
    /// First page.
    pub start: ObjectPage,
    /// One past the last page.
    pub end: ObjectPage,
}

impl ObjectRange {
    /// All pages that an object can have.
    pub const ALL: ObjectRange = ObjectRange { start: ObjectPage(0), end: ObjectPage(u64::MAX) };

    /// The run of `count` pages from `start` on.
    #[must_use]
    pub const fn new(start: ObjectPage, count: usize) -> ObjectRange {
        ObjectRange { start, end: start.add(count) }
    }

    /// Number of pages.
    #[must_use]
    pub const fn len(self) -> usize {
        (self.end.0 - self.start.0) as usize
    }

    /// Whether no page is in the run.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.end.0 <= self.start.0
    }

    /// Whether `page` is in the run.
    #[must_use]
    pub const fn contains(self, page: ObjectPage) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }

    /// The pages in both runs; empty where they do not meet.
    #[must_use]
    pub fn intersect(self, other: ObjectRange) -> ObjectRange {
        let start = self.start.max(other.start);
        ObjectRange { start, end: self.end.min(other.end).max(start) }
    }

    /// The pages, in order.
    pub fn pages(self) -> impl DoubleEndedIterator<Item = ObjectPage> + Clone {
        (self.start.0..self.end.0).map(ObjectPage)
    }
}
