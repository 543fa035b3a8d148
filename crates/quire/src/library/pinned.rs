//! Pinned ranges of mappings: guards over the engine's pins.

#![deny(unsafe_code)]

use core::fmt;
use core::ops::Range;
use std::string::ToString;

use super::Error;
use super::mapping::{Raw, Sharing};
use crate::object::{PinError, PinFor};
use crate::sys::Errno;
use crate::units::PAGE_SIZE;

/// A range of a mapping that stays in memory and mapped until this is dropped.
#[must_use = "the range is let go when this is dropped"]
pub struct Pinned<'a>(pub(super) RawPin<'a>);

/// The same for a range that may be written at any time, for instance by the kernel.
#[must_use = "the range is let go when this is dropped"]
pub struct PinnedMut<'a>(pub(super) RawPin<'a>);

/// A pin of either type.
pub(super) struct RawPin<'a> {
    raw: &'a Raw,
    bytes: Range<usize>,
    what: PinFor,
}

impl<'a> RawPin<'a> {
    pub fn new(raw: &'a Raw, bytes: Range<usize>, what: PinFor) -> Result<RawPin<'a>, Error> {
        let offset = raw.offset.saturating_add(bytes.start as u64);
        let bad = || raw.object.bad_range(offset, bytes.len() as u64);
        if bytes.is_empty() || bytes.end > raw.len {
            return Err(bad());
        }
        let pages = raw.pages(bytes.clone());
        let objects = raw.object.objects();
        let pinned =
            raw.object.space().engine.with_buffers(|scratch, buffer| match raw.sharing {
                Sharing::Shared => objects.pin(pages, what, scratch, buffer),
                Sharing::Private => objects.pin_private(pages, what, scratch, buffer),
            })?;
        match pinned {
            Ok(()) => Ok(RawPin { raw, bytes, what }),
            Err(PinError::TooMuch) => Err(Error::TooMuchPinned {
                path: raw.object.name().to_string(),
                bytes: pages.len() * PAGE_SIZE,
                most: raw.object.space().pinned().1,
            }),
            Err(PinError::BehindEnd(_)) => Err(bad()),
            Err(PinError::TooOften) => Err(Error::NoMemory {
                doing: "count one pin more of a page",
                errno: Errno::OVERFLOW,
            }),
            Err(PinError::Read(error)) => Err(raw.object.read_error(error)),
            Err(PinError::Refused(errno)) => {
                Err(Error::NoMemory { doing: "map a pinned page", errno })
            }
        }
    }

    fn start(&self) -> usize {
        self.raw.start + self.bytes.start
    }
}

impl Drop for RawPin<'_> {
    fn drop(&mut self) {
        let pages = self.raw.pages(self.bytes.clone());
        let objects = self.raw.object.objects();
        match self.raw.sharing {
            Sharing::Shared => objects.unpin(pages, self.what),
            Sharing::Private => objects.unpin_private(pages, self.what),
        }
    }
}

macro_rules! pinned {
    ($type:ident) => {
        impl $type<'_> {
            /// The first pinned byte.
            #[must_use]
            pub fn as_ptr(&self) -> *const u8 {
                self.0.start() as *const u8
            }

            /// How many bytes were asked for; their pages are pinned whole.
            #[must_use]
            pub fn len(&self) -> usize {
                self.0.bytes.len()
            }

            /// Whether there are none, which is never so.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.0.bytes.is_empty()
            }

            /// Where they are in the mapping.
            #[must_use]
            pub fn range(&self) -> Range<usize> {
                self.0.bytes.clone()
            }
        }

        impl fmt::Debug for $type<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let RawPin { raw, bytes, .. } = &self.0;
                write!(f, concat!(stringify!($type), "({:?} of {:?})"), bytes, raw.object)
            }
        }
    };
}

pinned!(Pinned);
pinned!(PinnedMut);

impl PinnedMut<'_> {
    /// The first pinned byte, to be written; the caller orders its writes and reads.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.start() as *mut u8
    }
}
