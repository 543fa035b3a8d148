//! What the kernel reads ahead of a file's device: set for the time of a measurement, and put back.
//!
//! The setting is the device's, so it holds for all its readers meanwhile.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use quire_cli::size::Human;

/// A setting to measure with.
#[derive(Clone)]
pub(super) struct ReadAheadSetting {
    name: String,
    /// What is to be set, in KiB; nothing where the device stays as it is.
    change: Option<(ReadAhead, u64)>,
}

/// Those of the `wanted` settings, in bytes, that the device of a file can be given; `leave_out` is
/// told of the others. The device's own, where there is none.
pub(super) fn settings(
    file: &Path,
    wanted: impl Iterator<Item = u64>,
    leave_out: &mut impl FnMut(String),
) -> Result<Vec<ReadAheadSetting>> {
    match ReadAhead::of(file) {
        Ok(device) => device.settings(wanted, leave_out),
        Err(error) => {
            leave_out(format!("the device's read-ahead: {error:#}"));
            Ok(vec![ReadAheadSetting { name: "as it is".into(), change: None }])
        }
    }
}

impl ReadAheadSetting {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sets it, until what is returned is dropped.
    pub(super) fn apply(&self) -> Result<Option<Changed>> {
        match &self.change {
            Some((device, kib)) => device.set(*kib),
            None => Ok(None),
        }
    }
}

/// A device's setting, in sysfs.
#[derive(Clone)]
struct ReadAhead {
    setting: PathBuf,
}

/// Puts the setting back when it is dropped.
pub(super) struct Changed {
    setting: PathBuf,
    before: String,
}

impl ReadAhead {
    /// That of the device which a file is on.
    fn of(file: &Path) -> Result<ReadAhead> {
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

    fn settings(
        &self,
        wanted: impl Iterator<Item = u64>,
        leave_out: &mut impl FnMut(String),
    ) -> Result<Vec<ReadAheadSetting>> {
        let mut settings = Vec::new();
        for bytes in wanted {
            let (name, kib) = (Human(bytes).to_string(), bytes >> 10);
            // Set and put back: whether that may be is known before anything is measured.
            match self.set(kib) {
                Ok(_) => {
                    settings.push(ReadAheadSetting { name, change: Some((self.clone(), kib)) })
                }
                Err(error) => leave_out(format!("a read-ahead of {name}: {error:#}")),
            }
        }
        if settings.is_empty() {
            let name = format!("{} as it is", Human(self.kib()? << 10));
            settings.push(ReadAheadSetting { name, change: None });
        }
        Ok(settings)
    }

    /// KiB, as it is.
    fn kib(&self) -> Result<u64> {
        let text = fs::read_to_string(&self.setting)?;
        text.trim().parse().with_context(|| format!("{}", self.setting.display()))
    }

    /// Sets it; `None` where it is so already, and nothing has to be put back.
    fn set(&self, kib: u64) -> Result<Option<Changed>> {
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
    use crate::data::unused_path;

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

    #[test]
    fn settings_are_tried_before_and_the_devices_own_is_what_is_left() {
        let sys = Sys::new();
        let device = ReadAhead::find(&sys.0, 8, 1).unwrap();
        let mut left_out = Vec::new();
        let mut leave_out = |what| left_out.push(what);
        let settings = device.settings([64 << 10, 8 << 20].into_iter(), &mut leave_out).unwrap();
        assert_eq!(
            settings.iter().map(ReadAheadSetting::name).collect::<Vec<_>>(),
            ["64 KiB", "8 MiB"]
        );
        let applied = settings[1].apply().unwrap();
        assert_eq!(device.kib().unwrap(), 8192);
        drop(applied);
        assert_eq!(device.kib().unwrap(), 128);

        let own = device.settings([].into_iter(), &mut leave_out).unwrap();
        assert_eq!((own.len(), own[0].name()), (1, "128 KiB as it is"));
        assert!(own[0].apply().unwrap().is_none());
        assert!(left_out.is_empty());
    }

    #[test]
    fn without_a_setting_the_device_stays_as_it_is() {
        let mut left_out = Vec::new();
        let file = Path::new("/proc/self/stat");
        let settings =
            settings(file, [64 << 10].into_iter(), &mut |what| left_out.push(what)).unwrap();
        assert_eq!((settings.len(), settings[0].name(), left_out.len()), (1, "as it is", 1));
        assert!(settings[0].apply().unwrap().is_none());
    }
}
