//! Finds the preload library, and puts it first in LD_PRELOAD.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Environment variable with the library's path, for trees that are not laid out as installed.
pub const PRELOAD_VARIABLE: &str = "QUIRE_PRELOAD";
const LIBRARY: &str = "libquire_preload.so";
/// Where the library lies, seen from the folder of the program `quire`.
const PLACES: [&str; 3] = ["", "../lib/quire", "../lib"];

/// The preload library's absolute path.
pub fn find() -> Result<PathBuf> {
    let library = match std::env::var_os(PRELOAD_VARIABLE) {
        Some(path) if !path.is_empty() => {
            let path = PathBuf::from(path);
            path.canonicalize().with_context(|| {
                format!("{PRELOAD_VARIABLE} names no library: {}", path.display())
            })?
        }
        _ => {
            let program = std::env::current_exe().context("cannot tell where quire itself lies")?;
            find_beside(program.parent().unwrap_or(Path::new("/")))?
        }
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

fn find_beside(folder: &Path) -> Result<PathBuf> {
    for place in PLACES {
        if let Ok(library) = folder.join(place).join(LIBRARY).canonicalize() {
            return Ok(library);
        }
    }
    bail!(
        "{LIBRARY} is neither beside quire in {} nor in ../lib/quire or ../lib; point {} to it",
        folder.display(),
        PRELOAD_VARIABLE
    )
}

/// LD_PRELOAD with `library` ahead of what is there.
pub fn prepend(library: &Path, present: Option<&OsStr>) -> OsString {
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
    fn a_missing_library_is_said_with_the_way_out() {
        let error = find_beside(Path::new("/proc")).unwrap_err().to_string();
        assert!(error.contains("/proc") && error.contains(PRELOAD_VARIABLE), "{error}");
    }
}
