//! Where bytes go: to standard output, or into a checksum.

use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{FileType, fstat};
use rustix::io::retry_on_intr;
use xxhash_rust::xxh3::Xxh3;

use crate::sys::mapped::Mapped;

/// How much is copied and summed at a time: what stays in a CPU's cache meanwhile.
const SUM_BYTES: usize = 256 << 10;

/// What becomes of the bytes of a file.
pub(super) trait Sink {
    /// Takes bytes of a mapping; says how many it took, 0 where the kernel could not read them.
    fn take_mapped(&mut self, mapped: &Mapped, range: Range<usize>) -> io::Result<usize>;

    fn take(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// The file was read to its end.
    fn end(&mut self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    /// The file was not read to its end.
    fn give_up(&mut self) {}

    /// Whether this very file is written to: reading it would never end, or wait for itself.
    fn is_output(&self, _device: u64, _inode: u64) -> bool {
        false
    }
}

pub(super) struct Cat {
    /// Device and inode, where it is a file.
    output: Option<(u64, u64)>,
}

impl Cat {
    pub(super) fn new() -> io::Result<Cat> {
        let stat = fstat(io::stdout())?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        Ok(Cat { output: is_file.then_some((stat.st_dev, stat.st_ino)) })
    }
}

impl Sink for Cat {
    fn take_mapped(&mut self, mapped: &Mapped, range: Range<usize>) -> io::Result<usize> {
        mapped.write(range, io::stdout())
    }

    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        // Past the buffer of std's own, which ends a line late.
        while !bytes.is_empty() {
            let count = retry_on_intr(|| rustix::io::write(io::stdout(), bytes))?;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    fn is_output(&self, device: u64, inode: u64) -> bool {
        self.output == Some((device, inode))
    }
}

/// An XXH3 checksum of 64 bits a file, with the seed 0.
pub(super) struct Sum {
    hash: Xxh3,
    buffer: Vec<u8>,
}

impl Sum {
    pub(super) fn new() -> Sum {
        Sum { hash: Xxh3::new(), buffer: vec![0; SUM_BYTES] }
    }
}

impl Sink for Sum {
    fn take_mapped(&mut self, mapped: &Mapped, range: Range<usize>) -> io::Result<usize> {
        let len = range.len().min(SUM_BYTES);
        let count = mapped.copy(range.start, &mut self.buffer[..len]);
        self.hash.update(&self.buffer[..count]);
        Ok(count)
    }

    fn take(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        Ok(())
    }

    fn end(&mut self, path: &Path) -> io::Result<()> {
        let line = line(self.hash.digest(), path);
        self.hash.reset();
        io::stdout().write_all(&line)?;
        io::stdout().flush()
    }

    fn give_up(&mut self) {
        self.hash.reset();
    }
}

/// A line as the checksum tools of coreutils print it: a name that would break the line is escaped,
/// and the line says so by a backslash in front.
fn line(sum: u64, path: &Path) -> Vec<u8> {
    let name = path.as_os_str().as_bytes();
    let is_escaped = name.iter().any(|byte| matches!(byte, b'\\' | b'\n' | b'\r'));
    let mut line = if is_escaped { vec![b'\\'] } else { Vec::new() };
    line.extend_from_slice(format!("{sum:016x}  ").as_bytes());
    for &byte in name {
        match byte {
            b'\\' if is_escaped => line.extend_from_slice(b"\\\\"),
            b'\n' => line.extend_from_slice(b"\\n"),
            b'\r' => line.extend_from_slice(b"\\r"),
            byte => line.push(byte),
        }
    }
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_would_break_the_line_is_escaped() {
        for (name, expected) in [
            ("a b", "00000000000000ff  a b\n"),
            ("a\nb\\c", "\\00000000000000ff  a\\nb\\\\c\n"),
            ("\r", "\\00000000000000ff  \\r\n"),
            ("-", "00000000000000ff  -\n"),
        ] {
            assert_eq!(String::from_utf8(line(255, Path::new(name))).unwrap(), expected);
        }
    }

    #[test]
    fn a_file_that_was_given_up_leaves_nothing_in_the_next_sum() {
        let mut sum = Sum::new();
        sum.take(b"left over").unwrap();
        sum.give_up();
        assert_eq!(sum.hash.digest(), xxhash_rust::xxh3::xxh3_64(b""));
    }
}
