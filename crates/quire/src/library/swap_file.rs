//! The swap file of an address space: made without a name, so that it goes with the process,
//! however that ends.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::string::ToString;

use rustix::fs::OFlags;

use super::Error;
use crate::control::{SEGMENT_BYTES, SEGMENTS_MAX};
use crate::sys::Errno;

/// Where it is to be, and how large.
#[derive(Clone, Debug)]
pub(super) struct SwapPlace {
    pub folder: PathBuf,
    pub bytes_max: u64,
}

/// A swap file.
pub(super) struct SwapFile {
    pub file: File,
    /// Segments that it has room for.
    pub segments: u32,
}

impl SwapFile {
    /// Makes one.
    ///
    /// # Errors
    /// [`Error::NoSwapFile`].
    pub fn create(place: &SwapPlace) -> Result<SwapFile, Error> {
        let failed = |error: std::io::Error| Error::NoSwapFile {
            folder: place.folder.display().to_string(),
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        };
        let segments = (place.bytes_max / SEGMENT_BYTES as u64).min(SEGMENTS_MAX as u64) as u32;
        if segments == 0 {
            return Err(failed(Errno::INVAL.into()));
        }
        let file = open_unnamed(&place.folder).map_err(failed)?;
        // Sparse, but of its size from the start: a read need not look where it ends.
        file.set_len(u64::from(segments) * SEGMENT_BYTES as u64).map_err(failed)?;
        Ok(SwapFile { file, segments })
    }
}

/// An unnamed file, past the page cache where its filesystem allows that.
fn open_unnamed(folder: &Path) -> std::io::Result<File> {
    let open = |more: OFlags| {
        let flags = (OFlags::TMPFILE | more).bits().cast_signed();
        File::options().read(true).write(true).custom_flags(flags).mode(0o600).open(folder)
    };
    open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()))
}
