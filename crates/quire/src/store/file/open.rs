//! Opening a file, and choosing how: direct, or through the kernel's page cache.
//!
//! Direct I/O is chosen where the kernel caches less than half of the file: cached bytes need not be
//! read from the device again. The choice is made once; a file that the kernel caches or drops later
//! is served as it was opened.

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
use super::{DirectFile, FileKind, FileStore, display};
use crate::sys::cachestat::{bytes_read, cached_pages};
use crate::units::{PAGE_SHIFT, PAGE_SIZE};

/// The alignment that direct I/O is assumed to demand where the kernel does not tell (before Linux
/// 6.1).
const ALIGNMENT: usize = 4096;
/// The choice for a longer file is made by samples.
const SAMPLED_ABOVE_BYTES: u64 = 256 << 20;
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 1 << 20;
/// File systems that live in the kernel's cache (linux/magic.h).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Whether a file is read and written past the kernel's page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Direct {
    /// It is, unless the kernel caches most of it already, or the file system has no direct I/O.
    #[default]
    Auto,
    /// It is, or opening it fails.
    On,
    /// It is not.
    Off,
}

/// How a file is opened.
#[derive(Clone, Debug)]
pub struct FileOptions {
    direct: Direct,
    is_writable: bool,
    is_created: bool,
}

impl FileOptions {
    /// Opens an existing file for reading.
    #[must_use]
    pub fn read_only() -> FileOptions {
        FileOptions { direct: Direct::Auto, is_writable: false, is_created: false }
    }

    #[must_use]
    pub fn read_write() -> FileOptions {
        FileOptions { is_writable: true, ..FileOptions::read_only() }
    }

    /// Opens for writing too, and makes an empty file where there is none.
    #[must_use]
    pub fn create(self) -> FileOptions {
        FileOptions { is_writable: true, is_created: true, ..self }
    }

    /// Chooses direct or buffered I/O.
    #[must_use]
    pub fn direct(self, direct: Direct) -> FileOptions {
        FileOptions { direct, ..self }
    }
}

impl FileStore {
    /// Opens a file. Where the call makes it, its directory entry is durable when the call returns.
    ///
    /// # Errors
    /// What the kernel says; [`Cause::Unsupported`] for what is neither a regular file nor a block
    /// device, and for [`Direct::On`] where the file system has no direct I/O.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        let fail = |cause| StoreError::new(Operation::Open, &display(path), 0, 0, cause);
        let mut how = OpenOptions::new();
        // Opening a FIFO would wait for its other end before it can be refused.
        how.read(true).write(options.is_writable).custom_flags(OFlags::NONBLOCK.bits() as i32);
        let file = match how.open(path) {
            Err(error) if options.is_created && error.kind() == std::io::ErrorKind::NotFound => {
                let file = how.create(true).mode(0o666).open(path);
                file.and_then(|file| sync_directory(path).map(|()| file))
            }
            other => other,
        };
        let file = file.map_err(|error| fail(Cause::Os(errno_of(&error))))?;
        // With O_NONBLOCK io_uring would not wait for the device.
        let flags = fcntl_getfl(&file).map_err(|errno| fail(Cause::Os(errno)))?;
        fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(|errno| fail(Cause::Os(errno)))?;
        FileStore::from_file(file, &display(path), &options)
    }

    /// Makes a store of a file that is open already. `name` is for messages.
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
        // With these, reads and writes would go astray without an error: appended writes go to the
        // end whatever their offset, and the buffered description must take requests that are not
        // aligned.
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
            FileType::RegularFile => FileKind::Regular,
            FileType::BlockDevice => FileKind::Device,
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
            known_len: AtomicU64::new(0),
            length_lock: Mutex::new(()),
        };
        let len = store.current_len().map_err(fail_os)?;
        store.known_len = AtomicU64::new(len);
        let file = &store.buffered;
        let open = || open_direct(file, store.is_writable);
        store.direct = match options.direct {
            Direct::Off => None,
            Direct::On => Some(open().map_err(|errno| {
                let why = format!("no direct I/O here ({errno}); open it with direct off or auto");
                fail(Cause::Unsupported(why))
            })?),
            Direct::Auto if is_memory(file) || is_mostly_cached(file, len) => None,
            Direct::Auto => open().ok(),
        };
        Ok(store)
    }
}

/// Opens the same file once more, whatever its path leads to by now.
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
        // So a file system says that this file has no direct I/O.
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

/// Whether the file lives in the kernel's cache.
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

/// The same, where the kernel does not tell, as of a file that is another user's: reads a byte of some pages where that
/// needs no waiting.
fn is_mostly_cached_by_reading(file: &File, len: u64) -> bool {
    // Otherwise the kernel would read ahead behind every page that it does not cache.
    let _ = fadvise(file, 0, None, Advice::Random);
    let (mut asked, mut cached) = (0, 0);
    let (step, before) = ((len / SAMPLES).max(PAGE_SIZE as u64), bytes_read());
    let mut offset = 0;
    while offset < len {
        let mut byte = [0];
        let mut into = [IoSliceMut::new(&mut byte)];
        match preadv2(file, &mut into, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => cached += 1,
            Err(Errno::AGAIN) => {}
            // What is cached stays unknown; direct I/O is right either way.
            Err(_) => break,
        }
        asked += 1;
        offset += step;
    }
    let _ = fadvise(file, 0, None, Advice::Normal);
    // What is not cached is asked of the disk, and a fast one has answered before the kernel looks again.
    let read = (bytes_read() - before) / PAGE_SIZE as u64;
    asked != 0 && cached * 2 >= asked && read * 2 <= asked
}

/// Makes the file's entry in its directory durable.
pub(in super::super) fn sync_directory(path: &Path) -> std::io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match fsync(File::open(directory)?) {
        // On some file systems a directory has nothing to sync.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The errno in an error of the standard library.
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
