//! One conformance suite for both MMUs: what each operation does to every page, whole, in part,
//! and refused.
//!
//! The real MMU needs the right to a userfaultfd (`quire doctor` says whether the process has it).
//! Without it that half is left out, with a message; with `CI=true` that is a failure.

mod common;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use quire::mmu::Access;
use quire::mmu::userfaultfd::Userfaultfd;
use quire::mmu::{Done, FrameId, FrameRun, Holes, Inspect, Mmu, Prot, Protection, Refusal};
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};
use quire_simulated::{Settings, Simulated, Trap};

const PAGES: usize = 2 * BLOCK_PAGES;
const FRAMES: usize = 2 * BLOCK_PAGES;

/// An MMU with a program on it.
trait Rig: Send + Sync + 'static {
    type M: Mmu;
    fn mmu(&self) -> &Self::M;
    /// Whether a page is mapped, and faults at the next write.
    fn is_present(&self, page: PageNum) -> bool;
    fn is_protected(&self, page: PageNum) -> bool;
    /// The program's accesses. They wait for their faults.
    fn store(&self, page: PageNum, at: usize, byte: u8);
    fn load(&self, page: PageNum, at: usize) -> u8;
    /// Whether a read fails for good. Not for missing pages.
    fn is_refused(&self, page: PageNum) -> bool;
    /// The next fault's message.
    fn next_fault(&self) -> (PageNum, Access);
    /// Another process has the mapped pages as well from now on, until the result is dropped.
    fn share(&self, pages: PageRange) -> Box<dyn std::any::Any>;

    /// A page of one byte.
    fn fill(&self, pages: PageRange, byte: u8) {
        for page in pages.pages() {
            let bytes = [byte; PAGE_SIZE];
            let one = PageRange::new(page, 1);
            // SAFETY: a page of ours.
            let done = unsafe { self.mmu().copy_in(one, bytes.as_ptr(), Protection::Writable) };
            assert_eq!(done, Done::all(1));
        }
    }

    fn present(&self, pages: PageRange) -> Vec<bool> {
        pages.pages().map(|page| self.is_present(page)).collect()
    }
}

impl Rig for Simulated {
    type M = Simulated;
    fn mmu(&self) -> &Simulated {
        self
    }
    fn is_present(&self, page: PageNum) -> bool {
        self.mapping(page).is_present
    }
    fn is_protected(&self, page: PageNum) -> bool {
        self.mapping(page).is_write_protected
    }
    fn store(&self, page: PageNum, at: usize, byte: u8) {
        // SAFETY: the test's threads do not write one page together.
        unsafe { (*self.access(page, true).unwrap())[at] = byte };
    }
    fn load(&self, page: PageNum, at: usize) -> u8 {
        // SAFETY: as above.
        unsafe { (*self.access(page, false).unwrap())[at] }
    }
    fn is_refused(&self, page: PageNum) -> bool {
        matches!(self.try_access(page, false), Err(Trap::Bus | Trap::Segv))
    }
    fn next_fault(&self) -> (PageNum, Access) {
        Simulated::next_fault(self)
    }
    fn share(&self, pages: PageRange) -> Box<dyn std::any::Any> {
        pages.pages().for_each(|page| Simulated::share(self, page));
        Box::new(())
    }
}

/// The real one, with the files that its pages are looked at through.
struct Real {
    mmu: Userfaultfd,
    pagemap: std::fs::File,
    _memory: std::fs::File,
    _device: Option<std::fs::File>,
}

/// A child that only waits to be killed.
struct Child(rustix::process::Pid);

impl Drop for Child {
    fn drop(&mut self) {
        use rustix::process::{Signal, WaitOptions, kill_process, waitpid};
        kill_process(self.0, Signal::KILL).unwrap();
        waitpid(Some(self.0), WaitOptions::empty()).unwrap();
    }
}

impl Real {
    fn new() -> Result<Real, String> {
        let open =
            |path: &str, writes| std::fs::File::options().read(true).write(writes).open(path);
        let device = open("/dev/userfaultfd", true).ok();
        let memory = open("/proc/self/mem", true).map_err(|error| error.to_string())?;
        let pagemap = open("/proc/self/pagemap", false).map_err(|error| error.to_string())?;
        let mmu = Userfaultfd::reserve(PAGES, FRAMES).map_err(|error| error.to_string())?;
        let number = device.as_ref().map(AsRawFd::as_raw_fd);
        mmu.attach(number, Some(memory.as_raw_fd()))
            .map_err(|error| format!("the process cannot get a userfaultfd: {error}"))?;
        mmu.register(PageRange::new(PageNum(0), PAGES)).map_err(|error| error.to_string())?;
        Ok(Real { mmu, pagemap, _memory: memory, _device: device })
    }

    fn pagemap(&self, page: PageNum) -> u64 {
        use std::os::unix::fs::FileExt;
        let mut entry = [0; 8];
        let at = self.mmu.address(page) as u64 / PAGE_SIZE as u64 * 8;
        self.pagemap.read_exact_at(&mut entry, at).unwrap();
        u64::from_ne_bytes(entry)
    }

    fn byte(&self, page: PageNum, at: usize) -> *mut u8 {
        (self.mmu.address(page) + at) as *mut u8
    }
}

impl Rig for Real {
    type M = Userfaultfd;
    fn mmu(&self) -> &Userfaultfd {
        &self.mmu
    }
    fn is_present(&self, page: PageNum) -> bool {
        self.pagemap(page) >> 63 & 1 != 0
    }
    fn is_protected(&self, page: PageNum) -> bool {
        self.pagemap(page) >> 57 & 1 != 0
    }
    fn store(&self, page: PageNum, at: usize, byte: u8) {
        // SAFETY: a page of the arena with the right to write; it may fault, and is answered.
        unsafe { self.byte(page, at).write_volatile(byte) };
    }
    fn load(&self, page: PageNum, at: usize) -> u8 {
        // SAFETY: as above.
        unsafe { self.byte(page, at).read_volatile() }
    }
    fn is_refused(&self, page: PageNum) -> bool {
        // A system call says EFAULT where an access would be a signal.
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let arguments = [writer.as_raw_fd() as usize, self.byte(page, 0) as usize, 1, 0, 0, 0];
        let number = linux_raw_sys::general::__NR_write;
        // SAFETY: the kernel only reads, or fails.
        let result = unsafe { quire::sys::call::syscall(number, arguments) };
        result == Err(quire::sys::Errno::FAULT)
    }
    fn next_fault(&self) -> (PageNum, Access) {
        use linux_raw_sys::general::{UFFD_PAGEFAULT_FLAG_WP, UFFD_PAGEFAULT_FLAG_WRITE};
        let message = self.mmu.faults.read().unwrap();
        // SAFETY: no other event was asked for.
        let fault = unsafe { message.arg.pagefault };
        let has = |flag: u32| fault.flags & u64::from(flag) != 0;
        let access = if has(UFFD_PAGEFAULT_FLAG_WP) {
            Access::WriteProtected
        } else if has(UFFD_PAGEFAULT_FLAG_WRITE) {
            Access::Write
        } else {
            Access::Read
        };
        (self.mmu.page(fault.address as usize), access)
    }
    fn share(&self, pages: PageRange) -> Box<dyn std::any::Any> {
        self.mmu.set_inherited(pages, true).unwrap();
        let number = linux_raw_sys::general::__NR_fork;
        // SAFETY: the child makes no other call than pause, so that it needs nothing of ours.
        let pid = unsafe { quire::sys::call::syscall(number, [0; 6]) }.unwrap();
        if pid == 0 {
            loop {
                // SAFETY: it takes no argument.
                let _ = unsafe {
                    quire::sys::call::syscall(linux_raw_sys::general::__NR_pause, [0; 6])
                };
            }
        }
        self.mmu.set_inherited(pages, false).unwrap();
        Box::new(Child(rustix::process::Pid::from_raw(pid as i32).unwrap()))
    }
}

/// Runs a case on both.
fn on_both(simulated: impl FnOnce(Arc<Simulated>), real: impl FnOnce(Arc<Real>)) {
    simulated(Arc::new(Simulated::new(PAGES, FRAMES, Settings::default()).unwrap()));
    match Real::new() {
        Ok(rig) => real(Arc::new(rig)),
        Err(why) => {
            let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
            assert!(!is_ci, "the real MMU cannot be tested: {why}");
            eprintln!("NOT TESTED on the real MMU: {why}; see `quire doctor`");
        }
    }
}

macro_rules! conformance {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            on_both(cases::$name, cases::$name);
        })*
    };
}

/// Write protection is asked for when the first page is to have it, over the whole arena: never over
/// what the program has mapped there meanwhile, whose faults would have no answer.
#[test]
fn what_is_foreign_has_its_faults_served_by_the_kernel_in_either_order() {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let round = |rig: Arc<Real>| {
        let (ours, foreign) = (PageRange::new(PageNum(0), 2), PageRange::new(PageNum(8), 4));
        assert!(!rig.mmu.is_protectable());
        assert_eq!(rig.mmu.protect(ours, Prot::READ_WRITE), Done::all(2));
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                let bytes = [7; 2 * PAGE_SIZE];
                // SAFETY: as many bytes as pages are filled.
                let copied =
                    unsafe { rig.mmu.copy_in(ours, bytes.as_ptr(), Protection::WriteProtected) };
                assert_eq!(copied, Done::all(2));
            });
            start.wait();
            rig.mmu.expect_foreign().unwrap();
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::PRIVATE | MapFlags::FIXED;
            let at = rig.mmu.address(foreign.start) as *mut _;
            // SAFETY: pages of the arena that are not in use.
            unsafe { mmap_anonymous(at, foreign.len() * PAGE_SIZE, rights, flags) }.unwrap();
        });
        assert!(rig.is_protected(PageNum(0)) && rig.mmu.is_protectable());
        // Missing pages: had they been registered, this would wait for ever.
        foreign.pages().for_each(|page| rig.store(page, 0, 1));
        rig.mmu.reserve_again(foreign);
        assert!(!rig.is_present(foreign.start));
    };
    (0..50).for_each(|_| on_both(|_| (), round));
}

conformance!(
    a_copy_maps_its_bytes_and_stops_at_what_is_mapped,
    a_copy_needs_no_right_to_write,
    a_protected_copy_faults_at_the_first_write,
    what_moves_out_and_in_again_keeps_its_bytes,
    a_move_steps_over_holes_or_stops_at_them,
    a_move_in_stops_at_what_is_mapped,
    nothing_moves_without_the_right_to_write,
    a_move_within_takes_the_page_along,
    a_move_does_not_carry_write_protection,
    an_unmapped_page_is_missing_again,
    a_page_without_rights_can_still_be_read_by_the_engine,
    a_poisoned_page_is_lost_until_it_is_unmapped,
    a_copy_over_a_poisoned_page_ends_it,
    a_released_place_is_a_hole,
    a_woken_fault_is_sent_again_and_a_copy_answers_it,
    a_move_answers_the_fault_that_waits_for_it,
    a_shared_page_is_busy_until_it_is_exclusive,
);

mod cases {
    use super::*;

    fn pages(start: u64, count: usize) -> PageRange {
        PageRange::new(PageNum(start), count)
    }

    /// The first pages, with all rights.
    fn open<R: Rig>(rig: &R) {
        assert_eq!(rig.mmu().protect(pages(0, 64), Prot::READ_WRITE).refusal, None);
    }

    fn refused(pages: usize, refusal: Refusal) -> Done {
        Done { pages, refusal: Some(refusal) }
    }

    fn copy<R: Rig>(rig: &R, to: PageRange, byte: u8, protection: Protection) -> Done {
        let bytes = vec![byte; to.len() * PAGE_SIZE];
        // SAFETY: as many pages as the range has.
        unsafe { rig.mmu().copy_in(to, bytes.as_ptr(), protection) }
    }

    pub fn a_copy_maps_its_bytes_and_stops_at_what_is_mapped<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        assert_eq!(copy(&*rig, pages(0, 4), 7, Protection::Writable), Done::all(4));
        assert_eq!((rig.load(PageNum(3), 4095), rig.is_present(PageNum(4))), (7, false));
        rig.fill(pages(6, 1), 9);
        let done = copy(&*rig, pages(4, 4), 8, Protection::Writable);
        assert_eq!(done, refused(2, Refusal::Exists));
        assert_eq!(rig.present(pages(4, 4)), [true, true, true, false]);
        assert_eq!([4, 5, 6].map(|page| rig.load(PageNum(page), 0)), [8, 8, 9]);
        let again = copy(&*rig, pages(6, 1), 8, Protection::Writable);
        assert_eq!(again, refused(0, Refusal::Exists));
    }

    pub fn a_copy_needs_no_right_to_write<R: Rig>(rig: Arc<R>) {
        for (at, prot) in [(0, Prot::READ), (8, Prot::NONE)] {
            assert_eq!(rig.mmu().protect(pages(at, 8), prot).refusal, None);
            assert_eq!(copy(&*rig, pages(at, 8), 5, Protection::Writable), Done::all(8));
        }
        assert_eq!(rig.load(PageNum(7), 1), 5);
        assert!(rig.is_refused(PageNum(8)));
        assert!(!rig.is_refused(PageNum(0)));
    }

    pub fn a_protected_copy_faults_at_the_first_write<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        assert_eq!(copy(&*rig, pages(0, 2), 5, Protection::WriteProtected), Done::all(2));
        assert!(rig.is_protected(PageNum(0)) && rig.load(PageNum(0), 0) == 5);
        let program = rig.clone();
        let thread = std::thread::spawn(move || program.store(PageNum(0), 0, 6));
        assert_eq!(rig.next_fault(), (PageNum(0), Access::WriteProtected));
        assert_eq!(rig.load(PageNum(0), 0), 5, "the write waits");
        assert_eq!(rig.mmu().write_protect(pages(0, 1), Protection::Writable), Done::all(1));
        thread.join().unwrap();
        assert_eq!(rig.load(PageNum(0), 0), 6);
        assert!(rig.is_protected(PageNum(1)));
        assert_eq!(rig.mmu().write_protect(pages(0, 2), Protection::WriteProtected), Done::all(2));
        assert!(rig.is_protected(PageNum(0)));
    }

    pub fn what_moves_out_and_in_again_keeps_its_bytes<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 16), 3);
        rig.store(PageNum(9), 77, 4);
        assert_eq!(rig.mmu().move_out(pages(0, 16), FrameId(100), Holes::Skip), Done::all(16));
        assert!(rig.present(pages(0, 16)).iter().all(|is_present| !is_present));
        // SAFETY: the frames are the test's.
        let frame = unsafe { *rig.mmu().frame(FrameId(109)) };
        assert_eq!((frame[76], frame[77]), (3, 4));
        // SAFETY: as above.
        unsafe { (*rig.mmu().frame(FrameId(110)))[0] = 5 };
        assert_eq!(rig.mmu().move_in(pages(32, 16), FrameId(100)), Done::all(16));
        assert_eq!((rig.load(PageNum(41), 77), rig.load(PageNum(42), 0)), (4, 5));
        // Their places are holes: they can be moved to again.
        assert_eq!(rig.mmu().move_out(pages(32, 16), FrameId(100), Holes::Refuse), Done::all(16));
    }

    pub fn a_move_steps_over_holes_or_stops_at_them<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 2), 1);
        rig.fill(pages(4, 2), 2);
        let done = rig.mmu().move_out(pages(0, 6), FrameId(0), Holes::Refuse);
        assert_eq!(done, refused(2, Refusal::Hole));
        assert_eq!(rig.present(pages(0, 6)), [false, false, false, false, true, true]);
        let done = rig.mmu().move_out(pages(2, 4), FrameId(2), Holes::Skip);
        assert_eq!(done, Done::all(4));
        assert!(rig.present(pages(0, 6)).iter().all(|is_present| !is_present));
        assert_eq!(rig.mmu().move_in(pages(20, 2), FrameId(4)), Done::all(2));
        assert_eq!(rig.load(PageNum(21), 0), 2);
        // A place that nothing was moved to has nothing to move.
        assert_eq!(rig.mmu().move_in(pages(22, 1), FrameId(2)), refused(0, Refusal::Hole));
    }

    pub fn a_move_in_stops_at_what_is_mapped<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 4), 1);
        assert_eq!(rig.mmu().move_out(pages(0, 4), FrameId(0), Holes::Refuse), Done::all(4));
        rig.fill(pages(12, 1), 2);
        let done = rig.mmu().move_in(pages(10, 4), FrameId(0));
        assert_eq!(done, refused(2, Refusal::Exists));
        assert_eq!([10, 11, 12].map(|page| rig.load(PageNum(page), 0)), [1, 1, 2]);
        assert!(!rig.is_present(PageNum(13)));
        // What was not moved is where it was.
        assert_eq!(rig.mmu().move_in(pages(13, 2), FrameId(2)), Done::all(2));
    }

    pub fn nothing_moves_without_the_right_to_write<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 8), 1);
        for prot in [Prot::READ, Prot::NONE] {
            assert_eq!(rig.mmu().protect(pages(4, 4), prot).refusal, None);
            let done = rig.mmu().move_out(pages(4, 4), FrameId(0), Holes::Skip);
            assert_eq!(done, refused(0, Refusal::Unmapped));
            // Over the end of a mapping nothing moves at all.
            let done = rig.mmu().move_out(pages(0, 8), FrameId(0), Holes::Skip);
            assert_eq!(done, refused(0, Refusal::Unmapped));
        }
        assert_eq!(rig.mmu().move_out(pages(0, 4), FrameId(0), Holes::Skip), Done::all(4));
        let done = rig.mmu().move_in(pages(4, 4), FrameId(0));
        assert_eq!(done, refused(0, Refusal::Unmapped));
    }

    pub fn a_move_within_takes_the_page_along<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 2), 8);
        assert_eq!(rig.mmu().move_within(pages(0, 2), PageNum(30)), Done::all(2));
        assert_eq!(rig.present(pages(0, 2)), [false, false]);
        assert_eq!(rig.load(PageNum(31), 0), 8);
        rig.fill(pages(0, 1), 9);
        let onto = rig.mmu().move_within(pages(0, 1), PageNum(30));
        assert_eq!(onto, refused(0, Refusal::Exists));
        let hole = rig.mmu().move_within(pages(5, 1), PageNum(40));
        assert_eq!(hole, refused(0, Refusal::Hole));
    }

    pub fn a_move_does_not_carry_write_protection<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        assert_eq!(copy(&*rig, pages(0, 1), 5, Protection::WriteProtected), Done::all(1));
        assert_eq!(rig.mmu().move_out(pages(0, 1), FrameId(0), Holes::Refuse), Done::all(1));
        assert_eq!(rig.mmu().move_in(pages(0, 1), FrameId(0)), Done::all(1));
        assert!(!rig.is_protected(PageNum(0)), "the engine sets it anew, and so may stop to");
    }

    pub fn an_unmapped_page_is_missing_again<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 4), 8);
        rig.mmu().unmap(pages(1, 2));
        assert_eq!(rig.present(pages(0, 4)), [true, false, false, true]);
        // Also where nothing is.
        rig.mmu().unmap(pages(1, 2));
        rig.fill(pages(1, 2), 9);
        assert_eq!(rig.load(PageNum(2), 0), 9);
    }

    pub fn a_page_without_rights_can_still_be_read_by_the_engine<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 1), 8);
        let mut bytes = [0; PAGE_SIZE];
        for prot in [Prot::READ_WRITE, Prot::READ, Prot::NONE] {
            assert_eq!(rig.mmu().protect(pages(0, 2), prot).refusal, None);
            bytes.fill(0);
            assert!(rig.mmu().read(PageNum(0), &mut bytes));
            assert_eq!(bytes, [8; PAGE_SIZE]);
            assert_eq!(rig.is_refused(PageNum(0)), prot == Prot::NONE);
        }
    }

    pub fn a_poisoned_page_is_lost_until_it_is_unmapped<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(1, 1), 8);
        assert_eq!(rig.mmu().poison(PageNum(1)), refused(0, Refusal::Exists));
        assert_eq!(rig.mmu().poison(PageNum(0)), Done::all(1));
        assert!(rig.is_refused(PageNum(0)));
        assert!(!rig.is_refused(PageNum(1)), "only that page");
        assert_eq!(rig.mmu().move_out(pages(1, 1), FrameId(0), Holes::Refuse), Done::all(1));
        assert_eq!(rig.mmu().move_in(pages(0, 1), FrameId(0)), refused(0, Refusal::Exists));
        let out = rig.mmu().move_out(pages(0, 1), FrameId(1), Holes::Skip);
        assert_eq!(out, refused(0, Refusal::Hole), "it is not a hole to be stepped over");
        rig.mmu().unmap(pages(0, 1));
        assert_eq!(rig.mmu().move_in(pages(0, 1), FrameId(0)), Done::all(1));
        assert_eq!(rig.load(PageNum(0), 0), 8);
    }

    /// So the engine must not copy where a page is lost.
    pub fn a_copy_over_a_poisoned_page_ends_it<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        assert_eq!(rig.mmu().poison(PageNum(0)), Done::all(1));
        assert_eq!(copy(&*rig, pages(0, 1), 5, Protection::Writable), Done::all(1));
        assert_eq!(rig.load(PageNum(0), 0), 5);
    }

    pub fn a_released_place_is_a_hole<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 4), 8);
        assert_eq!(rig.mmu().move_out(pages(0, 4), FrameId(8), Holes::Refuse), Done::all(4));
        rig.mmu().frames_release(FrameRun { start: FrameId(8), len: 3 });
        assert_eq!(rig.mmu().move_in(pages(0, 1), FrameId(9)), refused(0, Refusal::Hole));
        assert_eq!(rig.mmu().move_in(pages(0, 1), FrameId(11)), Done::all(1));
        rig.fill(pages(1, 3), 9);
        assert_eq!(rig.mmu().move_out(pages(1, 3), FrameId(8), Holes::Refuse), Done::all(3));
    }

    pub fn a_woken_fault_is_sent_again_and_a_copy_answers_it<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        let program = rig.clone();
        let thread = std::thread::spawn(move || program.load(PageNum(5), 10));
        assert_eq!(rig.next_fault(), (PageNum(5), Access::Read));
        rig.mmu().wake(pages(4, 1));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!thread.is_finished(), "another page's wake");
        rig.mmu().wake(pages(5, 1));
        assert_eq!(rig.next_fault(), (PageNum(5), Access::Read));
        rig.fill(pages(5, 1), 6);
        assert_eq!(thread.join().unwrap(), 6);
    }

    pub fn a_move_answers_the_fault_that_waits_for_it<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 1), 6);
        assert_eq!(rig.mmu().move_out(pages(0, 1), FrameId(0), Holes::Refuse), Done::all(1));
        let program = rig.clone();
        let thread = std::thread::spawn(move || {
            program.store(PageNum(0), 1, 7);
            program.load(PageNum(0), 0)
        });
        assert_eq!(rig.next_fault(), (PageNum(0), Access::Write));
        assert_eq!(rig.mmu().move_in(pages(0, 1), FrameId(0)), Done::all(1));
        assert_eq!(thread.join().unwrap(), 6);
        assert_eq!(rig.load(PageNum(0), 1), 7);
    }

    pub fn a_shared_page_is_busy_until_it_is_exclusive<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        rig.fill(pages(0, 4), 6);
        let child = rig.share(pages(1, 2));
        let done = rig.mmu().move_out(pages(0, 4), FrameId(0), Holes::Skip);
        assert_eq!(done, refused(1, Refusal::Busy));
        assert_eq!(rig.present(pages(0, 4)), [false, true, true, true]);
        drop(child);
        let done = rig.mmu().move_out(pages(1, 1), FrameId(1), Holes::Skip);
        assert_eq!(done, refused(0, Refusal::Busy), "also after the other has gone");
        assert_eq!(rig.mmu().make_exclusive(pages(1, 2)), Done::all(2));
        assert_eq!(rig.mmu().move_out(pages(1, 3), FrameId(1), Holes::Skip), Done::all(3));
        assert_eq!(rig.mmu().move_in(pages(0, 4), FrameId(0)), Done::all(4));
        assert_eq!(rig.load(PageNum(2), 9), 6);
    }
}
