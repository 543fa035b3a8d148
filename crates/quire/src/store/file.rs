//! A file, or a block device, as a store.
//!
//! A store has two open descriptions of its file: a buffered one, always, and one with O_DIRECT where
//! that is used ([`open`]). Direct I/O keeps the kernel from caching a second time what Quire caches.
//! What direct I/O cannot do goes through the buffered description, and the kernel keeps the two
//! coherent: a direct write drops the kernel's copies, a direct read first writes them out.
//!
//! | request | mode |
//! |---|---|
//! | offset, length and memory aligned | direct |
//! | whole pages of a write that ends inside a page | direct; the rest of it buffered, at its true length, so that no invented byte lies behind the end |
//! | anything else, and what direct I/O refuses | buffered |
//! | the last page of a file, read | direct up to the end, zeros behind it |
//!
//! The store remembers the file's length as it was last told, so that it notices a file that another
//! program made shorter. `length_lock` is held while the length is asked for or changed, and by a
//! write that extends the file, so that the remembered length follows the file's own order.

mod open;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::string::String;
use std::sync::{Mutex, MutexGuard};

use rustix::fs::{SeekFrom, fdatasync, fstat, ftruncate, seek};
use rustix::io::{Errno, pread};

pub use self::open::{Direct, FileOptions};
pub(super) use self::open::{errno_of, sync_directory};
use super::workers::lock;
use super::{Cause, Operation, Store, StoreError};
use crate::swap::io::Job;
use crate::units::PAGE_SIZE;

/// The description for direct I/O, and the alignments that it demands.
struct DirectFile {
    file: File,
    /// Of offsets and lengths: a page at least, so that no page is written partly by direct I/O.
    alignment: usize,
    /// Of memory addresses.
    memory_alignment: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FileKind {
    Regular,
    /// A block device, whose length is where a seek to its end arrives.
    Device,
}

/// A file or a block device.
pub struct FileStore {
    name: String,
    buffered: File,
    direct: Option<DirectFile>,
    kind: FileKind,
    is_writable: bool,
    /// The length in bytes, as last told or caused by us; changed under `length_lock`.
    known_len: AtomicU64,
    length_lock: Mutex<()>,
}

impl FileStore {
    /// Whether aligned requests use direct I/O.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// The description that a request goes through.
    fn description(&self, offset: u64, at: *const u8, bytes: usize) -> BorrowedFd<'_> {
        match &self.direct {
            Some(direct) if direct.fits(offset, at, bytes) => direct.file.as_fd(),
            _ => self.buffered.as_fd(),
        }
    }

    /// How much of a write goes first, by itself: the whole pages, where direct I/O can write those.
    fn head_bytes(&self, offset: u64, from: &[u8]) -> usize {
        let Some(direct) = &self.direct else { return from.len() };
        let head = from.len() - from.len() % direct.alignment;
        if head != 0 && direct.fits(offset, from.as_ptr(), head) { head } else { from.len() }
    }

    /// Completes a read whose first attempt read `done` bytes. Direct I/O stops where the file ends,
    /// inside a page, and cannot continue from there.
    fn finish_read(
        &self,
        offset: u64,
        into: &mut [u8],
        done: usize,
        attempt: Result<(), Errno>,
    ) -> Result<(), StoreError> {
        let bytes = into.len() as u64;
        let fail = |cause| self.error(Operation::Read, offset, bytes, cause);
        match attempt {
            Ok(()) => return Ok(()),
            // The end of the file (a job reports it as EIO), or an alignment that the file system
            // did not tell.
            Err(Errno::IO | Errno::INVAL) => {}
            Err(errno) => return Err(fail(Cause::Os(errno))),
        }
        let rest = offset.saturating_add(done as u64);
        let more = pread_full(self.buffered.as_fd(), rest, &mut into[done..])
            .map_err(|errno| fail(Cause::Os(errno)))?;
        let there = done + more;
        if there == into.len() {
            return Ok(());
        }
        into[there..].fill(0);
        // Relaxed: a length told during the read may or may not count; the bytes read are no newer.
        let known_len = self.known_len.load(Relaxed);
        let end = offset.saturating_add(there as u64);
        let wanted = known_len.min(offset.saturating_add(bytes));
        if end.next_multiple_of(PAGE_SIZE as u64) >= wanted {
            return Ok(());
        }
        // Pages are missing that the file had, unless our own length was that of a moment ago.
        let len = self.current_len().map_err(|errno| fail(Cause::Os(errno)))?;
        if len >= known_len { Ok(()) } else { Err(fail(Cause::Shrunk { len })) }
    }

    /// Completes a write whose first attempt wrote `done` bytes.
    fn finish_write(
        &self,
        offset: u64,
        from: &[u8],
        done: usize,
        attempt: Result<(), Errno>,
    ) -> Result<(), StoreError> {
        let bytes = from.len() as u64;
        let fail = |errno| self.error(Operation::Write, offset, bytes, Cause::Os(errno));
        match attempt {
            // An alignment that the file system did not tell.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(fail(errno)),
        }
        let rest = offset.saturating_add(done as u64);
        let written = self.buffered.write_all_at(&from[done..], rest);
        // Without an errno it wrote nothing of what is left.
        written.map_err(|error| fail(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        // Relaxed: our own write is done; another program that shortens the file meanwhile is noticed
        // under the lock.
        if offset.saturating_add(bytes) > self.known_len.load(Relaxed) {
            let guard = lock(&self.length_lock);
            let len = self.current_len().map_err(fail)?;
            self.set_known_len(&guard, len);
        }
        Ok(())
    }

    fn current_len(&self) -> Result<u64, Errno> {
        match self.kind {
            FileKind::Regular => Ok(fstat(&self.buffered)?.st_size as u64),
            FileKind::Device => seek(&self.buffered, SeekFrom::End(0)),
        }
    }

    fn set_known_len(&self, _held: &MutexGuard<'_, ()>, len: u64) {
        // Relaxed: the lock orders the stores among themselves; readers take any recent value.
        self.known_len.store(len, Relaxed);
    }

    fn check_writable(
        &self,
        operation: Operation,
        offset: u64,
        bytes: u64,
    ) -> Result<(), StoreError> {
        match self.is_writable {
            true => Ok(()),
            false => Err(self.error(operation, offset, bytes, Cause::ReadOnly)),
        }
    }

    fn error(&self, operation: Operation, offset: u64, bytes: u64, cause: Cause) -> StoreError {
        StoreError::new(operation, &self.name, offset, bytes, cause)
    }
}

impl DirectFile {
    fn fits(&self, offset: u64, at: *const u8, bytes: usize) -> bool {
        offset.is_multiple_of(self.alignment as u64)
            && bytes.is_multiple_of(self.alignment)
            && at.addr().is_multiple_of(self.memory_alignment)
    }
}

impl Store for FileStore {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> Result<u64, StoreError> {
        let guard = lock(&self.length_lock);
        let len = self
            .current_len()
            .map_err(|errno| self.error(Operation::Len, 0, 0, Cause::Os(errno)))?;
        self.set_known_len(&guard, len);
        Ok(len)
    }

    fn is_read_only(&self) -> bool {
        !self.is_writable
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let file = self.description(offset, into.as_ptr(), into.len());
        let (done, attempt) = Job::read(offset, into).run_alone(file);
        self.finish_read(offset, into, done, attempt)
    }

    fn reads_in_place(&self) -> bool {
        true
    }

    fn try_read_in_place(&self, offset: u64, into: &mut [u8]) -> bool {
        // One system call, as a rule, and nothing of ours that locks or allocates. A short read is
        // made anew by `read`, which finds out why it was short.
        let file = self.description(offset, into.as_ptr(), into.len());
        pread_full(file, offset, into) == Ok(into.len())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.check_writable(Operation::Write, offset, from.len() as u64)?;
        let head = &from[..self.head_bytes(offset, from)];
        let file = self.description(offset, head.as_ptr(), head.len());
        let (done, attempt) = Job::write(offset, head).run_alone(file);
        self.finish_write(offset, from, done, attempt)
    }

    fn set_len(&self, bytes: u64) -> Result<(), StoreError> {
        self.check_writable(Operation::SetLen, bytes, 0)?;
        let guard = lock(&self.length_lock);
        let before = self.known_len.load(Relaxed);
        // Before the file is shorter: a reader must not take our own cut for another program's.
        self.set_known_len(&guard, before.min(bytes));
        let cut = ftruncate(&self.buffered, bytes);
        self.set_known_len(&guard, if cut.is_ok() { bytes } else { before });
        cut.map_err(|errno| self.error(Operation::SetLen, bytes, 0, Cause::Os(errno)))
    }

    fn sync(&self) -> Result<(), StoreError> {
        // One call serves both descriptions: it flushes the file and the device's cache.
        fdatasync(&self.buffered)
            .map_err(|errno| self.error(Operation::Sync, 0, 0, Cause::Os(errno)))
    }
}

/// Reads until `into` is full or the file ends; returns how much that was.
fn pread_full(file: BorrowedFd<'_>, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
    let mut done = 0;
    while done < into.len() {
        match pread(file, &mut into[done..], offset.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(bytes) => done += bytes,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// A path as messages show it.
pub(super) fn display(path: &std::path::Path) -> String {
    path.to_string_lossy().into_owned()
}
