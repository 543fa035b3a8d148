//! Objects on both MMUs: the same calls give the same results, and leave every page in the same
//! state: mapped or not, write-protected (as a mark as well, where nothing is mapped), poisoned, and
//! its bytes.
//!
//! Most tests are scripts that a seed chooses, run on both at once and compared after every call. The
//! real MMU needs the right to a userfaultfd; without it nothing can be compared, and a message says
//! so. With `CI=true` that is a failure.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use quire::mmu::Access;
use quire::mmu::object::{InspectObjects, Memfd, ObjectMmu};
use quire::mmu::userfaultfd::Userfaultfd;
use quire::mmu::{Done, Inspect, Mmu, Prot, Protection, Refusal};
use quire::units::{BLOCK_PAGES, ObjectPage, ObjectRange, PAGE_SIZE, PageNum, PageRange};
use quire_simulated::{Generator, Settings, Simulated, Trap};

/// Pages of the arena, and of the longest memfd.
const PAGES: usize = BLOCK_PAGES;
const MEMFD_PAGES: usize = 24;
/// Where the memfd is shown: all of it twice, a part of it with the right to read only.
const VIEWS: [(u64, u64, usize, Prot); 3] = [
    (0, 0, MEMFD_PAGES, Prot::READ_WRITE),
    (64, 0, MEMFD_PAGES, Prot::READ_WRITE),
    (128, 5, 8, Prot::READ),
];
/// Words of /proc/self/pagemap.
const PRESENT: u64 = 1 << 63;
const SWAP: u64 = 1 << 62;
const UFFD_WP: u64 = 1 << 57;

/// What there is at a page of the arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Found {
    is_present: bool,
    is_protected: bool,
    is_poisoned: bool,
    /// Its first byte, where it is mapped.
    byte: Option<u8>,
}

/// An MMU with a program on it.
trait Rig: Send + Sync + 'static {
    type M: ObjectMmu;
    fn mmu(&self) -> &Self::M;
    fn find(&self, page: PageNum) -> Found;
    /// The program's accesses. They wait for their faults.
    fn store(&self, page: PageNum, byte: u8);
    fn load(&self, page: PageNum) -> u8;
    /// Whether a read fails for good. Not for missing pages.
    fn is_refused(&self, page: PageNum) -> bool;
    fn next_fault(&self) -> (PageNum, Access);
}

impl Rig for Simulated {
    type M = Simulated;
    fn mmu(&self) -> &Simulated {
        self
    }
    fn find(&self, page: PageNum) -> Found {
        let mapping = self.mapping(page);
        let byte = mapping.is_present.then(|| self.load(page));
        Found {
            is_present: mapping.is_present,
            is_protected: mapping.is_write_protected,
            is_poisoned: mapping.is_poisoned == Some(true),
            byte,
        }
    }
    fn store(&self, page: PageNum, byte: u8) {
        // SAFETY: the test's threads do not write one page together.
        unsafe { (*self.access(page, true).unwrap())[0] = byte };
    }
    fn load(&self, page: PageNum) -> u8 {
        // SAFETY: as above.
        unsafe { (*self.access(page, false).unwrap())[0] }
    }
    fn is_refused(&self, page: PageNum) -> bool {
        matches!(self.try_access(page, false), Err(Trap::Bus | Trap::Segv))
    }
    fn next_fault(&self) -> (PageNum, Access) {
        Simulated::next_fault(self)
    }
}

/// The real one, with the files that its pages are looked at through.
struct Real {
    mmu: Userfaultfd,
    pagemap: std::fs::File,
    _device: Option<std::fs::File>,
}

impl Real {
    fn new() -> Result<Real, String> {
        let open =
            |path: &str, writes| std::fs::File::options().read(true).write(writes).open(path);
        let device = open("/dev/userfaultfd", true).ok();
        let pagemap = open("/proc/self/pagemap", false).map_err(|error| error.to_string())?;
        let mmu = Userfaultfd::reserve(PAGES, PAGES).map_err(|error| error.to_string())?;
        let number = device.as_ref().map(AsRawFd::as_raw_fd);
        mmu.attach_shared(number, None, false)
            .map_err(|error| format!("the process cannot get a userfaultfd: {error}"))?;
        mmu.register(PageRange::new(PageNum(0), PAGES)).map_err(|error| error.to_string())?;
        Ok(Real { mmu, pagemap, _device: device })
    }

    fn byte(&self, page: PageNum) -> *mut u8 {
        self.mmu.address(page) as *mut u8
    }
}

impl Rig for Real {
    type M = Userfaultfd;
    fn mmu(&self) -> &Userfaultfd {
        &self.mmu
    }
    fn find(&self, page: PageNum) -> Found {
        use std::os::unix::fs::FileExt;
        let mut word = [0; 8];
        let at = self.mmu.address(page) as u64 / PAGE_SIZE as u64 * 8;
        self.pagemap.read_exact_at(&mut word, at).unwrap();
        let word = u64::from_ne_bytes(word);
        let has = |bit: u64| word & bit != 0;
        Found {
            is_present: has(PRESENT),
            is_protected: has(UFFD_WP),
            // A mark is told as swapped.
            is_poisoned: has(SWAP) && !has(UFFD_WP),
            byte: has(PRESENT).then(|| self.load(page)),
        }
    }
    fn store(&self, page: PageNum, byte: u8) {
        // SAFETY: a page of the arena with the right to write; it may fault, and is answered.
        unsafe { self.byte(page).write_volatile(byte) };
    }
    fn load(&self, page: PageNum) -> u8 {
        // SAFETY: as above.
        unsafe { self.byte(page).read_volatile() }
    }
    fn is_refused(&self, page: PageNum) -> bool {
        // A system call says EFAULT where an access would be a signal.
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let arguments = [writer.as_raw_fd() as usize, self.byte(page) as usize, 1, 0, 0, 0];
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
}

fn simulated() -> Arc<Simulated> {
    Arc::new(Simulated::new(PAGES, PAGES, Settings::default()).unwrap())
}

fn real() -> Option<Arc<Real>> {
    match Real::new() {
        Ok(rig) => Some(Arc::new(rig)),
        Err(why) => {
            let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
            assert!(!is_ci, "the real MMU cannot be tested: {why}");
            eprintln!("NOT TESTED on the real MMU: {why}; see `quire doctor`");
            None
        }
    }
}

/// A call of a script.
#[derive(Clone, Debug)]
enum Call {
    /// Whole pages of one byte.
    Write(ObjectRange, u8),
    /// A few bytes of a page that is there.
    WritePart(ObjectPage, u8),
    Read(ObjectPage),
    Punch(ObjectRange),
    Resize(usize),
    MapCached(PageRange, Protection),
    Protect(PageRange, Protection),
    Unmap(PageRange),
    Poison(PageNum),
    /// The program writes a page that is mapped and can be written.
    Store(PageNum, u8),
    /// A view is mapped anew.
    Map(usize),
    Hide(usize),
}

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Came {
    Nothing,
    Done(Done),
    Byte(u8),
    Error(i32),
}

fn came(result: Result<(), quire::sys::Errno>) -> Came {
    result.map_or_else(|error| Came::Error(error.raw_os_error()), |()| Came::Nothing)
}

fn view(index: usize) -> PageRange {
    PageRange::new(PageNum(VIEWS[index].0), VIEWS[index].2)
}

fn map_view<M: ObjectMmu>(mmu: &M, memfd: Memfd, index: usize) -> Came {
    let (_, first, _, prot) = VIEWS[index];
    came(mmu.map_object(view(index), memfd, ObjectPage(first), prot))
}

fn make<R: Rig>(rig: &R, memfd: Memfd, call: &Call) -> Came {
    let mmu = rig.mmu();
    match *call {
        Call::Write(pages, byte) => {
            let bytes = vec![byte; pages.len() * PAGE_SIZE];
            came(mmu.memfd_write(memfd, pages.start.offset(), &bytes))
        }
        Call::WritePart(page, byte) => came(mmu.memfd_write(memfd, page.offset(), &[byte; 9])),
        Call::Read(page) => {
            let mut byte = [0];
            match mmu.memfd_read(memfd, page.offset(), &mut byte) {
                Ok(()) => Came::Byte(byte[0]),
                Err(error) => Came::Error(error.raw_os_error()),
            }
        }
        Call::Punch(pages) => came(mmu.memfd_punch(memfd, pages)),
        Call::Resize(pages) => came(mmu.memfd_resize(memfd, pages)),
        Call::MapCached(pages, protection) => Came::Done(mmu.map_cached(pages, protection)),
        Call::Protect(pages, protection) => Came::Done(mmu.write_protect(pages, protection)),
        Call::Unmap(pages) => {
            mmu.unmap(pages);
            Came::Nothing
        }
        Call::Poison(page) => Came::Done(mmu.poison(page)),
        Call::Store(page, byte) => {
            rig.store(page, byte);
            Came::Nothing
        }
        Call::Map(index) => map_view(mmu, memfd, index),
        Call::Hide(index) => {
            mmu.reserve_again(view(index));
            Came::Nothing
        }
    }
}

/// Chooses calls that the rules of `ObjectMmu` allow.
struct Script {
    generator: Generator,
    /// Which views are mapped.
    is_mapped: [bool; 3],
    len: usize,
}

impl Script {
    fn part(&mut self, pages: usize) -> (u64, usize) {
        let start = self.generator.below(pages);
        (start as u64, 1 + self.generator.below((pages - start).min(6)))
    }

    fn memfd_part(&mut self) -> ObjectRange {
        let (start, len) = self.part(self.len.max(1));
        ObjectRange::new(ObjectPage(start), len)
    }

    fn protection(&mut self) -> Protection {
        [Protection::Writable, Protection::WriteProtected][self.generator.below(2)]
    }

    fn next(&mut self, sim: &Simulated, memfd: Memfd) -> Option<Call> {
        let index = self.generator.below(VIEWS.len());
        let byte = self.generator.next_u64() as u8;
        let (start, len) = self.part(VIEWS[index].2);
        let pages = PageRange::new(PageNum(VIEWS[index].0 + start), len);
        let call = match self.generator.below(24) {
            0..5 if self.len > 0 => Call::Write(self.memfd_part(), byte),
            5 | 6 => {
                let page = self.memfd_part().start;
                let is_there = sim.is_in_memfd(memfd, page);
                is_there.then_some(Call::WritePart(page, byte))?
            }
            7 => {
                let page = self.memfd_part().start;
                let is_behind = page.index() >= self.len;
                (is_behind || sim.is_in_memfd(memfd, page)).then_some(Call::Read(page))?
            }
            8 | 9 => Call::Punch(self.memfd_part()),
            10 => {
                self.len = self.generator.below(MEMFD_PAGES + 1);
                Call::Resize(self.len)
            }
            11 if self.is_mapped[index] => {
                self.is_mapped[index] = false;
                Call::Hide(index)
            }
            11 | 12 => {
                self.is_mapped[index] = true;
                Call::Map(index)
            }
            _ if !self.is_mapped[index] => return None,
            13..18 => Call::MapCached(pages, self.protection()),
            18 => Call::Protect(pages, self.protection()),
            19 => Call::Unmap(pages),
            20 => Call::Poison(pages.start),
            21.. => {
                let is_open = sim.try_access(pages.start, true).is_ok_and(|found| found.is_ok());
                is_open.then_some(Call::Store(pages.start, byte))?
            }
            _ => return None,
        };
        Some(call)
    }
}

fn look<R: Rig>(rig: &R) -> Vec<(PageNum, Found)> {
    let pages = (0..VIEWS.len()).flat_map(|index| view(index).pages());
    pages.map(|page| (page, rig.find(page))).collect()
}

#[test]
fn the_same_calls_give_the_same_results_and_leave_the_same_pages() {
    let Some(real) = real() else { return };
    for seed in 0..60 {
        let sim = simulated();
        let memfds =
            (sim.memfd_open(MEMFD_PAGES).unwrap(), real.mmu().memfd_open(MEMFD_PAGES).unwrap());
        let mut script =
            Script { generator: Generator::new(seed), is_mapped: [false; 3], len: MEMFD_PAGES };
        let mut calls = vec![Call::Resize(MEMFD_PAGES), Call::Map(0), Call::Map(1), Call::Map(2)];
        script.is_mapped = [true; 3];
        let mut made = Vec::new();
        for _ in 0..600 {
            let call =
                if calls.is_empty() { script.next(&sim, memfds.0) } else { Some(calls.remove(0)) };
            let Some(call) = call else { continue };
            made.push(call.clone());
            let results = (make(&*sim, memfds.0, &call), make(&*real, memfds.1, &call));
            let last = &made[made.len().saturating_sub(12)..];
            assert_eq!(results.0, results.1, "simulated, real; seed {seed}, {last:?}");
            for (one, other) in look(&*sim).into_iter().zip(look(&*real)) {
                assert_eq!(one, other, "simulated, real; seed {seed}, {last:?}");
            }
        }
        for (index, _) in VIEWS.iter().enumerate() {
            sim.reserve_again(view(index));
            real.mmu().reserve_again(view(index));
        }
        sim.memfd_close(memfds.0);
        real.mmu().memfd_close(memfds.1);
        assert_eq!(sim.used(), 0, "memory is left over; seed {seed}");
    }
}

macro_rules! conformance {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            cases::$name(simulated());
            if let Some(real) = real() {
                cases::$name(real);
            }
        })*
    };
}

conformance!(
    a_page_that_is_not_cached_is_waited_for_until_it_is_mapped,
    a_cached_page_that_is_not_mapped_faults_as_well,
    a_protected_page_faults_at_the_first_write_in_each_mapping,
    a_punched_page_is_missing_in_every_mapping,
    behind_the_end_is_a_refusal_until_the_memfd_is_longer,
    what_is_filled_is_there_and_mapped_nowhere,
    a_wake_without_a_page_has_the_fault_sent_again,
    mapping_stops_at_a_hole_and_at_what_is_mapped,
    a_poisoned_page_is_refused_in_its_mapping_until_it_is_mapped,
);

#[test]
fn what_is_long_enough_has_an_alias_as_long_as_it_may_become() {
    let Some(real) = real() else { return };
    for (pages, len) in [(300, 300 * PAGE_SIZE), (MEMFD_PAGES, 0)] {
        let memfd = real.mmu().memfd_open(pages).unwrap();
        assert_eq!(memfd.alias.len, len);
        assert_eq!(memfd.alias.start == 0, len == 0);
        real.mmu().memfd_close(memfd);
    }
}

mod cases {
    use super::*;

    fn pages(start: u64, count: usize) -> PageRange {
        PageRange::new(PageNum(start), count)
    }

    fn refused(pages: usize, refusal: Refusal) -> Done {
        Done { pages, refusal: Some(refusal) }
    }

    /// A memfd of which the first four pages are cached, and the first two views of it.
    fn open<R: Rig>(rig: &R) -> Memfd {
        let memfd = rig.mmu().memfd_open(MEMFD_PAGES).unwrap();
        rig.mmu().memfd_resize(memfd, MEMFD_PAGES).unwrap();
        put(rig, memfd, 0, 4, 7);
        assert_eq!(map_view(rig.mmu(), memfd, 0), Came::Nothing);
        assert_eq!(map_view(rig.mmu(), memfd, 1), Came::Nothing);
        memfd
    }

    fn put<R: Rig>(rig: &R, memfd: Memfd, page: u64, count: usize, byte: u8) {
        let bytes = vec![byte; count * PAGE_SIZE];
        rig.mmu().memfd_write(memfd, ObjectPage(page).offset(), &bytes).unwrap();
    }

    fn map<R: Rig>(rig: &R, pages: PageRange, protection: Protection) {
        assert_eq!(rig.mmu().map_cached(pages, protection), Done::all(pages.len()));
    }

    pub fn a_page_that_is_not_cached_is_waited_for_until_it_is_mapped<R: Rig>(rig: Arc<R>) {
        let memfd = open(&*rig);
        for (is_write, access) in [(false, Access::Read), (true, Access::Write)] {
            let program = rig.clone();
            let page = PageNum(10 + u64::from(is_write));
            let thread = std::thread::spawn(move || {
                if is_write {
                    program.store(page, 9);
                }
                program.load(page)
            });
            assert_eq!(rig.next_fault(), (page, access));
            put(&*rig, memfd, page.0, 1, 5);
            assert!(!thread.is_finished(), "bytes alone are no answer");
            map(&*rig, PageRange::new(page, 1), Protection::Writable);
            assert_eq!(thread.join().unwrap(), if is_write { 9 } else { 5 });
        }
    }

    pub fn a_cached_page_that_is_not_mapped_faults_as_well<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        let program = rig.clone();
        let thread = std::thread::spawn(move || program.load(PageNum(2)));
        assert_eq!(rig.next_fault(), (PageNum(2), Access::Read));
        // The whole run, which the page is in the midst of.
        map(&*rig, pages(0, 4), Protection::WriteProtected);
        assert_eq!(thread.join().unwrap(), 7);
        assert!(!rig.find(PageNum(66)).is_present, "the other view is one of its own");
    }

    pub fn a_protected_page_faults_at_the_first_write_in_each_mapping<R: Rig>(rig: Arc<R>) {
        let memfd = open(&*rig);
        map(&*rig, pages(0, 1), Protection::WriteProtected);
        map(&*rig, pages(64, 1), Protection::WriteProtected);
        for page in [PageNum(0), PageNum(64)] {
            let program = rig.clone();
            let thread = std::thread::spawn(move || program.store(page, page.0 as u8 + 1));
            assert_eq!(rig.next_fault(), (page, Access::WriteProtected));
            let one = PageRange::new(page, 1);
            assert_eq!(
                rig.mmu().map_cached(one, Protection::Writable),
                refused(0, Refusal::Exists)
            );
            assert_eq!(rig.mmu().write_protect(one, Protection::Writable), Done::all(1));
            thread.join().unwrap();
            let mut byte = [0];
            rig.mmu().memfd_read(memfd, 0, &mut byte).unwrap();
            assert_eq!(byte[0], page.0 as u8 + 1);
        }
        assert_eq!(rig.load(PageNum(0)), 65, "both show the same page");
    }

    pub fn a_punched_page_is_missing_in_every_mapping<R: Rig>(rig: Arc<R>) {
        let memfd = open(&*rig);
        map(&*rig, pages(0, 4), Protection::Writable);
        map(&*rig, pages(64, 4), Protection::WriteProtected);
        rig.mmu().memfd_punch(memfd, ObjectRange::new(ObjectPage(1), 2)).unwrap();
        for start in [0, 64] {
            let found = [0, 1, 2, 3].map(|at| rig.find(PageNum(start + at)).is_present);
            assert_eq!(found, [true, false, false, true]);
        }
        let done = rig.mmu().map_cached(pages(1, 1), Protection::Writable);
        assert_eq!(done, refused(0, Refusal::Hole));
    }

    pub fn behind_the_end_is_a_refusal_until_the_memfd_is_longer<R: Rig>(rig: Arc<R>) {
        let memfd = open(&*rig);
        map(&*rig, pages(0, 4), Protection::Writable);
        rig.mmu().memfd_resize(memfd, 2).unwrap();
        assert!(!rig.is_refused(PageNum(1)));
        for page in [2, 3, 4, 66] {
            assert!(rig.is_refused(PageNum(page)), "page {page}");
        }
        assert_eq!(rig.mmu().memfd_read(memfd, ObjectPage(2).offset(), &mut [0]), {
            Err(quire::sys::Errno::INVAL)
        });
        rig.mmu().memfd_resize(memfd, 4).unwrap();
        let program = rig.clone();
        let thread = std::thread::spawn(move || program.load(PageNum(3)));
        assert_eq!(rig.next_fault(), (PageNum(3), Access::Read), "it is a hole now");
        put(&*rig, memfd, 3, 1, 6);
        map(&*rig, pages(3, 1), Protection::Writable);
        assert_eq!(thread.join().unwrap(), 6);
    }

    pub fn what_is_filled_is_there_and_mapped_nowhere<R: Rig>(rig: Arc<R>) {
        const LONG: usize = 300;
        let memfd = rig.mmu().memfd_open(LONG).unwrap();
        rig.mmu().memfd_resize(memfd, LONG).unwrap();
        assert_eq!(map_view(rig.mmu(), memfd, 0), Came::Nothing);
        // What is there already is replaced.
        put(&*rig, memfd, 5, 1, 1);
        put(&*rig, memfd, 170, 1, 1);
        map(&*rig, pages(5, 1), Protection::Writable);
        let fill = |page: u64, count: usize, byte: u8| {
            let bytes = vec![byte; count * PAGE_SIZE];
            rig.mmu().memfd_fill(memfd, ObjectPage(page).offset(), &bytes)
        };
        let byte_of = |page: u64| {
            let mut byte = [0];
            rig.mmu().memfd_read(memfd, ObjectPage(page).offset(), &mut byte).unwrap();
            byte[0]
        };
        for (page, count, byte) in [(0, 200, 9), (210, 90, 8), (202, 2, 7)] {
            fill(page, count, byte).unwrap();
            for page in [page, page + count as u64 - 1] {
                assert_eq!(byte_of(page), byte, "page {page}");
            }
        }
        assert_eq!([5, 100, 170].map(byte_of), [9; 3]);
        assert!(!rig.find(PageNum(4)).is_present);
        assert_eq!(rig.load(PageNum(5)), 9);
        rig.mmu().memfd_punch(memfd, ObjectRange::new(ObjectPage(100), 100)).unwrap();
        fill(90, 100, 6).unwrap();
        assert_eq!([89, 90, 120, 189].map(byte_of), [9, 6, 6, 6]);
        // The program sees what was filled once it is mapped, and its writes stay.
        map(&*rig, pages(0, 5), Protection::Writable);
        rig.store(PageNum(2), 3);
        assert_eq!((byte_of(2), byte_of(3)), (3, 9));
    }

    pub fn a_wake_without_a_page_has_the_fault_sent_again<R: Rig>(rig: Arc<R>) {
        let memfd = open(&*rig);
        let program = rig.clone();
        let thread = std::thread::spawn(move || program.load(PageNum(9)));
        for _ in 0..3 {
            assert_eq!(rig.next_fault(), (PageNum(9), Access::Read));
            rig.mmu().wake(pages(9, 1));
        }
        assert_eq!(rig.next_fault(), (PageNum(9), Access::Read));
        // To be mapped elsewhere is no answer.
        put(&*rig, memfd, 9, 1, 6);
        map(&*rig, pages(73, 1), Protection::Writable);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!thread.is_finished());
        map(&*rig, pages(9, 1), Protection::Writable);
        assert_eq!(thread.join().unwrap(), 6);
    }

    pub fn mapping_stops_at_a_hole_and_at_what_is_mapped<R: Rig>(rig: Arc<R>) {
        open(&*rig);
        let done = rig.mmu().map_cached(pages(2, 4), Protection::Writable);
        assert_eq!(done, refused(2, Refusal::Hole));
        let done = rig.mmu().map_cached(pages(0, 4), Protection::WriteProtected);
        assert_eq!(done, refused(2, Refusal::Exists));
        let done = rig.mmu().map_cached(pages(0, 4), Protection::WriteProtected);
        assert_eq!(done, refused(0, Refusal::Exists));
        let found = [0, 1, 2, 3, 4].map(|page| rig.find(PageNum(page)));
        assert_eq!(found.map(|found| found.is_present), [true, true, true, true, false]);
        assert_eq!(found.map(|found| found.is_protected), [true, true, false, false, false]);
    }

    pub fn a_poisoned_page_is_refused_in_its_mapping_until_it_is_mapped<R: Rig>(rig: Arc<R>) {
        let memfd = open(&*rig);
        assert_eq!(rig.mmu().poison(PageNum(8)), Done::all(1));
        assert!(rig.is_refused(PageNum(8)));
        rig.mmu().memfd_punch(memfd, ObjectRange::new(ObjectPage(8), 1)).unwrap();
        put(&*rig, memfd, 8, 1, 6);
        assert!(rig.is_refused(PageNum(8)), "the mark is the mapping's");
        map(&*rig, pages(72, 1), Protection::Writable);
        assert_eq!(rig.load(PageNum(72)), 6, "only where it was marked");
        map(&*rig, pages(8, 1), Protection::WriteProtected);
        assert_eq!(rig.load(PageNum(8)), 6);
        // What was protected leaves a mark of its own behind, which is in the way.
        rig.mmu().memfd_punch(memfd, ObjectRange::new(ObjectPage(8), 1)).unwrap();
        assert_eq!(rig.mmu().poison(PageNum(8)), refused(0, Refusal::Exists));
        assert_eq!(rig.mmu().write_protect(pages(8, 1), Protection::Writable), Done::all(1));
        assert_eq!(rig.mmu().poison(PageNum(8)), Done::all(1));
    }
}
