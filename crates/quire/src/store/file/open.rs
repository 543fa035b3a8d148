//! Opening a file, and choosing how: direct, or through the kernel's page cache.
//!
//! Direct I/O is chosen where the kernel has less than half of the file cached: what it has need
//! not be read from the device again. The choice is made once; a file that is cached or dropped
//! later is served as it was opened.

use core::sync::atomic::AtomicU64;
use std::format;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::{
    Advice, AtFlags, FileType, OFlags, StatxFlags, fadvise, fcntl_getfl, fcntl_setfl, fstat,
    fstatfs, fsync, statx,
};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, preadv2};

use super::super::{Cause, Operation, StoreError};
use super::{DirectFile, FileStore, Kind, display};
use crate::sys::cachestat::cached_pages;
use crate::units::{PAGE_SHIFT, PAGE_SIZE};

/// What direct I/O is assumed to want where the kernel does not tell (before Linux 6.1).
const ALIGNMENT: usize = 4096;
/// A file that is longer is judged by samples.
const SAMPLED_ABOVE_BYTES: u64 = 256 << 20;
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 1 << 20;
/// tmpfs: all of it is the kernel's cache. (linux/magic.h)
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// ramfs, likewise.
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Whether a file is read and written past the kernel's page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Direct {
    /// Yes, unless most of it is in the kernel's cache already, or it cannot be.
    #[default]
    Auto,
    /// Yes, or the file is not opened.
    On,
    /// No.
    Off,
}

/// How a file is opened.
#[derive(Clone, Debug)]
pub struct FileOptions {
    direct: Direct,
    is_writable: bool,
    is_created: bool,
    has_uring: bool,
}

impl FileOptions {
    /// For reading a file that there is.
    #[must_use]
    pub fn read_only() -> FileOptions {
        FileOptions { direct: Direct::Auto, is_writable: false, is_created: false, has_uring: true }
    }

    /// For reading and writing a file that there is.
    #[must_use]
    pub fn read_write() -> FileOptions {
        FileOptions { is_writable: true, ..FileOptions::read_only() }
    }

    /// For writing too; a file that is not there is made, empty.
    #[must_use]
    pub fn create(self) -> FileOptions {
        FileOptions { is_writable: true, is_created: true, ..self }
    }

    /// Whether to go past the kernel's page cache.
    #[must_use]
    pub fn direct(self, direct: Direct) -> FileOptions {
        FileOptions { direct, ..self }
    }

    /// Batches go by threads, as where io_uring is forbidden.
    #[must_use]
    pub fn without_uring(self) -> FileOptions {
        FileOptions { has_uring: false, ..self }
    }
}

impl FileStore {
    /// Opens a file. One that is made here is in its directory for good when this returns.
    ///
    /// # Errors
    /// What the kernel says; [`Cause::Unsupported`] for what is neither a regular file nor a block
    /// device, and for [`Direct::On`] where the file system has no direct I/O.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        let fail = |cause| StoreError::new(Operation::Open, &display(path), 0, 0, cause);
        let mut how = OpenOptions::new();
        // A FIFO would keep us waiting for its other end before it can be refused.
        how.read(true).write(options.is_writable).custom_flags(OFlags::NONBLOCK.bits() as i32);
        let file = match how.open(path) {
            Err(error) if options.is_created && error.kind() == std::io::ErrorKind::NotFound => {
                let file = how.create(true).mode(0o666).open(path);
                file.and_then(|file| sync_directory(path).map(|()| file))
            }
            other => other,
        };
        let file = file.map_err(|error| fail(Cause::Os(errno_of(&error))))?;
        // io_uring would take it at its word, and not wait for the device.
        let flags = fcntl_getfl(&file).map_err(|errno| fail(Cause::Os(errno)))?;
        fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(|errno| fail(Cause::Os(errno)))?;
        FileStore::from_file(file, &display(path), &options)
    }

    /// A store of a file that is open already. `name` is for messages.
    ///
    /// # Errors
    /// As [`FileStore::open`]; [`Cause::Unsupported`] for a file that is open in a way that a
    /// store cannot use.
    pub fn from_file(
        file: File,
        name: &str,
        options: &FileOptions,
    ) -> Result<FileStore, StoreError> {
        let fail = |cause| StoreError::new(Operation::Open, name, 0, 0, cause);
        let fail_os = |errno| fail(Cause::Os(errno));
        let flags = fcntl_getfl(&file).map_err(fail_os)?;
        // Of these, reads and writes would go astray without an error: appended writes go to the
        // end wherever they are meant for, and direct ones need what is not aligned to be so.
        let astray = OFlags::APPEND | OFlags::DIRECT | OFlags::PATH;
        let access = flags & OFlags::RWMODE;
        if flags.intersects(astray) || access == OFlags::WRONLY {
            let why = "open it for reading, or reading and writing, and without O_APPEND, O_DIRECT";
            return Err(fail(Cause::Unsupported(why.into())));
        }
        if options.is_writable && access != OFlags::RDWR {
            return Err(fail(Cause::ReadOnly));
        }
        let kind = match FileType::from_raw_mode(fstat(&file).map_err(fail_os)?.st_mode) {
            FileType::RegularFile => Kind::Regular,
            FileType::BlockDevice => Kind::Device,
            other => {
                let why = format!("it is a {other:?}; give a regular file or a block device");
                return Err(fail(Cause::Unsupported(why)));
            }
        };
        let mut store = FileStore {
            name: name.into(),
            buffered: file,
            direct: None,
            kind,
            is_writable: options.is_writable,
            has_uring: options.has_uring && !flags.contains(OFlags::NONBLOCK),
            known_len: AtomicU64::new(0),
            length_lock: Mutex::new(()),
        };
        let len = store.current_len().map_err(fail_os)?;
        store.known_len = AtomicU64::new(len);
        store.direct = match options.direct {
            Direct::Off => None,
            Direct::On => {
                Some(open_direct(&store.buffered, store.is_writable).map_err(|errno| {
                    let why =
                        format!("no direct I/O here ({errno}); open it with direct off or auto");
                    fail(Cause::Unsupported(why))
                })?)
            }
            Direct::Auto
                if is_memory(&store.buffered) || is_mostly_cached(&store.buffered, len) =>
            {
                None
            }
            Direct::Auto => open_direct(&store.buffered, store.is_writable).ok(),
        };
        Ok(store)
    }
}

/// Opens the file once more, the very same one whatever its path leads to by now.
fn open_direct(file: &File, is_writable: bool) -> Result<DirectFile, Errno> {
    let dioalign = StatxFlags::from_bits_retain(StatxFlags::DIOALIGN.bits());
    let (mut memory_alignment, mut alignment) = (ALIGNMENT, ALIGNMENT);
    if let Ok(told) = statx(file, c"", AtFlags::EMPTY_PATH, dioalign)
        && told.stx_mask & dioalign.bits() != 0
    {
        memory_alignment = told.stx_dio_mem_align as usize;
        alignment = told.stx_dio_offset_align as usize;
    }
    if memory_alignment == 0 || alignment == 0 {
        // The file system's way to say that this file has none.
        return Err(Errno::OPNOTSUPP);
    }
    let direct = OpenOptions::new()
        .read(true)
        .write(is_writable)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(|error| errno_of(&error))?;
    if !fcntl_getfl(&direct)?.contains(OFlags::DIRECT) {
        return Err(Errno::OPNOTSUPP);
    }
    // Both are powers of two, so the larger is a multiple of the smaller.
    Ok(DirectFile { file: direct, alignment: alignment.max(PAGE_SIZE), memory_alignment })
}

/// Whether the kernel's cache is where the file lives.
fn is_memory(file: &File) -> bool {
    fstatfs(file).is_ok_and(|system| matches!(system.f_type as u64, TMPFS_MAGIC | RAMFS_MAGIC))
}

/// Whether at least half of the file is in the kernel's cache, as far as can be found out.
fn is_mostly_cached(file: &File, len: u64) -> bool {
    let samples: &mut dyn Iterator<Item = (u64, u64)> = if len <= SAMPLED_ABOVE_BYTES {
        &mut core::iter::once((0, len))
    } else {
        let stride = len / SAMPLES;
        &mut (0..SAMPLES).map(move |n| (n * (stride >> PAGE_SHIFT << PAGE_SHIFT), SAMPLE_BYTES))
    };
    let (mut pages, mut cached) = (0, 0);
    for (offset, bytes) in samples {
        if bytes == 0 {
            return false;
        }
        match cached_pages(file.as_fd(), offset, bytes) {
            Ok(count) => cached += count,
            Err(_) => return is_mostly_cached_by_reading(file, len),
        }
        pages += bytes.div_ceil(PAGE_SIZE as u64);
    }
    cached * 2 >= pages
}

/// The same, before Linux 6.5: reads bytes of some pages if that needs no I/O.
fn is_mostly_cached_by_reading(file: &File, len: u64) -> bool {
    // Or the kernel would read ahead behind every page that it does not have.
    let _ = fadvise(file, 0, None, Advice::Random);
    let (mut asked, mut cached) = (0, 0);
    let step = (len / SAMPLES).max(PAGE_SIZE as u64);
    let mut offset = 0;
    while offset < len {
        let mut byte = [0];
        let mut into = [IoSliceMut::new(&mut byte)];
        match preadv2(file, &mut into, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => cached += 1,
            Err(Errno::AGAIN) => {}
            // Nobody knows; a read past the cache is right either way.
            Err(_) => break,
        }
        asked += 1;
        offset += step;
    }
    let _ = fadvise(file, 0, None, Advice::Normal);
    asked != 0 && cached * 2 >= asked
}

/// Makes durable that the file is in its directory.
pub(in super::super) fn sync_directory(path: &Path) -> std::io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match fsync(File::open(directory)?) {
        // Some file systems have nothing to sync there.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The errno in an error of the standard library's.
pub(in super::super) fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::vec;

    use super::*;

    /// Without a name, on the disk.
    fn scratch_file() -> File {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlags::TMPFILE.bits() as i32)
            .open(
                std::env::var_os("CARGO_TARGET_TMPDIR").map_or_else(std::env::temp_dir, Into::into),
            )
            .unwrap()
    }

    #[test]
    fn both_ways_to_ask_see_a_file_that_was_just_written_and_one_that_was_dropped() {
        let mut file = scratch_file();
        if is_memory(&file) {
            std::println!("the temporary files are in memory here: not tested");
            return;
        }
        let len = 4 << 20;
        file.write_all(&vec![7; len as usize]).unwrap();
        assert!(is_mostly_cached(&file, len));
        assert!(is_mostly_cached_by_reading(&file, len));
        fsync(&file).unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        assert!(!is_mostly_cached(&file, len));
        assert!(!is_mostly_cached_by_reading(&file, len));
    }

    #[test]
    fn an_empty_file_is_not_cached() {
        let file = scratch_file();
        assert!(!is_mostly_cached(&file, 0));
        assert!(!is_mostly_cached_by_reading(&file, 0));
    }
}
