//! Whether this user may have a userfaultfd, and by which way.

use std::os::fd::OwnedFd;

use anyhow::{Result, bail};
use linux_raw_sys::general::UFFD_FEATURE_MOVE;
use rustix::io::Errno;

use crate::sys::uffd::{self, Faults};

/// What memory cannot be managed without.
pub(crate) const FEATURES_NEEDED: u64 = UFFD_FEATURE_MOVE as u64;

/// The ways to a userfaultfd that gets every fault, those of system calls included.
pub(crate) struct Ways {
    /// The device, if it can be opened and yields one.
    pub device: Result<OwnedFd, Errno>,
    pub call: Result<OwnedFd, Errno>,
}

impl Ways {
    pub(crate) fn find() -> Ways {
        let device =
            uffd::open_device().and_then(|device| uffd::from_device(&device).map(|_uffd| device));
        Ways { device, call: uffd::from_call(Faults::All) }
    }

    /// A new userfaultfd, by whichever way there is.
    pub(crate) fn open(&self) -> Result<OwnedFd, Errno> {
        match &self.device {
            Ok(device) => uffd::from_device(device),
            Err(_) => uffd::from_call(Faults::All),
        }
    }

    /// All features that the kernel has.
    pub(crate) fn features(&self) -> Result<u64, Errno> {
        uffd::handshake(&self.open()?, 0)
    }
}

/// What a run hands its members: the device, where it can be opened. An error where they would
/// have no right to a userfaultfd, or the kernel's cannot do enough.
pub(crate) fn for_run() -> Result<Option<OwnedFd>> {
    let ways = Ways::find();
    if ways.device.is_err()
        && let Err(errno) = ways.call
    {
        match errno {
            Errno::NOSYS => bail!("this kernel has no userfaultfd; run `quire doctor`"),
            _ => bail!("no right to userfaultfd ({errno}); `quire doctor` says how to get it"),
        }
    }
    match ways.features() {
        Ok(features) if features & FEATURES_NEEDED == FEATURES_NEEDED => Ok(ways.device.ok()),
        Ok(_) => {
            bail!("this kernel cannot move pages (UFFDIO_MOVE, Linux 6.8); run `quire doctor`")
        }
        Err(errno) => bail!("userfaultfd does not work here ({errno}); run `quire doctor`"),
    }
}
