//! A tree of C files that is built by make: zstd's own source, or any with a Makefile.
//!
//! zstd's is what cargo keeps for the build of this program, copied, with a Makefile of ours beside
//! it, whose build prints a checksum of what it made.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::contestant::Workload;

/// The folders of zstd's source, and of them those that a quick run builds.
const FOLDERS: [&str; 6] =
    ["common", "decompress", "compress", "deprecated", "dictBuilder", "legacy"];
const QUICK_FOLDERS: usize = 1;

/// What is built again and again.
pub(crate) struct Tree {
    path: PathBuf,
    pub name: String,
    /// The build prints a checksum of what it made.
    has_checksum: bool,
}

impl Tree {
    /// A tree that has a Makefile.
    pub(crate) fn at(path: &Path) -> Result<Tree> {
        let has_makefile =
            ["GNUmakefile", "makefile", "Makefile"].iter().any(|name| path.join(name).is_file());
        ensure!(has_makefile, "{}: there is no Makefile", path.display());
        Ok(Tree { path: path.into(), name: path.display().to_string(), has_checksum: false })
    }

    /// zstd's source, copied into `folder`.
    pub(crate) fn of_zstd(folder: &Path, is_quick: bool) -> Result<Tree> {
        let source = find_zstd().context(
            "cargo's registry has no source of zstd (zstd-sys) on this machine; name a tree with \
             a Makefile by --tree",
        )?;
        let path = folder.join("tree");
        let folders = if is_quick { &FOLDERS[..QUICK_FOLDERS] } else { &FOLDERS };
        let mut units = Vec::new();
        for (index, name) in FOLDERS.iter().enumerate() {
            let files = copy_folder(&source.join(name), &path.join(name))?;
            if index < folders.len() {
                units.extend(
                    files
                        .iter()
                        .filter_map(|file| file.strip_suffix(".c"))
                        .map(|stem| format!("{name}/{stem}")),
                );
            }
        }
        copy_folder(&source, &path)?;
        units.sort();
        ensure!(!units.is_empty(), "{}: there is nothing to compile", source.display());
        fs::write(path.join("Makefile"), makefile(&units))?;
        let name = format!("zstd, {} C files", units.len());
        Ok(Tree { path, name, has_checksum: true })
    }

    /// The build, with so many jobs.
    pub(crate) fn workload(&self, jobs: usize) -> Workload {
        let mut argv = vec!["make".into(), "-s".into(), format!("-j{jobs}").into(), "-C".into()];
        argv.push(self.path.clone().into());
        Workload { name: self.name.clone(), argv, is_deterministic: self.has_checksum }
    }

    /// The build of everything, whatever is there already, with flags that make compilers want memory.
    pub(crate) fn rebuild(&self, jobs: usize) -> Workload {
        let mut workload = self.workload(jobs);
        workload.name = format!("a build of {}", self.name);
        // Where the tree lies is not in what it makes: results of several runs go together.
        let flags = "CFLAGS=-O3 -g -fdebug-prefix-map=$(CURDIR)=.";
        workload.argv.extend(["-B", flags].map(Into::into));
        workload
    }

    /// Removes what a build made; not part of what is measured.
    pub(crate) fn clean(&self) -> Result<()> {
        let mut make = Command::new("make");
        make.arg("-s").arg("-C").arg(&self.path).arg("clean").stdin(Stdio::null());
        let made = make.output().context("make cannot be run")?;
        let said = String::from_utf8_lossy(&made.stderr);
        ensure!(made.status.success(), "make clean: {}", said.lines().last().unwrap_or(""));
        Ok(())
    }
}

/// The newest source of zstd that cargo has unpacked.
fn find_zstd() -> Option<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cargo")))?;
    let registries = fs::read_dir(home.join("registry/src")).ok()?.flatten();
    let packages = registries.filter_map(|registry| fs::read_dir(registry.path()).ok());
    let is_zstd = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("zstd-sys-") && path.join("zstd/lib/common").is_dir()
    };
    let found = packages.flatten().flatten().map(|package| package.path()).filter(is_zstd).max();
    Some(found?.join("zstd/lib"))
}

/// Copies the files of a folder; returns their names.
fn copy_folder(from: &Path, to: &Path) -> Result<Vec<String>> {
    fs::create_dir_all(to)?;
    let mut names = Vec::new();
    for entry in fs::read_dir(from).with_context(|| format!("{}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(&name))?;
            names.push(name);
        }
    }
    Ok(names)
}

/// A rule for each unit, and one that prints the checksum of all.
fn makefile(units: &[String]) -> String {
    let objects: Vec<String> = units.iter().map(|unit| format!("{unit}.o")).collect();
    let objects = objects.join(" ");
    let mut text = format!(
        "CFLAGS = -O2\nOBJECTS = {objects}\nall: $(OBJECTS)\n\tcat $(OBJECTS) | cksum\n\
         clean:\n\trm -f $(OBJECTS)\n.PHONY: all clean\n"
    );
    for unit in units {
        let _ = write!(
            text,
            "{unit}.o: {unit}.c\n\t$(CC) $(CFLAGS) -DZSTD_DISABLE_ASM -DZSTD_LEGACY_SUPPORT=1 -I. \
             -c -o $@ $<\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_makefile_builds_each_unit_and_cleans_it() {
        let text = makefile(&["a/x".into(), "b/y".into()]);
        assert!(text.starts_with("CFLAGS = -O2\nOBJECTS = a/x.o b/y.o\nall: $(OBJECTS)\n\tcat"));
        assert!(text.contains("\nb/y.o: b/y.c\n\t$(CC) "));
    }

    #[test]
    fn a_tree_without_a_makefile_is_refused() {
        let folder = std::env::temp_dir().join(format!("quire-tree-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        assert!(Tree::at(&folder).is_err());
        fs::write(folder.join("Makefile"), "all:\n\techo made\n").unwrap();
        let tree = Tree::at(&folder).unwrap();
        assert_eq!(tree.workload(3).argv[2], "-j3");
        assert!(tree.clean().is_err(), "there is no rule to clean");
        fs::remove_dir_all(&folder).unwrap();
    }
}
