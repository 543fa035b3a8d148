//! The doctor's probes: each does the thing once, where nothing else can notice.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use linux_raw_sys::general::{
    UFFDIO_REGISTER_MODE_MISSING, uffdio_move, uffdio_range, uffdio_register,
};
use linux_raw_sys::ioctl::UFFDIO_REGISTER;
use quire::sys::memory::{self, InitialProt};
use quire::units::PAGE_SIZE;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

const UFFDIO_MOVE: Opcode = opcode::read_write::<uffdio_move>(0xAA, 5);

/// A page of private anonymous memory.
struct OwnPage(NonNull<u8>);

impl OwnPage {
    fn new() -> Result<OwnPage, Errno> {
        memory::reserve(PAGE_SIZE, InitialProt::ReadWrite).map(OwnPage)
    }

    fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }
}

impl Drop for OwnPage {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this page, and nothing refers to it any more.
        unsafe { memory::release(self.0, PAGE_SIZE) };
    }
}

/// Registers a page on a new userfaultfd for missing faults, and moves another page to its place.
pub(crate) fn serve_missing_page(uffd: &OwnedFd) -> Result<(), Errno> {
    super::uffd::handshake(uffd, 0)?;
    let (source, place) = (OwnPage::new()?, OwnPage::new()?);
    // SAFETY: the page is mapped writable, and only ours.
    unsafe { source.0.write_volatile(0x51) };
    let mut register = uffdio_register {
        range: uffdio_range { start: place.address(), len: PAGE_SIZE as u64 },
        mode: UFFDIO_REGISTER_MODE_MISSING.into(),
        ioctls: 0,
    };
    // SAFETY: UFFDIO_REGISTER reads and writes a uffdio_register; the range is our own page, which
    // no thread touches before it is filled.
    unsafe {
        ioctl(uffd, Updater::<{ UFFDIO_REGISTER as Opcode }, _>::new(&mut register))?;
    }
    let mut order = uffdio_move {
        dst: place.address(),
        src: source.address(),
        len: PAGE_SIZE as u64,
        mode: 0,
        move_: 0,
    };
    // SAFETY: UFFDIO_MOVE reads and writes a uffdio_move; both pages are our own.
    unsafe { ioctl(uffd, Updater::<UFFDIO_MOVE, _>::new(&mut order)) }?;
    // SAFETY: the page was just filled, so that the access cannot wait for a handler.
    match unsafe { place.0.read_volatile() } {
        0x51 => Ok(()),
        _ => Err(Errno::IO),
    }
}

/// Whether Syscall User Dispatch is there: turns it off, which it is.
pub(crate) fn syscall_user_dispatch() -> Result<(), Errno> {
    const PR_SET_SYSCALL_USER_DISPATCH: libc::c_int = 59;
    // SAFETY: with PR_SYS_DISPATCH_OFF (0) the call takes no pointers and changes nothing.
    match unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

/// Whether pages of several ranges can be dropped in one call.
pub(crate) fn process_madvise() -> Result<(), Errno> {
    let page = OwnPage::new()?;
    let range = libc::iovec { iov_base: page.0.as_ptr().cast(), iov_len: PAGE_SIZE };
    // SAFETY: the kernel drops our own page, in which nothing is.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            memory::PIDFD_SELF_THREAD,
            &raw const range,
            1,
            libc::MADV_DONTNEED,
            0,
        )
    };
    whole_page(done)
}

/// Whether memory of this process can be read by a call, without a fault.
pub(crate) fn process_vm_readv() -> Result<(), Errno> {
    let (from, to) = (OwnPage::new()?, OwnPage::new()?);
    let range =
        |page: &OwnPage| libc::iovec { iov_base: page.0.as_ptr().cast(), iov_len: PAGE_SIZE };
    let (local, remote) = (range(&to), range(&from));
    // SAFETY: both pages are our own, and writable.
    let done = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    whole_page(done as i64)
}

fn whole_page(done: i64) -> Result<(), Errno> {
    match usize::try_from(done) {
        Ok(PAGE_SIZE) => Ok(()),
        Ok(_) => Err(Errno::AGAIN),
        Err(_) => {
            Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
        }
    }
}

/// Whether a ring can be set up.
pub(crate) fn io_uring() -> Result<(), Errno> {
    let mut parameters = rustix::io_uring::io_uring_params::default();
    // SAFETY: the parameters are zeros, which asks for a plain ring; it is closed at once.
    unsafe { rustix::io_uring::io_uring_setup(1, &mut parameters) }.map(drop)
}
