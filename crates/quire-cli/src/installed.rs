//! Finds what is installed with `quire`: the preload library, which it puts first in LD_PRELOAD, and
//! the bench's program.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Environment variable with the library's path, for trees that are not laid out as installed.
const PRELOAD_VARIABLE: &str = "QUIRE_PRELOAD";
/// Environment variable with the path of the bench's program.
const BENCH_VARIABLE: &str = "QUIRE_BENCH";

/// The preload library's absolute path.
pub(crate) fn find_library() -> Result<PathBuf> {
    let library = find(PRELOAD_VARIABLE, find_library_from)?;
    // The loader has no way to write these in a path.
    if library.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ' | b'\t' | b'\n'))
    {
        bail!(
            "the loader cannot preload {}, as the path has blanks or colons; move it, or point \
             {PRELOAD_VARIABLE} to a copy",
            library.display()
        );
    }
    Ok(library)
}

fn find_library_from(folder: &Path) -> Result<PathBuf> {
    let places = ["", "../lib/quire", "../lib"];
    find_in(folder, places, "libquire_preload.so").with_context(|| {
        format!(
            "libquire_preload.so is neither beside quire in {} nor in ../lib/quire or ../lib; point \
             {PRELOAD_VARIABLE} to it",
            folder.display()
        )
    })
}

/// The absolute path of the bench's program.
pub(crate) fn find_bench() -> Result<PathBuf> {
    find(BENCH_VARIABLE, find_bench_from)
}

fn find_bench_from(folder: &Path) -> Result<PathBuf> {
    let places = ["", "../libexec/quire", "../lib/quire"];
    find_in(folder, places, "quire-bench").with_context(|| {
        format!(
            "the bench is not installed: quire-bench is neither beside quire in {} nor in \
             ../libexec/quire or ../lib/quire; build it in quire's source tree by \
             `cargo build --release -p quire-bench`, then `make install-bench`, or point \
             {BENCH_VARIABLE} to it",
            folder.display()
        )
    })
}

/// The file that an environment variable names, where it is set and not empty; else what `find_from`
/// finds, seen from the folder of the program `quire`.
fn find(variable: &str, find_from: fn(&Path) -> Result<PathBuf>) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) {
        let found = Path::new(&path).canonicalize();
        return found.with_context(|| format!("{variable} names no file: {}", path.display()));
    }
    let program = std::env::current_exe().context("cannot tell where quire itself lies")?;
    find_from(program.parent().unwrap_or(Path::new("/")))
}

fn find_in<const N: usize>(folder: &Path, places: [&str; N], name: &str) -> Option<PathBuf> {
    places.iter().find_map(|place| folder.join(place).join(name).canonicalize().ok())
}

/// LD_PRELOAD with `library` ahead of what is there.
pub(crate) fn prepend(library: &Path, present: Option<&OsStr>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    let others = present.unwrap_or_default().as_bytes().split(|byte| matches!(byte, b':' | b' '));
    for other in
        others.filter(|other| !other.is_empty() && *other != library.as_os_str().as_bytes())
    {
        value.push(":");
        value.push(OsStr::from_bytes(other));
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_preloaded_stays_preloaded_once() {
        let library = Path::new("/lib/q.so");
        let prepended = |present: &str| prepend(library, Some(OsStr::new(present)));
        assert_eq!(prepend(library, None), "/lib/q.so");
        assert_eq!(prepended(""), "/lib/q.so");
        assert_eq!(prepended("/a.so b.so"), "/lib/q.so:/a.so:b.so");
        assert_eq!(prepended("/a.so:/lib/q.so"), "/lib/q.so:/a.so");
    }

    #[test]
    fn what_is_missing_is_said_with_the_way_out() {
        let error = find_library_from(Path::new("/proc")).unwrap_err().to_string();
        assert!(error.contains("/proc") && error.contains(PRELOAD_VARIABLE), "{error}");
        let error = find_bench_from(Path::new("/proc")).unwrap_err().to_string();
        assert!(error.contains("make install-bench") && error.contains(BENCH_VARIABLE), "{error}");
    }
}
