//! The process at the other end of a Unix socket.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};

/// A peer of a connection, as the kernel names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// Process id, as of when it connected.
    pub pid: u32,
    /// Effective user id, as of then.
    pub uid: u32,
}

/// The peer of `socket`; none where it lives in a process namespace that cannot be seen from here.
pub(crate) fn of(socket: &OwnedFd) -> Option<Peer> {
    // SAFETY: SO_PEERCRED writes a ucred. (rustix's form has no way to say a process id of 0.)
    let credentials: libc::ucred = unsafe { socket_option(socket, libc::SO_PEERCRED) }?;
    let pid = u32::try_from(credentials.pid).ok().filter(|&pid| pid != 0)?;
    Some(Peer { pid, uid: credentials.uid })
}

/// The process at the other end of a Unix socket, as of when it connected; `None` where the kernel
/// does not say, or it has ended and been waited for.
pub(crate) fn pidfd_of(socket: impl AsFd) -> Option<OwnedFd> {
    /// Linux 6.5; libc has no name for it yet on every target.
    const SO_PEERPIDFD: libc::c_int = 77;
    // SAFETY: SO_PEERPIDFD writes an int.
    let descriptor: libc::c_int = unsafe { socket_option(socket, SO_PEERPIDFD) }?;
    // SAFETY: a new descriptor, close-on-exec, that is ours alone.
    (descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// # Safety
/// The option is of SOL_SOCKET, and its value is a `T`, which is made of integers only.
unsafe fn socket_option<T>(socket: impl AsFd, option: libc::c_int) -> Option<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    let to = value.as_mut_ptr().cast();
    // SAFETY: the call writes at most `length` bytes to the value, for which zeros are valid.
    let status = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, option, to, &raw mut length) };
    // SAFETY: as above; the call has filled it.
    (status == 0).then(|| unsafe { value.assume_init() })
}
