//! A memory cgroup for the kernel's contestant: a limit, and swap allowed, at whatever version of
//! the controller is there. Removed when dropped.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use quire_cli::cgroup::{Hierarchy, Version};

/// Between tries to remove a cgroup whose last process has only just gone.
const REMOVE_PAUSE: Duration = Duration::from_millis(10);
const REMOVE_TRIES: u32 = 100;

/// A memory cgroup of ours.
pub(crate) struct MemoryLimit {
    version: Version,
    folder: PathBuf,
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
        let limit = MemoryLimit { version: hierarchy.version, folder };
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

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        for _ in 0..REMOVE_TRIES {
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
