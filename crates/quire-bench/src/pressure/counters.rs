//! What is counted around a run: pages that came in from the kernel's swap, and what the disk read and
//! wrote, both by the whole machine.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// /sys/block/DEV/stat counts in these, whatever the device has.
const SECTOR_BYTES: u64 = 512;

/// The disk that a directory is on.
pub(crate) struct Disk {
    stat: PathBuf,
}

/// Counts at a moment, or since one.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Counts {
    /// Pages that came in from swap.
    pub page_ins: u64,
    /// What the disk read and wrote; nothing where the directory is on none.
    pub disk_bytes: Option<[u64; 2]>,
}

impl Disk {
    pub(crate) fn under(directory: &Path) -> Disk {
        let device = fs::metadata(directory).map_or(0, |metadata| metadata.dev());
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        Disk { stat: format!("/sys/dev/block/{major}:{minor}/stat").into() }
    }

    pub(crate) fn counts(&self) -> Counts {
        let vmstat = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let page_ins = counter(&vmstat, "pswpin") + counter(&vmstat, "zswpin");
        let disk_bytes = fs::read_to_string(&self.stat).ok().and_then(|text| bytes_of(&text));
        Counts { page_ins, disk_bytes }
    }
}

impl Counts {
    pub(crate) fn since(self, before: Counts) -> Counts {
        let bytes = self.disk_bytes.zip(before.disk_bytes);
        Counts {
            page_ins: self.page_ins - before.page_ins,
            disk_bytes: bytes.map(|(now, then)| [now[0] - then[0], now[1] - then[1]]),
        }
    }
}

fn counter(vmstat: &str, name: &str) -> u64 {
    let value = vmstat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

/// The bytes read and written of a device's statistics.
fn bytes_of(text: &str) -> Option<[u64; 2]> {
    let fields: Vec<u64> =
        text.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    Some([fields.get(2)? * SECTOR_BYTES, fields.get(6)? * SECTOR_BYTES])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_their_whole_name() {
        let text = "pswpin 3\npswpin_x 9\nzswpin 4\n";
        assert_eq!((counter(text, "pswpin"), counter(text, "none")), (3, 0));
        assert_eq!(bytes_of(" 1 2 10 4 5 6 20 8 9 10 11\n"), Some([5120, 10240]));
        assert_eq!(bytes_of("1 2"), None);
    }

    #[test]
    fn counts_are_differences() {
        let at = |page_ins, bytes| Counts { page_ins, disk_bytes: Some([bytes, 2 * bytes]) };
        assert_eq!(at(5, 100).since(at(2, 60)), Counts { page_ins: 3, disk_bytes: Some([40, 80]) });
    }
}
