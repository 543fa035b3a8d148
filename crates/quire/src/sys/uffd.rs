//! userfaultfd: the descriptor, its ioctls and its messages.

use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, Ordering};

use linux_raw_sys::general::{__NR_ioctl, __NR_read, __NR_userfaultfd, O_CLOEXEC, uffd_msg};

use super::Errno;
use super::call::syscall;

const fn ioctl_number(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | 0xaa << 8 | number
}
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// `USERFAULTFD_IOC_NEW` on /dev/userfaultfd.
const IOC_NEW: u32 = 0xaa << 8;

/// The features that the engine asks for, by name.
pub mod feature {
    /// Write faults on protected pages are reported.
    pub const PAGEFAULT_FLAG_WP: u64 = 1;
    /// Missing pages of shared memory are reported.
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// A fault is a SIGBUS in the faulting thread.
    pub const SIGBUS: u64 = 1 << 7;
    /// Messages tell the kernel's id of the thread that faulted.
    pub const THREAD_ID: u64 = 1 << 8;
    /// Pages of shared memory that are there, but not mapped, are reported.
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// Shared memory can be write-protected.
    pub const WP_SHMEM: u64 = 1 << 12;
    /// UFFDIO_POISON.
    pub const POISON: u64 = 1 << 14;
    /// UFFDIO_MOVE.
    pub const MOVE: u64 = 1 << 16;
}

/// `UFFDIO_REGISTER_MODE_MISSING`.
pub const MODE_MISSING: u64 = 1;
/// `UFFDIO_REGISTER_MODE_WP`.
pub const MODE_WP: u64 = 2;
/// `UFFDIO_REGISTER_MODE_MINOR`.
pub const MODE_MINOR: u64 = 4;
/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: usize = 1;

/// How far a call over a range came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Partial {
    /// Bytes done, from the start of the range on.
    pub done: usize,
    /// Why it stopped, where it stopped early.
    pub error: Option<Errno>,
}

/// A userfaultfd. The number can be replaced (a fork's child opens one of its own).
pub struct Uffd {
    descriptor: AtomicI32,
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct RangeMode {
    range: Range,
    mode: u64,
}

#[repr(C)]
struct Continue {
    range: Range,
    mode: u64,
    mapped: i64,
}

#[repr(C)]
struct Poison {
    range: Range,
    mode: u64,
    updated: i64,
}

impl Uffd {
    /// No descriptor yet.
    #[must_use]
    pub const fn closed() -> Uffd {
        Uffd { descriptor: AtomicI32::new(-1) }
    }

    /// Opens a userfaultfd for this process with `features`: through `device` where there is one,
    /// by the plain call otherwise.
    ///
    /// # Errors
    /// `PERM` without the right, `INVAL` where the kernel lacks a feature.
    pub fn open(&self, device: Option<i32>, features: u64) -> Result<(), Errno> {
        let flags = O_CLOEXEC as usize;
        let (number, arguments) = match device {
            Some(device) => (__NR_ioctl, [device as usize, IOC_NEW as usize, flags, 0, 0, 0]),
            None => (__NR_userfaultfd, [flags, 0, 0, 0, 0, 0]),
        };
        self.open_by(number, arguments, features)
    }

    /// Opens a userfaultfd that serves only faults taken in user mode, which everybody may.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open_user_mode_only(&self, features: u64) -> Result<(), Errno> {
        let flags = O_CLOEXEC as usize | USER_MODE_ONLY;
        self.open_by(__NR_userfaultfd, [flags, 0, 0, 0, 0, 0], features)
    }

    fn open_by(&self, number: u32, arguments: [usize; 6], features: u64) -> Result<(), Errno> {
        // SAFETY: neither call touches memory.
        let made = unsafe { syscall(number, arguments) }?;
        self.descriptor.store(made as i32, Ordering::Relaxed);
        let mut api = Api { api: 0xaa, features, ioctls: 0 };
        self.ioctl(ioctl_number(READ_WRITE, 0x3f, size_of::<Api>()), &mut api)
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
        // SAFETY: each caller pairs the request with its structure; the ranges inside belong to
        // the arena and the frame pool.
        unsafe {
            syscall(
                __NR_ioctl,
                [
                    self.number() as usize,
                    request as usize,
                    core::ptr::from_mut(argument) as usize,
                    0,
                    0,
                    0,
                ],
            )
        }
        .map(drop)
    }

    /// Asks for the faults of a range.
    ///
    /// # Errors
    /// The kernel's.
    pub fn register(&self, start: usize, len: usize, mode: u64) -> Result<(), Errno> {
        let mut register =
            Register { range: Range { start: start as u64, len: len as u64 }, mode, ioctls: 0 };
        self.ioctl(ioctl_number(READ_WRITE, 0, size_of::<Register>()), &mut register)
    }

    /// Answers all faults of a range: their threads try again.
    pub fn wake(&self, start: usize, len: usize) {
        let mut range = Range { start: start as u64, len: len as u64 };
        let _ = self.ioctl(ioctl_number(READ, 2, size_of::<Range>()), &mut range);
    }

    fn transfer(&self, number: u32, dst: usize, src: usize, len: usize, mode: u64) -> Partial {
        let mut copy = Copy { dst: dst as u64, src: src as u64, len: len as u64, mode, done: 0 };
        let request = ioctl_number(READ_WRITE, number, size_of::<Copy>());
        let mut done = 0;
        loop {
            copy.done = 0;
            match self.ioctl(request, &mut copy) {
                Ok(()) => return Partial { done: len, error: None },
                // Part of it was done: the rest may be refused, or was only interrupted.
                Err(Errno::AGAIN) if copy.done > 0 => {
                    done += copy.done as usize;
                    copy.dst += copy.done as u64;
                    copy.src += copy.done as u64;
                    copy.len -= copy.done as u64;
                }
                Err(error) => return Partial { done, error: Some(error) },
            }
        }
    }

    /// Fills `len` missing bytes at `dst` with a copy of those at `src`.
    pub fn copy(&self, dst: usize, src: usize, len: usize, write_protect: bool) -> Partial {
        self.transfer(3, dst, src, len, if write_protect { 2 } else { 0 })
    }

    /// Maps `len` bytes of shared memory at `dst` that are there, but not mapped.
    pub fn map_cached(&self, dst: usize, len: usize, write_protect: bool) -> Partial {
        let mode = if write_protect { 2 } else { 0 };
        let mut done = 0;
        loop {
            let range = Range { start: (dst + done) as u64, len: (len - done) as u64 };
            let mut argument = Continue { range, mode, mapped: 0 };
            match self.ioctl(ioctl_number(READ_WRITE, 7, size_of::<Continue>()), &mut argument) {
                Ok(()) => return Partial { done: len, error: None },
                // A part was done: what the rest is refused for is told when it comes first.
                Err(Errno::AGAIN) if argument.mapped > 0 => done += argument.mapped as usize,
                Err(error) => return Partial { done, error: Some(error) },
            }
        }
    }

    /// Moves the pages at `src` to `dst`, which must be missing there and be registered with this
    /// descriptor. With `holes`, what is missing at `src` is stepped over.
    pub fn move_pages(&self, dst: usize, src: usize, len: usize, holes: bool) -> Partial {
        self.transfer(5, dst, src, len, if holes { 2 } else { 0 })
    }

    /// Sets or clears write protection; clearing answers the faults that waited for it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn write_protect(&self, start: usize, len: usize, protect: bool) -> Result<(), Errno> {
        let mut argument = RangeMode {
            range: Range { start: start as u64, len: len as u64 },
            mode: u64::from(protect),
        };
        self.ioctl(ioctl_number(READ_WRITE, 6, size_of::<RangeMode>()), &mut argument)
    }

    /// Makes any access to a missing page a SIGBUS.
    ///
    /// # Errors
    /// The kernel's; `EXIST` where something is mapped.
    pub fn poison(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut argument =
            Poison { range: Range { start: start as u64, len: len as u64 }, mode: 0, updated: 0 };
        self.ioctl(ioctl_number(READ_WRITE, 8, size_of::<Poison>()), &mut argument)
    }

    /// Waits for a message and reads it.
    ///
    /// # Errors
    /// The kernel's; `INTR` where it was only interrupted.
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
}
