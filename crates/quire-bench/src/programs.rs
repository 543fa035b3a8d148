//! The programs that the bench runs, and their input.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::contestant::Workload;

const DICTS: &str = include_str!("programs/dicts.py");
const JSON_TEXT: &str = include_str!("programs/json_text.py");

/// How much of the memory program's data is random.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Randomness {
    /// Half of every page.
    Half,
    /// An eighth of every page.
    Eighth,
}

impl Randomness {
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Randomness::Half => "half of each page random",
            Randomness::Eighth => "an eighth of each page random",
        }
    }

    fn random_words(self) -> usize {
        match self {
            Randomness::Half => 256,
            Randomness::Eighth => 64,
        }
    }
}

/// A program built into this binary, by its command line, whose words have no blanks.
pub(crate) fn built_in(own: &Path, name: impl Into<String>, line: &str) -> Workload {
    let mut argv: Vec<OsString> = vec![own.into()];
    argv.extend(line.split_whitespace().map(OsString::from));
    Workload { name: name.into(), argv, is_deterministic: false }
}

/// Writes, scans and touches at random `bytes` of memory.
pub(crate) fn memory(own: &Path, bytes: u64, threads: usize, data: Randomness) -> Workload {
    let random = data.random_words();
    let line = format!("work memory --size={bytes} --threads={threads} --random-words={random}");
    built_in(own, format!("memory, {}", data.in_words()), &line)
}

/// Sorts numbers in memory.
pub(crate) fn sort_numbers(own: &Path, bytes: u64, rounds: usize) -> Workload {
    built_in(own, "sorting numbers", &format!("work sort --size={bytes} --rounds={rounds}"))
}

/// Allocates and frees without pause.
pub(crate) fn malloc(own: &Path, threads: usize, rounds: usize) -> Workload {
    let line = format!("work malloc --threads={threads} --rounds={rounds}");
    built_in(own, "malloc and free", &line)
}

/// madvise(MADV_PAGEOUT) of `bytes`.
pub(crate) fn pageout(own: &Path, bytes: u64, is_zero_filled: bool, spins: bool) -> Workload {
    let random = if is_zero_filled { 0 } else { 128 };
    let spin = if spins { "--spin" } else { "" };
    let line = format!("work pageout --size={bytes} --random-words={random} {spin}");
    built_in(own, "pageout", &line)
}

/// CPython's executable itself: `python3` may be a script that looks for it.
pub(crate) fn python() -> Result<PathBuf> {
    let output = Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output()
        .context("python3 cannot be run")?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || path.is_empty() {
        bail!("python3 does not say where it is");
    }
    Ok(path.into())
}

fn script(python: &Path, name: &str, script: &str, size: usize) -> Workload {
    let argv = vec![python.into(), "-c".into(), script.into(), size.to_string().into()];
    Workload { name: name.into(), argv, is_deterministic: true }
}

/// CPython reads and writes JSON.
pub(crate) fn json_text(python: &Path, rounds: usize) -> Workload {
    script(python, "CPython, JSON", JSON_TEXT, rounds)
}

/// CPython builds and walks a tree of objects.
pub(crate) fn dicts(python: &Path, count: usize) -> Workload {
    script(python, "CPython, dicts and lists", DICTS, count)
}

/// GNU sort with all of a text in memory.
pub(crate) fn sort_text(text: &Path, threads: usize) -> Workload {
    let mut argv: Vec<OsString> = ["sort", "-S", "4G"].map(OsString::from).into();
    argv.push(format!("--parallel={threads}").into());
    argv.push(text.into());
    Workload { name: "GNU sort".into(), argv, is_deterministic: true }
}

/// Lines of words in no order, the same every time.
pub(crate) fn write_text(file: &Path, bytes: u64) -> Result<()> {
    const SYLLABLES: [&str; 16] = [
        "ka", "lo", "mi", "ren", "sta", "vel", "or", "an", "ti", "bu", "sen", "dra", "quo", "pel",
        "ni", "ver",
    ];
    let mut out = BufWriter::new(File::create(file)?);
    let (mut state, mut written) = (88_172_645_463_325_252_u64, 0);
    while written < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let (mut line, mut bits) = (String::with_capacity(64), state);
        for syllable in 0..14 {
            line.push_str(SYLLABLES[(bits & 15) as usize]);
            line.push_str(if syllable % 3 == 2 { " " } else { "" });
            bits >>= 4;
        }
        line.push('\n');
        out.write_all(line.as_bytes())?;
        written += line.len() as u64;
    }
    out.flush()?;
    Ok(())
}
