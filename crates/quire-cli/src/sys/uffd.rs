//! userfaultfd, as far as `run` and `doctor` go: whether one can be opened, and what it can do.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};

use linux_raw_sys::general::{UFFD_API, USERFAULTFD_IOC, uffdio_api};
use linux_raw_sys::ioctl::UFFDIO_API;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl};
use rustix::mm::UserfaultfdFlags;

/// `USERFAULTFD_IOC_NEW`: flags by value in, a descriptor out.
const IOC_NEW: libc::c_ulong = (USERFAULTFD_IOC as libc::c_ulong) << 8;
/// The device that hands out userfaultfds.
pub(crate) const DEVICE: &str = "/dev/userfaultfd";

pub(crate) fn open_device() -> Result<OwnedFd, Errno> {
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

pub(crate) fn from_device(device: &OwnedFd) -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes its flags by value, and touches no memory of ours.
    let number =
        unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if number < 0 {
        return Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    // SAFETY: a successful call returned this new descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
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
