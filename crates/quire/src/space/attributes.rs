//! What all pages of a VMA have in common: rights, kind, advice, and what is mapped.

use crate::mmu::Prot;
use crate::units::{ObjectPage, ObjectRange, PageNum, PageRange};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Private anonymous memory, managed.
    Anonymous = 0,
    /// The program has mapped something else over this part of the arena; not managed.
    Foreign = 1,
    /// Shared memory: pages of an object.
    Object = 2,
    /// Private memory, managed, whose first content is an object's: a page without content reads as
    /// the object's bytes, and not as zeros.
    Private = 3,
    /// Being unmapped: its pages go, and what comes to it waits (`dying.rs`).
    Dying = 4,
}

impl Kind {
    /// Whether its pages are the space's own: they have words there, and go to swap.
    #[must_use]
    pub const fn is_anonymous(self) -> bool {
        matches!(self, Kind::Anonymous | Kind::Private)
    }
}

/// How the program says that it uses a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Pattern {
    #[default]
    Normal = 0,
    Sequential = 1,
    Random = 2,
}

/// What is mapped in a VMA of kind [`Kind::Object`] or [`Kind::Private`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Backing {
    /// The object's number in its space.
    pub object: u32,
    /// The mapping's number in its space: neighbours of two mappings do not merge.
    pub mapping: u32,
    /// What is to be added to a page's number to have its page in the object, wrapping: the same
    /// for all pages, so that a split changes nothing.
    pub delta: u64,
}

impl Backing {
    #[must_use]
    pub const fn object_page(self, page: PageNum) -> ObjectPage {
        ObjectPage(page.0.wrapping_add(self.delta))
    }

    #[must_use]
    pub const fn object_range(self, pages: PageRange) -> ObjectRange {
        ObjectRange::new(self.object_page(pages.start), pages.len())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    pub prot: Prot,
    pub kind: Kind,
    pub pattern: Pattern,
    /// Pages are locked in memory as they come.
    pub is_mlocked: bool,
    /// MADV_DONTFORK: a child gets nothing here.
    pub is_dontfork: bool,
    /// What is mapped, where that is an object.
    pub backing: Backing,
}

impl Attributes {
    /// Managed memory with rights `prot`.
    #[must_use]
    pub const fn anonymous(prot: Prot) -> Attributes {
        Attributes {
            prot,
            kind: Kind::Anonymous,
            pattern: Pattern::Normal,
            is_mlocked: false,
            is_dontfork: false,
            backing: Backing { object: 0, mapping: 0, delta: 0 },
        }
    }

    pub(super) const fn to_bits(self) -> [u64; 3] {
        let bits = self.prot.0 as u64
            | (self.kind as u64) << 8
            | (self.pattern as u64) << 16
            | (self.is_mlocked as u64) << 24
            | (self.is_dontfork as u64) << 25;
        let Backing { object, mapping, delta } = self.backing;
        [bits, object as u64 | (mapping as u64) << 32, delta]
    }

    pub(super) const fn from_bits([bits, backing, delta]: [u64; 3]) -> Attributes {
        Attributes {
            prot: Prot(bits as u32 & 0xff),
            kind: match bits >> 8 & 0xff {
                1 => Kind::Foreign,
                2 => Kind::Object,
                3 => Kind::Private,
                4 => Kind::Dying,
                _ => Kind::Anonymous,
            },
            pattern: match bits >> 16 & 0xff {
                1 => Pattern::Sequential,
                2 => Pattern::Random,
                _ => Pattern::Normal,
            },
            is_mlocked: bits >> 24 & 1 != 0,
            is_dontfork: bits >> 25 & 1 != 0,
            backing: Backing { object: backing as u32, mapping: (backing >> 32) as u32, delta },
        }
    }
}
