//! The control memfd: the supervisor makes it, seals it and maps it; others map what it made.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use anyhow::{Context as _, Result};
use quire::control::{CONTROL_BYTES, Control, MAGIC, VERSION};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// What a mapping is for. A store through one that is for reading is a SIGSEGV.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// To look.
    Read,
    /// To look, and to change settings.
    Write,
}

/// Why a descriptor is no control page of ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotAttached {
    /// It is another version's.
    OtherVersion(u32),
    /// It is something else.
    NotControl,
}

/// The control memfd, mapped shared.
pub(crate) struct ControlMap {
    address: NonNull<Control>,
    memfd: OwnedFd,
}

impl ControlMap {
    /// A control memfd of zeros: no member, no budget. It is sparse: only what is written costs
    /// memory.
    pub(crate) fn create() -> Result<ControlMap> {
        let memfd = rustix::fs::memfd_create(
            "quire-control",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .context("cannot make the control memfd")?;
        rustix::fs::ftruncate(&memfd, CONTROL_BYTES as u64)
            .context("cannot size the control memfd")?;
        // A member that shrank it would kill all others by SIGBUS.
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .context("cannot seal the control memfd")?;
        ControlMap::map(memfd, Access::Write)
    }

    /// Maps the control memfd of another process's tree. What claims to be one, and could shrink
    /// under us, is none.
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
        let rights = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                CONTROL_BYTES,
                rights,
                MapFlags::SHARED,
                &memfd,
                0,
            )
        }
        .context("cannot map the control memfd")?;
        let address =
            NonNull::new(address.cast()).context("the control memfd came at address 0")?;
        Ok(ControlMap { address, memfd })
    }
}

impl Deref for ControlMap {
    type Target = Control;

    fn deref(&self) -> &Control {
        // SAFETY: the mapping has CONTROL_BYTES bytes and lives as long as `self`; the seals keep
        // the memfd from shrinking under it; all fields are atomics, for which zeros are valid and
        // which other processes may change at any time. Who maps to read only loads, Relaxed, which
        // needs no right to write.
        unsafe { self.address.as_ref() }
    }
}

impl AsFd for ControlMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }
}

impl Drop for ControlMap {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly this; references to it borrow `self`, so none is left.
        // A failure leaves a mapping behind, no more.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), CONTROL_BYTES) };
    }
}

#[cfg(test)]
mod tests {
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
