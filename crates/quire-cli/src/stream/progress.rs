//! How far it is: one line on a terminal.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::print::status::StatusLine;
use crate::size::Human;

const BAR: usize = 24;

pub(super) struct Progress {
    pub(super) line: StatusLine,
    files: usize,
    started: Instant,
}

impl Progress {
    /// Shown where stdout, which would be mixed with it, is no terminal.
    pub(super) fn new(files: &[PathBuf]) -> Progress {
        let line = StatusLine::new(!io::stdout().is_terminal());
        Progress { line, files: files.len(), started: Instant::now() }
    }

    /// Says how much was read of all files, and how much of this one where its length is known.
    pub(super) fn show(&mut self, path: &Path, bytes: u64, part: Option<(usize, usize)>) {
        let seconds = self.started.elapsed().as_secs_f64().max(0.001);
        let speed = (bytes as f64 / seconds) as u64;
        self.line.show(|| line(path, self.files, bytes, part, speed));
    }
}

fn line(path: &Path, files: usize, all: u64, part: Option<(usize, usize)>, speed: u64) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    // One line, whatever the name: it is cut, and nothing in it moves the cursor.
    let mut line: String = name.chars().filter(|sign| !sign.is_control()).take(24).collect();
    if let Some((done, len)) = part {
        let filled = (done as u128 * BAR as u128 / (len as u128).max(1)) as usize;
        let percent = done as u128 * 100 / (len as u128).max(1);
        let (bar, rest) = ("#".repeat(filled), "-".repeat(BAR - filled.min(BAR)));
        let _ = write!(line, " [{bar}{rest}] {percent}% of {}", Human(len as u64));
    }
    if files > 1 || part.is_none() {
        let _ = write!(line, "; {} in all", Human(all));
    }
    let _ = write!(line, ", {}/s", Human(speed));
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_how_far_it_is() {
        let path = Path::new("/tmp/data\x1b.bin");
        assert_eq!(
            line(path, 1, 512 << 20, Some((512 << 20, 1 << 30)), 100 << 20),
            "data.bin [############------------] 50% of 1 GiB, 100 MiB/s"
        );
        assert_eq!(line(Path::new("-"), 1, 4096, None, 1024), "-; 4 KiB in all, 1 KiB/s");
        let whole = line(path, 2, 3 << 20, Some((1 << 20, 1 << 20)), 0);
        assert_eq!(whole, "data.bin [########################] 100% of 1 MiB; 3 MiB in all, 0 B/s");
    }
}
