//! Packing a file into an archive that can be mapped.
//!
//! The archive appears under its name whole and durable, or not at all: it is written beside it,
//! under a name of this process's own, and renamed in the end. Every frame has its content's size
//! and checksum, which all zstd tools check, so the seek table needs no checksums.

use std::ffi::OsString;
use std::format;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::string::String;
use std::vec;
use std::vec::Vec;

use rustix::fs::{CWD, RenameFlags, fsync, renameat_with};
use rustix::io::Errno;
use zstd_safe::{CCtx, CParameter};

use super::super::file::{display, errno_of};
use super::super::workers::{cpus, on_threads};
use super::super::{Cause, Operation, StoreError};
use super::seek_table::{self, FRAMES_MAX, TableEntry};
use super::{FRAME_BYTES_MAX, Flaw};
use crate::sys::monotonic_ns;
use crate::units::PAGE_SIZE;

/// How a file is packed.
#[derive(Clone, Debug)]
pub struct PackOptions {
    frame_bytes: usize,
    level: i32,
    is_replacing: bool,
}

impl PackOptions {
    /// Frames of 1 MiB, level 3; an existing file is not replaced.
    #[must_use]
    pub fn new() -> PackOptions {
        PackOptions { frame_bytes: 1 << 20, level: 3, is_replacing: false }
    }

    /// Unpacked bytes a frame: whole pages, at most [`FRAME_BYTES_MAX`]. Larger frames pack better,
    /// and take longer to unpack for the first page that is wanted.
    #[must_use]
    pub fn frame_bytes(self, frame_bytes: usize) -> PackOptions {
        PackOptions { frame_bytes, ..self }
    }

    /// zstd's level: 1 is fast, 19 packs small, negative levels are faster still.
    #[must_use]
    pub fn level(self, level: i32) -> PackOptions {
        PackOptions { level, ..self }
    }

    /// Replaces an existing file.
    #[must_use]
    pub fn replace(self) -> PackOptions {
        PackOptions { is_replacing: true, ..self }
    }
}

impl Default for PackOptions {
    fn default() -> PackOptions {
        PackOptions::new()
    }
}

/// The sizes of a packed file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packed {
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes of the archive.
    pub packed_bytes: u64,
    /// Frames in it.
    pub frames: usize,
}

/// Packs `input` into the archive `output`. Calls `progress` now and then with how many bytes of the
/// file are packed.
///
/// # Errors
/// [`Cause::Unsupported`] for options that no archive can have, `EEXIST` where `output` exists, or
/// what the kernel says.
pub fn pack(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    options: &PackOptions,
    progress: impl FnMut(u64),
) -> Result<Packed, StoreError> {
    let (input, output) = (input.as_ref(), output.as_ref());
    let fail = |path: &Path, cause| StoreError::new(Operation::Pack, &display(path), 0, 0, cause);
    let fail_io = |path, error: io::Error| fail(path, Cause::Os(errno_of(&error)));
    check(options).map_err(|why| fail(input, Cause::Unsupported(why)))?;
    let mut source = File::open(input).map_err(|error| fail_io(input, error))?;
    if !options.is_replacing && output.symlink_metadata().is_ok() {
        return Err(fail(output, Cause::Os(Errno::EXIST)));
    }
    let partial = PartialArchive::create(output).map_err(|error| fail_io(output, error))?;
    let mut packer = Packer {
        options,
        archive: BufWriter::new(&partial.file),
        packed_bytes: 0,
        entries: Vec::new(),
    };
    let packed = packer.run(&mut source, progress).map_err(|flaw| match flaw {
        Failed::Input(error) => fail_io(input, error),
        Failed::Output(error) => fail_io(output, error),
        Failed::Zstd(flaw) => flaw.into_error(Operation::Pack, &display(input)),
    })?;
    drop(packer);
    partial.finish(output, options.is_replacing).map_err(|error| fail_io(output, error))?;
    Ok(packed)
}

fn check(options: &PackOptions) -> Result<(), String> {
    let frame_bytes = options.frame_bytes;
    if !frame_bytes.is_multiple_of(PAGE_SIZE)
        || !(PAGE_SIZE..=FRAME_BYTES_MAX).contains(&frame_bytes)
    {
        return Err(format!(
            "frames of {frame_bytes} bytes; choose whole pages, from {PAGE_SIZE} to \
             {FRAME_BYTES_MAX} bytes"
        ));
    }
    let levels = zstd_safe::min_c_level()..=zstd_safe::max_c_level();
    if !levels.contains(&options.level) {
        return Err(format!("level {}; choose one from {levels:?}", options.level));
    }
    Ok(())
}

/// Where packing failed.
enum Failed {
    Input(io::Error),
    Output(io::Error),
    Zstd(Flaw),
}

/// The bytes of one frame.
struct Piece {
    bytes: Vec<u8>,
    packed: Result<Vec<u8>, Flaw>,
}

struct Packer<'a> {
    options: &'a PackOptions,
    archive: BufWriter<&'a File>,
    packed_bytes: u64,
    entries: Vec<TableEntry>,
}

impl Packer<'_> {
    fn run(&mut self, source: &mut File, mut progress: impl FnMut(u64)) -> Result<Packed, Failed> {
        let mut bytes = 0;
        loop {
            let mut pieces = Vec::new();
            for _ in 0..cpus() {
                let mut piece = Vec::new();
                let frame_bytes = self.options.frame_bytes as u64;
                source.take(frame_bytes).read_to_end(&mut piece).map_err(Failed::Input)?;
                if !piece.is_empty() {
                    pieces.push(Piece { bytes: piece, packed: Ok(Vec::new()) });
                }
            }
            if pieces.is_empty() {
                break;
            }
            let level = self.options.level;
            on_threads(cpus(), &mut pieces, |piece| piece.packed = pack_frame(&piece.bytes, level));
            for piece in pieces {
                let packed = piece.packed.map_err(Failed::Zstd)?;
                bytes += piece.bytes.len() as u64;
                self.put(&piece.bytes, &packed).map_err(Failed::Output)?;
            }
            progress(bytes);
        }
        let table = seek_table::to_bytes(&self.entries);
        self.archive.write_all(&table).map_err(Failed::Output)?;
        self.archive.flush().map_err(Failed::Output)?;
        let packed_bytes = self.packed_bytes + table.len() as u64;
        Ok(Packed { bytes, packed_bytes, frames: self.entries.len() })
    }

    fn put(&mut self, bytes: &[u8], packed: &[u8]) -> io::Result<()> {
        if self.entries.len() == FRAMES_MAX {
            // The format allows no more; larger frames would be fewer.
            return Err(Errno::FBIG.into());
        }
        self.archive.write_all(packed)?;
        self.packed_bytes += packed.len() as u64;
        self.entries.push(TableEntry {
            packed_bytes: packed.len() as u32,
            bytes: bytes.len() as u32,
            checksum: None,
        });
        Ok(())
    }
}

fn pack_frame(bytes: &[u8], level: i32) -> Result<Vec<u8>, Flaw> {
    let zstd = |code| Flaw::Unsupported(0, zstd_safe::get_error_name(code).into());
    let mut context = CCtx::try_create().ok_or(Flaw::Os(Errno::NOMEM))?;
    context.set_parameter(CParameter::CompressionLevel(level)).map_err(zstd)?;
    context.set_parameter(CParameter::ChecksumFlag(true)).map_err(zstd)?;
    let mut packed = vec![0; zstd_safe::compress_bound(bytes.len())];
    let packed_bytes = context.compress2(&mut packed[..], bytes).map_err(zstd)?;
    packed.truncate(packed_bytes);
    Ok(packed)
}

/// An archive that is not finished; its drop removes it unless [`Self::finish`] has renamed it.
struct PartialArchive {
    file: File,
    path: PathBuf,
    is_finished: bool,
}

impl PartialArchive {
    fn create(output: &Path) -> io::Result<PartialArchive> {
        let mut name = OsString::from(".");
        name.push(output.file_name().ok_or(io::ErrorKind::InvalidInput)?);
        // With the time: a killed process of the same number may have left one.
        name.push(format!(".{}-{:x}.partial", std::process::id(), monotonic_ns()));
        let path = output.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(PartialArchive { file, path, is_finished: false })
    }

    fn finish(mut self, output: &Path, is_replacing: bool) -> io::Result<()> {
        fsync(&self.file)?;
        let flags = if is_replacing { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        match renameat_with(CWD, &self.path, CWD, output, flags) {
            // This file system has no such rename; `pack` has checked that there is no such file.
            Err(Errno::INVAL) => fs::rename(&self.path, output)?,
            other => other?,
        }
        self.is_finished = true;
        super::super::file::sync_directory(output)
    }
}

impl Drop for PartialArchive {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = fs::remove_file(&self.path);
        }
    }
}
