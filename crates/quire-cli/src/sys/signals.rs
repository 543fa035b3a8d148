//! Signals by descriptor: the supervisor blocks those it forwards and reads them in its loop.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::OnceLock;

use libc::{
    SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU,
    SIGUSR1, SIGUSR2, SIGWINCH,
};

/// Signals that the supervisor passes on to the program or acts on.
pub(crate) const TAKEN: [i32; 13] = [
    SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGWINCH, SIGTSTP, SIGTTIN,
    SIGTTOU, SIGCONT, SIGCHLD,
];

/// Signals that end a command that looks on, after it has printed what it saw so far.
pub(crate) const ENDS: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// Has the process end, without a word, where it prints to a pipe that has no reader any more.
pub fn end_with_reader() {
    // SAFETY: the default disposition, before any thread was started.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// A signal that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived {
    pub signal: i32,
    /// Whether the kernel sent it (a terminal's ^C, a hangup), and so to a whole process group.
    pub is_from_kernel: bool,
}

/// What a program must find as `quire` itself found it.
#[derive(Clone, Copy)]
pub(crate) struct Inherited {
    mask: libc::sigset_t,
    is_child_ignored: bool,
}

/// The taken signals, blocked and readable.
pub(crate) struct Signals {
    descriptor: OwnedFd,
    inherited: Inherited,
}

/// Blocks these signals for the calling thread, of a process that takes them elsewhere.
pub(crate) fn block(signals: &[i32]) {
    let set = set_of(signals);
    // SAFETY: the set is a local, and no old mask is asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the pointer is to a local of the right type; callers give valid signal numbers.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &signal in signals {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

impl Signals {
    /// Blocks these signals, and opens a descriptor for them.
    pub(crate) fn take(signals: &[i32]) -> io::Result<Signals> {
        let set = set_of(signals);
        let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut child = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all pointers are to locals of the right type; zeroed sets are valid sets;
        // `action` zeroed is SIG_DFL without flags.
        unsafe {
            check(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, mask.as_mut_ptr()))?;
            check(libc::sigaction(SIGCHLD, std::ptr::null(), child.as_mut_ptr()))?;
            let is_child_ignored = child.assume_init().sa_sigaction == libc::SIG_IGN;
            if is_child_ignored {
                // An ignored SIGCHLD would have the kernel throw the program's status away.
                set_disposition(SIGCHLD, libc::SIG_DFL)?;
            }
            let raw =
                check(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
            let found = Inherited { mask: mask.assume_init(), is_child_ignored };
            // A second program must find what the first one found, and not what was made of it.
            static INHERITED: OnceLock<Inherited> = OnceLock::new();
            let inherited = *INHERITED.get_or_init(|| found);
            Ok(Signals { descriptor: OwnedFd::from_raw_fd(raw), inherited })
        }
    }

    /// The signals' state before [`Signals::take`].
    pub(crate) fn inherited(&self) -> Inherited {
        self.inherited
    }

    pub(crate) fn try_read(&self) -> Option<Arrived> {
        let mut record = [0u8; size_of::<libc::signalfd_siginfo>()];
        let count = rustix::io::read(&self.descriptor, &mut record).ok()?;
        if count != record.len() {
            return None;
        }
        // SAFETY: signalfd_siginfo is integers only, any bytes are valid; the array has its size,
        // and read_unaligned asks for no alignment.
        let info: libc::signalfd_siginfo =
            unsafe { std::ptr::read_unaligned(record.as_ptr().cast()) };
        Some(Arrived {
            signal: info.ssi_signo.cast_signed(),
            is_from_kernel: info.ssi_code == libc::SI_KERNEL,
        })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Inherited {
    /// Gives the calling process the signals' state that `quire` found. Async-signal-safe.
    pub(crate) fn restore(&self) -> io::Result<()> {
        // SAFETY: `mask` is a set that sigprocmask wrote.
        unsafe {
            if self.is_child_ignored {
                set_disposition(SIGCHLD, libc::SIG_IGN)?;
            }
            check(libc::sigprocmask(
                libc::SIG_SETMASK,
                &raw const self.mask,
                std::ptr::null_mut(),
            ))?;
        }
        Ok(())
    }
}

/// Sends `signal` to process `pid`; one that is gone needs none.
pub(crate) fn send(pid: u32, signal: i32) {
    if let Ok(pid) = i32::try_from(pid)
        && pid > 0
    {
        // SAFETY: kill touches no memory.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Sets the disposition of `signal` to SIG_DFL or SIG_IGN.
///
/// # Safety
/// `handler` is one of these two.
unsafe fn set_disposition(signal: i32, handler: libc::sighandler_t) -> io::Result<()> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: sigaction is plain data for which zeros are valid: no flags, an empty mask.
    unsafe {
        (*action.as_mut_ptr()).sa_sigaction = handler;
        check(libc::sigaction(signal, action.as_ptr(), std::ptr::null_mut()))?;
    }
    Ok(())
}

fn check(status: i32) -> io::Result<i32> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
}
