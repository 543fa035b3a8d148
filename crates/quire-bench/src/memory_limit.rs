//! A memory cgroup for the kernel's contestant: a limit, and swap allowed, at whatever version of
//! the controller is there. Removed when dropped.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use quire_cli::cgroup::{Hierarchy, Version};

/// Between tries to remove a cgroup whose last process has only just gone.
const REMOVE_PAUSE: Duration = Duration::from_millis(10);
const REMOVE_TRIES: u32 = 100;

/// A memory cgroup, to be looked at.
pub(crate) struct Group {
    version: Version,
    folder: PathBuf,
}

/// A memory cgroup of ours.
pub(crate) struct MemoryLimit {
    group: Group,
}

impl Deref for MemoryLimit {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.group
    }
}

impl MemoryLimit {
    /// Makes the cgroup; the limit comes later.
    pub(crate) fn create() -> Result<MemoryLimit> {
        let hierarchy = Hierarchy::find()?;
        let parent = match hierarchy.version {
            Version::V1 => hierarchy.own,
            Version::V2 => parent_in_v2(&hierarchy),
        };
        let folder = parent.join(format!("quire-bench-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("{}", folder.display()))?;
        let limit = MemoryLimit { group: Group { version: hierarchy.version, folder } };
        limit.set(u64::MAX)?;
        if limit.version == Version::V1 {
            write(&limit.folder.join("memory.swappiness"), "100")?;
        }
        Ok(limit)
    }

    /// Which controller it is, in words.
    pub(crate) fn version(&self) -> &'static str {
        match self.version {
            Version::V1 => "v1, memory.swappiness 100",
            Version::V2 => "v2",
        }
    }

    /// Limits what the processes inside may hold; swap is not limited.
    pub(crate) fn set(&self, bytes: u64) -> Result<()> {
        let (file, unlimited) = match self.version {
            Version::V1 => ("memory.limit_in_bytes", "-1"),
            Version::V2 => ("memory.max", "max"),
        };
        let text = if bytes == u64::MAX { unlimited.into() } else { bytes.to_string() };
        write(&self.folder.join(file), &text)
    }

    /// What enters the cgroup and becomes the program that its arguments say.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.procs());
        command
    }

    /// The file through which a process enters.
    fn procs(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    /// Ends every process inside.
    fn kill(&self) {
        let procs = fs::read_to_string(self.procs()).unwrap_or_default();
        for pid in procs.lines().filter_map(|line| line.parse().ok()) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

impl Group {
    /// Processes inside that the kernel killed because the limit was reached.
    pub(crate) fn oom_kills(&self) -> u64 {
        let text = self.read(["memory.oom_control", "memory.events"]).unwrap_or_default();
        field(&text, "oom_kill").unwrap_or(0)
    }

    /// Faults of the processes inside for which the kernel had to wait.
    pub(crate) fn major_faults(&self) -> Option<u64> {
        self.stat(["total_pgmajfault", "pgmajfault"])
    }

    /// What is held inside now that cannot be dropped: all but the pages of files.
    pub(crate) fn undroppable_bytes(&self) -> Option<u64> {
        let usage = self.read(["memory.usage_in_bytes", "memory.current"])?;
        let of_files = ["inactive_file", "active_file"]
            .map(|name| self.stat([&format!("total_{name}"), name]).unwrap_or(0));
        Some(usage.trim().parse::<u64>().ok()?.saturating_sub(of_files.iter().sum()))
    }

    /// A cgroup that a process inside made, by the beginning of its name.
    pub(crate) fn child(&self, name: &str) -> Option<Group> {
        let is_wanted = |folder: &PathBuf| {
            let found = folder.file_name().unwrap_or_default().to_string_lossy();
            found.starts_with(name) && folder.join("cgroup.procs").exists()
        };
        let folders = fs::read_dir(&self.folder).ok()?.flatten().map(|entry| entry.path());
        let folder = folders.into_iter().find(is_wanted)?;
        Some(Group { version: self.version, folder })
    }

    /// Whether the kernel counts what zswap keeps of the processes inside as theirs.
    pub(crate) fn counts_zswap(&self) -> bool {
        self.version == Version::V2
    }

    fn stat(&self, names: [&str; 2]) -> Option<u64> {
        field(&self.read(["memory.stat"; 2])?, names[self.index()])
    }

    /// One of its files, by the names of versions 1 and 2.
    fn read(&self, names: [&str; 2]) -> Option<String> {
        fs::read_to_string(self.folder.join(names[self.index()])).ok()
    }

    fn index(&self) -> usize {
        usize::from(self.version == Version::V2)
    }
}

/// The number of the line `name NUMBER`.
fn field(text: &str, name: &str) -> Option<u64> {
    let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    found?.trim().parse().ok()
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        for _ in 0..REMOVE_TRIES {
            // A supervisor that was killed left its own.
            for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
                let _ = fs::remove_dir(entry.path());
            }
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            self.kill();
            std::thread::sleep(REMOVE_PAUSE);
        }
    }
}

/// Below our own cgroup where it passes the controller on, beside it otherwise.
fn parent_in_v2(hierarchy: &Hierarchy) -> PathBuf {
    let passes_on = hierarchy.own.join("cgroup.subtree_control");
    let lists_memory = fs::read_to_string(&passes_on)
        .is_ok_and(|text| text.split_whitespace().any(|w| w == "memory"));
    match hierarchy.own.parent() {
        Some(parent) if !lists_memory && hierarchy.own != hierarchy.mount_point => parent.into(),
        _ => hierarchy.own.clone(),
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    // Not fs::write: it would create and truncate, which cgroup files do not know.
    let opened = OpenOptions::new().write(true).open(file);
    opened
        .and_then(|mut opened| opened.write_all(text.as_bytes()))
        .with_context(|| format!("{}", file.display()))
}
