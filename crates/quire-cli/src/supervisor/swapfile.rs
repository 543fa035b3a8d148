//! The swap file: made without a name, so that it goes with its last user, however that ends.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use quire::control::{SEGMENT_BYTES, SEGMENTS_MAX};
use rustix::fs::OFlags;
use rustix::process::Resource;

use crate::size::{Human, Size};

/// Without `--swap-max` the file takes half of the free space, and no more than this: to swap
/// more than that at a disk's speed takes longer than users wait.
const DEFAULT_BYTES_MAX: u64 = 64 << 30;
/// Below this there is nothing to gain from a swap file.
const BYTES_MIN: u64 = 4 << 20;

/// `f_type` of filesystems whose files are memory.
const MEMORY_FILESYSTEMS: [i64; 2] = [0x0102_1994 /* tmpfs */, 0x8584_58f6 /* ramfs */];

pub(crate) struct SwapFile {
    pub descriptor: OwnedFd,
    pub segments: u32,
    /// Where it was made.
    pub folder: PathBuf,
    /// What the user should know about it.
    pub warning: Option<String>,
}

impl SwapFile {
    pub(crate) fn create(folder: &Path, bytes_max: Option<Size>) -> Result<SwapFile> {
        let shown = folder.display();
        let context = || format!("cannot make a swap file in {shown}");
        if !folder.metadata().with_context(context)?.is_dir() {
            bail!("cannot make a swap file in {shown}: not a directory; name a folder");
        }
        let descriptor = open_unnamed(folder).with_context(context)?;
        let filesystem = rustix::fs::fstatfs(&descriptor).with_context(context)?;
        let free_bytes = filesystem.f_bavail * filesystem.f_bsize.cast_unsigned();
        let bytes = match bytes_max {
            Some(size) => size.bytes_of(free_bytes),
            None => (free_bytes / 2).min(DEFAULT_BYTES_MAX),
        };
        // A write beyond RLIMIT_FSIZE fails, whatever the disk has room for.
        let limit = rustix::process::getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
        let segments = bytes.min(limit) / SEGMENT_BYTES as u64;
        if free_bytes < BYTES_MIN || (bytes_max.is_none() && bytes < BYTES_MIN) {
            bail!(
                "cannot make a swap file in {shown}: only {} are free there, and {} are the least; name another \
                 folder, or a size by --swap-max",
                Human(free_bytes),
                Human(BYTES_MIN)
            );
        }
        if segments == 0 {
            bail!("a swap file of {} is too small; give 256K at least", Human(bytes.min(limit)));
        }
        if bytes > SEGMENT_BYTES as u64 * SEGMENTS_MAX as u64 {
            bail!("a swap file of {} is too large; give 256G at most", Human(bytes));
        }
        // The file is sparse, but has its size from the start: reads need no look at it.
        rustix::fs::ftruncate(&descriptor, segments * SEGMENT_BYTES as u64)
            .with_context(context)?;
        let warning = if MEMORY_FILESYSTEMS.contains(&filesystem.f_type) {
            Some(format!("{shown} is in memory itself: a swap file there saves nothing"))
        } else if bytes > free_bytes {
            let free = Human(free_bytes);
            Some(format!("{shown} has only {free} free of the {} asked for", Human(bytes)))
        } else {
            None
        };
        let segments = u32::try_from(segments).context("too many segments")?;
        Ok(SwapFile { descriptor, segments, folder: folder.to_owned(), warning })
    }

    pub(crate) fn allocated_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.descriptor)
            .map_or(0, |status| u64::try_from(status.st_blocks).unwrap_or(0) * 512)
    }
}

/// An unnamed file in `folder`, past the page cache where its filesystem allows that.
fn open_unnamed(folder: &Path) -> io::Result<OwnedFd> {
    let file = tempfile::tempfile_in(folder)?;
    let _ = rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? | OFlags::DIRECT);
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> std::path::PathBuf {
        std::env::temp_dir()
    }

    #[test]
    fn a_swap_file_has_no_name_and_the_size_asked_for() {
        let swap = SwapFile::create(&folder(), Some(Size::Bytes(8 << 20))).unwrap();
        assert_eq!(swap.segments, 32);
        let status = rustix::fs::fstat(&swap.descriptor).unwrap();
        assert_eq!((status.st_size, status.st_nlink), (8 << 20, 0));
        assert_eq!(swap.allocated_bytes(), 0);
    }

    #[test]
    fn a_swap_file_is_past_the_page_cache_where_it_can_be() {
        let swap = SwapFile::create(Path::new("."), Some(Size::Bytes(4 << 20))).unwrap();
        let has_direct =
            rustix::fs::open(".", OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT, 0o600.into());
        let flags = rustix::fs::fcntl_getfl(&swap.descriptor).unwrap();
        assert_eq!(flags.contains(OFlags::DIRECT), has_direct.is_ok());
    }

    #[test]
    fn what_cannot_be_is_said_in_one_line() {
        let error = |folder: &str, size| {
            let result = SwapFile::create(Path::new(folder), Some(Size::Bytes(size)));
            format!("{:#}", result.err().expect("an error"))
        };
        assert!(error("/no/such/folder", 1 << 30).contains("/no/such/folder: No such file"));
        assert!(error("/etc/passwd", 1 << 30).contains("not a directory"));
        assert!(error("/proc", 1 << 30).starts_with("cannot make a swap file in /proc"));
        let folder = folder();
        let folder = folder.to_str().unwrap();
        assert!(error(folder, 4096).contains("too small"));
        assert!(error(folder, 1 << 40).contains("too large"));
    }

    #[test]
    fn a_swap_file_in_memory_is_warned_of() {
        if let Ok(swap) = SwapFile::create(Path::new("/dev/shm"), Some(Size::Bytes(4 << 20))) {
            let is_memory = rustix::fs::fstatfs(&swap.descriptor)
                .is_ok_and(|filesystem| MEMORY_FILESYSTEMS.contains(&filesystem.f_type));
            assert_eq!(swap.warning.is_some(), is_memory);
        }
    }
}
