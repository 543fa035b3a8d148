//! How the command line prints: lines on stderr, text on stdout or into a file, tables,
//! JSON, and a line that says how far something is.

pub(crate) mod status;
pub(crate) mod table;

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context as _, Result};

/// Writes a line to stderr, in one piece: the program writes there too. Its stderr may be closed or
/// full; that must not end the run.
pub fn say(line: &str) {
    let _ = io::stderr().write_all(format!("quire: {line}\n").as_bytes());
}

pub(crate) fn print(text: &str) -> Result<()> {
    io::stdout().write_all(text.as_bytes()).context("cannot print")
}

/// Where `-o FILE` says that a command prints: that file, or stderr.
pub(crate) fn output(file: Option<&Path>) -> Result<Box<dyn Write>> {
    Ok(match file {
        Some(file) => Box::new(create(file)?),
        None => Box::new(io::stderr()),
    })
}

/// A new file, or an old one made empty.
pub(crate) fn create(file: &Path) -> Result<File> {
    File::create(file).with_context(|| format!("cannot write {}", file.display()))
}
