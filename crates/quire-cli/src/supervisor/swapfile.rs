//! The swap file: made without a name, so that it goes with its last user, however that ends.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use quire::control::{SEGMENT_BYTES, SEGMENTS_MAX};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
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
    /// What the user should know about it.
    pub warning: Option<String>,
}

impl SwapFile {
    pub(crate) fn create(folder: &Path, bytes_max: Option<Size>) -> Result<SwapFile> {
        let shown = folder.display();
        let context = || format!("cannot make a swap file in {shown}");
        if !folder.metadata().with_context(context)?.is_dir() {
            bail!("cannot make a swap file in {shown}: not a directory");
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
            bail!("cannot make a swap file in {shown}: only {} are free there", Human(free_bytes));
        }
        if segments == 0 {
            bail!("a swap file of {} is too small: at least 256 KiB", Human(bytes.min(limit)));
        }
        if bytes > SEGMENT_BYTES as u64 * SEGMENTS_MAX as u64 {
            bail!("a swap file of {} is too large: at most 256 GiB", Human(bytes));
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
        Ok(SwapFile { descriptor, segments, warning })
    }

    pub(crate) fn allocated_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.descriptor)
            .map_or(0, |status| u64::try_from(status.st_blocks).unwrap_or(0) * 512)
    }
}

/// An unnamed file in `folder`, past the page cache where its filesystem allows that.
fn open_unnamed(folder: &Path) -> io::Result<OwnedFd> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let open = |more| rustix::fs::openat(CWD, folder, flags | OFlags::TMPFILE | more, mode);
    for more in [OFlags::DIRECT, OFlags::empty()] {
        match open(more) {
            // No O_DIRECT here, or no O_TMPFILE: each has its errno, and shares it.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::ISDIR) => {}
            result => return Ok(result?),
        }
    }
    open_and_unlink(folder)
}

/// For filesystems without O_TMPFILE: a name that is gone as soon as the file is open.
fn open_and_unlink(folder: &Path) -> io::Result<OwnedFd> {
    for _ in 0..100 {
        let file = folder.join(format!(".quire-swap-{:016x}", super::random()));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let direct = options.clone().custom_flags(OFlags::DIRECT.bits().cast_signed()).open(&file);
        // A filesystem that refuses O_DIRECT may have made the file all the same.
        let opened = direct.or_else(|_| {
            let _ = std::fs::remove_file(&file);
            options.open(&file)
        });
        match opened {
            Ok(opened) => {
                std::fs::remove_file(&file)?;
                return Ok(opened.into());
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::EXIST.into())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

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
    fn without_o_tmpfile_the_name_is_gone_at_once() {
        let opened = open_and_unlink(&folder()).unwrap();
        assert_eq!(rustix::fs::fstat(&opened).unwrap().st_nlink, 0);
        let link = std::fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd())).unwrap();
        assert!(link.to_string_lossy().ends_with("(deleted)"), "{link:?}");
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
