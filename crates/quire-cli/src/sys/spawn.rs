//! Starting the program: between fork and exec it gets its signals back and enters its cgroup.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

use rustix::event::EventfdFlags;

use super::signals::Inherited;

pub(crate) struct Spawned {
    pub child: Child,
    /// Why the process could not enter the cgroup, where it could not.
    pub cgroup_error: Option<io::Error>,
}

/// Starts `command` with the signals `quire` inherited, inside the cgroup whose `cgroup.procs` is
/// given.
pub(crate) fn spawn(
    mut command: Command,
    inherited: Inherited,
    cgroup_procs: Option<File>,
) -> io::Result<Spawned> {
    // A failure to enter the cgroup must not end the program, so it cannot go the way of
    // pre_exec's errors: the child leaves the errno here.
    let failure = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let failure_in_child = rustix::io::fcntl_dupfd_cloexec(&failure, 0)?;
    let before_exec = move || {
        inherited.restore()?;
        if let Some(procs) = &cgroup_procs
            // 0 is the writer itself.
            && let Err(errno) = rustix::io::write(procs, b"0")
        {
            let code = u64::from(errno.raw_os_error().unsigned_abs());
            rustix::io::write(&failure_in_child, &code.to_ne_bytes())?;
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls on descriptors that it owns and allocates nothing,
    // so it may run between fork and exec.
    unsafe { command.pre_exec(before_exec) };
    let child = command.spawn()?;
    let mut code = [0u8; 8];
    let cgroup_error = rustix::io::read(&failure, &mut code).ok().map(|_| {
        io::Error::from_raw_os_error(i32::try_from(u64::from_ne_bytes(code)).unwrap_or_default())
    });
    Ok(Spawned { child, cgroup_error })
}
