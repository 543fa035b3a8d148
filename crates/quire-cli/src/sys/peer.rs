//! The process at the other end of a Unix socket.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};

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
    // rustix's form has no way to say a process id of 0.
    let mut credentials = MaybeUninit::<libc::ucred>::zeroed();
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED writes at most `length` bytes to a ucred, which is integers only.
    let credentials = unsafe {
        let status = libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            credentials.as_mut_ptr().cast(),
            &raw mut length,
        );
        if status != 0 {
            return None;
        }
        credentials.assume_init()
    };
    let pid = u32::try_from(credentials.pid).ok().filter(|&pid| pid != 0)?;
    Some(Peer { pid, uid: credentials.uid })
}
