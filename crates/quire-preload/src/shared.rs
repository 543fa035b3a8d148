//! Shared memory: not managed, but a part of the budget, to which managed memory gives way.
//!
//! Owns what a mapping of it may still bring into memory, and says so to the engine before the program can
//! touch it ([`Process::announce`]). Memory that is written without a mapping (a file in tmpfs, by write) is
//! seen by the supervisor alone, when it has come.

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;

use quire::process::Process;
use rustix::io::Errno;

use crate::sys::{self, PAGE};
use crate::{set_errno, start};

/// Announces what an mmap with these arguments, which is not managed, may bring into memory.
pub fn announce_map(process: &Process, len: usize, flags: c_int, fd: c_int, offset: i64) {
    let is_shared = matches!(flags & 0xf, libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
    if !is_shared || flags & libc::MAP_HUGETLB != 0 {
        return;
    }
    let bytes = if flags & libc::MAP_ANONYMOUS != 0 { len } else { unfilled(fd, len, offset) };
    process.announce(bytes / PAGE);
}

/// How much of a range of a file in memory (of tmpfs or a memfd) has no page yet, at most; of other files
/// nothing, for their pages can leave.
fn unfilled(fd: c_int, len: usize, offset: i64) -> usize {
    let mut system = MaybeUninit::<libc::statfs>::uninit();
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel fills them in where it returns no error; the descriptor may be none.
    let (system, stat) = unsafe {
        let filled = sys::call(libc::SYS_fstatfs, [fd as usize, system.as_mut_ptr() as usize])
            .and_then(|_| sys::call(libc::SYS_fstat, [fd as usize, stat.as_mut_ptr() as usize]));
        if filled.is_err() {
            return 0;
        }
        (system.assume_init(), stat.assume_init())
    };
    if system.f_type != libc::TMPFS_MAGIC {
        return 0;
    }
    let [size, filled] = [stat.st_size, stat.st_blocks * 512].map(|bytes| bytes.max(0) as usize);
    let mapped = size.saturating_sub(offset.max(0) as usize).min(len);
    mapped.min(size.saturating_sub(filled))
}

/// `man 2 shmat`.
///
/// # Safety
///
/// As the manual has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmat(id: c_int, addr: *const c_void, flags: c_int) -> *mut c_void {
    if let Some(process) = start::process() {
        process.announce(unattached(id) / PAGE);
    }
    // SAFETY: the program's own call. The kernel puts it where nothing is, unless SHM_REMAP is given.
    match unsafe { sys::call(libc::SYS_shmat, [id as usize, addr as usize, flags as usize]) } {
        Ok(address) => address as *mut c_void,
        Err(errno) => {
            set_errno(errno);
            libc::MAP_FAILED
        }
    }
}

/// The size of a segment that no process has attached yet; 0 of others, which may be filled.
fn unattached(id: c_int) -> usize {
    let mut segment = MaybeUninit::<libc::shmid_ds>::uninit();
    let args = [id as usize, libc::IPC_STAT as usize, segment.as_mut_ptr() as usize];
    // SAFETY: the kernel fills it in where it returns no error.
    let result: Result<usize, Errno> = unsafe { sys::call(libc::SYS_shmctl, args) };
    if result.is_err() {
        return 0;
    }
    // SAFETY: filled in.
    let segment = unsafe { segment.assume_init() };
    if segment.shm_nattch == 0 { segment.shm_segsz } else { 0 }
}
