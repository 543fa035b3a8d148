//! The memory cgroup around the program, by which the kernel itself checks the budget.
//!
//! Owns one child cgroup a run, named `quire-<pid>-<start>` after the supervisor, and removes what
//! killed supervisors left. Quire itself keeps the program within its budget; the cgroup makes sure
//! of it, counts what is not managed, and keeps the kernel's swap out of it. Where none can be
//! made the run goes on without.
//!
//! In version 1 the child is made below the supervisor's cgroup. Version 2 wants no processes in a
//! cgroup whose children have controllers, so there the child goes, in this order:
//! below the supervisor's cgroup, where that passes the memory controller on or can be made to (the root may);
//! below it, after the supervisor has moved to a leaf of its own, where it is alone there;
//! beside it, where it has no limit of its own that the program would escape.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::procfs;
use crate::supervisor::InMemory;

/// What a cgroup may hold beside its budget. Where that is for managed memory alone: code and data of the program
/// and its libraries (16 MiB), stacks (12 MiB), page tables (8 MiB map 4 GiB), the kernel's structures for
/// its tasks and files (8 MiB), and what the kernel charges ahead, 64 pages a CPU (4 MiB). Where it is for the
/// whole: what comes from one count of unmanaged memory to the next, and until managed memory has given way.
const ALLOWANCE_BYTES: u64 = (16 + 12 + 8 + 8 + 4) << 20;
/// The data that the allowance has page tables for, and how much of it a byte of a page table maps.
const MAPPED_BYTES: u64 = 4 << 30;
const MAPPED_BY_BYTE: u64 = 512;
/// The limit is raised by as much at least: a write to a file of the kernel's.
const RAISE_BYTES: u64 = 1 << 20;

/// The same for each further process of the run: its engine (stacks and scratch buffers of its
/// threads, page tables of arena, pool and tables, the kernel's side of threads and userfaultfds),
/// and what it has of its own of libraries and stacks. 0.8 MiB at rest; 3.2 MiB where sixteen swap
/// four times the budget without pause.
const MEMBER_BYTES: u64 = 4 << 20;

/// What a run with so many processes, whose data are `wanted_bytes`, may hold beside its budget. The page
/// tables of data that has left memory stay, so those of a program that wants many times its budget may be
/// as large as that.
pub const fn allowance_bytes(members: usize, wanted_bytes: u64) -> u64 {
    let page_tables = wanted_bytes.saturating_sub(MAPPED_BYTES) / MAPPED_BY_BYTE;
    ALLOWANCE_BYTES + page_tables + MEMBER_BYTES * (members as u64).saturating_sub(1)
}

const REMOVE_TRIES: u32 = 100;
const REMOVE_PAUSE: Duration = Duration::from_millis(5);
/// What the name of a supervisor's own leaf ends with.
const LEAF_SUFFIX: &str = "-supervisor";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    V1 = 1,
    V2 = 2,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version {}", *self as u8)
    }
}

/// The memory controller's hierarchy, and where this process is in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hierarchy {
    pub version: Version,
    pub own: PathBuf,
    pub mount_point: PathBuf,
}

/// What a run has grown to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    pub budget_bytes: u64,
    pub members: usize,
    /// The members' data, wherever it rests.
    pub wanted_bytes: u64,
}

/// A run's cgroup, which is removed with this. One that processes of the run still live in stays, for
/// a later run to remove.
pub(crate) struct Cgroup {
    version: Version,
    /// Its name is one that no other cgroup has.
    pub folder: PathBuf,
    /// The leaf that the supervisor moved to.
    leaf: Option<PathBuf>,
}

fn set_limit(version: Version, folder: &Path, limit_bytes: u64) -> Result<()> {
    let limit = limit_bytes.to_string();
    // Without a kernel that accounts swap the second file is missing, and not needed.
    let (memory, swap, swap_limit) = match version {
        Version::V1 => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit.as_str()),
        Version::V2 => ("memory.max", "memory.swap.max", "0"),
    };
    let set_swap = || write(&folder.join(swap), swap_limit);
    // Version 1 refuses a second limit that is less than the first, so the second is raised first.
    let _ = set_swap();
    write(&folder.join(memory), &limit)?;
    let _ = set_swap();
    Ok(())
}

impl Hierarchy {
    pub fn find() -> Result<Hierarchy> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
        let own = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
        find_in(&mounts, &own).context("no memory controller is mounted")
    }
}

fn find_in(mounts: &str, own: &str) -> Option<Hierarchy> {
    let path_of = |is_wanted: &dyn Fn(&str, &str) -> bool| {
        own.lines().find_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            is_wanted(number, controllers).then_some(path)
        })
    };
    let is_memory = |controllers: &str| controllers.split(',').any(|name| name == "memory");
    let (version, kind, path) = match path_of(&|_, controllers| is_memory(controllers)) {
        Some(path) => (Version::V1, "cgroup", path),
        None => (Version::V2, "cgroup2", path_of(&|number, _| number == "0")?),
    };
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let (filesystem, options) = (right.next()?, right.nth(1)?);
        if filesystem != kind || (version == Version::V1 && !is_memory(options)) {
            return None;
        }
        let mut left = left.split(' ').skip(3);
        let (root, mount_point) = (unescape(left.next()?), unescape(left.next()?));
        // A container may see only its part of the hierarchy.
        let below = Path::new(path).strip_prefix(root).ok()?;
        let mount_point = PathBuf::from(mount_point);
        Some(Hierarchy { version, own: mount_point.join(below), mount_point })
    })
}

/// mountinfo writes blanks, tabs, newlines and backslashes in octal.
fn unescape(text: &str) -> String {
    text.replace(r"\040", " ").replace(r"\011", "\t").replace(r"\012", "\n").replace(r"\134", r"\")
}

impl Cgroup {
    /// Makes a cgroup that may hold `budget_bytes` and the allowance; removes what is stale.
    pub(crate) fn create(hierarchy: &Hierarchy, budget_bytes: u64) -> Result<Cgroup> {
        let pid = std::process::id();
        let start = procfs::stat(pid).context("/proc/self/stat cannot be read")?.start_ticks;
        let name = format!("quire-{pid}-{start}");
        let limit_bytes = budget_bytes + allowance_bytes(1, 0);
        let (parent, leaf) = match hierarchy.version {
            Version::V1 => (hierarchy.own.clone(), None),
            Version::V2 => parent_in_v2(hierarchy, &name, limit_bytes)?,
        };
        remove_stale(&parent);
        let folder = parent.join(&name);
        let cgroup = Cgroup { version: hierarchy.version, folder, leaf };
        fs::create_dir(&cgroup.folder).with_context(|| cgroup.folder.display().to_string())?;
        set_limit(cgroup.version, &cgroup.folder, limit_bytes)?;
        if cgroup.version == Version::V1 {
            let _ = write(&cgroup.folder.join("memory.swappiness"), "0");
        }
        Ok(cgroup)
    }

    /// Raises the limit when it is called with a larger budget than before; where that is for managed memory
    /// only, with more processes or more data as well. It never lowers the limit: processes that come take the
    /// places of those that went, and a run whose budget is lowered gives way by and by. Where the kernel
    /// refuses, the limit stays as it is.
    pub(crate) fn limit_follower(
        &self,
        budget_bytes: u64,
        is_managed_only: bool,
    ) -> impl FnMut(Growth) + use<> {
        let (version, folder) = (self.version, self.folder.clone());
        let mut limit_bytes = budget_bytes + allowance_bytes(1, 0);
        move |growth| {
            let allowed = match is_managed_only {
                true => allowance_bytes(growth.members, growth.wanted_bytes),
                false => allowance_bytes(1, 0),
            };
            if growth.budget_bytes + allowed >= limit_bytes + RAISE_BYTES {
                limit_bytes = growth.budget_bytes + allowed;
                let _ = set_limit(version, &folder, limit_bytes);
            }
        }
    }

    /// What it may hold now.
    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        self.read(["memory.limit_in_bytes", "memory.max"])?.trim().parse().ok()
    }

    /// Of what is in it.
    pub(crate) fn meter(&self) -> Meter {
        Meter { version: self.version, folder: self.folder.clone() }
    }

    /// One of its files, by the names of versions 1 and 2.
    fn read(&self, names: [&str; 2]) -> Option<String> {
        self.meter().read(names)
    }

    /// The file into which a process writes itself to enter.
    pub(crate) fn procs(&self) -> Result<File> {
        open(&self.folder.join("cgroup.procs"))
    }

    /// Most that the cgroup ever held, by the kernel's count (its page cache included).
    pub(crate) fn bytes_max(&self) -> Option<u64> {
        self.read(["memory.max_usage_in_bytes", "memory.peak"])?.trim().parse().ok()
    }

    /// Processes that the kernel killed because the cgroup's limit was reached.
    pub(crate) fn oom_kills(&self) -> u64 {
        let text = self.read(["memory.oom_control", "memory.events"]).unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }
}

/// Reads what is in a cgroup.
pub(crate) struct Meter {
    version: Version,
    folder: PathBuf,
}

impl Meter {
    fn read(&self, names: [&str; 2]) -> Option<String> {
        let name = names[(self.version == Version::V2) as usize];
        fs::read_to_string(self.folder.join(name)).ok()
    }

    /// All that is in memory.
    pub(crate) fn seen(&self) -> Option<u64> {
        self.read(["memory.usage_in_bytes", "memory.current"])?.trim().parse().ok()
    }

    /// What is in memory and cannot be dropped: all but the page cache of files, and what else the kernel
    /// says that it can reclaim.
    pub(crate) fn usage(&self) -> Option<InMemory> {
        let usage = self.seen()?;
        let kernel = match self.version {
            Version::V1 => self.read(["memory.kmem.usage_in_bytes", ""]).unwrap_or_default(),
            Version::V2 => String::new(),
        };
        Some(in_memory(usage, &self.read(["memory.stat"; 2])?, kernel.trim().parse().ok()))
    }
}

/// What of `usage` cannot be dropped, by the text of memory.stat; where that does not say it, with `kernel_bytes`
/// of the kernel's.
fn in_memory(usage: u64, stat: &str, kernel_bytes: Option<u64>) -> InMemory {
    let of = |name: &str| {
        // Version 1 has those of the cgroup alone, and after "total_" those of all below it too.
        let value = |line: &str| {
            let (key, value) = line.split_once(' ')?;
            (key.strip_prefix("total_").unwrap_or(key) == name).then(|| value.parse().ok())?
        };
        stat.lines().filter_map(value).next_back().unwrap_or(0)
    };
    let slab_bytes = of("slab_reclaimable");
    let dropped: u64 = of("active_file") + of("inactive_file") + slab_bytes;
    let kernel_bytes = kernel_bytes.unwrap_or_else(|| of("kernel"));
    InMemory {
        bytes: usage.saturating_sub(dropped),
        shared_bytes: of("shmem"),
        kernel_bytes: kernel_bytes.saturating_sub(slab_bytes),
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for _ in 0..REMOVE_TRIES {
            match fs::remove_dir(&self.folder) {
                // The last processes may have been killed or waited for, but not quite have left.
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    std::thread::sleep(REMOVE_PAUSE);
                }
                _ => break,
            }
        }
        if let Some(leaf) = &self.leaf {
            leave_leaf(leaf);
        }
    }
}

/// The cgroup of version 2 below which the program's can be made, and the leaf that the supervisor
/// had to move to for that.
fn parent_in_v2(
    hierarchy: &Hierarchy,
    name: &str,
    limit_bytes: u64,
) -> Result<(PathBuf, Option<PathBuf>)> {
    let own = &hierarchy.own;
    if !lists(&own.join("cgroup.controllers"), "memory") {
        bail!("the memory controller is not enabled for {}", own.display());
    }
    let passes_on = own.join("cgroup.subtree_control");
    if lists(&passes_on, "memory") || write(&passes_on, "+memory").is_ok() {
        return Ok((own.clone(), None));
    }
    let procs = fs::read_to_string(own.join("cgroup.procs")).unwrap_or_default();
    if procs.trim() == std::process::id().to_string() {
        let leaf = own.join(format!("{name}{LEAF_SUFFIX}"));
        fs::create_dir(&leaf).with_context(|| leaf.display().to_string())?;
        let moved = write(&leaf.join("cgroup.procs"), "0");
        if let Err(error) = moved.and_then(|()| write(&passes_on, "+memory")) {
            leave_leaf(&leaf);
            return Err(error);
        }
        return Ok((own.clone(), Some(leaf)));
    }
    let has_room = |file: &str| {
        let text = fs::read_to_string(own.join(file)).unwrap_or_default();
        text.trim().parse::<u64>().is_ok_and(|bytes| bytes >= limit_bytes) || text.trim() == "max"
    };
    match own.parent() {
        Some(parent) if *own != hierarchy.mount_point => {
            if !has_room("memory.max") || !has_room("memory.high") {
                bail!("{} has a limit of its own and other processes in it", own.display());
            }
            Ok((parent.to_owned(), None))
        }
        _ => bail!("{} has processes in it and passes no controllers on", own.display()),
    }
}

/// Moves the supervisor back from its leaf, and removes that. Processes that are left keep their
/// cgroup, and then the supervisor, which is about to end, stays where it is.
fn leave_leaf(leaf: &Path) {
    if let Some(parent) = leaf.parent() {
        let _ = write(&parent.join("cgroup.subtree_control"), "-memory");
        let _ = write(&parent.join("cgroup.procs"), "0");
        let _ = fs::remove_dir(leaf);
    }
}

/// Removes the cgroups below `parent` whose supervisors are gone, as far as they are empty.
fn remove_stale(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some((pid, start)) = name.to_str().and_then(parse_name) else { continue };
        if procfs::stat(pid).is_none_or(|stat| stat.start_ticks != start || stat.is_dead) {
            // A run inside that run may have left its own.
            remove_stale(&entry.path());
            let _ = fs::remove_dir(entry.path());
        }
    }
}

fn parse_name(name: &str) -> Option<(u32, u64)> {
    let name = name.strip_suffix(LEAF_SUFFIX).unwrap_or(name);
    let (pid, start) = name.strip_prefix("quire-")?.split_once('-')?;
    Some((pid.parse().ok()?, start.parse().ok()?))
}

fn lists(file: &Path, word: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.split_whitespace().any(|one| one == word))
}

fn write(file: &Path, text: &str) -> Result<()> {
    open(file)?.write_all(text.as_bytes()).with_context(|| file.display().to_string())
}

/// Opens a file of a cgroup, which cannot be created or truncated.
fn open(file: &Path) -> Result<File> {
    let opened = OpenOptions::new().write(true).open(file);
    opened.with_context(|| file.display().to_string())
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
