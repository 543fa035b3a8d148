//! Blocks of objects on a disk, shared by processes.
//!
//! ```text
//! DIR/quire-cache/size                how many bytes all entries have at most, as text
//! DIR/quire-cache/OBJECT/NUMBER       a block: checksum (16 bytes), content
//! DIR/quire-cache/partial             one that is being written
//! ```
//!
//! OBJECT is a hash of the URL and of what tells the object from others under that name. An entry
//! comes by a rename, and its checksum counts which block of which object it is, so that one that a
//! crash tore is no entry, and goes when it is read. Who adds one holds `size` locked, and first adds
//! its bytes to that count, which is never less than what is there. Where it would be more than allowed
//! the entries are counted, and those go that were read longest ago.
//!
//! It is a cache: whatever fails in it, the server has the bytes.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use quire::store::Cause;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128_with_seed};

use crate::pieces::BLOCK_BYTES;

const CHECKSUM_BYTES: usize = 16;
/// The least that makes sense: a stream's pieces in flight.
pub(crate) const CACHE_BYTES_MIN: u64 = 16 << 20;

/// How long another may hold the count.
const LOCKED_FOR: Duration = Duration::from_secs(2);
const LOCK_AGAIN: Duration = Duration::from_micros(200);

pub(crate) struct Disk {
    /// Of all objects.
    root: PathBuf,
    /// Of this one.
    entries: PathBuf,
    identity: u64,
    bytes_max: u64,
}

impl Disk {
    /// Makes what is missing.
    ///
    /// # Errors
    /// [`Cause::Unsupported`].
    pub fn open(dir: &Path, bytes_max: u64, object: &str) -> Result<Disk, Cause> {
        if bytes_max < CACHE_BYTES_MIN {
            let least = CACHE_BYTES_MIN >> 20;
            let why = format!("its cache may have {bytes_max} bytes; give it {least} MiB or more");
            return Err(Cause::Unsupported(why));
        }
        let root = dir.join("quire-cache");
        let name = format!("{:032x}", xxh3_128_with_seed(object.as_bytes(), 0));
        let entries = root.join(name);
        let unusable = |why: String| {
            let root = root.display();
            Cause::Unsupported(format!("its cache cannot be in {root}: {why}; name another folder"))
        };
        let made = make(&entries).and_then(|()| fs::symlink_metadata(&root));
        let made = made.map_err(|error| unusable(error.to_string()))?;
        let is_ours = made.uid() == rustix::process::geteuid().as_raw();
        if !is_ours || !made.is_dir() || made.mode() & 0o022 != 0 {
            // A checksum does not tell if another user wrote it.
            return Err(unusable("others may write there".to_owned()));
        }
        let disk = Disk { root, entries, identity: xxh3_64(object.as_bytes()), bytes_max };
        // Another process may have had a larger bound.
        let _ = disk.reserve(0);
        Ok(disk)
    }

    /// A block's content; `None` where it is not there as it was stored.
    pub fn load(&self, block: u64) -> Option<Vec<u8>> {
        let path = self.path(block);
        let mut file = File::open(&path).ok()?;
        let mut content = Vec::with_capacity(CHECKSUM_BYTES + BLOCK_BYTES as usize);
        file.read_to_end(&mut content).ok()?;
        let body = content.split_off(CHECKSUM_BYTES.min(content.len()));
        if content != self.checksum(block, &body) {
            let _ = fs::remove_file(&path);
            return None;
        }
        let _ = file.set_modified(SystemTime::now());
        Some(body)
    }

    /// Stores a block.
    ///
    /// # Errors
    /// That it is left out.
    pub fn store(&self, block: u64, body: &[u8]) -> io::Result<()> {
        // Held until it is stored: who counts the entries finds none that is only in part there.
        let _size = self.reserve((CHECKSUM_BYTES + body.len()) as u64)?;
        // Who has the last entry of an object go removes its folder.
        make(&self.entries)?;
        let partial = self.root.join("partial");
        let written = File::create(&partial).and_then(|mut file| {
            file.write_all(&self.checksum(block, body))?;
            file.write_all(body)
        });
        let stored = written.and_then(|()| fs::rename(&partial, self.path(block)));
        // A disk may be full.
        stored.inspect_err(|_| drop(fs::remove_file(&partial)))
    }

    fn path(&self, block: u64) -> PathBuf {
        self.entries.join(format!("{block}"))
    }

    fn checksum(&self, block: u64, body: &[u8]) -> [u8; CHECKSUM_BYTES] {
        xxh3_128_with_seed(body, self.identity.wrapping_add(block)).to_le_bytes()
    }

    /// Sees to it that so many bytes more are within the bound, and keeps others away meanwhile.
    fn reserve(&self, bytes: u64) -> io::Result<Locked> {
        let path = self.root.join("size");
        let size =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut size = Locked::new(size)?;
        let mut text = String::new();
        size.0.read_to_string(&mut text)?;
        // One that cannot be read is counted anew.
        let mut total = text.trim().parse().unwrap_or(u64::MAX).saturating_add(bytes);
        if total > self.bytes_max {
            total = self.evict(self.bytes_max - self.bytes_max / 8 - bytes)? + bytes;
        }
        size.0.seek(SeekFrom::Start(0))?;
        // As wide as any number: the old one is written over at once.
        size.0.write_all(format!("{total:020}\n").as_bytes())?;
        Ok(size)
    }

    /// Has what was read longest ago go until no more than so many bytes are left; says how many are.
    fn evict(&self, bytes_max: u64) -> io::Result<u64> {
        let mut found = Vec::new();
        for object in fs::read_dir(&self.root)?.flatten() {
            // What another process has removed meanwhile is not there.
            for entry in fs::read_dir(object.path()).into_iter().flatten().flatten() {
                if let Ok(metadata) = entry.metadata() {
                    found.push((
                        metadata.mtime(),
                        metadata.mtime_nsec(),
                        metadata.len(),
                        entry.path(),
                    ));
                }
            }
        }
        found.sort_unstable();
        let mut total = found.iter().map(|entry| entry.2).sum::<u64>();
        for (_, _, bytes, path) in found {
            if total <= bytes_max {
                break;
            }
            if fs::remove_file(&path).is_ok() {
                total -= bytes;
            }
            // Of an object of which nothing is left.
            if let Some(object) = path.parent().filter(|&object| object != self.entries) {
                let _ = fs::remove_dir(object);
            }
        }
        Ok(total)
    }
}

/// The count, locked. It is let go by a call, for a fork's child has a copy of the descriptor.
struct Locked(File);

impl Locked {
    /// Waits for others, but not for a process that was stopped while it had it.
    fn new(file: File) -> io::Result<Locked> {
        let since = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Locked(file)),
                Err(Errno::WOULDBLOCK) if since.elapsed() < LOCKED_FOR => sleep(LOCK_AGAIN),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

fn make(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn bytes_in(root: &Path) -> u64 {
        // One that is renamed meanwhile would be seen twice.
        let size = File::open(root.join("quire-cache/size")).unwrap();
        flock(&size, FlockOperation::LockExclusive).unwrap();
        let objects = fs::read_dir(root.join("quire-cache")).unwrap().flatten();
        let entries = objects.flat_map(|object| fs::read_dir(object.path()).into_iter().flatten());
        entries.flatten().map(|entry| entry.metadata().map_or(0, |data| data.len())).sum()
    }

    fn body(block: u64) -> Vec<u8> {
        vec![block as u8; BLOCK_BYTES as usize]
    }

    #[test]
    fn what_was_stored_is_found_also_by_another_and_only_as_that_block_of_that_object() {
        let folder = folder();
        let disk = Disk::open(folder.path(), 64 << 20, "a").unwrap();
        disk.store(3, b"content").unwrap();
        disk.store(4, &body(4)).unwrap();
        let again = Disk::open(folder.path(), 64 << 20, "a").unwrap();
        assert_eq!(again.load(3).unwrap(), b"content");
        assert_eq!(again.load(4).unwrap(), body(4));
        assert_eq!(again.load(5), None);
        let other = Disk::open(folder.path(), 64 << 20, "b").unwrap();
        assert_eq!(other.load(3), None);
        fs::copy(disk.entries.join("3"), other.entries.join("3")).unwrap();
        fs::copy(disk.entries.join("3"), disk.entries.join("9")).unwrap();
        assert_eq!((other.load(3), disk.load(9)), (None, None));
        assert!(!disk.entries.join("9").exists());
    }

    #[test]
    fn an_entry_that_a_crash_tore_is_none_and_goes() {
        let folder = folder();
        let disk = Disk::open(folder.path(), 64 << 20, "a").unwrap();
        for bytes in [0, 5, 16, 1000] {
            disk.store(1, &body(1)).unwrap();
            let path = disk.entries.join("1");
            OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
            assert_eq!(disk.load(1), None);
            assert!(!path.exists());
        }
        // An object's folder may have gone with its last entry.
        fs::remove_dir(&disk.entries).unwrap();
        // A count of the bytes may be torn as well.
        fs::write(folder.path().join("quire-cache/size"), "torn").unwrap();
        disk.store(1, &body(1)).unwrap();
        assert_eq!(disk.load(1).unwrap(), body(1));
    }

    #[test]
    fn threads_of_several_objects_stay_within_the_bound_and_what_is_read_stays() {
        let folder = folder();
        let open =
            |object| Disk::open(folder.path(), CACHE_BYTES_MIN, object).map(Arc::new).unwrap();
        let disks = [open("a"), open("b")];
        disks[0].store(0, &body(0)).unwrap();
        thread::scope(|scope| {
            for disk in &disks {
                scope.spawn(|| {
                    for block in 1..200 {
                        disk.store(block, &body(block)).unwrap();
                        assert!(bytes_in(folder.path()) <= CACHE_BYTES_MIN);
                        let _ = disks[0].load(0);
                    }
                });
            }
        });
        assert!(bytes_in(folder.path()) <= CACHE_BYTES_MIN);
        assert_eq!(disks[0].load(0).unwrap(), body(0));
        assert!(disks.iter().any(|disk| disk.load(199).is_some()));
        assert!(disks.iter().all(|disk| disk.load(1).is_none()));
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_an_error_that_says_so() {
        let folder = folder();
        fs::write(folder.path().join("file"), "").unwrap();
        for (path, bytes) in [(folder.path().join("file"), 64 << 20), (folder.path().into(), 1)] {
            let error = Disk::open(&path, bytes, "a").err().unwrap();
            assert!(matches!(error, Cause::Unsupported(_)), "{error:?}");
        }
    }
}
