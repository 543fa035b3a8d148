//! Fault-around: which pages a read fault makes present, as the kernel sees it.

#[path = "common/objects.rs"]
mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{PAGE, Watchdog, load, random, space, survive_sigbus};
use quire::library::{FaultAround, MapOptions, Object, Pattern};
use quire::mmu::{Access, Prot};
use quire::object::{IoBuffer, Keeper, MapRequest, Objects};
use quire::page::{Flags, State};
use quire::store::Operation;
use quire::sys::clock::Moment;
use quire::units::{BLOCK_PAGES, ObjectPage, ObjectRange};
use quire_simulated::tree::{self, Tree};
use quire_simulated::{Generator, Ones, Settings, Simulated};
use quire_test_stores::{DelayStore, VecStore};

/// Which of so many pages from an address on are present, by the kernel's page table.
fn present(start: *const u8, pages: usize) -> Vec<usize> {
    const PRESENT: u64 = 1 << 63;
    let mut entries = vec![0; pages * 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entries, (start as usize / PAGE * 8) as u64).unwrap();
    let entries =
        entries.chunks_exact(8).map(|entry| u64::from_ne_bytes(entry.try_into().unwrap()));
    entries.enumerate().filter(|(_, entry)| entry & PRESENT != 0).map(|(page, _)| page).collect()
}

/// The first page of a mapping at whose address a window of so many pages begins.
fn first_of_window(start: *const u8, pages: usize) -> usize {
    (start as usize / PAGE).next_multiple_of(pages) - start as usize / PAGE
}

#[test]
fn a_window_is_aligned_and_cut_to_its_mapping_and_to_the_objects_end() {
    const PAGES: usize = 700;
    survive_sigbus();
    let Some(space) = space(8 << 20) else { return };
    let bytes = random(PAGES * PAGE - 100, 21);
    let object = Object::with_store(&space, VecStore::new(bytes.clone()), None).unwrap();
    let mut all = vec![0; bytes.len()];
    assert_eq!(object.read_at(0, &mut all).unwrap(), all.len());
    let mut generator = Generator::new(22);
    let mut cuts = [0; 3];
    for _ in 0..400 {
        let order = generator.below(10) as u32;
        let first = generator.below(PAGES);
        // Up to some pages behind the object's end.
        let len = 1 + generator.below(PAGES + 40 - first);
        let options = MapOptions::new()
            .offset((first * PAGE) as u64)
            .len((len * PAGE) as u64)
            .beyond_end(true)
            .fault_around(FaultAround::Order(order));
        // SAFETY: nothing writes the object, and no byte behind its end is accessed.
        let map = unsafe { options.map(&object) }.unwrap();
        let asked = generator.below(len.min(PAGES - first));
        assert_eq!(load(map.as_ptr(), asked * PAGE), Some(bytes[(first + asked) * PAGE]));
        let start = map.as_ptr() as usize / PAGE;
        let window = (start + asked) >> order << order;
        let [begin, end] =
            [window, window + (1 << order)].map(|page| page.clamp(start, start + len));
        let end = end.min(start + PAGES - first);
        let expected: Vec<usize> = (begin - start..end - start).collect();
        assert_eq!(present(map.as_ptr(), len), expected, "order {order}, {first} + {len}, {asked}");
        assert_eq!(map.mapped_pages(), expected.len());
        let is_cut = [window < start, start + len < window + (1 << order), end < start + len];
        cuts.iter_mut().zip(is_cut).for_each(|(cuts, is_cut)| *cuts += usize::from(is_cut));
    }
    assert!(cuts.iter().all(|&cuts| cuts > 10), "{cuts:?} windows were cut at each side");
}

#[test]
fn a_page_that_cannot_be_had_at_once_is_skipped_and_the_others_come() {
    const WINDOW: usize = 16;
    const PAGES: usize = 2 * WINDOW;
    let _watchdog = Watchdog::new(60);
    survive_sigbus();
    let Some(space) = space(8 << 20) else { return };
    let bytes = random(PAGES * PAGE, 23);
    let slow = Arc::new(DelayStore::new(VecStore::new(bytes.clone())));
    let object = Object::with_store(&space, Arc::clone(&slow), None).unwrap();
    let mut all = vec![0; bytes.len()];
    assert_eq!(object.read_at(0, &mut all).unwrap(), all.len());
    let alone = MapOptions::new().fault_around(FaultAround::Off).pattern(Pattern::Random);
    // SAFETY: one byte of it is written, and read by no slice meanwhile.
    let mut other = unsafe { alone.map_mut(&object) }.unwrap();
    // SAFETY: accessed by single bytes alone.
    let map = unsafe { alone.map(&object) }.unwrap();
    let first = first_of_window(map.as_ptr(), WINDOW);
    let [not_cached, being_read, being_written, poisoned, mapped] =
        [3, 5, 7, 9, 11].map(|page| first + page);
    let of_page = |page: usize| (page * PAGE) as u64..((page + 1) * PAGE) as u64;

    assert_eq!(load(map.as_ptr(), mapped * PAGE), Some(bytes[mapped * PAGE]));
    other[being_written * PAGE] = 1;
    assert!(object.poison((poisoned * PAGE) as u64).unwrap());
    for page in [not_cached, being_read] {
        assert_eq!(object.drop_cached(of_page(page)), PAGE);
    }
    let skipped = [not_cached, being_read, being_written, poisoned];
    let window = first..first + WINDOW;
    let expected: Vec<usize> = window.filter(|page| !skipped.contains(page)).collect();
    slow.hold(Operation::Read);
    slow.hold(Operation::Write);
    let seen = std::thread::scope(|scope| {
        let at = other.as_ptr() as usize;
        let reader = scope.spawn(move || load(at as *const u8, being_read * PAGE));
        let writer = scope.spawn(|| object.flush_range(of_page(being_written)));
        let are_held = slow.wait_for(2, Duration::from_secs(10));
        map.set_fault_around(FaultAround::Order(WINDOW.ilog2()));
        let asked = load(map.as_ptr(), first * PAGE);
        // The thread goes on with the first run that is mapped: the others may come a moment later.
        let end = Instant::now() + Duration::from_secs(5);
        let mut seen = present(map.as_ptr(), PAGES);
        while seen != expected && Instant::now() < end {
            seen = present(map.as_ptr(), PAGES);
        }
        slow.release_all();
        assert_eq!(reader.join().unwrap(), Some(bytes[being_read * PAGE]));
        writer.join().unwrap().unwrap();
        assert!(are_held && asked == Some(bytes[first * PAGE]));
        seen
    });
    assert_eq!(seen, expected);
    assert_eq!(load(map.as_ptr(), not_cached * PAGE), Some(bytes[not_cached * PAGE]));
    assert_eq!(load(map.as_ptr(), being_written * PAGE), Some(1));
    assert_eq!(load(map.as_ptr(), poisoned * PAGE), None, "a SIGBUS");
}

#[test]
fn of_what_is_mapped_around_a_fault_only_the_page_that_was_asked_for_counts_as_used() {
    const PAGES: usize = 64;
    let mmu = Simulated::new(4 * BLOCK_PAGES, BLOCK_PAGES, Settings::default()).unwrap();
    let space = tree::space(mmu, Tree::default(), 4 * BLOCK_PAGES, BLOCK_PAGES).0;
    let objects = Objects::new(space).unwrap();
    let bytes = (PAGES * PAGE) as u64;
    let id = objects.open(&Ones, bytes, bytes, Keeper::Store).unwrap();
    let pages = ObjectRange::new(ObjectPage(0), PAGES);
    assert_eq!(objects.prefetch(id, pages), PAGES);
    objects.stop_workers();
    objects.serve_requests(&mut IoBuffer::new().unwrap());
    let (pattern, fault_around) = (quire::space::vma::Pattern::Normal, FaultAround::Order(4));
    let request = MapRequest { pages, prot: Prot::READ, pattern, fault_around };
    let start = objects.map(id, request).unwrap().start;
    objects.object_fault(start.add(21), Access::Read, Moment::now()).unwrap();
    let mmu = objects.space.mmu();
    let mapped: Vec<usize> = (0..PAGES)
        .filter(|&page| matches!(mmu.try_access(start.add(page), false), Ok(Ok(_))))
        .collect();
    assert_eq!(mapped, (16..32).collect::<Vec<_>>());
    for page in pages.pages() {
        let word = objects.snapshot(objects.object(id), page);
        assert_eq!(word.state(), State::Cached);
        assert_eq!(word.has(Flags::ACCESSED), page == ObjectPage(21), "{page:?}");
    }
}
