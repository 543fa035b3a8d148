//! A file of words for the benches of objects, what must be read from it, and whether the kernel
//! has it cached.

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::{BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use rustix::fs::Advice;

use super::sys;
use super::work::Random;
use quire_cli::print::say;

pub(crate) const PAGE_BYTES: usize = 4096;
pub(crate) const BLOCK_BYTES: usize = 2 << 20;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// The kernel may keep a few pages that were on their way to its lists; more make a cold read warm.
const KEPT_PARTS_MAX: usize = 100;

/// Numbers the files of one process.
static FILES: AtomicU32 = AtomicU32::new(0);

/// The directory for files that are to be on a disk: /tmp may be memory.
pub(crate) fn disk_directory() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// A name in `directory` that no other file of this bench has.
pub(crate) fn unused_path(directory: &Path) -> PathBuf {
    // Relaxed: only that each number is given once matters.
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    directory.join(format!("quire-bench-{}-{number}", std::process::id()))
}

/// A file's path with something behind its name.
pub(crate) fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Removes a file when it is dropped, whether it was made or not.
pub(crate) struct Remove(pub PathBuf);

impl Drop for Remove {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// How a file is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pattern {
    /// Every word.
    InOrder,
    /// A word of each page, in random order.
    Random,
    /// A word of one page per 2 MiB.
    Sparse,
}

impl Pattern {
    pub(crate) const ALL: [Pattern; 3] = [Pattern::InOrder, Pattern::Random, Pattern::Sparse];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Pattern::InOrder => "in order",
            Pattern::Random => "at random",
            Pattern::Sparse => "one page per 2 MiB",
        }
    }

    /// Reads, and adds up what was read.
    pub(crate) fn read(self, words: &[u64], order: &[u32]) -> u64 {
        let sum = |sum: u64, word: &u64| sum.wrapping_add(*word);
        match self {
            Pattern::InOrder => words.iter().fold(0, sum),
            Pattern::Random => {
                order.iter().map(|&page| &words[page as usize * PAGE_WORDS]).fold(0, sum)
            }
            Pattern::Sparse => words.iter().step_by(BLOCK_BYTES / 8).fold(0, sum),
        }
    }
}

/// A file of random words that is removed when this is dropped.
pub(crate) struct Data {
    file: Remove,
    pub bytes: usize,
    /// Of all words.
    sum: u64,
    /// The first word of each page.
    first_words: Vec<u64>,
    /// Most pages that the kernel kept when it was to forget all.
    kept_pages_max: AtomicUsize,
}

impl Data {
    /// Writes a file of `bytes`, rounded up to 2 MiB, to the disk.
    pub(crate) fn new(directory: &Path, bytes: usize) -> Result<Data> {
        let bytes = bytes.next_multiple_of(BLOCK_BYTES);
        let file = Remove(unused_path(directory));
        let (first_words, kept_pages_max) = (Vec::new(), AtomicUsize::new(0));
        let mut data = Data { file, bytes, sum: 0, first_words, kept_pages_max };
        let path = data.path();
        let file =
            OpenOptions::new().write(true).create_new(true).open(path).context("cannot make")?;
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        let mut random = Random::new(1);
        for at in 0..bytes / 8 {
            let word = random.next();
            data.sum = data.sum.wrapping_add(word);
            if at % PAGE_WORDS == 0 {
                data.first_words.push(word);
            }
            writer.write_all(&word.to_ne_bytes())?;
        }
        writer.into_inner()?.sync_all()?;
        Ok(data)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.file.0
    }

    /// What [`Pattern::read`] returns for all of it, or for the pages of `order`.
    pub(crate) fn expected(&self, pattern: Pattern, order: &[u32]) -> u64 {
        let sum = |sum: u64, word: &u64| sum.wrapping_add(*word);
        let firsts = &self.first_words;
        match pattern {
            Pattern::InOrder => self.sum,
            Pattern::Random => order.iter().map(|&page| &firsts[page as usize]).fold(0, sum),
            Pattern::Sparse => firsts.iter().step_by(BLOCK_BYTES / PAGE_BYTES).fold(0, sum),
        }
    }

    /// All pages, in random order.
    pub(crate) fn shuffled(&self) -> Vec<u32> {
        shuffled(self.bytes / PAGE_BYTES)
    }

    /// Has the kernel cache all of it.
    pub(crate) fn warm(&self) -> Result<()> {
        let mut file = File::open(self.path())?;
        let mut buffer = vec![0; 1 << 20];
        while file.read(&mut buffer)? > 0 {}
        Ok(())
    }

    /// Has the kernel forget it; where it does not, that is said the first time. No mapping of it
    /// may be there.
    pub(crate) fn make_cold(&self) -> Result<()> {
        let file = File::open(self.path())?;
        // What is dirty would stay.
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
        let kept = sys::FileMapping::new(self.path(), self.bytes)?.cached_pages()?;
        // Relaxed: a figure.
        let before = self.kept_pages_max.fetch_max(kept, Ordering::Relaxed);
        let pages = self.bytes / PAGE_BYTES;
        if before <= pages / KEPT_PARTS_MAX && kept > pages / KEPT_PARTS_MAX {
            say(&format!("NOT COLD: the kernel keeps {kept} of {pages} pages of the file cached"));
        }
        Ok(())
    }

    /// Most pages that the kernel kept cached when it was to forget the file.
    pub(crate) fn kept_pages_max(&self) -> usize {
        // Relaxed: a figure.
        self.kept_pages_max.load(Ordering::Relaxed)
    }
}

/// So many pages, in an order that is random and always the same.
pub(crate) fn shuffled(pages: usize) -> Vec<u32> {
    let mut random = Random::new(2);
    let mut order: Vec<u32> = (0..pages as u32).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at + 1));
    }
    order
}

/// Whether what was read is right; nothing of the reading can be left out for it.
pub(crate) fn check(found: u64, expected: u64) -> Result<()> {
    ensure!(black_box(found) == expected, "wrong bytes were read");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(data: &Data) -> Vec<u64> {
        let bytes = std::fs::read(data.path()).unwrap();
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    fn what_is_expected_is_what_is_in_the_file() {
        let data = Data::new(&std::env::temp_dir(), (2 << 20) + 1).unwrap();
        let words = words(&data);
        assert_eq!((data.bytes, words.len() * 8), (4 << 20, 4 << 20));
        let order = data.shuffled();
        for pattern in Pattern::ALL {
            assert_eq!(pattern.read(&words, &order), data.expected(pattern, &order));
        }
        let some = &order[..10];
        let all = data.expected(Pattern::Random, &order);
        assert_eq!(Pattern::Random.read(&words, some), data.expected(Pattern::Random, some));
        assert_ne!(data.expected(Pattern::Random, some), all);
    }

    #[test]
    fn every_page_is_once_in_the_random_order() {
        let data = Data::new(&std::env::temp_dir(), 4 << 20).unwrap();
        let mut order = data.shuffled();
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1024));
    }

    #[test]
    fn pages_that_the_kernel_keeps_are_counted() {
        let data = Data::new(&disk_directory(), 2 << 20).unwrap();
        assert_eq!(data.kept_pages_max(), 0);
        data.warm().unwrap();
        // Touched through a mapping that stands, they cannot go.
        let mapping = sys::FileMapping::new(data.path(), data.bytes).unwrap();
        black_box(Pattern::InOrder.read(mapping.words(), &[]));
        data.make_cold().unwrap();
        assert_eq!(data.kept_pages_max(), 512);
    }

    #[test]
    fn the_file_goes_with_its_data() {
        let data = Data::new(&std::env::temp_dir(), 1).unwrap();
        let path = data.path().to_owned();
        assert!(path.exists());
        drop(data);
        assert!(!path.exists());
    }
}
