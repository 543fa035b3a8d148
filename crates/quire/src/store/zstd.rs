//! An archive of zstd frames as a read-only store.
//!
//! The store knows where each frame lies in the archive ([`index`]), and keeps a few frames unpacked
//! ([`cache`], which has the only lock). Its bytes are those of the file that was packed. An archive
//! is any `.zst` whose frames are small enough to be unpacked for one page, with a seek table
//! ([`seek_table`]) or without. [`pack()`] makes one.
//!
//! Nothing in an archive is trusted: every length is checked against the file's before it is used, a
//! wrong one cannot shift the frames behind it ([`index`]), and a frame that does not unpack to
//! exactly the bytes that the index promises is an error.

mod cache;
mod index;
mod pack;
mod seek_table;

use core::fmt;
use std::boxed::Box;
use std::format;
use std::path::Path;
use std::string::String;
use std::sync::Arc;
use std::vec;
use std::vec::Vec;

use rustix::io::Errno;
use zstd_safe::DCtx;

use self::cache::Cache;
use self::index::{Frame, Index};
pub use self::pack::{PackOptions, Packed, pack};
use super::{Cause, Direct, FileOptions, FileStore, Operation, Store, StoreError};

/// The largest frame that is unpacked for one page, in bytes, packed or unpacked.
pub const FRAME_BYTES_MAX: usize = 64 << 20;
/// Bytes of unpacked frames that are kept by default: enough for several streams of readers.
pub(crate) const CACHE_BYTES: usize = 32 << 20;

/// A [`Cause`] with the offset in the archive, before it is an error of a named store.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Flaw {
    Os(Errno),
    /// The store that the archive lies in failed.
    Store(StoreError),
    Corrupt(u64, String),
    Unsupported(u64, String),
}

impl Flaw {
    fn corrupt(offset: u64, what: impl fmt::Display) -> Flaw {
        Flaw::Corrupt(offset, format!("{what}"))
    }

    /// As an error of the archive called `name`.
    fn into_error(self, operation: Operation, name: &str) -> StoreError {
        let (offset, cause) = match self {
            Flaw::Os(errno) => (0, Cause::Os(errno)),
            Flaw::Store(error) => (error.offset(), error.cause().clone()),
            Flaw::Corrupt(offset, what) => (offset, Cause::Corrupt(what)),
            Flaw::Unsupported(offset, what) => (offset, Cause::Unsupported(what)),
        };
        StoreError::new(operation, name, offset, 0, cause)
    }
}

/// Where the packed bytes lie.
struct Archive {
    store: Box<dyn Store>,
    /// Its length when it was opened.
    bytes: u64,
}

impl Archive {
    /// Fills `into` from `at` on. All of it lies in the archive, as far as its index is right.
    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), Flaw> {
        let read = self.store.read(at, into);
        // A store has zeros behind its end, which may have come nearer.
        let end = self.bytes.min(self.store.len().map_err(Flaw::Store)?);
        if at.saturating_add(into.len() as u64) > end {
            return Err(Flaw::corrupt(at, "the archive ends inside a frame"));
        }
        read.map_err(Flaw::Store)
    }
}

/// A packed file, seen unpacked.
pub struct ZstdStore {
    archive: Archive,
    index: Index,
    cache: Cache,
}

impl ZstdStore {
    /// Opens an archive and reads where its frames lie. An archive without a seek table whose frames
    /// are of many sizes is unpacked once for that, which takes long where it is large.
    ///
    /// # Errors
    /// [`Cause::Unsupported`] where a frame is too large, or does not tell its size;
    /// [`Cause::Corrupt`] with the offset in the archive; or what the kernel says.
    pub fn open(path: impl AsRef<Path>) -> Result<ZstdStore, StoreError> {
        ZstdStore::with_cache(path, CACHE_BYTES)
    }

    /// The same, keeping about `cache_bytes` bytes of unpacked frames (one frame at least, and
    /// those that are being read).
    ///
    /// # Errors
    /// As [`ZstdStore::open`].
    pub fn with_cache(path: impl AsRef<Path>, cache_bytes: usize) -> Result<ZstdStore, StoreError> {
        // Frames begin anywhere, so direct I/O would not do.
        let options = FileOptions::read_only().direct(Direct::Off);
        ZstdStore::over(FileStore::open(path, options)?, cache_bytes)
    }

    /// The same of an archive that lies in another store.
    ///
    /// # Errors
    /// As [`ZstdStore::open`], or what that store says.
    pub fn over(store: impl Store + 'static, cache_bytes: usize) -> Result<ZstdStore, StoreError> {
        let archive = Archive { bytes: store.len()?, store: Box::new(store) };
        let index = Index::read(&archive)
            .map_err(|flaw| flaw.into_error(Operation::Open, archive.store.name()))?;
        Ok(ZstdStore { archive, index, cache: Cache::new(cache_bytes) })
    }

    /// The number of frames in the archive that have content.
    #[must_use]
    pub fn frame_count(&self) -> usize {
        self.index.frames.len()
    }

    /// How often a frame was unpacked so far.
    #[must_use]
    pub fn unpacked_count(&self) -> u64 {
        self.cache.filled_count()
    }

    /// Bytes of the unpacked frames that are kept.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.cache.kept_bytes()
    }

    fn fill(&self, offset: u64, into: &mut [u8]) -> Result<(), Flaw> {
        let mut rest = &mut *into;
        let mut at = offset;
        while let Some((number, frame)) = self.index.find(at) {
            if rest.is_empty() {
                return Ok(());
            }
            let bytes = self.cache.get(number, || unpack(&self.archive, frame))?;
            let inside = &bytes[(at - frame.at) as usize..];
            let (now, later) = rest.split_at_mut(inside.len().min(rest.len()));
            now.copy_from_slice(&inside[..now.len()]);
            at += now.len() as u64;
            rest = later;
        }
        rest.fill(0);
        Ok(())
    }
}

impl Store for ZstdStore {
    fn name(&self) -> &str {
        self.archive.store.name()
    }

    fn len(&self) -> Result<u64, StoreError> {
        Ok(self.index.bytes())
    }

    fn is_read_only(&self) -> bool {
        true
    }

    /// The offset of [`Cause::Corrupt`] is one in the archive, not the one that was read.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.fill(offset, into).map_err(|flaw| flaw.into_error(Operation::Read, self.name()))
    }

    fn sync(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

/// The content of a frame, exactly as large as the index promises.
fn unpack(archive: &Archive, frame: &Frame) -> Result<Arc<Vec<u8>>, Flaw> {
    let mut packed = vec![0; frame.packed_bytes];
    archive.read_at(frame.packed_at, &mut packed)?;
    // One byte more than promised, so that a larger content is noticed.
    let mut bytes = vec![0; frame.bytes + 1];
    let unpacked = DCtx::try_create()
        .ok_or(Flaw::Os(Errno::NOMEM))?
        .decompress(&mut bytes[..], &packed)
        .map_err(|code| Flaw::corrupt(frame.packed_at, zstd_safe::get_error_name(code)))?;
    if unpacked != frame.bytes {
        let what = format!("a frame has {unpacked} bytes in it, not {}", frame.bytes);
        return Err(Flaw::corrupt(frame.packed_at, what));
    }
    bytes.truncate(frame.bytes);
    if let Some(checksum) = frame.checksum
        && checksum != seek_table::checksum(&bytes)
    {
        let what = "a frame's content does not fit the seek table's checksum";
        return Err(Flaw::corrupt(frame.packed_at, what));
    }
    Ok(Arc::new(bytes))
}
