//! The swap file of an address space: without a name, so that it goes with the process, however
//! that ends.

use std::fs::File;
use std::path::Path;
use std::string::ToString;

use rustix::fs::{CWD, Mode, OFlags};

use super::Error;
use crate::control::{SEGMENT_BYTES, SEGMENTS_MAX};
use crate::sys::Errno;

/// Makes a swap file of at most `bytes` in `folder`; returns it with how many segments it has room
/// for.
pub(super) fn create(folder: &Path, bytes: u64) -> Result<(File, u32), Error> {
    let segments = (bytes / SEGMENT_BYTES as u64).min(SEGMENTS_MAX as u64) as u32;
    let failed = |errno| Error::SwapFile { folder: folder.display().to_string(), errno };
    if segments == 0 {
        return Err(failed(Errno::INVAL));
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
    let open = |more| rustix::fs::openat(CWD, folder, flags | more, Mode::RUSR | Mode::WUSR);
    // Past the kernel's page cache, where the filesystem can: what is swapped is to leave memory.
    let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty())).map_err(failed)?;
    // Sparse, but as long as it gets from the start: reads need no look at its length.
    rustix::fs::ftruncate(&file, u64::from(segments) * SEGMENT_BYTES as u64).map_err(failed)?;
    Ok((File::from(file), segments))
}
