//! Rights that stay in the kernel after an unmap, on the real MMU. It is one test, since it changes a
//! limit of the process.

mod common;

use std::sync::atomic::Ordering;

use common::Tree;
use common::real::Engine;
use linux_raw_sys::general::__NR_pwrite64;
use quire::mmu::Prot;
use quire::sys::Errno;
use quire::units::{BLOCK_PAGES, PAGE_SIZE, PageNum, PageRange};
use rustix::fs::MemfdFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Pages that get their rights together: 16 MiB.
const STEP_PAGES: usize = 8 * BLOCK_PAGES;
const CHUNK_PAGES: usize = 128;

fn protects(engine: &Engine) -> usize {
    engine.space.mmu().1.load(Ordering::Relaxed)
}

fn unmap(engine: &Engine, range: PageRange) {
    engine.space.unmap(&mut engine.space.lock(), range).unwrap();
}

/// What a system call finds at a page's first byte.
fn look(engine: &Engine, page: PageNum) -> Result<u8, Errno> {
    use std::os::fd::AsRawFd;
    let file = rustix::fs::memfd_create(c"look", MemfdFlags::CLOEXEC).unwrap();
    let address = engine.space.mmu().0.address(page);
    // SAFETY: the kernel reads a byte, or finds that it may not.
    let result = unsafe {
        quire::sys::call::syscall(__NR_pwrite64, [file.as_raw_fd() as usize, address, 1, 0, 0, 0])
    };
    let mut byte = [0xff];
    result.map(|_| {
        rustix::io::pread(&file, &mut byte, 0).unwrap();
        byte[0]
    })
}

/// Has the kernel write a byte of a file's to memory of the arena.
fn read_into(file: &std::fs::File, memory: usize) -> Result<usize, Errno> {
    use std::os::fd::AsRawFd;
    let number = linux_raw_sys::general::__NR_read;
    // SAFETY: the kernel writes a byte of the arena's, or finds that it may not.
    unsafe { quire::sys::call::syscall(number, [file.as_raw_fd() as usize, memory, 1, 0, 0, 0]) }
}

fn chunks_come_and_go_without_a_change_of_rights(engine: &Engine) {
    let (first, _) = engine.map(CHUNK_PAGES);
    assert_eq!(protects(engine), 1, "the first opens a whole step");
    for round in 0..500 {
        let (range, memory) = engine.map(CHUNK_PAGES);
        assert_eq!(range.start, first.end, "addresses are used again");
        // SAFETY: mapped just now.
        unsafe {
            assert_eq!(memory.add(round).read_volatile(), 0, "round {round}");
            memory.add(round).write_volatile(7);
        }
        unmap(engine, range);
    }
    unmap(engine, first);
    assert_eq!(protects(engine), 1);
}

fn what_is_touched_is_sealed_once_and_opened_once(engine: &Engine) {
    let before = protects(engine);
    let (range, memory) = engine.map(CHUNK_PAGES);
    // SAFETY: mapped just now.
    unsafe { memory.write_volatile(9) };
    assert_eq!(look(engine, range.start), Ok(9));
    unmap(engine, range);
    assert_eq!(protects(engine), before);
    for page in range.pages().chain([PageNum(STEP_PAGES as u64 - 1)]) {
        assert_eq!(look(engine, page), Err(Errno::FAULT), "{page:?} is in no VMA");
    }
    assert_eq!(protects(engine), before + 1, "all of the stretch is sealed with the first page");
    let (again, _) = engine.map(CHUNK_PAGES);
    assert_eq!((again, protects(engine)), (range, before + 2));
    assert_eq!(look(engine, range.start), Ok(0), "what comes there next is zeros");
    assert_eq!(look(engine, range.end), Err(Errno::FAULT), "what is behind it was opened with it");
    unmap(engine, range);
}

fn other_rights_are_the_kernels_as_well(engine: &Engine) {
    let (range, _) = engine.map(CHUNK_PAGES);
    unmap(engine, range);
    for prot in [Prot::NONE, Prot::READ] {
        let before = protects(engine);
        engine.space.map_fixed(&mut engine.space.lock(), range, prot).unwrap();
        assert_eq!(protects(engine), before + 1, "{prot:?}");
        let expected = if prot == Prot::NONE { Err(Errno::FAULT) } else { Ok(0) };
        assert_eq!(look(engine, range.start), expected);
        let memory = engine.space.mmu().0.address(range.start);
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        assert_eq!(read_into(&zeros, memory), Err(Errno::FAULT), "{prot:?}");
        unmap(engine, range);
        assert_eq!(look(engine, range.start), Err(Errno::FAULT));
    }
}

/// Kilobytes of data, as RLIMIT_DATA counts them.
fn data_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmData:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// What is open counts as data, used or not: under a limit it must not be in the way.
fn what_is_open_is_given_back_under_a_limit(engine: &Engine) {
    let pages = STEP_PAGES * 3 / 4;
    let (low, _) = engine.map(pages);
    let before = data_kib();
    unmap(engine, low);
    assert!(data_kib() >= before, "it stays open");
    let old = getrlimit(Resource::Data);
    let limit = (data_kib() << 10) + (STEP_PAGES / 2 * PAGE_SIZE) as u64;
    setrlimit(Resource::Data, Rlimit { current: Some(limit), ..old }).unwrap();
    let far = PageNum(3 * STEP_PAGES as u64);
    let mapped = engine.space.map(&mut engine.space.lock(), Some(far), pages, Prot::READ_WRITE);
    setrlimit(Resource::Data, old).unwrap();
    assert_eq!(mapped, Ok(far));
    assert_eq!(look(engine, far), Ok(0));
    assert_eq!(look(engine, low.start), Err(Errno::FAULT));
    unmap(engine, PageRange::new(far, pages));
}

/// What the kernel would not seal may have any rights: they are asked for where it is mapped next.
fn what_could_not_be_sealed_is_mapped_with_rights_of_its_own(engine: &Engine) {
    let (range, memory) = engine.map(CHUNK_PAGES);
    engine.space.map_fixed(&mut engine.space.lock(), range, Prot::READ).unwrap();
    let refuses = &engine.space.mmu().2;
    refuses.store(true, Ordering::Relaxed);
    unmap(engine, range);
    refuses.store(false, Ordering::Relaxed);
    engine.space.map_fixed(&mut engine.space.lock(), range, Prot::READ_WRITE).unwrap();
    let zeros = std::fs::File::open("/dev/zero").unwrap();
    assert_eq!(read_into(&zeros, memory as usize), Ok(1), "the VMA says that it can be written");
    unmap(engine, range);
    assert_eq!(look(engine, range.start), Err(Errno::FAULT));
}

#[test]
fn rights_stay_where_nothing_is_and_nothing_can_be_reached_by_them() {
    let Some(engine) = Engine::start(Tree::default(), 8 * STEP_PAGES) else { return };
    engine.space.keep_rights(STEP_PAGES);
    chunks_come_and_go_without_a_change_of_rights(engine);
    what_is_touched_is_sealed_once_and_opened_once(engine);
    other_rights_are_the_kernels_as_well(engine);
    what_is_open_is_given_back_under_a_limit(engine);
    // Last: from then on every map asks for its rights.
    what_could_not_be_sealed_is_mapped_with_rights_of_its_own(engine);
}
