//! Mappings: an object's bytes as memory.

use core::fmt;
use core::ops::{Deref, DerefMut, Range};

use super::change::{RemapOptions, Unchanged};
use super::pinned::{Pinned, PinnedMut, RawPin};
use super::{Error, Object};
use crate::mmu::Prot;
use crate::object::{FaultAround, PinFor};
use crate::space::Advice;
use crate::space::vma::Pattern;
use crate::units::{PAGE_SIZE, PageRange};

/// As mmap's MAP_SHARED and MAP_PRIVATE.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// The bytes are the object's.
    Shared,
    /// The bytes are the mapping's own, once they are copied.
    Private,
}

/// A mapping of any type.
pub(super) struct Raw {
    pub object: Object,
    pub range: PageRange,
    pub start: usize,
    pub offset: u64,
    pub len: usize,
    pub sharing: Sharing,
    pub is_beyond_end: bool,
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.object.objects().unmap(self.range);
    }
}

impl Raw {
    /// Bytes of the first page before the mapping's first byte.
    pub fn lead(&self) -> usize {
        (self.offset % PAGE_SIZE as u64) as usize
    }

    pub fn pages(&self, bytes: Range<usize>) -> PageRange {
        let lead = self.lead();
        let end = bytes.end.min(self.len);
        let start = bytes.start.min(end);
        let first = self.range.start.add((lead + start) / PAGE_SIZE);
        PageRange { start: first, end: self.range.start.add((lead + end).div_ceil(PAGE_SIZE)) }
    }

    /// The same bytes of the object, as far as they are in the mapping.
    fn bytes(&self, bytes: Range<usize>) -> Range<u64> {
        let end = bytes.end.min(self.len);
        let start = bytes.start.min(end);
        self.offset + start as u64..self.offset + end as u64
    }

    pub fn populate(&self, bytes: Range<usize>) -> Result<(), Error> {
        let pages = self.pages(bytes);
        self.object.read(|objects, scratch, buffer| match self.sharing {
            Sharing::Shared => objects.populate(pages, scratch, buffer),
            Sharing::Private => objects.populate_private(pages, scratch, buffer),
        })
    }

    fn populate_cached(&self, bytes: Range<usize>) -> usize {
        let pages = self.pages(bytes);
        match self.sharing {
            Sharing::Shared => self.object.objects().populate_cached(pages),
            Sharing::Private => {
                let engine = &self.object.space().engine;
                let mapped = engine.with_buffers(|scratch, _| {
                    self.object.objects().populate_private_cached(pages, scratch)
                });
                // Without memory for a buffer nothing more is mapped.
                mapped.unwrap_or_else(|_| self.present_pages(pages))
            }
        }
    }

    fn present_pages(&self, pages: PageRange) -> usize {
        match self.sharing {
            Sharing::Shared => self.object.objects().present_pages(pages),
            Sharing::Private => self.object.objects().present_private_pages(pages),
        }
    }

    fn try_read(&self, at: usize, into: &mut [u8]) -> Result<usize, Error> {
        let len = into.len().min(self.len.saturating_sub(at));
        let at = at.min(self.len);
        let into = &mut into[..len];
        if self.sharing == Sharing::Shared {
            return self.object.read_at(self.offset + at as u64, into);
        }
        let from = self.lead() + at;
        self.object.read(|objects, scratch, buffer| {
            objects.read_private(self.range.start, from, into, scratch, buffer)
        })
    }

    fn dont_need(&self, bytes: Range<usize>) -> usize {
        if self.sharing == Sharing::Private {
            self.object.objects().advise_private(self.pages(bytes.clone()), Advice::PageOut);
        }
        self.object.drop_cached(self.bytes(bytes))
    }

    /// The pages of which a range has every byte of the mapping.
    fn whole_pages(&self, bytes: Range<usize>) -> PageRange {
        let lead = self.lead();
        let end = if bytes.end >= self.len {
            (lead + self.len).next_multiple_of(PAGE_SIZE)
        } else {
            lead + bytes.end
        };
        let start = if bytes.start == 0 { 0 } else { (lead + bytes.start).div_ceil(PAGE_SIZE) };
        let end = (end / PAGE_SIZE).max(start);
        PageRange { start: self.range.start.add(start), end: self.range.start.add(end) }
    }
}

/// What all types of mappings have.
macro_rules! mapping {
    ($type:ident) => {
        impl $type {
            /// The object.
            #[must_use]
            pub fn object(&self) -> &Object {
                &self.raw.object
            }

            /// The length in bytes.
            #[must_use]
            pub fn len(&self) -> usize {
                self.raw.len
            }

            /// Whether there are none, which is never so.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.raw.len == 0
            }

            /// Has a range read and mapped, as far as memory allows. Where accesses failed after a read
            /// error they no longer do, if the bytes can be read now.
            ///
            /// # Errors
            /// [`Error::Store`].
            pub fn populate(&self, bytes: Range<usize>) -> Result<(), Error> {
                self.raw.populate(bytes)
            }

            /// Has a range read and mapped, and keeps it so until the result is dropped, whatever
            /// else needs memory: a system call can be given these bytes, with inline delivery as
            /// well, and the kernel may hold them as long, as for direct I/O, `vmsplice` or io_uring.
            /// Pins nest. Half of the memory can be pinned at most. A change of the object's length
            /// that would cut off a pinned page is refused; a private copy keeps its page instead.
            /// (Where the whole machine is short of memory the kernel may swap such pages out by itself,
            /// and map them again at the next access.)
            ///
            /// # Errors
            /// [`Error::TooMuchPinned`], [`Error::BadRange`] where the range reaches behind the
            /// mapping's or the object's end, [`Error::Store`]; the call has pinned nothing then.
            pub fn pin(&self, bytes: Range<usize>) -> Result<Pinned<'_>, Error> {
                Ok(Pinned(RawPin::new(&self.raw, bytes, PinFor::Reading)?))
            }

            /// Maps what is cached already, without waiting; returns how many pages of the range are
            /// mapped then.
            pub fn populate_cached(&self, bytes: Range<usize>) -> usize {
                self.raw.populate_cached(bytes)
            }

            /// Reads bytes with an error instead of a SIGBUS; returns how many there were before the
            /// object's end.
            ///
            /// # Errors
            /// [`Error::Store`].
            pub fn try_read(&self, at: usize, into: &mut [u8]) -> Result<usize, Error> {
                self.raw.try_read(at, into)
            }

            /// Says how a range will be used.
            ///
            /// # Errors
            /// [`Error::NoMemory`] where the table of ranges is full.
            pub fn advise(&self, pattern: Pattern, bytes: Range<usize>) -> Result<(), Error> {
                let pages = self.raw.pages(bytes);
                self.raw
                    .object
                    .objects()
                    .advise_pattern(pages, pattern)
                    .map_err(|errno| Error::NoMemory { doing: "note advice", errno })
            }

            /// Begins to read a range; returns how many bytes are under way.
            pub fn will_need(&self, bytes: Range<usize>) -> usize {
                self.raw.object.prefetch(self.raw.bytes(bytes))
            }

            /// Drops a range from the cache, but for dirty and pinned pages; returns how many bytes were
            /// dropped. What was written to a private copy stays, packed.
            pub fn dont_need(&self, bytes: Range<usize>) -> usize {
                self.raw.dont_need(bytes)
            }

            /// Gives the mapping another length, in its place or, where that is allowed, at another
            /// address: memmap2's remap. Bytes that stay in the mapping keep their values.
            ///
            /// # Errors
            /// [`Error::BadRange`] as for [`MapOptions::map`]; [`Error::NoMemory`] where there is no
            /// room for it. The mapping is unchanged then.
            pub fn remap(&mut self, len: usize, options: RemapOptions) -> Result<(), Error> {
                self.raw.remap(len, options)
            }

            /// Changes how much is mapped around a read fault.
            pub fn set_fault_around(&self, fault_around: FaultAround) {
                self.raw.object.objects().set_fault_around(self.raw.range.start, fault_around);
            }

            /// How many pages are mapped now.
            #[must_use]
            pub fn mapped_pages(&self) -> usize {
                self.raw.present_pages(self.raw.range)
            }

            /// The first byte.
            #[must_use]
            pub fn as_ptr(&self) -> *const u8 {
                self.raw.start as *const u8
            }
        }

        impl Deref for $type {
            type Target = [u8];

            fn deref(&self) -> &[u8] {
                // SAFETY: the bytes are mapped until the drop; the caller of `MapOptions::map` and
                // the like of it has promised that they are not written elsewhere.
                unsafe { core::slice::from_raw_parts(self.as_ptr(), self.raw.len) }
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Raw { object, len, offset, .. } = &self.raw;
                write!(f, concat!(stringify!($type), "({:?}, {} bytes at {})"), object, len, offset)
            }
        }
    };
}

/// What the writable types have beside that.
macro_rules! writable {
    ($type:ident) => {
        impl $type {
            /// The first byte.
            #[must_use]
            pub fn as_mut_ptr(&mut self) -> *mut u8 {
                self.raw.start as *mut u8
            }

            /// Makes the mapping read-only. What was written still reaches the store; to a copy, it
            /// stays the copy's own.
            ///
            /// # Errors
            /// [`Error::NoMemory`]; the mapping is in the error, as it was.
            #[allow(clippy::result_large_err, reason = "the mapping comes back in it")]
            pub fn make_read_only(self) -> Result<Mapping, Unchanged<Self>> {
                match self.raw.protect(Prot::READ) {
                    Ok(()) => Ok(Mapping { raw: self.raw }),
                    Err(error) => Err(Unchanged { mapping: self, error }),
                }
            }
        }

        impl DerefMut for $type {
            fn deref_mut(&mut self) -> &mut [u8] {
                // SAFETY: as for `deref`, the mapping is writable, and `self` is borrowed
                // exclusively.
                unsafe { core::slice::from_raw_parts_mut(self.as_mut_ptr(), self.raw.len) }
            }
        }
    };
}

mapping!(Mapping);
mapping!(MappingMut);
mapping!(MappingCopy);
writable!(MappingMut);
writable!(MappingCopy);

/// A mapping that can be read.
pub struct Mapping {
    pub(super) raw: Raw,
}

/// A mapping that can be written.
pub struct MappingMut {
    pub(super) raw: Raw,
}

impl MappingMut {
    /// Writes what was written to the store and makes it durable.
    ///
    /// # Errors
    /// As for [`Object::flush_range`].
    pub fn flush(&self) -> Result<(), Error> {
        self.flush_range(0..self.raw.len)
    }

    /// The same for a range.
    ///
    /// # Errors
    /// As for [`Object::flush_range`].
    pub fn flush_range(&self, bytes: Range<usize>) -> Result<(), Error> {
        self.raw.object.flush_range(self.raw.bytes(bytes))
    }

    /// Pins a range as [`Self::pin`] does, for bytes that are written: until the result is dropped
    /// they can be written without a fault, so that the kernel may do it at any time, as the target of
    /// read(2), direct I/O or io_uring. All that time they count as dirty. A flush writes the bytes
    /// that it finds, which may be a part of what the kernel is just writing; only a flush that begins
    /// after the kernel has reported completion is sure to write all of it, and the barrier cannot hold
    /// back what is written after it has let the page go.
    ///
    /// # Errors
    /// As for [`Self::pin`].
    pub fn pin_write(&self, bytes: Range<usize>) -> Result<PinnedMut<'_>, Error> {
        Ok(PinnedMut(RawPin::new(&self.raw, bytes, PinFor::Writing)?))
    }
}

/// A private copy that can be read and written.
pub struct MappingCopy {
    pub(super) raw: Raw,
}

impl MappingCopy {
    /// Pins a range as [`Self::pin`] does, for bytes that are written: until the result is dropped
    /// they can be written without a fault, so that the kernel may do it at any time. From then on
    /// they are the copy's own, as if they had been written.
    ///
    /// # Errors
    /// As for [`Self::pin`].
    pub fn pin_write(&self, bytes: Range<usize>) -> Result<PinnedMut<'_>, Error> {
        Ok(PinnedMut(RawPin::new(&self.raw, bytes, PinFor::Writing)?))
    }

    /// Discards what was written to the pages that lie whole in a range: they have the object's bytes
    /// again, as after madvise's MADV_DONTNEED.
    pub fn discard(&mut self, bytes: Range<usize>) {
        let pages = self.raw.whole_pages(bytes);
        self.raw.object.objects().advise_private(pages, Advice::DontNeed);
    }
}
