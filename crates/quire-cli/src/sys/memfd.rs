//! Memfds that the supervisor shares with the members: sealed, and mapped shared.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use anyhow::{Context as _, Result};
use quire::units::PAGE_SIZE;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// What a mapping is for. A store through one that is for reading is a SIGSEGV.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    Read,
    /// To look, and to change settings.
    Write,
}

/// A memfd of zeros, `quire-` and `what` by name. It is sparse: only what is written costs memory.
pub(crate) fn create(what: &str, bytes: usize) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = rustix::fs::memfd_create(format!("quire-{what}"), flags)
        .with_context(|| format!("cannot make the {what} memfd"))?;
    rustix::fs::ftruncate(&memfd, bytes as u64)
        .with_context(|| format!("cannot size the {what} memfd"))?;
    // A member that shrank it would kill all others by SIGBUS.
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .with_context(|| format!("cannot seal the {what} memfd"))?;
    Ok(memfd)
}

/// The beginning of a memfd, mapped shared.
pub(super) struct SharedMap {
    pub(super) base: NonNull<u8>,
    bytes: usize,
    pub(super) memfd: OwnedFd,
}

// SAFETY: the address is all that it hands out; what others do there is for them to justify.
unsafe impl Sync for SharedMap {}
// SAFETY: likewise; any thread may unmap it.
unsafe impl Send for SharedMap {}

impl SharedMap {
    pub(super) fn new(
        memfd: OwnedFd,
        bytes: usize,
        access: Access,
        what: &str,
    ) -> Result<SharedMap> {
        let rights = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, &memfd, 0)
        }
        .with_context(|| format!("cannot map the {what} memfd"))?;
        // What lies there is the members', or secret, and no part of a core dump.
        // SAFETY: what was just mapped; its content stays.
        unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxDontDump) }
            .with_context(|| format!("cannot keep the {what} memfd out of core dumps"))?;
        let base = NonNull::new(base.cast())
            .with_context(|| format!("the {what} memfd came at address 0"))?;
        Ok(SharedMap { base, bytes, memfd })
    }
}

impl SharedMap {
    /// Keeps the first page in memory: the kernel does not swap it out.
    pub(super) fn lock_first_page(&self) -> rustix::io::Result<()> {
        // SAFETY: a page of what `new` mapped; to lock it changes nothing of it.
        unsafe { rustix::mm::mlock(self.base.as_ptr().cast(), PAGE_SIZE) }
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: `new` mapped exactly this; the two that own one lend references only by a borrow of
        // themselves, so none is left. A failure leaves a mapping behind, no more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
