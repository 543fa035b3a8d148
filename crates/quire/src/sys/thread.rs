//! Raw threads, of which libc never hears; `process/threads.rs` says why.

use core::ffi::CStr;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use linux_raw_sys::general::{
    __NR_clone, __NR_close_range, __NR_exit, __NR_rt_sigprocmask, __NR_sched_getattr,
    __NR_sched_setattr, __NR_sched_setscheduler, CLONE_FILES, CLONE_FS, CLONE_SETTLS,
    CLONE_SIGHAND, CLONE_SYSVSEM, CLONE_THREAD, CLONE_VM,
};

use super::call::syscall;
use super::{Errno, memory, yard};

pub(crate) const STACK_BYTES: usize = 256 * 1024;
/// What libraries may have below the thread pointer; ours is never read, only there.
const TLS_BYTES: usize = 128 * 1024;
const SIGNAL_SET_BYTES: usize = 8;
/// Stands behind an engine thread's thread pointer, where a program's thread has an address.
const ENGINE_MARK: usize = 0x5155_4952_452d_4d4d;

/// A thread, by the number that the kernel has for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ThreadId(pub u32);

impl ThreadId {
    pub const UNKNOWN: ThreadId = ThreadId(0);
    /// The thread that asks, whose number is looked up where it is needed.
    pub(crate) const CALLER: ThreadId = ThreadId(u32::MAX);
}

/// Whether a thread shares its maker's descriptor table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Files {
    /// A copy of it, private from then on.
    Private,
    /// The same.
    Shared,
}

/// An engine thread's stack and TLS block: made once, used again by a fork's child.
pub struct ThreadMemory {
    base: NonNull<u8>,
    number: usize,
}

// SAFETY: plain memory, used by one thread at a time.
unsafe impl Send for ThreadMemory {}
// SAFETY: as above.
unsafe impl Sync for ThreadMemory {}

impl ThreadMemory {
    /// Maps a stack and a TLS block for the engine thread with this number, which no other thread of
    /// the process has.
    pub fn new(number: usize) -> Result<ThreadMemory, Errno> {
        let base = yard::take(STACK_BYTES + TLS_BYTES)?;
        // A stack that overflows must not overwrite the TLS block of another thread.
        // SAFETY: the first page of our own mapping.
        unsafe { memory::protect(base.as_ptr() as usize, 4096, 0) }?;
        Ok(ThreadMemory { base, number })
    }

    /// Starts `entry(argument)` on this stack. The caller has blocked all signals.
    ///
    /// # Safety
    /// No other thread runs on the stack; `entry` never returns and uses no thread-local, and
    /// `argument` is valid for as long as it runs.
    pub unsafe fn spawn(
        &self,
        files: Files,
        entry: extern "C" fn(usize) -> !,
        argument: usize,
    ) -> Result<u32, Errno> {
        let mut flags =
            CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS;
        if files == Files::Shared {
            flags |= CLONE_FILES;
        }
        let stack = self.base.as_ptr() as usize + STACK_BYTES;
        let thread_pointer = stack + TLS_BYTES - 4096;
        // SAFETY: the block is inside the mapping. x86-64's ABI wants the thread pointer at its own
        // address; compilers' stack protectors read a canary behind it, which is zero here.
        unsafe {
            let block = thread_pointer as *mut [usize; 4];
            block.write([thread_pointer, ENGINE_MARK, thread_pointer, self.number]);
        }
        let result: isize;
        // SAFETY: the child runs on its own stack and jumps to `entry`, which never returns; the
        // parent's stack is not touched by it.
        unsafe {
            core::arch::asm!(
                "syscall",
                "test rax, rax",
                "jnz 2f",
                "xor ebp, ebp",
                "mov rdi, r12",
                "call r13",
                "ud2",
                "2:",
                inlateout("rax") __NR_clone as isize => result,
                in("rdi") flags as usize,
                in("rsi") stack - 64,
                in("rdx") 0usize,
                in("r10") 0usize,
                in("r8") thread_pointer,
                in("r12") argument,
                in("r13") entry as usize,
                lateout("rcx") _,
                lateout("r11") _,
            );
        }
        if result < 0 { Err(Errno::from_raw_os_error(-result as i32)) } else { Ok(result as u32) }
    }
}

/// Whether the calling thread is one of the engine's: only those have its descriptors.
#[inline]
#[must_use]
pub(crate) fn is_engine_thread() -> bool {
    // SAFETY: a word of libc's or our own control block.
    unsafe { word_of_thread::<8>() == ENGINE_MARK }
}

/// The word `OFFSET` bytes behind the calling thread's thread pointer.
///
/// # Safety
/// There is one.
#[inline]
unsafe fn word_of_thread<const OFFSET: usize>() -> usize {
    let word: usize;
    // SAFETY: every thread has a thread pointer; the rest is the caller's promise.
    unsafe {
        core::arch::asm!(
            "mov {}, fs:[{}]", out(reg) word, const OFFSET,
            options(nostack, readonly, preserves_flags),
        );
    }
    word
}

/// The number of the calling thread among the engine's own; `None` for any other thread.
#[inline]
#[must_use]
pub(crate) fn engine_number() -> Option<usize> {
    // SAFETY: the mark says that the block behind the thread pointer is one of `ThreadMemory::spawn`'s,
    // which writes the number there before the thread starts.
    is_engine_thread().then(|| unsafe { word_of_thread::<24>() })
}

/// Whether the processor tells its number: [`UNKNOWN`], [`NO`] or [`YES`]. Relaxed: every thread that
/// finds it unknown finds out the same.
static HAS_RDPID: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;
const NO: u32 = 1;
const YES: u32 = 2;

/// The CPU that the calling thread was on just now; `None` where only a system call would tell.
#[inline]
#[must_use]
pub(crate) fn cpu() -> Option<u32> {
    match HAS_RDPID.load(Ordering::Relaxed) {
        YES => {}
        NO => return None,
        _ => {
            find_rdpid();
            return cpu();
        }
    }
    let number: u64;
    // SAFETY: the processor has the instruction. It reads a register that Linux fills with the
    // CPU's number, and the node's above bit 12.
    unsafe {
        core::arch::asm!("rdpid {}", out(reg) number, options(nomem, nostack, preserves_flags));
    }
    Some(number as u32 & 0xfff)
}

#[cold]
fn find_rdpid() {
    HAS_RDPID.store(if super::cpu::has_rdpid() { YES } else { NO }, Ordering::Relaxed);
}

/// The calling thread's thread pointer: an address that no other live thread has.
#[inline]
#[must_use]
pub(crate) fn thread_pointer() -> usize {
    // SAFETY: every thread has one, libc's or our own (`ThreadMemory::spawn`), and x86-64's ABI has its
    // own address stand there.
    unsafe { word_of_thread::<0>() }
}

/// Signals blocked, until dropped.
pub struct SignalsBlocked {
    old: u64,
}

impl SignalsBlocked {
    /// Blocks the signals that others send to this thread, but those with which libc reaches all
    /// threads (setuid, cancellation): for threads that libc has made.
    #[must_use]
    pub fn of_others() -> SignalsBlocked {
        const LIBCS: u64 = 1 << 31 | 1 << 32;
        // SIGILL, SIGTRAP, SIGBUS, SIGFPE and SIGSEGV: the thread's own doing.
        const OWN: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10;
        SignalsBlocked::of(!(LIBCS | OWN))
    }

    /// Blocks every signal of this thread that can be blocked.
    #[must_use]
    pub fn new() -> SignalsBlocked {
        SignalsBlocked::of(u64::MAX)
    }

    fn of(signals: u64) -> SignalsBlocked {
        let mut old = 0u64;
        set_mask(&signals, Some(&mut old));
        SignalsBlocked { old }
    }
}

impl Default for SignalsBlocked {
    fn default() -> SignalsBlocked {
        SignalsBlocked::new()
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        set_mask(&self.old, None);
    }
}

fn set_mask(new: &u64, old: Option<&mut u64>) {
    const SIG_SETMASK: usize = 2;
    let old = old.map_or(0, |old| core::ptr::from_mut(old) as usize);
    let new = core::ptr::from_ref(new) as usize;
    // SAFETY: both point to signal sets of the size that is passed.
    let _ =
        unsafe { syscall(__NR_rt_sigprocmask, [SIG_SETMASK, new, old, SIGNAL_SET_BYTES, 0, 0]) };
}

/// Runs the calling thread on one CPU only: the `nth` of those where it may run, counted round.
pub fn pin_to_nth_cpu(nth: usize) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    if let Some(cpu) = cpus.nth(nth % (allowed.count().max(1) as usize)) {
        let mut one = CpuSet::new();
        one.set(cpu);
        // A refusal leaves the thread where it may run anyway.
        let _ = sched_setaffinity(None, &one);
    }
}

/// Gives up preempting others when woken (SCHED_BATCH): a handler then runs when the thread that
/// faulted has gone to sleep, not before, and on its CPU.
pub fn never_preempt() {
    const SCHED_BATCH: usize = 3;
    let priority = 0u32;
    let priority = core::ptr::from_ref(&priority) as usize;
    // SAFETY: the kernel reads one integer.
    let _ = unsafe { syscall(__NR_sched_setscheduler, [0, SCHED_BATCH, priority, 0, 0, 0]) };
}

/// Has the calling thread run soon when it is woken, on a busy CPU as well: it asks for short slices,
/// and the kernel (from 6.12) runs the thread first whose slice would end first. It needs no right.
pub(crate) fn run_soon() {
    const SCHED_OTHER: u32 = 0;
    /// The least that the kernel knows.
    const SLICE_NS: u64 = 100_000;
    /// The kernel's `struct sched_attr`, in its first version.
    #[repr(C)]
    #[derive(Default)]
    struct SchedAttributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime_ns: u64,
        deadline_ns: u64,
        period_ns: u64,
    }
    const SIZE: usize = size_of::<SchedAttributes>();
    let mut attributes = SchedAttributes::default();
    let place = core::ptr::from_mut(&mut attributes) as usize;
    // SAFETY: the kernel writes at most as many bytes as it is told there are.
    if unsafe { syscall(__NR_sched_getattr, [0, place, SIZE, 0, 0, 0]) }.is_err() {
        return;
    }
    // What it is apart from that, its niceness, stays.
    let attributes =
        SchedAttributes { policy: SCHED_OTHER, priority: 0, runtime_ns: SLICE_NS, ..attributes };
    let place = core::ptr::from_ref(&attributes) as usize;
    // SAFETY: the kernel reads a structure that says how large it is. A refusal leaves the thread as
    // soon as any other.
    let _ = unsafe { syscall(__NR_sched_setattr, [0, place, 0, 0, 0, 0]) };
}

pub(crate) fn set_name(name: &CStr) {
    let _ = rustix::thread::set_name(name);
}

/// Closes the descriptors `first..=last` of the calling thread's table.
pub(crate) fn close_range(first: u32, last: u32) {
    // SAFETY: closes descriptors of a private table only.
    let _ = unsafe { syscall(__NR_close_range, [first as usize, last as usize, 0, 0, 0, 0]) };
}

#[must_use]
pub(crate) fn process_id() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
}

#[must_use]
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Ends the process as the kernel's OOM killer would.
pub(crate) fn kill_process() -> ! {
    use rustix::process::{Signal, getpid, kill_process};
    loop {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}

pub fn exit_thread() -> ! {
    loop {
        // SAFETY: does not return.
        let _ = unsafe { syscall(__NR_exit, [0; 6]) };
    }
}

/// A flag that one thread sets and another waits for.
#[derive(Default)]
pub struct Signal(AtomicU32);

impl Signal {
    /// Sets it to `value` (not 0) and wakes the thread that waits.
    pub fn set(&self, value: u32) {
        // Release publishes what was done before.
        self.0.store(value, Ordering::Release);
        super::futex::wake(&self.0, u32::MAX, super::futex::Reach::Process);
    }

    /// Waits until it is set; returns its value and clears it.
    pub fn wait(&self) -> u32 {
        loop {
            let value = self.0.swap(0, Ordering::Acquire);
            if value != 0 {
                return value;
            }
            super::futex::wait(&self.0, 0, super::futex::Reach::Process, None);
        }
    }
}
