//! What the pidfd of a process that is no child of this one says of its end.

use std::os::fd::{AsRawFd as _, BorrowedFd};

/// `struct pidfd_info` of Linux 6.15, as far as it is needed: 64 bytes, its first form.
#[repr(C)]
#[derive(Default)]
struct Info {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
}

/// `PIDFD_GET_INFO`, with an [`Info`].
const GET_INFO: libc::c_ulong = 0xC040_FF0B;
/// `PIDFD_INFO_EXIT`: asks for the exit status, and says that it is there.
const INFO_EXIT: u64 = 1 << 3;

/// The wait status of a process that has ended and was waited for; `None` before that, and on
/// kernels that do not keep it (before 6.15).
pub(crate) fn wait_status(process: BorrowedFd<'_>) -> Option<i32> {
    let mut info = Info { mask: INFO_EXIT, ..Info::default() };
    // SAFETY: the call reads and writes an Info of the size that is part of its number.
    let status = unsafe { libc::ioctl(process.as_raw_fd(), GET_INFO, &raw mut info) };
    (status == 0 && info.mask & INFO_EXIT != 0).then_some(info.exit_code)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::process::Command;

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn a_process_that_was_waited_for_tells_its_status() {
        for (script, expected) in [("exit 7", 7 << 8), ("kill -s KILL $$", libc::SIGKILL)] {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
            child.wait().unwrap();
            match wait_status(pidfd.as_fd()) {
                Some(status) => assert_eq!(status, expected, "{script}"),
                None => eprintln!("this kernel does not keep exit statuses: not tested"),
            }
        }
    }

    #[test]
    fn a_process_that_lives_has_no_status() {
        let own = Pid::from_raw(std::process::id() as i32).unwrap();
        assert_eq!(wait_status(pidfd_open(own, PidfdFlags::empty()).unwrap().as_fd()), None);
    }
}
