//! userfaultfd, as far as `run` and `doctor` go: whether one can be opened, and what it can do.

use std::ffi::c_void;
use std::os::fd::{AsFd, FromRawFd as _, OwnedFd, RawFd};

use linux_raw_sys::general::{UFFD_API, USERFAULTFD_IOC, uffdio_api};
use linux_raw_sys::ioctl::UFFDIO_API;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Updater, ioctl, opcode};
use rustix::mm::UserfaultfdFlags;

/// The device that hands out userfaultfds.
pub(crate) const DEVICE: &str = "/dev/userfaultfd";

pub(crate) fn open_device() -> Result<OwnedFd, Errno> {
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

pub(crate) fn from_device(device: &OwnedFd) -> Result<OwnedFd, Errno> {
    // SAFETY: the opcode takes flags by value and returns a descriptor, as `New` says.
    unsafe { ioctl(device, New { flags: OFlags::CLOEXEC | OFlags::NONBLOCK }) }
}

/// The faults that a userfaultfd gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Faults {
    /// Those of system calls too, which needs a right.
    All,
    UserModeOnly,
}

pub(crate) fn from_call(faults: Faults) -> Result<OwnedFd, Errno> {
    let mut flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    if faults == Faults::UserModeOnly {
        flags |= UserfaultfdFlags::from_bits_retain(linux_raw_sys::general::UFFD_USER_MODE_ONLY);
    }
    // SAFETY: a userfaultfd on which nothing is registered changes nothing.
    unsafe { rustix::mm::userfaultfd(flags) }
}

/// Asks for `features` on a new userfaultfd; returns all that the kernel offers.
pub(crate) fn handshake(uffd: &OwnedFd, features: u64) -> Result<u64, Errno> {
    let mut api = uffdio_api { api: UFFD_API.into(), features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes a uffdio_api.
    unsafe { ioctl(uffd.as_fd(), Updater::<{ UFFDIO_API as Opcode }, _>::new(&mut api)) }?;
    Ok(api.features)
}

/// USERFAULTFD_IOC_NEW: flags by value in, a descriptor out.
struct New {
    flags: OFlags,
}

// SAFETY: the ioctl takes its argument by value, touches no memory of ours and returns a new
// descriptor that has no other owner.
unsafe impl Ioctl for New {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(USERFAULTFD_IOC as u8, 0)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.flags.bits() as usize)
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: a successful call returned this descriptor to us.
        Ok(unsafe { OwnedFd::from_raw_fd(out as RawFd) })
    }
}
