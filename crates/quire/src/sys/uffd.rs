//! userfaultfd: the descriptor, its ioctls and its messages.

use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, Ordering};

use linux_raw_sys::general::{
    __NR_ioctl, __NR_preadv2, __NR_read, __NR_userfaultfd, O_CLOEXEC, RWF_NOWAIT, UFFD_API,
    UFFD_USER_MODE_ONLY, UFFDIO_COPY_MODE_WP, uffd_msg, uffdio_api, uffdio_continue, uffdio_copy,
    uffdio_move, uffdio_poison, uffdio_range, uffdio_register, uffdio_writeprotect,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
};
use rustix::ioctl::opcode;

use super::Errno;
use super::call::syscall;

// What the kernel's headers have, and the crate of them has not.
const USERFAULTFD_IOC_NEW: u32 = opcode::none(0xaa, 0);
const UFFDIO_MOVE: u32 = opcode::read_write::<uffdio_move>(0xaa, 5);
const UFFDIO_POISON: u32 = opcode::read_write::<uffdio_poison>(0xaa, 8);
const UFFDIO_CONTINUE_MODE_WP: u64 = 2;
const UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES: u64 = 2;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1;

/// How far a call over a range came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Bytes done, from the start of the range on.
    pub done: usize,
    /// Why it stopped, where it stopped early.
    pub error: Option<Errno>,
}

/// A userfaultfd. The number can be replaced (a fork's child opens one of its own).
pub struct Uffd {
    descriptor: AtomicI32,
}

const fn range(start: usize, len: usize) -> uffdio_range {
    uffdio_range { start: start as u64, len: len as u64 }
}

/// Repeats a call until its `len` bytes are done. It is passed what is done already, and returns how
/// much more it did where it fails.
fn in_parts(len: usize, mut call: impl FnMut(usize) -> (Result<(), Errno>, i64)) -> Progress {
    let mut done = 0;
    loop {
        match call(done) {
            (Ok(()), _) => return Progress { done: len, error: None },
            // What the rest is refused for, if it is, is told when the rest comes first.
            (Err(Errno::AGAIN), part) if part > 0 => done += part as usize,
            (Err(error), _) => return Progress { done, error: Some(error) },
        }
    }
}

impl Uffd {
    #[must_use]
    pub const fn closed() -> Uffd {
        Uffd { descriptor: AtomicI32::new(-1) }
    }

    /// Opens a userfaultfd for this process with `features` (`UFFD_FEATURE_`): through `device`
    /// where there is one, by the plain call otherwise.
    ///
    /// # Errors
    /// `PERM` without the right, `INVAL` where the kernel lacks a feature.
    pub fn open(&self, device: Option<i32>, features: u32) -> Result<(), Errno> {
        let flags = O_CLOEXEC as usize;
        let (number, arguments) = match device {
            Some(device) => {
                (__NR_ioctl, [device as usize, USERFAULTFD_IOC_NEW as usize, flags, 0, 0, 0])
            }
            None => (__NR_userfaultfd, [flags, 0, 0, 0, 0, 0]),
        };
        self.open_by(number, arguments, features)
    }

    /// Opens a userfaultfd that serves only faults taken in user mode, which needs no right.
    pub(crate) fn open_user_mode_only(&self, features: u32) -> Result<(), Errno> {
        let flags = (O_CLOEXEC | UFFD_USER_MODE_ONLY) as usize;
        self.open_by(__NR_userfaultfd, [flags, 0, 0, 0, 0, 0], features)
    }

    fn open_by(&self, number: u32, arguments: [usize; 6], features: u32) -> Result<(), Errno> {
        // SAFETY: neither call touches memory.
        let made = unsafe { syscall(number, arguments) }?;
        self.descriptor.store(made as i32, Ordering::Relaxed);
        let mut api = uffdio_api { api: UFFD_API.into(), features: features.into(), ioctls: 0 };
        self.ioctl(UFFDIO_API, &mut api)
    }

    /// The descriptor's number, -1 where closed.
    #[inline]
    #[must_use]
    pub fn number(&self) -> i32 {
        // Relaxed: set before the threads that use it start.
        self.descriptor.load(Ordering::Relaxed)
    }

    #[inline]
    fn ioctl<T>(&self, request: u32, argument: &mut T) -> Result<(), Errno> {
        let place = core::ptr::from_mut(argument) as usize;
        let arguments = [self.number() as usize, request as usize, place, 0, 0, 0];
        // SAFETY: each caller pairs the request with its structure; the ranges inside belong to
        // the arena and the frame pool.
        unsafe { syscall(__NR_ioctl, arguments) }.map(drop)
    }

    /// Asks for the faults of a range, of the kinds `modes` (`UFFDIO_REGISTER_MODE_`).
    pub fn register(&self, start: usize, len: usize, modes: u32) -> Result<(), Errno> {
        let mut argument =
            uffdio_register { range: range(start, len), mode: modes.into(), ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut argument)
    }

    /// Answers all faults of a range: their threads try again.
    pub fn wake(&self, start: usize, len: usize) {
        let _ = self.ioctl(UFFDIO_WAKE, &mut range(start, len));
    }

    /// Fills `len` missing bytes at `dst` with a copy of those at `src`.
    pub fn copy(&self, dst: usize, src: usize, len: usize, write_protect: bool) -> Progress {
        let mode = if write_protect { UFFDIO_COPY_MODE_WP.into() } else { 0 };
        in_parts(len, |done| {
            let (dst, src, len) = ((dst + done) as u64, (src + done) as u64, (len - done) as u64);
            let mut argument = uffdio_copy { dst, src, len, mode, copy: 0 };
            (self.ioctl(UFFDIO_COPY, &mut argument), argument.copy)
        })
    }

    /// Maps `len` bytes of shared memory at `dst` that are there, but not mapped.
    pub(crate) fn map_cached(&self, dst: usize, len: usize, write_protect: bool) -> Progress {
        let mode = if write_protect { UFFDIO_CONTINUE_MODE_WP } else { 0 };
        in_parts(len, |done| {
            let range = range(dst + done, len - done);
            let mut argument = uffdio_continue { range, mode, mapped: 0 };
            (self.ioctl(UFFDIO_CONTINUE, &mut argument), argument.mapped)
        })
    }

    /// Moves the pages at `src` to `dst`, which must be missing there and be registered with this
    /// descriptor. With `holes`, what is missing at `src` is stepped over.
    pub(crate) fn move_pages(&self, dst: usize, src: usize, len: usize, holes: bool) -> Progress {
        let mode = if holes { UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES } else { 0 };
        in_parts(len, |done| {
            let (dst, src, len) = ((dst + done) as u64, (src + done) as u64, (len - done) as u64);
            let mut argument = uffdio_move { dst, src, len, mode, move_: 0 };
            (self.ioctl(UFFDIO_MOVE, &mut argument), argument.move_)
        })
    }

    /// Sets or clears write protection; clearing answers the faults that waited for it.
    pub(crate) fn write_protect(
        &self,
        start: usize,
        len: usize,
        protect: bool,
    ) -> Result<(), Errno> {
        let mode = if protect { UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = uffdio_writeprotect { range: range(start, len), mode };
        self.ioctl(UFFDIO_WRITEPROTECT, &mut argument)
    }

    /// Makes any access to a missing page a SIGBUS; `EXIST` where something is mapped.
    pub(crate) fn poison(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut argument = uffdio_poison { range: range(start, len), mode: 0, updated: 0 };
        self.ioctl(UFFDIO_POISON, &mut argument)
    }

    /// Waits for a message and reads it; `INTR` where it was only interrupted.
    pub fn read(&self) -> Result<uffd_msg, Errno> {
        let mut message = MaybeUninit::<uffd_msg>::uninit();
        // SAFETY: the kernel writes one whole message, or none and says so.
        unsafe {
            let place = message.as_mut_ptr() as usize;
            let number = self.number() as usize;
            syscall(__NR_read, [number, place, size_of::<uffd_msg>(), 0, 0, 0])?;
            Ok(message.assume_init())
        }
    }

    /// Reads a message that is there already.
    ///
    /// # Errors
    /// `AGAIN` where none is; `OPNOTSUPP` before Linux 6.10.
    pub fn read_if_there(&self) -> Result<uffd_msg, Errno> {
        const HERE: usize = usize::MAX;
        let mut message = MaybeUninit::<uffd_msg>::uninit();
        // SAFETY: the kernel writes one whole message, or none and says so.
        unsafe {
            let part = [message.as_mut_ptr() as usize, size_of::<uffd_msg>()];
            let (number, parts) = (self.number() as usize, part.as_ptr() as usize);
            syscall(__NR_preadv2, [number, parts, 1, HERE, HERE, RWF_NOWAIT as usize])?;
            Ok(message.assume_init())
        }
    }
}
