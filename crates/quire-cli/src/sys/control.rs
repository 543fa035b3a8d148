//! The control memfd: the supervisor makes it, seals it and maps it; others map what it made.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context as _, Result};
use quire::control::{CONTROL_BYTES, Control, MAGIC, VERSION};
use rustix::fs::SealFlags;

pub(crate) use super::memfd::Access;
use super::memfd::{self, SharedMap};

/// Why a descriptor is no control page that can be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotAttached {
    OtherVersion(u32),
    NotControl,
}

pub(crate) struct ControlMap(SharedMap);

impl ControlMap {
    /// A control memfd of zeros: no member, no budget.
    pub(crate) fn create() -> Result<ControlMap> {
        ControlMap::map(memfd::create("control", CONTROL_BYTES)?, Access::Write)
    }

    /// Has the run's swap file encrypted, by this key, which stays in memory.
    pub(crate) fn encrypt_swap(&self, key: &[u8; 32]) -> Result<()> {
        self.0
            .lock_first_page()
            .context("cannot lock the key of the swap file in memory (see ulimit -l)")?;
        for (word, &key) in self.swap_key.iter().zip(key.as_chunks().0) {
            word.store(u64::from_ne_bytes(key), Relaxed);
        }
        self.is_swap_encrypted.store(1, Relaxed);
        Ok(())
    }

    /// Maps the control memfd of another process's run. A memfd that could shrink while it is mapped is
    /// refused.
    pub(crate) fn attach(memfd: OwnedFd, access: Access) -> Result<ControlMap, NotAttached> {
        let seals = rustix::fs::fcntl_get_seals(&memfd).map_err(|_| NotAttached::NotControl)?;
        let stat = rustix::fs::fstat(&memfd).map_err(|_| NotAttached::NotControl)?;
        // Magic and version come first in every version. Read, and not yet mapped: another
        // version's may be shorter.
        let mut head = [0u8; 8];
        if rustix::io::pread(&memfd, &mut head, 0) != Ok(head.len())
            || !seals.contains(SealFlags::SHRINK)
        {
            return Err(NotAttached::NotControl);
        }
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
        match (word(0), word(4)) {
            (MAGIC, VERSION) if stat.st_size.cast_unsigned() == CONTROL_BYTES as u64 => {
                ControlMap::map(memfd, access).map_err(|_| NotAttached::NotControl)
            }
            (MAGIC, version) if version != VERSION => Err(NotAttached::OtherVersion(version)),
            _ => Err(NotAttached::NotControl),
        }
    }

    /// Maps a memfd of CONTROL_BYTES that cannot shrink.
    fn map(memfd: OwnedFd, access: Access) -> Result<ControlMap> {
        Ok(ControlMap(SharedMap::new(memfd, CONTROL_BYTES, access, "control")?))
    }
}

impl Deref for ControlMap {
    type Target = Control;

    fn deref(&self) -> &Control {
        // SAFETY: the mapping has CONTROL_BYTES bytes and lives as long as `self`; the seals keep
        // the memfd from shrinking under it; all fields are atomics, for which zeros are valid and
        // which other processes may change at any time. A mapping that may only be read is only
        // loaded from, Relaxed, which needs no right to write.
        unsafe { self.0.base.cast().as_ref() }
    }
}

impl AsFd for ControlMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.memfd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::*;

    fn memfd(words: [u32; 2], bytes: usize, seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("control-of-tests", flags).unwrap();
        rustix::io::write(&memfd, words.map(u32::to_ne_bytes).as_flattened()).unwrap();
        rustix::fs::ftruncate(&memfd, bytes as u64).unwrap();
        rustix::fs::fcntl_add_seals(&memfd, seals).unwrap();
        memfd
    }

    #[test]
    fn only_what_cannot_shrink_is_mapped() {
        let attach = |words, bytes, seals| {
            ControlMap::attach(memfd(words, bytes, seals), Access::Read)
                .map(|control| control.version.load(std::sync::atomic::Ordering::Relaxed))
        };
        let ours = [MAGIC, VERSION];
        assert_eq!(attach(ours, CONTROL_BYTES, SealFlags::SHRINK), Ok(VERSION));
        for (words, bytes, seals) in [
            (ours, CONTROL_BYTES, SealFlags::empty()),
            (ours, CONTROL_BYTES, SealFlags::GROW),
            (ours, 4096, SealFlags::SHRINK),
            (ours, 4, SealFlags::SHRINK),
            ([1, VERSION], CONTROL_BYTES, SealFlags::SHRINK),
        ] {
            assert_eq!(
                attach(words, bytes, seals),
                Err(NotAttached::NotControl),
                "{words:?} {bytes}"
            );
        }
        // However long another version's is.
        let other = Err(NotAttached::OtherVersion(VERSION + 1));
        assert_eq!(attach([MAGIC, VERSION + 1], 8192, SealFlags::SHRINK), other);
    }
}
