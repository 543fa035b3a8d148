//! The kernel's swaps: a file on the disk, zram, and zswap before the file. Each is made once and on
//! only while one of its programs runs; all of it is undone when dropped.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::FallocateFlags;

use super::columns::Column;
use crate::data::Remove;
use crate::kernel_swap::{self, SwapOn, Zram};
use crate::memory_limit::MemoryLimit;

const ZSWAP: &str = "/sys/module/zswap/parameters";
/// What zswap compresses with, the best first; where the kernel has neither it stays what it is.
const ZSWAP_COMPRESSORS: [&str; 2] = ["zstd", "lz4"];

/// A swap, and why it is not there where it is not.
pub(crate) struct Swaps {
    file: Result<SwapFile>,
    lz4: Result<Zram>,
    zstd: Result<Zram>,
    /// What zswap compresses with.
    zswap: Result<String>,
}

/// A swap while it is on. The swap goes first, then what was set for it.
pub(crate) struct On<'a> {
    swaps: &'a Swaps,
    column: Column,
    _swap: SwapOn<'a>,
    _zswap: Option<Zswap>,
}

impl Swaps {
    /// Makes what the columns want, with files in `folder`, of so many bytes each.
    pub(crate) fn create(columns: &[Column], folder: &Path, bytes: u64) -> Swaps {
        let is_wanted = |column| columns.contains(&column);
        let zram = |column, algorithm| match is_wanted(column) {
            true => has_cgroup().and_then(|()| Zram::create(bytes, algorithm)),
            false => Err(not_wanted()),
        };
        let file = match is_wanted(Column::Disk) || is_wanted(Column::Zswap) {
            true => has_cgroup().and_then(|()| SwapFile::create(&folder.join("swap"), bytes)),
            false => Err(not_wanted()),
        };
        let zswap = match is_wanted(Column::Zswap) {
            true => Zswap::enable().and_then(|zswap| zswap.get("compressor")),
            false => Err(not_wanted()),
        };
        let [lz4, zstd] = [(Column::ZramLz4, "lz4"), (Column::ZramZstd, "zstd")]
            .map(|(column, algorithm)| zram(column, algorithm));
        Swaps { file, lz4, zstd, zswap }
    }

    /// What there is to know of them beside their names.
    pub(crate) fn note(&self) -> Option<String> {
        let compressor = self.zswap.as_ref().ok()?;
        Some(format!("zswap: compresses by {compressor}, and writes what is cold on to the file"))
    }

    /// Why a column cannot be run here.
    pub(crate) fn why_not(&self, column: Column) -> Option<String> {
        let why = |error: &anyhow::Error| format!("{error:#}");
        match column {
            Column::Bare | Column::Quire => None,
            Column::Disk => self.file.as_ref().err().map(why),
            Column::ZramLz4 => self.lz4.as_ref().err().map(why),
            Column::ZramZstd => self.zstd.as_ref().err().map(why),
            Column::Zswap => self.zswap.as_ref().err().or(self.file.as_ref().err()).map(why),
        }
    }

    /// Turns a column's swap on.
    pub(crate) fn on(&self, column: Column) -> Result<On<'_>> {
        if let Some(why) = self.why_not(column) {
            bail!("{why}");
        }
        let zswap = match column {
            Column::Zswap => Some(Zswap::enable()?),
            _ => None,
        };
        let swap = match (column, &self.file, &self.lz4, &self.zstd) {
            (Column::ZramLz4, _, Ok(zram), _) | (Column::ZramZstd, _, _, Ok(zram)) => {
                zram.swap_on()?
            }
            (Column::Disk | Column::Zswap, Ok(file), _, _) => file.swap_on()?,
            _ => bail!("no swap of the kernel's"),
        };
        Ok(On { swaps: self, column, _swap: swap, _zswap: zswap })
    }
}

impl On<'_> {
    /// The memory that its store takes now and that the cgroup does not count; 0 where it has none.
    pub(crate) fn store_bytes(&self, limit: &MemoryLimit) -> u64 {
        let bytes = match (self.column, &self.swaps.lz4, &self.swaps.zstd) {
            (Column::ZramLz4, Ok(zram), _) | (Column::ZramZstd, _, Ok(zram)) => zram.used_bytes(),
            (Column::Zswap, _, _) if !limit.counts_zswap() => zswap_bytes(),
            _ => Ok(0),
        };
        // A look that fails is no reason to stop the program; the next one comes.
        bytes.unwrap_or(0)
    }
}

fn not_wanted() -> anyhow::Error {
    anyhow::anyhow!("not asked for")
}

/// An error where no memory cgroup can be made.
fn has_cgroup() -> Result<()> {
    MemoryLimit::create().map(drop).context("no memory cgroup")
}

/// A file on the disk that is swapped to.
struct SwapFile(Remove);

impl SwapFile {
    fn create(path: &Path, bytes: u64) -> Result<SwapFile> {
        let file = SwapFile(Remove(path.to_owned()));
        let shown = || format!("{}", path.display());
        let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let opened = opened.with_context(shown)?;
        rustix::fs::fallocate(&opened, FallocateFlags::empty(), 0, bytes).with_context(shown)?;
        kernel_swap::run("mkswap", &[path])?;
        // Not every filesystem lets its files be swapped to.
        drop(file.swap_on()?);
        Ok(file)
    }

    fn swap_on(&self) -> Result<SwapOn<'_>> {
        SwapOn::to(self, self.0.0.clone())
    }
}

/// zswap, switched on; its parameters are put back when dropped.
struct Zswap {
    /// What was changed, in order.
    saved: Vec<(PathBuf, String)>,
}

impl Zswap {
    fn enable() -> Result<Zswap> {
        ensure!(Path::new(ZSWAP).exists(), "the kernel has no zswap");
        let mut zswap = Zswap { saved: Vec::new() };
        for compressor in ZSWAP_COMPRESSORS {
            if zswap.set("compressor", compressor).is_ok() {
                break;
            }
        }
        // Without it the store only grows until it is full. An older kernel has none.
        let _ = zswap.set("shrinker_enabled", "Y");
        zswap.set("enabled", "Y")?;
        Ok(zswap)
    }

    fn get(&self, name: &str) -> Result<String> {
        Ok(fs::read_to_string(Path::new(ZSWAP).join(name))?.trim().to_owned())
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let path = Path::new(ZSWAP).join(name);
        let shown = || format!("{} = {value}", path.display());
        let before = fs::read_to_string(&path).with_context(shown)?;
        fs::write(&path, value).with_context(shown)?;
        self.saved.push((path, before.trim().to_owned()));
        Ok(())
    }
}

impl Drop for Zswap {
    fn drop(&mut self) {
        for (path, value) in self.saved.iter().rev() {
            if let Err(error) = fs::write(path, value) {
                quire_cli::print::say(&format!("{} = {value}: {error}", path.display()));
            }
        }
    }
}

/// What zswap's store takes, of the whole machine.
fn zswap_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Zswap:"));
    let kib: u64 = line.context("no Zswap")?.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}
