//! The bench's ring with `unsafe`: waiting for a child together with what it used, noticing
//! signals, and mappings made the way a C program makes them, so that they can be managed.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use linux_raw_sys::general::uffd_msg;
use quire::sys::uffd::Uffd;
use rustix::fs::{MemfdFlags, memfd_create};

/// A signal asked the bench to end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_signal: libc::c_int) {
    // Relaxed: the flag carries nothing but itself.
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Notes SIGINT, SIGTERM and SIGHUP instead of dying of them.
pub(crate) fn notice_signals() {
    notice(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP]);
}

/// Notes SIGPIPE as well: who reads what the bench says may be gone while much is set up.
pub(crate) fn notice_lost_reader() {
    notice(&[libc::SIGPIPE]);
}

fn notice(signals: &[libc::c_int]) {
    for &signal in signals {
        // SAFETY: an all-zero sigaction is valid; the handler only stores to an atomic, which is
        // async-signal-safe. No SA_RESTART, so that waits end.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Whether a signal asked the bench to end.
pub(crate) fn is_interrupted() -> bool {
    // Relaxed: see on_signal.
    INTERRUPTED.load(Ordering::Relaxed)
}

/// How a child ended, and what it and the children that it waited for used.
pub(crate) struct Ended {
    /// The exit status, 128+N for signal N.
    pub status: i32,
    /// Most resident memory of one process, in bytes.
    pub peak_bytes: u64,
    pub used: Used,
}

/// Time of CPUs, and how often they changed hands.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Used {
    pub user_seconds: f64,
    pub system_seconds: f64,
    /// Threads that had to give a CPU up.
    pub involuntary_switches: u64,
    /// Threads that went to sleep.
    pub voluntary_switches: u64,
}

impl Used {
    fn of(usage: &libc::rusage) -> Used {
        Used {
            user_seconds: seconds(usage.ru_utime),
            system_seconds: seconds(usage.ru_stime),
            involuntary_switches: usage.ru_nivcsw.unsigned_abs(),
            voluntary_switches: usage.ru_nvcsw.unsigned_abs(),
        }
    }
}

fn seconds(time: libc::timeval) -> f64 {
    time.tv_sec as f64 + time.tv_usec as f64 * 1e-6
}

/// Waits for the child `pid`.
pub(crate) fn wait4(pid: u32) -> io::Result<Ended> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    let mut status = 0;
    // SAFETY: an all-zero rusage is valid, and both pointers are to locals of the right type.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        while libc::wait4(pid, &raw mut status, 0, &raw mut usage) < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        usage
    };
    let status = if libc::WIFSIGNALED(status) {
        128 + libc::WTERMSIG(status)
    } else {
        libc::WEXITSTATUS(status)
    };
    let peak_bytes = usage.ru_maxrss.unsigned_abs() * 1024;
    Ok(Ended { status, peak_bytes, used: Used::of(&usage) })
}

/// Where a fault was, of a message that can only be of a fault.
pub(crate) fn fault_address(message: &uffd_msg) -> usize {
    // SAFETY: no other event was asked for.
    unsafe { message.arg.pagefault.address as usize }
}

/// A page of zeros, to be copied from.
pub(crate) static ZEROS: [u8; 4096] = [0; 4096];

/// Room for messages.
pub(crate) fn no_messages<const N: usize>() -> [uffd_msg; N] {
    // SAFETY: a message is plain integers.
    unsafe { std::mem::zeroed() }
}

/// Waits for messages and reads as many as there are and have room; returns how many.
pub(crate) fn read_faults(uffd: &Uffd, messages: &mut [uffd_msg]) -> io::Result<usize> {
    let bytes = size_of_val(messages);
    loop {
        // SAFETY: the kernel writes whole messages into room for so many.
        let read = unsafe { libc::read(uffd.number(), messages.as_mut_ptr().cast(), bytes) };
        if let Ok(read) = usize::try_from(read) {
            return Ok(read / size_of::<uffd_msg>());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// What [`on_fault`] serves faults by, and how long it computes for one.
static BY_SIGNAL: AtomicPtr<Uffd> = AtomicPtr::new(std::ptr::null_mut());
static BY_SIGNAL_WORK_US: AtomicU64 = AtomicU64::new(0);

/// Serves faults that are a SIGBUS where they are taken: a page of zeros each.
pub(crate) fn serve_by_signal(uffd: &'static Uffd, work_us: u64) -> io::Result<()> {
    BY_SIGNAL_WORK_US.store(work_us, Ordering::Relaxed);
    // Release pairs with the acquire in `on_fault`.
    BY_SIGNAL.store(std::ptr::from_ref(uffd).cast_mut(), Ordering::Release);
    // SAFETY: an all-zero sigaction is valid; the handler makes system calls and reads the clock,
    // which is async-signal-safe.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_fault(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes what there is to know of the signal.
    let page = unsafe { (*info).si_addr() }.addr() & !(ZEROS.len() - 1);
    // SAFETY: set before the handler was, to what lives for ever.
    let uffd = unsafe { BY_SIGNAL.load(Ordering::Acquire).as_ref() };
    super::handlers::compute(BY_SIGNAL_WORK_US.load(Ordering::Relaxed));
    let copied = uffd.map(|uffd| uffd.copy(page, ZEROS.as_ptr().addr(), ZEROS.len(), false));
    if copied.is_none_or(|copied| copied.done == 0) {
        // Not ours: the access, tried again, ends the process.
        // SAFETY: sets a disposition.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }
}

/// A mapping of 64-bit words that no other process sees, made by libc's mmap.
pub(crate) struct Mapping {
    base: *mut u64,
    words: usize,
}

impl Mapping {
    /// Maps `bytes`, which are a multiple of the page size: private and anonymous.
    pub(crate) fn new(bytes: usize) -> io::Result<Mapping> {
        Mapping::make(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// Maps the first `bytes` of memory that is a file, and the caller's alone; shared, or as a
    /// private copy.
    pub(crate) fn of_file(file: &MemoryFile, bytes: usize, is_shared: bool) -> io::Result<Mapping> {
        let flags = if is_shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        Mapping::make(bytes, flags, file.0.as_raw_fd())
    }

    fn make(bytes: usize, flags: libc::c_int, file: libc::c_int) -> io::Result<Mapping> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping where the kernel likes.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, flags, file, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { base: base.cast(), words: bytes / 8 })
    }

    /// The memory.
    pub(crate) fn words(&mut self) -> &mut [u64] {
        // SAFETY: the mapping is readable and writable, ours alone, and lives as long as self.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.words) }
    }

    /// The memory, to be read and written by many threads.
    pub(crate) fn shared_words(&mut self) -> &[AtomicU64] {
        // SAFETY: as above; an AtomicU64 has the size of a u64, the mapping begins at a page, and while
        // it is lent nothing else can write it.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.words) }
    }

    /// Has every fault be of one page, under Quire and under the kernel: no huge pages, and nothing mapped around.
    pub(crate) fn one_page_a_fault(&mut self) -> io::Result<()> {
        // A kernel without huge pages knows nothing of the first, and has none.
        let _ = self.advise(libc::MADV_NOHUGEPAGE);
        self.advise(libc::MADV_RANDOM)
    }

    /// madvise of the whole mapping, with an advice that keeps its content.
    fn advise(&mut self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is the mapping's own; its content stays what it is.
        let done = unsafe { libc::madvise(self.base.cast(), self.words * 8, advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Takes the right to write away from the whole mapping, and gives it back.
    pub(crate) fn protect_for_a_moment(&mut self) -> io::Result<()> {
        self.protect(libc::PROT_READ)?;
        let given_back = self.protect(libc::PROT_READ | libc::PROT_WRITE);
        // Else `words` would lend what must not be written.
        given_back.expect("the mapping could be written before");
        Ok(())
    }

    fn protect(&mut self, rights: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is the mapping's own, and nothing borrows it.
        let done = unsafe { libc::mprotect(self.base.cast(), self.words * 8, rights) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// madvise(MADV_PAGEOUT) of the whole mapping.
    pub(crate) fn page_out(&mut self) -> io::Result<()> {
        self.advise(libc::MADV_PAGEOUT)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping's own, and nothing borrows it any more.
        unsafe { libc::munmap(self.base.cast(), self.words * 8) };
    }
}

/// A file without a name, in memory.
pub(crate) struct MemoryFile(OwnedFd);

impl MemoryFile {
    pub(crate) fn in_memory(bytes: usize) -> io::Result<MemoryFile> {
        let file = memfd_create("quire-bench", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        Ok(MemoryFile(file))
    }
}

/// Has glibc's malloc make no mappings for large blocks, as far as that goes.
pub(crate) fn never_map_in_malloc() {
    // SAFETY: sets a number of the allocator's.
    unsafe { libc::mallopt(libc::M_MMAP_MAX, 0) };
}

/// A file mapped by the kernel, shared, to be read.
pub(crate) struct FileMapping {
    base: *const u64,
    words: usize,
}

impl FileMapping {
    /// Maps the first `bytes` of a file.
    pub(crate) fn new(path: &std::path::Path, bytes: usize) -> io::Result<FileMapping> {
        let file = std::fs::File::open(path)?;
        // SAFETY: a fresh mapping where the kernel likes.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(FileMapping { base: base.cast(), words: bytes / 8 })
    }

    /// Says how it will be used.
    pub(crate) fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        let base = self.base.cast_mut().cast();
        // SAFETY: the range is the mapping's own; advice about reading changes no content.
        let done = unsafe { libc::madvise(base, self.words * 8, advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// How many of its pages the kernel has cached; touches none.
    pub(crate) fn cached_pages(&self) -> io::Result<usize> {
        let bytes = self.words * 8;
        let mut pages = vec![0u8; bytes.div_ceil(4096)];
        // SAFETY: the range is the mapping's own, and there is a byte for each page of it.
        let done = unsafe { libc::mincore(self.base.cast_mut().cast(), bytes, pages.as_mut_ptr()) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(pages.iter().filter(|&&page| page & 1 != 0).count())
    }

    /// The memory.
    pub(crate) fn words(&self) -> &[u64] {
        // SAFETY: the mapping lives as long as self; no process writes the bench's own file.
        unsafe { std::slice::from_raw_parts(self.base, self.words) }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping's own, and nothing borrows it any more.
        unsafe { libc::munmap(self.base.cast_mut().cast(), self.words * 8) };
    }
}

fn usage() -> libc::rusage {
    // SAFETY: an all-zero rusage is valid, and the pointer is to a local of the right type.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    }
}

/// Minor faults of this process so far.
pub(crate) fn minor_faults() -> u64 {
    usage().ru_minflt.unsigned_abs()
}

/// What this process has used so far, all of its threads together.
pub(crate) fn used() -> Used {
    Used::of(&usage())
}

/// CPU time of this process so far, all of its threads together, in seconds.
pub(crate) fn cpu_seconds() -> f64 {
    let used = used();
    used.user_seconds + used.system_seconds
}

/// Maps an object of the bench's own.
pub(crate) fn map_object(
    options: &quire::library::MapOptions,
    object: &quire::library::Object,
) -> Result<quire::library::Mapping, quire::library::Error> {
    // SAFETY: no process writes the bench's own files while they are mapped.
    unsafe { options.map(object) }
}

/// A mapping that begins at a page, as words.
pub(crate) fn words_of(mapping: &[u8]) -> &[u64] {
    // SAFETY: any bytes are words.
    let (head, words, _) = unsafe { mapping.align_to::<u64>() };
    assert!(head.is_empty(), "a mapping begins at a page");
    words
}

/// Maps an object of the bench's own, to be written.
pub(crate) fn map_object_mut(
    options: &quire::library::MapOptions,
    object: &quire::library::Object,
) -> Result<quire::library::MappingMut, quire::library::Error> {
    // SAFETY: a caller that takes a slice of it has the only mapping; other callers have
    // `write_byte`.
    unsafe { options.map_mut(object) }
}

/// Writes a byte that other threads may write as well.
pub(crate) fn write_byte(mapping: &quire::library::MappingMut, at: usize, value: u8) {
    assert!(at < mapping.len());
    // SAFETY: inside of the mapping; atomic, because other mappings show the same byte.
    unsafe {
        let byte = mapping.as_ptr().add(at).cast_mut();
        std::sync::atomic::AtomicU8::from_ptr(byte).store(value, Ordering::Relaxed);
    }
}
