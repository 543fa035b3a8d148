//! Joining a run: the messages to and from the supervisor, and the descriptors that it sends.

use core::mem::MaybeUninit;
use core::ptr::NonNull;

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use rustix::process::{Pid, test_kill_process};

use crate::control::{
    CONTROL_BYTES, Control, Hello, JoinRefusal, MAGIC, SOCKET_VARIABLE, WELCOME_POOL,
    WELCOME_REFUSED, WELCOME_SWAP_FILE, WELCOME_UFFD_DEVICE, Welcome,
};
use crate::steps::{Step, reach};
use crate::sys::Errno;

/// The kernel's limit for the name of a socket.
const NAME_BYTES_MAX: usize = 107;

pub(super) struct SocketName {
    bytes: [u8; NAME_BYTES_MAX],
    len: usize,
}

/// A member's descriptors, in the table of the thread that joined.
pub(super) struct Joined {
    /// Kept open as long as the member lives.
    pub connection: OwnedFd,
    pub control: OwnedFd,
    /// The pool memfd; a fork's child has it mapped.
    pub pool: Option<OwnedFd>,
    /// /dev/userfaultfd, where the supervisor could open it.
    pub device: Option<OwnedFd>,
    pub swap_file: Option<OwnedFd>,
    pub slot: u32,
}

impl SocketName {
    /// Finds the name in the environment that this program was started with. Reads
    /// /proc/self/environ: libc's copy is not set up yet when the first malloc comes.
    pub fn from_environment() -> Option<SocketName> {
        let file = rustix::fs::open(
            c"/proc/self/environ",
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .ok()?;
        let mut name = SocketName { bytes: [0; NAME_BYTES_MAX], len: 0 };
        let mut buffer = [0u8; 4096];
        // How many bytes of the variable match so far.
        let mut matched = Some(0usize);
        let key = SOCKET_VARIABLE.as_bytes();
        loop {
            let read = rustix::io::read(&file, &mut buffer).ok()?;
            if read == 0 {
                return None;
            }
            for &byte in &buffer[..read] {
                match matched {
                    _ if byte == 0 => {
                        if matched.is_some_and(|at| at > key.len()) {
                            return Some(name);
                        }
                        matched = Some(0);
                        name.len = 0;
                    }
                    Some(at) if at < key.len() => {
                        matched = (key[at] == byte).then_some(at + 1);
                    }
                    Some(at) if at == key.len() => matched = (byte == b'=').then_some(at + 1),
                    Some(at) if name.len < NAME_BYTES_MAX => {
                        name.bytes[name.len] = byte;
                        name.len += 1;
                        matched = Some(at);
                    }
                    _ => matched = None,
                }
            }
        }
    }

    /// Connects to the supervisor.
    ///
    /// # Errors
    /// The kernel's; `CONNREFUSED` where the supervisor has ended, or is in another network namespace.
    pub fn connect(&self) -> Result<OwnedFd, Errno> {
        let connection = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let address = SocketAddrUnix::new_abstract_name(&self.bytes[..self.len])?;
        rustix::net::connect(&connection, &address)?;
        Ok(connection)
    }

    /// Why a process cannot join, where the errno tells: for a message.
    pub fn why_not(&self, errno: Errno) -> Option<&'static str> {
        match errno {
            Errno::USERS => Some("the run has as many processes as it may; raise --members-max"),
            Errno::PROTO => Some(
                "the supervisor of its run is another version of quire; end that run and start it \
                 again",
            ),
            Errno::CONNRESET => Some(
                "the supervisor of its run has ended, or does not know this process; start it anew",
            ),
            Errno::CONNREFUSED if self.has_ended() => {
                Some("the supervisor of its run has ended; start it anew with `quire run`")
            }
            // The supervisor may also have ended without having been waited for.
            Errno::CONNREFUSED => Some(
                "the supervisor of its run cannot be reached: it has ended, or listens in another \
                 network namespace; share the run's (--net=host, in a container)",
            ),
            _ => None,
        }
    }

    /// Whether the supervisor, whose process id is in the name (`quire-PID-...`), has ended.
    fn has_ended(&self) -> bool {
        let mut parts = self.bytes[..self.len].split(|&byte| byte == b'-');
        let number = parts.nth(1).and_then(|part| core::str::from_utf8(part).ok());
        let pid = number.and_then(|number| number.parse().ok()).and_then(Pid::from_raw);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }
}

/// Joins the run of the supervisor at the other end.
///
/// # Errors
/// The kernel's; `USERS` where the run has as many members as it may, `SRCH` where the parent is no
/// member any more, `PROTO` where the supervisor has another version.
pub(super) fn join(connection: OwnedFd, hello: &Hello) -> Result<Joined, Errno> {
    // SAFETY: a Hello is plain integers without padding.
    let bytes = unsafe {
        core::slice::from_raw_parts(core::ptr::from_ref(hello).cast::<u8>(), size_of::<Hello>())
    };
    rustix::net::send(&connection, bytes, SendFlags::NOSIGNAL).map_err(|error| match error {
        // The supervisor has ended since the connection was made.
        Errno::PIPE | Errno::NOTCONN => Errno::CONNRESET,
        error => error,
    })?;
    reach(Step::HelloSent);
    receive_welcome(connection)
}

fn receive_welcome(connection: OwnedFd) -> Result<Joined, Errno> {
    let mut bytes = [0u8; size_of::<Welcome>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        connection.as_fd(),
        &mut [rustix::io::IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if received.bytes == 0 {
        // The supervisor has ended just now, or has no place for a process like this one.
        return Err(Errno::CONNRESET);
    }
    if received.bytes != bytes.len() {
        return Err(Errno::PROTO);
    }
    // SAFETY: a Welcome is plain integers, of this size; the array need not be aligned.
    let welcome = unsafe { bytes.as_ptr().cast::<Welcome>().read_unaligned() };
    if welcome.magic != MAGIC {
        return Err(Errno::PROTO);
    }
    if welcome.flags & WELCOME_REFUSED != 0 {
        return Err(match JoinRefusal::from_number(welcome.refusal) {
            Some(JoinRefusal::Full) => Errno::USERS,
            Some(JoinRefusal::NoParent) => Errno::SRCH,
            Some(JoinRefusal::Version) => Errno::PROTO,
            Some(JoinRefusal::NoRoom) | None => Errno::AGAIN,
        });
    }
    let mut descriptors = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        })
        .flatten();
    let control = descriptors.next();
    let mut take = |flag: u32| if welcome.flags & flag != 0 { descriptors.next() } else { None };
    let (pool, device) = (take(WELCOME_POOL), take(WELCOME_UFFD_DEVICE));
    let swap_file = take(WELCOME_SWAP_FILE);
    // RLIMIT_NOFILE may have cut the list short.
    if welcome.flags & WELCOME_POOL != 0 && pool.is_none() {
        return Err(Errno::MFILE);
    }
    let control = control.ok_or(Errno::MFILE)?;
    Ok(Joined { connection, control, pool, device, swap_file, slot: welcome.slot })
}

impl Joined {
    pub fn map_control(&self) -> Result<NonNull<Control>, Errno> {
        // SAFETY: a new shared mapping of the supervisor's memfd.
        let address = unsafe {
            rustix::mm::mmap(
                core::ptr::null_mut(),
                CONTROL_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &self.control,
                0,
            )
        }?;
        // The key of an encrypted swap file is no part of a core dump.
        // SAFETY: what was just mapped; its content stays.
        unsafe { rustix::mm::madvise(address, CONTROL_BYTES, Advice::LinuxDontDump) }?;
        NonNull::new(address.cast::<Control>()).ok_or(Errno::NOMEM)
    }
}

/// Opens this process's memory as a file.
pub(super) fn open_memory() -> Result<OwnedFd, Errno> {
    rustix::fs::open(c"/proc/self/mem", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}
