//! Stores: they return what was written, report what fails, and invent nothing.

mod archives;
mod deadline;
mod files;
mod random;
mod refusals;
mod wrappers;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use quire::store::{Direct, FileOptions};

const PAGE: usize = 4096;

/// A folder of one test's own, gone with it.
struct Folder(PathBuf);

impl Folder {
    /// On the disk that the build is on.
    fn on_disk() -> Folder {
        Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")))
    }

    /// In memory.
    fn in_memory() -> Folder {
        Folder::new(Path::new("/dev/shm"))
    }

    fn new(parent: &Path) -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = parent.join(format!("quire-store-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    /// The names that are in it.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Every way to open a file here: a folder to make it in, and how.
fn ways() -> Vec<(Folder, FileOptions)> {
    let mut ways = Vec::new();
    for direct in [Direct::Auto, Direct::On, Direct::Off] {
        let options = FileOptions::read_write().create().direct(direct);
        ways.push((Folder::on_disk(), options));
    }
    ways.push((Folder::in_memory(), FileOptions::read_write().create()));
    ways
}

/// Bytes that differ from place to place and with `seed`.
fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    (0..bytes).map(|_| random.next() as u8).collect()
}

/// Numbers that one seed decides.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Memory that may be used for direct I/O, or just misses to.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Buffer {
    fn aligned(bytes: usize) -> Buffer {
        // Not zeros: what a store leaves alone is seen.
        let memory = vec![0xa5; bytes + 2 * PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        Buffer { memory, start, bytes }
    }

    fn misaligned(bytes: usize) -> Buffer {
        let mut buffer = Buffer::aligned(bytes);
        buffer.start += 1;
        buffer
    }

    fn of(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::aligned(bytes.len());
        buffer.get().copy_from_slice(bytes);
        buffer
    }

    fn get(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.bytes]
    }
}

/// A test that cannot run here for want of something: a failure where everything must be there.
fn cannot_run(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    println!("{why}: not tested");
}
