//! An engine on the real MMU in the test's own process: the threads that `process` starts, but as
//! plain ones, which have the descriptors as all other threads here.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use quire::mmu::userfaultfd::{FaultMessage, Userfaultfd};
use quire::mmu::{Done, FrameId, FrameRun, Holes, Mmu, Prot, Protection, Refusal, Sharer};
use quire::reclaim::{Balance, NoCaches};
use quire::scratch::Scratch;
use quire::space::VmSpace;
use quire::swap::SwapRead;
use quire::sys::clock::Moment;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};

use super::{Tree, space};

/// The real MMU, reachable from every thread; counts changes of rights, and refuses to take them away
/// while it is told to, as the kernel does where it has no mapping to spare.
pub struct Reachable(pub Userfaultfd, pub AtomicUsize, pub AtomicBool);

impl Mmu for Reachable {
    fn move_in(&self, pages: PageRange, frames: FrameId) -> Done {
        self.0.move_in(pages, frames)
    }
    fn move_out(&self, pages: PageRange, frames: FrameId, holes: Holes) -> Done {
        self.0.move_out(pages, frames, holes)
    }
    fn move_within(&self, from: PageRange, to: PageNum) -> Done {
        self.0.move_within(from, to)
    }
    unsafe fn copy_in(&self, pages: PageRange, source: *const u8, protection: Protection) -> Done {
        // SAFETY: the caller's promise.
        unsafe { self.0.copy_in(pages, source, protection) }
    }
    fn unmap(&self, pages: PageRange) {
        self.0.unmap(pages);
    }
    fn unmap_all(&self, runs: &[PageRange]) -> usize {
        self.0.unmap_all(runs)
    }
    fn look(&self, pages: PageRange, is_mapped: &mut [bool]) {
        self.0.look(pages, is_mapped);
    }
    fn find_missing(&self, pages: PageRange, is_missing: &mut [bool]) {
        self.0.find_missing(pages, is_missing);
    }
    fn find_empty(&self, frames: FrameRun, is_empty: &mut [bool]) {
        self.0.find_empty(frames, is_empty);
    }
    fn look_at_sharers(&self, pages: PageRange, sharers: &mut [Sharer]) -> bool {
        self.0.look_at_sharers(pages, sharers)
    }
    fn make_exclusive(&self, pages: PageRange) -> Done {
        self.0.make_exclusive(pages)
    }
    fn write_protect(&self, pages: PageRange, protection: Protection) -> Done {
        self.0.write_protect(pages, protection)
    }
    fn poison(&self, page: PageNum) -> Done {
        self.0.poison(page)
    }
    fn wake(&self, pages: PageRange) {
        self.0.wake(pages);
    }
    fn expect_foreign(&self) -> Result<(), rustix::io::Errno> {
        self.0.expect_foreign()
    }
    fn read(&self, page: PageNum, into: &mut [u8; PAGE_SIZE]) -> bool {
        self.0.read(page, into)
    }
    fn protect(&self, pages: PageRange, prot: Prot) -> Done {
        self.1.fetch_add(1, Ordering::Relaxed);
        if prot == Prot::NONE && self.2.load(Ordering::Relaxed) {
            return Done { pages: 0, refusal: Some(Refusal::NoMemory) };
        }
        self.0.protect(pages, prot)
    }
    fn reserve_again(&self, pages: PageRange) {
        self.0.reserve_again(pages);
    }
    fn frames_release(&self, frames: FrameRun) {
        self.0.frames_release(frames);
    }
    fn address_of(&self, page: PageNum) -> usize {
        self.0.address_of(page)
    }
    fn cycles(&self) -> u64 {
        self.0.cycles()
    }
    fn frame(&self, frame: FrameId) -> *mut [u8; PAGE_SIZE] {
        self.0.frame(frame)
    }
}

/// What must stay open as long as the engine lives, which is for ever.
struct Files {
    _memory: std::fs::File,
    _device: Option<std::fs::File>,
    _swap: Option<OwnedFd>,
}

/// An engine whose threads run until the test's process ends.
pub struct Engine {
    pub space: VmSpace<Reachable>,
    /// Whose fault came last, by the kernel's id.
    pub last_thread: AtomicU32,
    _files: Files,
}

impl Engine {
    /// Starts one; `None`, said loudly, where there is no right to a userfaultfd.
    pub fn start(tree: Tree, pages: usize) -> Option<&'static Engine> {
        match Engine::try_start(tree, pages) {
            Ok(engine) => Some(engine),
            Err(why) => {
                let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
                assert!(!is_ci, "the real MMU cannot be tested: {why}");
                eprintln!("NOT TESTED on the real MMU: {why}; see `quire doctor`");
                None
            }
        }
    }

    fn try_start(tree: Tree, pages: usize) -> Result<&'static Engine, String> {
        let open = |path: &str| std::fs::File::options().read(true).write(true).open(path);
        let device = open("/dev/userfaultfd").ok();
        let memory = open("/proc/self/mem").map_err(|error| error.to_string())?;
        let frames = (tree.budget_pages * 4).next_multiple_of(BLOCK_PAGES) + 16 * BLOCK_PAGES;
        let mmu = Userfaultfd::reserve(pages, frames).map_err(|error| error.to_string())?;
        mmu.attach(device.as_ref().map(AsRawFd::as_raw_fd), Some(memory.as_raw_fd()))
            .map_err(|error| format!("the process cannot get a userfaultfd: {error}"))?;
        mmu.register(PageRange::new(PageNum(0), pages)).map_err(|error| error.to_string())?;
        let (space, swap) =
            space(Reachable(mmu, AtomicUsize::new(0), AtomicBool::new(false)), tree, pages, frames);
        let has_swap = swap.is_some();
        let files = Files { _memory: memory, _device: device, _swap: swap };
        let last_thread = AtomicU32::new(0);
        let engine: &'static Engine =
            Box::leak(Box::new(Engine { space, last_thread, _files: files }));
        for _ in 0..2 {
            std::thread::spawn(|| engine.handle_faults());
        }
        std::thread::spawn(|| engine.reclaim());
        if has_swap {
            std::thread::spawn(|| engine.read_swap());
        }
        Ok(engine)
    }

    fn handle_faults(&self) {
        let mmu = &self.space.mmu().0;
        let mut scratch = Scratch::new().unwrap();
        loop {
            let Some(FaultMessage { page, access, thread }) = mmu.read_fault() else { continue };
            let since = Moment::now();
            // Before the answer: the thread's next step finds it.
            self.last_thread.store(thread.0, Ordering::SeqCst);
            self.space.handle_fault_of(thread, page, access, since, &mut scratch);
        }
    }

    fn reclaim(&self) {
        let mut scratch = Scratch::new().unwrap();
        loop {
            if self.space.balance(&NoCaches, &mut scratch) != Balance::Progress {
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        }
    }

    fn read_swap(&self) {
        let mut ring = self.space.swap().new_reader();
        let mut scratch = Scratch::new().unwrap();
        let mut requests = [SwapRead::NONE; 16];
        loop {
            let count = self.space.swap().take_requests(&mut requests);
            self.space.complete_reads(&requests[..count], &mut ring, &mut scratch);
        }
    }

    /// Waits until no handler holds a page any more: a fault is answered before its pages are
    /// unlocked.
    pub fn settle(&self, range: PageRange) {
        while range.pages().any(|page| self.space.snapshot(page).is_locked()) {
            std::thread::yield_now();
        }
    }

    /// Maps pages, readable and writable, and says where they are.
    pub fn map(&self, pages: usize) -> (PageRange, *mut u8) {
        let mut layout = self.space.lock();
        let start = self.space.map(&mut layout, None, pages, Prot::READ_WRITE).unwrap();
        (PageRange::new(start, pages), self.space.mmu().0.address(start) as *mut u8)
    }
}
