//! The swap file of an address space. It has no name, so that it goes with the process, however that
//! ends.

#![deny(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::string::ToString;

use rustix::fs::OFlags;

use super::Error;
use crate::control::{SEGMENT_BYTES, SEGMENTS_MAX};
use crate::sys::Errno;

/// Where the swap file is to be, and how large.
#[derive(Clone, Debug)]
pub(super) struct SwapPlace {
    pub folder: PathBuf,
    pub bytes_max: u64,
}

impl SwapPlace {
    /// Makes the file; returns how many segments it has room for as well.
    pub fn create(&self) -> Result<(File, u32), Error> {
        let failed = |error: std::io::Error| Error::NoSwapFile {
            folder: self.folder.display().to_string(),
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        };
        let segments = (self.bytes_max / SEGMENT_BYTES as u64).min(SEGMENTS_MAX as u64) as u32;
        if segments == 0 {
            return Err(failed(Errno::INVAL.into()));
        }
        let file = open_unnamed(&self.folder).map_err(failed)?;
        // Sparse, but of its size from the start, so that no read has to look for the file's end.
        file.set_len(u64::from(segments) * SEGMENT_BYTES as u64).map_err(failed)?;
        Ok((file, segments))
    }
}

/// Opens an unnamed file, with direct I/O where its file system has that.
fn open_unnamed(folder: &Path) -> std::io::Result<File> {
    let open = |more: OFlags| {
        let flags = (OFlags::TMPFILE | more).bits().cast_signed();
        File::options().read(true).write(true).custom_flags(flags).mode(0o600).open(folder)
    };
    open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()))
}
