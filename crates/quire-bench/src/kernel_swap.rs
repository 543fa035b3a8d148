//! The kernel's swap as a contestant: a zram device of our own, used as swap, and the
//! huge-page sizes that decide how large the folios are that it swaps. All of it is undone when
//! dropped.
//!
//! A swap device serves the whole machine: pages of other processes may come to rest on it, and
//! swapoff brings them back. So it is on for the kernel's own turns only, and only processes in the
//! bench's own cgroup are put under pressure.

use std::fs;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

const CONTROL: &str = "/sys/class/zram-control";
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage";
/// udev may look into a device that has just appeared, and holds it meanwhile.
const BUSY_PAUSE: Duration = Duration::from_millis(50);
const BUSY_TRIES: u32 = 100;

/// A zram device of our own.
pub(crate) struct Zram {
    number: u32,
}

/// While it lives, a device or a file is swapped to.
pub(crate) struct SwapOn<'a> {
    place: PathBuf,
    /// It goes first.
    owner: PhantomData<&'a ()>,
}

impl SwapOn<'_> {
    /// Swaps to `place`, before any other swap: what the bench's cgroup swaps must not go elsewhere.
    pub(crate) fn to<T>(_owner: &T, place: PathBuf) -> Result<SwapOn<'_>> {
        run("swapon", &[Path::new("--priority"), Path::new("32767"), &place])?;
        Ok(SwapOn { place, owner: PhantomData })
    }
}

impl Zram {
    /// Adds a device with `bytes` of swap, compressed by `algorithm`.
    pub(crate) fn create(bytes: u64, algorithm: &str) -> Result<Zram> {
        let hot_add = format!("{CONTROL}/hot_add");
        let number = fs::read_to_string(&hot_add).context(hot_add)?;
        let zram = Zram { number: number.trim().parse()? };
        let known = zram.get("comp_algorithm")?;
        if !known.split_whitespace().any(|name| name.trim_matches(['[', ']']) == algorithm) {
            bail!("zram has no {algorithm} here, only {}", known.trim());
        }
        zram.set("comp_algorithm", algorithm)?;
        zram.set("disksize", &bytes.to_string())?;
        run("mkswap", &[&zram.device()])?;
        Ok(zram)
    }

    /// Swaps to the device, and notes anew how much memory its store takes at most.
    pub(crate) fn swap_on(&self) -> Result<SwapOn<'_>> {
        self.set("mem_used_max", "0")?;
        SwapOn::to(self, self.device())
    }

    fn device(&self) -> PathBuf {
        format!("/dev/zram{}", self.number).into()
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let file = format!("/sys/block/zram{}/{name}", self.number);
        fs::write(&file, value).with_context(|| format!("{file} = {value}"))
    }

    fn get(&self, name: &str) -> Result<String> {
        let file = format!("/sys/block/zram{}/{name}", self.number);
        fs::read_to_string(&file).context(file)
    }

    /// The memory that the store takes now (mem_used_total), in bytes.
    pub(crate) fn used_bytes(&self) -> Result<u64> {
        self.used(2)
    }

    /// The most memory that the store took (mem_used_max), in bytes.
    pub(crate) fn used_max_bytes(&self) -> Result<u64> {
        self.used(4)
    }

    /// A field of mm_stat.
    fn used(&self, field: usize) -> Result<u64> {
        let text = self.get("mm_stat")?;
        let found = text.split_whitespace().nth(field).context("mm_stat is shorter than it was")?;
        Ok(found.parse()?)
    }
}

impl Drop for SwapOn<'_> {
    fn drop(&mut self) {
        if let Err(error) = run("swapoff", &[&self.place]) {
            quire_cli::print::say(&format!("{error:#}"));
        }
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        for _ in 0..BUSY_TRIES {
            let _ = self.set("reset", "1");
            if fs::write(format!("{CONTROL}/hot_remove"), self.number.to_string()).is_ok() {
                return;
            }
            thread::sleep(BUSY_PAUSE);
        }
        quire_cli::print::say(&format!("zram{} could not be removed", self.number));
    }
}

/// Runs a program of the system; an error with what it said where it fails.
pub(crate) fn run(program: &str, arguments: &[&Path]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("{program} cannot be run"))?;
    if !output.status.success() {
        bail!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// The sizes of transparent huge pages, as they were found.
pub(crate) struct HugePages {
    found: Vec<(PathBuf, String)>,
}

impl HugePages {
    /// Remembers the settings.
    pub(crate) fn remember() -> Result<HugePages> {
        let entries = fs::read_dir(HUGE_PAGES).context(HUGE_PAGES)?;
        let mut files = vec![Path::new(HUGE_PAGES).join("enabled")];
        files.extend(
            entries
                .flatten()
                .filter(|entry| entry.file_name().to_string_lossy().starts_with("hugepages-"))
                .map(|entry| entry.path().join("enabled"))
                // Some sizes are for files only.
                .filter(|file| file.exists()),
        );
        let mut found = Vec::new();
        for file in files {
            let text = fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?;
            found.push((file, chosen(&text)?.to_owned()));
        }
        Ok(HugePages { found })
    }

    /// Anonymous memory comes in huge pages of 64 KiB where it can, or in single pages.
    pub(crate) fn only_64k(&self, is_on: bool) -> Result<()> {
        for (file, _) in &self.found {
            let is_64k = file.parent().is_some_and(|folder| folder.ends_with("hugepages-64kB"));
            // The file above all sizes only counts for those that say "inherit".
            let value = if is_64k && is_on { "always" } else { "never" };
            fs::write(file, value).with_context(|| format!("{} = {value}", file.display()))?;
        }
        Ok(())
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        for (file, value) in &self.found {
            if let Err(error) = fs::write(file, value) {
                quire_cli::print::say(&format!("{} = {value}: {error}", file.display()));
            }
        }
    }
}

/// The word in brackets of a sysfs file that lists its choices.
fn chosen(text: &str) -> Result<&str> {
    let (_, after) = text.split_once('[').context("no choice is marked")?;
    let (word, _) = after.split_once(']').context("no choice is marked")?;
    Ok(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_is_the_word_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n").unwrap(), "madvise");
        assert!(chosen("always madvise never\n").is_err());
    }
}
