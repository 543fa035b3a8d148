//! A mapped object whose bytes only the kernel touches.
//!
//! An access of ours to a page that cannot be read would be a SIGBUS; one of the kernel's is
//! EFAULT. And what another program writes meanwhile is no data race, for no reference is made.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use quire::library::{Error, MapOptions, Mapping, Object};

pub(crate) struct Mapped {
    map: Mapping,
    len: usize,
}

impl Mapped {
    /// Maps all of an object, which must not be empty.
    pub(crate) fn new(object: &Object, options: &MapOptions) -> Result<Mapped, Error> {
        let len = object.len();
        // SAFETY: no slice is made of it; see above.
        let map = unsafe { options.clone().len(len).map(object)? };
        Ok(Mapped { map, len: len as usize })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The mapping, for all that is not its bytes.
    pub(crate) fn map(&self) -> &Mapping {
        &self.map
    }

    /// The place of `range`, cut off at the end.
    fn place(&self, range: Range<usize>) -> (*const u8, usize) {
        let start = range.start.min(self.len);
        (self.map.as_ptr().wrapping_add(start), range.end.min(self.len).saturating_sub(start))
    }

    /// Has the kernel copy bytes to `into`; says how many it could read.
    pub(crate) fn copy(&self, at: usize, into: &mut [u8]) -> usize {
        let (from, len) = self.place(at..at.saturating_add(into.len()));
        let remote = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len };
        let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: len };
        // SAFETY: the kernel writes to `into`, `len` bytes at most, which it has; it reads from
        // where it may, or fails.
        let count = unsafe {
            libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
        };
        // Where it is forbidden, or fails otherwise: nothing came.
        usize::try_from(count).unwrap_or(0)
    }

    /// Has the kernel write bytes to a file; says how many it did, 0 where it could not read them.
    pub(crate) fn write(&self, range: Range<usize>, to: impl AsFd) -> io::Result<usize> {
        let (from, len) = self.place(range);
        // SAFETY: the kernel reads `len` bytes that are mapped, or fails.
        let count = unsafe { libc::write(to.as_fd().as_raw_fd(), from.cast(), len) };
        match usize::try_from(count) {
            Ok(count) => Ok(count),
            Err(_) => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::EFAULT) => Ok(0),
                error => Err(error),
            },
        }
    }
}
