//! The supervisor's end of the control memfd: makes it, seals it, maps it.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use anyhow::{Context as _, Result};
use quire::control::{CONTROL_BYTES, Control};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// The control memfd, mapped shared.
pub struct ControlMap {
    address: NonNull<Control>,
    memfd: OwnedFd,
}

impl ControlMap {
    /// A control memfd of zeros: no member, no budget. It is sparse: only what is written costs
    /// memory.
    pub fn create() -> Result<ControlMap> {
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
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                CONTROL_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
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
        // which other processes may change at any time.
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
        // SAFETY: `create` mapped exactly this; references to it borrow `self`, so none is left.
        // A failure leaves a mapping behind, no more.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), CONTROL_BYTES) };
    }
}
