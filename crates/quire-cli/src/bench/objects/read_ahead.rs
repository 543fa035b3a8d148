//! What the kernel reads ahead of a file's device: set for the time of a measurement, and put back.
//!
//! The setting is the device's, so whoever reads from it meanwhile reads so as well.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// A device's setting, in sysfs.
#[derive(Clone)]
pub struct ReadAhead {
    setting: PathBuf,
}

/// Puts the setting back when it is dropped.
pub struct Changed {
    setting: PathBuf,
    before: String,
}

impl ReadAhead {
    /// That of the device which a file is on.
    pub fn of(file: &Path) -> Result<ReadAhead> {
        let device = rustix::fs::stat(file)?.st_dev;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        ReadAhead::find(Path::new("/sys"), major, minor)
    }

    fn find(sys: &Path, major: u32, minor: u32) -> Result<ReadAhead> {
        let number = format!("{major}:{minor}");
        let block = sys.join("dev/block").join(&number);
        // A partition's queue is its disk's, one folder up from where the link leads.
        let disk = fs::canonicalize(&block).ok().and_then(|folder| Some(folder.parent()?.into()));
        let folders = [
            Some(sys.join("class/bdi").join(&number)),
            Some(block.join("queue")),
            disk.map(|disk: PathBuf| disk.join("queue")),
        ];
        let settings = folders.into_iter().flatten().map(|folder| folder.join("read_ahead_kb"));
        match settings.into_iter().find(|setting| setting.exists()) {
            Some(setting) => Ok(ReadAhead { setting }),
            None => bail!("device {number} has no read_ahead_kb"),
        }
    }

    /// KiB, as it is.
    pub fn kib(&self) -> Result<u64> {
        let text = fs::read_to_string(&self.setting)?;
        text.trim().parse().with_context(|| format!("{}", self.setting.display()))
    }

    /// Sets it; `None` where it is so already, and nothing has to be put back.
    pub fn set(&self, kib: u64) -> Result<Option<Changed>> {
        if self.kib()? == kib {
            return Ok(None);
        }
        let path = &self.setting;
        let failed = || format!("cannot write {}", path.display());
        let changed = Changed {
            setting: path.clone(),
            before: fs::read_to_string(path).with_context(failed)?,
        };
        fs::write(path, kib.to_string()).with_context(failed)?;
        Ok(Some(changed))
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        let _ = fs::write(&self.setting, self.before.trim());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::bench::data::unused_path;

    struct Sys(PathBuf);

    impl Sys {
        fn new() -> Sys {
            let sys = Sys(unused_path(&std::env::temp_dir()));
            for folder in ["dev/block", "class/bdi/8:0", "devices/sda/queue", "devices/sda/sda1"] {
                fs::create_dir_all(sys.0.join(folder)).unwrap();
            }
            fs::write(sys.0.join("devices/sda/queue/read_ahead_kb"), "128\n").unwrap();
            symlink("../../devices/sda/sda1", sys.0.join("dev/block/8:1")).unwrap();
            sys
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_partition_has_the_setting_of_its_disk() {
        let sys = Sys::new();
        let found = ReadAhead::find(&sys.0, 8, 1).unwrap();
        assert_eq!(found.kib().unwrap(), 128);
        assert!(ReadAhead::find(&sys.0, 9, 1).is_err());
    }

    #[test]
    fn what_a_file_system_says_itself_comes_first() {
        let sys = Sys::new();
        fs::write(sys.0.join("class/bdi/8:0/read_ahead_kb"), "64\n").unwrap();
        assert_eq!(ReadAhead::find(&sys.0, 8, 0).unwrap().kib().unwrap(), 64);
    }

    #[test]
    fn a_setting_is_put_back() {
        let sys = Sys::new();
        let found = ReadAhead::find(&sys.0, 8, 1).unwrap();
        assert!(found.set(128).unwrap().is_none());
        let changed = found.set(8192).unwrap();
        assert_eq!(found.kib().unwrap(), 8192);
        drop(changed);
        assert_eq!(found.kib().unwrap(), 128);
    }
}
