//! The real MMU: userfaultfd over the arena and the frame pool.

mod modes;
mod object;
mod pagemap;
mod spares;
mod touchers;

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use linux_raw_sys::general::{
    __NR_pread64, __NR_process_vm_readv, MADV_DOFORK, MADV_DONTFORK, MADV_DONTNEED,
    MADV_DONTNEED_LOCKED, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, UFFD_EVENT_PAGEFAULT,
    UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_MISSING_SHMEM, UFFD_FEATURE_MOVE,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_POISON, UFFD_FEATURE_SIGBUS,
    UFFD_FEATURE_THREAD_ID, UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_PAGEFAULT_FLAG_WP,
    UFFD_PAGEFAULT_FLAG_WRITE, UFFDIO_REGISTER_MODE_MISSING, uffd_msg,
};
use rustix::fd::{AsRawFd, IntoRawFd};
use rustix::mm::{MapFlags, ProtFlags};

use self::modes::Modes;
use self::spares::Spares;
use self::touchers::Touchers;
use super::{Access, Done, FrameId, FrameRun, Holes, Mmu, Prot, Protection, Refusal, Sharer};
use crate::sys::futex::{self, Reach};
use crate::sys::thread::{ThreadId, is_engine_thread, process_id};
use crate::sys::uffd::{Progress, Uffd};
use crate::sys::{Errno, call, memory};
use crate::units::{BLOCK_PAGES, PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange};

/// A fault of the arena, as the kernel reports it.
pub struct FaultMessage {
    pub page: PageNum,
    pub access: Access,
    pub thread: ThreadId,
}

/// The arena and the frame pool, each registered with a userfaultfd of its own.
///
/// The pool's is in SIGBUS mode: a mistake of the engine is a crash and not a hang.
///
/// # Errors
/// Of all calls: the kernel's.
pub struct Userfaultfd {
    arena: NonNull<u8>,
    arena_pages: usize,
    pool: NonNull<u8>,
    pool_frames: usize,
    /// Faults of the arena arrive here.
    pub faults: Uffd,
    modes: Modes,
    pool_faults: Uffd,
    /// /proc/self/mem, by which pages are read; -1 where it cannot be had.
    mem: AtomicI32,
    /// /proc/self/pagemap, once it was needed; -1 where it cannot be had.
    pagemap: AtomicI32,
    /// Whether every thread of the process has the descriptors, and not only the engine's.
    is_shared: AtomicBool,
    /// Whether faults are a SIGBUS in the thread that faults, which then serves itself.
    is_inline: AtomicBool,
    /// Counts of answers to such faults, by block: the futexes of threads that wait for one.
    answers: [AtomicU32; ANSWERS],
    /// Threads that wait for an answer, or are about to.
    waiting: AtomicU32,
    spares: Spares,
    touchers: Touchers,
}

/// Counters of answers; blocks share them.
const ANSWERS: usize = 64;
const ARENA_FEATURES: u32 = UFFD_FEATURE_MOVE
    | UFFD_FEATURE_POISON
    | UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | UFFD_FEATURE_THREAD_ID;
const POOL_FEATURES: u32 = UFFD_FEATURE_MOVE | UFFD_FEATURE_SIGBUS;

// SAFETY: the addresses are constant, and the kernel serialises the calls.
unsafe impl Send for Userfaultfd {}
// SAFETY: as above.
unsafe impl Sync for Userfaultfd {}

impl Userfaultfd {
    /// Reserves an arena of `arena_pages` without any rights, and a pool of `pool_frames` holes.
    pub fn reserve(arena_pages: usize, pool_frames: usize) -> Result<Userfaultfd, Errno> {
        let arena = memory::reserve(arena_pages << PAGE_SHIFT, memory::InitialProt::None)?;
        let pool = memory::reserve(pool_frames << PAGE_SHIFT, memory::InitialProt::ReadWrite);
        // SAFETY: just reserved, and no other thread knows of it.
        let give_back = |_: &Errno| unsafe { memory::release(arena, arena_pages << PAGE_SHIFT) };
        let pool = pool.inspect_err(give_back)?;
        let mmu = Userfaultfd {
            arena,
            arena_pages,
            pool,
            pool_frames,
            faults: Uffd::closed(),
            modes: Modes::default(),
            pool_faults: Uffd::closed(),
            mem: AtomicI32::new(-1),
            pagemap: AtomicI32::new(-1),
            is_shared: AtomicBool::new(false),
            is_inline: AtomicBool::new(false),
            answers: [const { AtomicU32::new(0) }; ANSWERS],
            waiting: AtomicU32::new(0),
            spares: Spares::default(),
            touchers: Touchers::default(),
        };
        // A child that the engine did not make finds nothing mapped, and so never reads a zero where
        // data was. A fork that the engine serves lifts this while it lasts.
        mmu.set_inherited(PageRange::new(PageNum(0), arena_pages), false)?;
        mmu.set_pool_inherited(false)?;
        Ok(mmu)
    }

    /// Opens the descriptors and registers both ranges; `mem` is /proc/self/mem.
    pub fn attach(&self, device: Option<i32>, mem: Option<i32>) -> Result<(), Errno> {
        self.faults.open(device, ARENA_FEATURES)?;
        self.pool_faults.open(device, POOL_FEATURES)?;
        self.register_pool(mem)
    }

    fn register_pool(&self, mem: Option<i32>) -> Result<(), Errno> {
        self.mem.store(mem.unwrap_or(-1), Ordering::Relaxed);
        let pool = self.pool.as_ptr() as usize;
        self.pool_faults.register(pool, self.pool_bytes(), UFFDIO_REGISTER_MODE_MISSING)
    }

    /// As [`Self::attach`], for an application that manages memory of its own: all its threads have
    /// the descriptors, and objects can be mapped. With `is_inline` a fault is a SIGBUS in the thread
    /// that faults. Says whether faults taken in system calls are served: they are not with
    /// `is_inline`, or without the right to.
    pub fn attach_shared(
        &self,
        device: Option<i32>,
        mem: Option<i32>,
        is_inline: bool,
    ) -> Result<bool, Errno> {
        let delivery = if is_inline { UFFD_FEATURE_SIGBUS } else { 0 };
        let features = delivery
            | ARENA_FEATURES
            | UFFD_FEATURE_MISSING_SHMEM
            | UFFD_FEATURE_MINOR_SHMEM
            | UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
        let serves_calls =
            self.faults.open(device, features).or_else(|_| self.faults.open(None, features));
        if serves_calls.is_err() {
            self.faults.open_user_mode_only(features)?;
        }
        self.pool_faults
            .open(device, POOL_FEATURES)
            .or_else(|_| self.pool_faults.open_user_mode_only(POOL_FEATURES))?;
        self.is_shared.store(true, Ordering::Relaxed);
        // Objects come and go in it.
        self.modes.set_protectable(true);
        self.is_inline.store(is_inline, Ordering::Relaxed);
        self.register_pool(mem)?;
        self.spares.hold();
        Ok(serves_calls.is_ok() && !is_inline)
    }

    /// How many answers there have been for a page, or one that shares its counter.
    #[cfg(feature = "library")]
    pub(crate) fn answers(&self, page: PageNum) -> u32 {
        // Acquire pairs with the release in `answer_inline`.
        self.answers[page.block() % ANSWERS].load(Ordering::Acquire)
    }

    /// Waits while there have been no more than `seen`; may return for no reason.
    #[cfg(feature = "library")]
    pub(crate) fn wait_for_answer(&self, page: PageNum, seen: u32) {
        // SeqCst, as in `answer_inline`: either the thread that answers sees this one wait, or the
        // kernel finds another count than `seen`.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        futex::wait(&self.answers[page.block() % ANSWERS], seen, Reach::Process, None);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Where threads serve themselves: the threads that wait for these pages try again.
    fn answer_inline(&self, pages: PageRange) {
        // Relaxed: set before any other thread knows the MMU.
        if !self.is_inline.load(Ordering::Relaxed) {
            return;
        }
        let blocks = pages.start.block()..PageNum(pages.end.0 - 1).block() + 1;
        for block in blocks.take(ANSWERS) {
            let answers = &self.answers[block % ANSWERS];
            // SeqCst: a release, so that a thread that sees the count sees what the answer is about;
            // and ordered before the look at the waiters, see `wait_for_answer`.
            answers.fetch_add(1, Ordering::SeqCst);
            if self.waiting.load(Ordering::SeqCst) > 0 {
                futex::wake(answers, u32::MAX, Reach::Process);
            }
        }
    }

    /// On a thread with the engine's descriptors, before a fork or where it is needed: opens what says whether
    /// a page is there, and whether another process has it.
    pub fn open_pagemap(&self) {
        // Relaxed, here and where it is read: a descriptor that stays open from now on.
        if self.pagemap.load(Ordering::Relaxed) < 0
            && let Ok(opened) = pagemap::open()
        {
            let number = opened.as_raw_fd();
            let is_first =
                self.pagemap.compare_exchange(-1, number, Ordering::Relaxed, Ordering::Relaxed);
            if is_first.is_ok() {
                let _ = opened.into_raw_fd();
            }
        }
    }

    /// The same in a fork's child, where nothing of the parent's is open.
    pub(crate) fn open_pagemap_in_child(&self) {
        self.pagemap.store(-1, Ordering::Relaxed);
        self.open_pagemap();
    }

    /// Of the pages from an address on that `is_missing` names, leaves those where there is no memory, nor what
    /// the kernel has swapped out by itself.
    fn find_missing_at(&self, start: usize, is_missing: &mut [bool]) {
        let mut is_there = [false; BLOCK_PAGES];
        let is_there = &mut is_there[..is_missing.len()];
        if memory::look(start, is_there).is_err() {
            is_there.fill(true);
        }
        let mut is_any = false;
        for (is_missing, is_there) in is_missing.iter_mut().zip(is_there) {
            *is_missing &= !*is_there;
            is_any |= *is_missing;
        }
        if !is_any {
            return;
        }
        let mut entries = [pagemap::PRESENT; BLOCK_PAGES];
        let entries = &mut entries[..is_missing.len()];
        self.open_pagemap();
        // Without it they are taken to be there.
        let _ = pagemap::read(self.pagemap.load(Ordering::Relaxed), start, entries);
        for (is_missing, &entry) in is_missing.iter_mut().zip(&*entries) {
            *is_missing &= entry & (pagemap::PRESENT | pagemap::SWAPPED) == 0;
        }
    }

    /// Says whether a stretch of the arena is inherited by a fork.
    pub fn set_inherited(&self, pages: PageRange, is_inherited: bool) -> Result<(), Errno> {
        self.advise(self.address(pages.start), pages.len(), inheritance(is_inherited))
    }

    /// Says whether the pool is inherited by a fork. It must be empty then: pages that two
    /// processes share do not move.
    pub(crate) fn set_pool_inherited(&self, is_inherited: bool) -> Result<(), Errno> {
        self.advise(self.pool.as_ptr() as usize, self.pool_frames, inheritance(is_inherited))
    }

    /// The descriptors' numbers: faults, pool, /proc/self/mem.
    pub fn descriptors(&self) -> [i32; 3] {
        [self.faults.number(), self.pool_faults.number(), self.mem.load(Ordering::Relaxed)]
    }

    /// Waits for a fault and reads it. `None` where another handler took it, it is answered already, or the
    /// wait was interrupted.
    pub fn read_fault(&self) -> Option<FaultMessage> {
        self.fault_of(self.faults.read().ok()?)
    }

    /// Reads a fault that has come already.
    ///
    /// # Errors
    /// `AGAIN` where none has; `OPNOTSUPP` where the kernel cannot look without waiting.
    pub(crate) fn read_fault_if_there(&self) -> Result<Option<FaultMessage>, Errno> {
        self.faults.read_if_there().map(|message| self.fault_of(message))
    }

    fn fault_of(&self, message: uffd_msg) -> Option<FaultMessage> {
        if u32::from(message.event) != UFFD_EVENT_PAGEFAULT {
            return None;
        }
        // SAFETY: the event says which part of the union is valid, and `attach` asks for the thread.
        let (fault, thread) = unsafe {
            let fault = message.arg.pagefault;
            (fault, ThreadId(fault.feat.ptid))
        };
        let access = if fault.flags & u64::from(UFFD_PAGEFAULT_FLAG_WP) != 0 {
            Access::WriteProtected
        } else if fault.flags & u64::from(UFFD_PAGEFAULT_FLAG_WRITE) != 0 {
            Access::Write
        } else {
            Access::Read
        };
        let page = self.page(fault.address as usize);
        let is_answered = self.touchers.answer(thread, page, || self.answer_toucher(page, access));
        (!is_answered).then_some(FaultMessage { page, access, thread })
    }

    /// Answers the fault of a thread that has the page's lock: the program has dropped the page.
    fn answer_toucher(&self, page: PageNum, access: Access) {
        let one = PageRange::new(page, 1);
        let done = match access {
            Access::WriteProtected => self.write_protect(one, Protection::Writable),
            // SAFETY: a page of bytes that are not managed.
            _ => unsafe { self.copy_in(one, [0u8; PAGE_SIZE].as_ptr(), Protection::Writable) },
        };
        if done.pages == 0 {
            self.wake(one);
        }
    }

    /// Address of a page's first byte.
    #[inline]
    pub fn address(&self, page: PageNum) -> usize {
        self.arena.as_ptr() as usize + (page.index() << PAGE_SHIFT)
    }

    /// The page that holds an address of the arena.
    #[inline]
    pub fn page(&self, address: usize) -> PageNum {
        PageNum(((address - self.arena.as_ptr() as usize) >> PAGE_SHIFT) as u64)
    }

    pub const fn arena_pages(&self) -> usize {
        self.arena_pages
    }

    pub(crate) const fn pool_frames(&self) -> usize {
        self.pool_frames
    }

    fn pool_bytes(&self) -> usize {
        self.pool_frames << PAGE_SHIFT
    }

    fn frame_address(&self, frame: FrameId) -> usize {
        debug_assert!((frame.0 as usize) < self.pool_frames);
        self.pool.as_ptr() as usize + ((frame.0 as usize) << PAGE_SHIFT)
    }

    fn advise(&self, start: usize, pages: usize, advice: u32) -> Result<(), Errno> {
        // SAFETY: only ranges of the arena and the pool are passed, whose page locks or frames
        // the caller holds.
        unsafe { memory::advise(start, pages << PAGE_SHIFT, advice) }
    }
}

/// Gives everything back: addresses, and the descriptors that `attach` opened. An engine that serves
/// a program never gets here; one that could not start does, and one that an application has closed.
impl Drop for Userfaultfd {
    fn drop(&mut self) {
        // SAFETY: reserved by `reserve`; a thread that drops the MMU has no mapping left.
        unsafe {
            memory::release(self.arena, self.arena_pages << PAGE_SHIFT);
            memory::release(self.pool, self.pool_bytes());
        }
        let [faults, pool, _] = self.descriptors();
        let pagemap = self.pagemap.load(Ordering::Relaxed);
        for descriptor in [faults, pool, pagemap].into_iter().filter(|&number| number >= 0) {
            // SAFETY: our own, and closed once.
            unsafe { rustix::io::close(descriptor) };
        }
    }
}

const fn inheritance(is_inherited: bool) -> u32 {
    if is_inherited { MADV_DOFORK } else { MADV_DONTFORK }
}

fn refusal(error: Errno) -> Refusal {
    match error {
        Errno::EXIST => Refusal::Exists,
        Errno::BUSY => Refusal::Busy,
        Errno::NOMEM => Refusal::NoMemory,
        Errno::FAULT => Refusal::Hole,
        _ => Refusal::Unmapped,
    }
}

fn done(progress: Progress) -> Done {
    Done { pages: progress.done >> PAGE_SHIFT, refusal: progress.error.map(refusal) }
}

/// Moves pages, and finds out what became of them where the kernel does not say: Linux 6.18 may
/// refuse a move with EEXIST that it has made (docs/decisions/0012).
fn move_pages(uffd: &Uffd, dst: usize, src: usize, len: usize, holes: Holes) -> Done {
    let mut at = 0;
    while at < len {
        let step = || uffd.move_pages(dst + at, src + at, len - at, holes == Holes::Skip);
        let progress = settled(step);
        at += progress.done;
        let Some(error) = progress.error else { break };
        let unsaid = match error {
            Errno::EXIST | Errno::NOENT => moved_unsaid(dst + at, src + at, len - at),
            _ => 0,
        };
        if unsaid == 0 {
            // Of a move ENOENT is a hole in its source.
            let refusal = if error == Errno::NOENT { Refusal::Hole } else { refusal(error) };
            return Done { pages: at >> PAGE_SHIFT, refusal: Some(refusal) };
        }
        uffd.wake(dst + at, unsaid);
        at += unsaid;
    }
    Done::all(len >> PAGE_SHIFT)
}

/// Bytes from the start that are at `dst` and no longer at `src`.
fn moved_unsaid(dst: usize, src: usize, len: usize) -> usize {
    let pages = (len >> PAGE_SHIFT).min(BLOCK_PAGES);
    let mut is_present = [[false; BLOCK_PAGES]; 2];
    for (start, is_present) in [dst, src].into_iter().zip(&mut is_present) {
        if memory::look(start, &mut is_present[..pages]).is_err() {
            return 0;
        }
    }
    let has_moved = |at: &usize| is_present[0][*at] && !is_present[1][*at];
    (0..pages).take_while(has_moved).count() << PAGE_SHIFT
}

fn finished(pages: usize, result: Result<(), Errno>) -> Done {
    match result {
        Ok(()) => Done::all(pages),
        Err(error) => Done { pages: 0, refusal: Some(refusal(error)) },
    }
}

/// Repeats a call while the kernel says that the layout is changing just now.
fn settled(mut step: impl FnMut() -> Progress) -> Progress {
    for _ in 0..64 {
        let progress = step();
        if progress.done > 0 || progress.error != Some(Errno::AGAIN) {
            return progress;
        }
    }
    Progress { done: 0, error: Some(Errno::BUSY) }
}

/// The same for a call that is done whole or not at all.
fn settled_whole(mut step: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    let progress = settled(|| Progress { done: 0, error: step().err() });
    progress.error.map_or(Ok(()), Err)
}

impl Mmu for Userfaultfd {
    fn move_in(&self, pages: PageRange, frames: FrameId) -> Done {
        let (dst, src) = (self.address(pages.start), self.frame_address(frames));
        let done = move_pages(&self.faults, dst, src, pages.len() << PAGE_SHIFT, Holes::Refuse);
        self.answer_inline(pages);
        done
    }

    fn move_out(&self, pages: PageRange, frames: FrameId, holes: Holes) -> Done {
        let (dst, src) = (self.frame_address(frames), self.address(pages.start));
        move_pages(&self.pool_faults, dst, src, pages.len() << PAGE_SHIFT, holes)
    }

    fn move_within(&self, from: PageRange, to: PageNum) -> Done {
        let (dst, src) = (self.address(to), self.address(from.start));
        move_pages(&self.faults, dst, src, from.len() << PAGE_SHIFT, Holes::Refuse)
    }

    unsafe fn copy_in(&self, pages: PageRange, source: *const u8, protection: Protection) -> Done {
        let protect = protection == Protection::WriteProtected;
        if protect && let Err(error) = self.make_protectable() {
            return finished(pages.len(), Err(error));
        }
        let dst = self.address(pages.start);
        let len = pages.len() << PAGE_SHIFT;
        let done = done(settled(|| self.faults.copy(dst, source as usize, len, protect)));
        self.answer_inline(pages);
        done
    }

    fn unmap(&self, pages: PageRange) {
        // What an application has locked goes as well: it would show what its memory holds next.
        let _ = self.advise(self.address(pages.start), pages.len(), MADV_DONTNEED_LOCKED);
    }

    fn unmap_all(&self, runs: &[PageRange]) -> usize {
        // One call, and one interrupt of the other CPUs, for any number of runs.
        let ranges = runs.iter().map(|run| (self.address(run.start), run.len() << PAGE_SHIFT));
        // SAFETY: ranges of the arena whose page locks the caller holds.
        if unsafe { memory::discard_all(ranges) }.is_ok() {
            return 1;
        }
        runs.iter().for_each(|&run| self.unmap(run));
        runs.len()
    }

    fn look(&self, pages: PageRange, is_mapped: &mut [bool]) {
        if memory::look(self.address(pages.start), is_mapped).is_err() {
            // Not all of it is mapped memory any more: the thread that changes that waits for our locks.
            is_mapped.fill(true);
        }
    }

    fn find_missing(&self, pages: PageRange, is_missing: &mut [bool]) {
        self.find_missing_at(self.address(pages.start), is_missing);
    }

    fn find_empty(&self, frames: FrameRun, is_empty: &mut [bool]) {
        self.find_missing_at(self.frame_address(frames.start), is_empty);
    }

    fn look_at_sharers(&self, pages: PageRange, sharers: &mut [Sharer]) -> bool {
        let pagemap = self.pagemap.load(Ordering::Relaxed);
        let mut entries = [0; BLOCK_PAGES];
        let entries = &mut entries[..sharers.len()];
        let is_read = pagemap::read(pagemap, self.address(pages.start), entries);
        for (sharer, &entry) in sharers.iter_mut().zip(&*entries) {
            *sharer = match (entry & pagemap::PRESENT != 0, entry & pagemap::EXCLUSIVE != 0) {
                (false, _) => Sharer::Missing,
                (true, true) => Sharer::None,
                (true, false) => Sharer::Others,
            };
        }
        is_read
    }

    fn make_exclusive(&self, pages: PageRange) -> Done {
        let start = self.address(pages.start);
        let populate = || self.advise(start, pages.len(), MADV_POPULATE_WRITE);
        finished(pages.len(), self.touchers.during(self.thread(), pages, populate))
    }

    fn write_protect(&self, pages: PageRange, protection: Protection) -> Done {
        let (start, len) = (self.address(pages.start), pages.len() << PAGE_SHIFT);
        let protect = protection == Protection::WriteProtected;
        let result = if protect { self.make_protectable() } else { Ok(()) };
        let act = |()| settled_whole(|| self.faults.write_protect(start, len, protect));
        finished(pages.len(), result.and_then(act))
    }

    fn poison(&self, page: PageNum) -> Done {
        finished(1, settled_whole(|| self.faults.poison(self.address(page), PAGE_SIZE)))
    }

    fn wake(&self, pages: PageRange) {
        self.answer_inline(pages);
        self.faults.wake(self.address(pages.start), pages.len() << PAGE_SHIFT);
    }

    fn expect_foreign(&self) -> Result<(), Errno> {
        self.make_protectable()
    }

    fn is_reachable(&self) -> bool {
        // Relaxed: set before any other thread knows the MMU.
        self.is_shared.load(Ordering::Relaxed) || is_engine_thread()
    }

    fn read(&self, page: PageNum, into: &mut [u8; PAGE_SIZE]) -> bool {
        let address = self.address(page);
        let place = into.as_mut_ptr() as usize;
        let vectors = [[place, PAGE_SIZE], [address, PAGE_SIZE]];
        let [local, remote] = vectors.each_ref().map(|vector| vector.as_ptr() as usize);
        let pid = process_id() as usize;
        let mem = self.mem.load(Ordering::Relaxed);
        // SAFETY: the kernel writes at most a page into `into`. By the file a page that is not there after all
        // is an error and no fault, and one without rights can be read.
        let read = unsafe {
            if mem >= 0 {
                call::syscall(__NR_pread64, [mem as usize, place, PAGE_SIZE, address, 0, 0])
            } else {
                call::syscall(__NR_process_vm_readv, [pid, local, 1, remote, 1, 0])
            }
        };
        read == Ok(PAGE_SIZE)
    }

    fn protect(&self, pages: PageRange, prot: Prot) -> Done {
        let start = self.address(pages.start);
        // SAFETY: the arena's range.
        let result = unsafe { memory::protect(start, pages.len() << PAGE_SHIFT, prot.0) };
        finished(pages.len(), result)
    }

    fn reserve_again(&self, pages: PageRange) {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let (start, len) = (self.address(pages.start), pages.len() << PAGE_SHIFT);
        // SAFETY: the arena's range, and the program unmaps what it put there.
        let again = || unsafe {
            rustix::mm::mmap_anonymous(start as *mut _, len, ProtFlags::empty(), flags)
                .and_then(|_| memory::advise(start, len, MADV_NOHUGEPAGE))
                .and_then(|()| memory::advise(start, len, MADV_DONTFORK))
                .and_then(|()| self.faults.register(start, len, self.modes.bits()))
        };
        let _ = self.spares.with(again);
    }

    fn frames_release(&self, frames: FrameRun) {
        let _ = self.advise(self.frame_address(frames.start), frames.len, MADV_DONTNEED);
    }

    fn address_of(&self, page: PageNum) -> usize {
        self.address(page)
    }

    fn cycles(&self) -> u64 {
        // SAFETY: every x86-64 CPU has it.
        unsafe { core::arch::x86_64::_rdtsc() }
    }

    fn frame(&self, frame: FrameId) -> *mut [u8; PAGE_SIZE] {
        self.frame_address(frame) as *mut _
    }
}
