//! Finds what is installed with `quire`: the preload library, which it puts first in LD_PRELOAD, and
//! the bench's program.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Environment variable with the library's path, for trees that are not laid out as installed.
pub(crate) const PRELOAD_VARIABLE: &str = "QUIRE_PRELOAD";
const LIBRARY: &str = "libquire_preload.so";
/// Where the library lies, seen from the folder of the program `quire`.
const LIBRARY_FOLDERS: [&str; 3] = ["", "../lib/quire", "../lib"];

/// Environment variable with the path of the bench's program.
pub(crate) const BENCH_VARIABLE: &str = "QUIRE_BENCH";
const BENCH: &str = "quire-bench";
const BENCH_FOLDERS: [&str; 3] = ["", "../libexec/quire", "../lib/quire"];

/// The preload library's absolute path.
pub(crate) fn find_library() -> Result<PathBuf> {
    let library = match named(PRELOAD_VARIABLE) {
        Some(path) => path
            .canonicalize()
            .with_context(|| format!("{PRELOAD_VARIABLE} names no library: {}", path.display()))?,
        None => find_library_from(&own_folder()?)?,
    };
    // The loader has no way to write these in a path.
    if library.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ' | b'\t' | b'\n'))
    {
        bail!(
            "the loader cannot preload {}: a path with blanks or colons; move it, or point {} \
             to a copy",
            library.display(),
            PRELOAD_VARIABLE
        );
    }
    Ok(library)
}

fn find_library_from(folder: &Path) -> Result<PathBuf> {
    find_from(folder, LIBRARY_FOLDERS, LIBRARY).with_context(|| {
        format!(
            "{LIBRARY} is neither beside quire in {} nor in ../lib/quire or ../lib; point \
             {PRELOAD_VARIABLE} to it",
            folder.display()
        )
    })
}

/// The absolute path of the bench's program.
pub(crate) fn find_bench() -> Result<PathBuf> {
    match named(BENCH_VARIABLE) {
        Some(path) => path
            .canonicalize()
            .with_context(|| format!("{BENCH_VARIABLE} names no program: {}", path.display())),
        None => find_bench_from(&own_folder()?),
    }
}

fn find_bench_from(folder: &Path) -> Result<PathBuf> {
    find_from(folder, BENCH_FOLDERS, BENCH).with_context(|| {
        format!(
            "the bench is not installed: {BENCH} is neither beside quire in {} nor in \
             ../libexec/quire or ../lib/quire; build it in quire's source tree by \
             `cargo build --release -p quire-bench`, then `make install-bench`, or point \
             {BENCH_VARIABLE} to it",
            folder.display()
        )
    })
}

/// The path in an environment variable that is set and not empty.
fn named(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The folder of the program `quire`.
fn own_folder() -> Result<PathBuf> {
    let program = std::env::current_exe().context("cannot tell where quire itself lies")?;
    Ok(program.parent().unwrap_or(Path::new("/")).to_owned())
}

fn find_from<const N: usize>(folder: &Path, places: [&str; N], name: &str) -> Option<PathBuf> {
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
