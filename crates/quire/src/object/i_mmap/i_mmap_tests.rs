//! The tree against a plain list, and what walkers see of a mapping that moves.

use std::sync::atomic::AtomicUsize;
use std::thread;
use std::vec::Vec;

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::units::ObjectPage;

/// Pages of the small object that the mappings show.
const PAGES: u64 = 96;

fn small(mappings: usize) -> IMmaps {
    let nodes = Nodes::with_room_for(mappings).unwrap();
    IMmaps { nodes, walks_exclusive: AtomicBool::new(false) }
}

fn mapping(start: u64, count: usize, arena: u64) -> ObjectMapping {
    let pages = ObjectRange::new(ObjectPage(start), count);
    ObjectMapping { pages, arena_start: PageNum(arena), id: arena as u32 }
}

#[derive(Clone, Debug)]
enum Operation {
    Insert(ObjectMapping),
    Remove(Index),
    Change(Index, ObjectMapping),
    Query(ObjectRange),
}

fn range() -> impl Strategy<Value = ObjectRange> {
    // Few starts, so that many begin alike and some are the same altogether.
    (0..PAGES / 4, prop_oneof![1..4usize, 1..PAGES as usize])
        .prop_map(|(start, count)| ObjectRange::new(ObjectPage(start * 4), count))
}

fn any_mapping() -> impl Strategy<Value = ObjectMapping> {
    (range(), 0..4u64).prop_map(|(pages, arena)| ObjectMapping {
        pages,
        arena_start: PageNum(arena * 1024),
        id: arena as u32,
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        5 => any_mapping().prop_map(Operation::Insert),
        2 => any::<Index>().prop_map(Operation::Remove),
        2 => (any::<Index>(), any_mapping()).prop_map(|(of, to)| Operation::Change(of, to)),
        3 => range().prop_map(Operation::Query),
    ]
}

/// What is mapped.
#[derive(Default)]
struct Oracle {
    mapped: Vec<(MappingRef, ObjectMapping)>,
}

impl Oracle {
    fn overlapping(&self, range: ObjectRange) -> Vec<(MappingRef, ObjectMapping)> {
        let mut found: Vec<_> = self
            .mapped
            .iter()
            .filter(|(_, mapping)| !mapping.pages.intersect(range).is_empty())
            .copied()
            .collect();
        found.sort_by_key(|(of, mapping)| (mapping.pages.start, of.0));
        found
    }
}

fn apply(guard: &mut WriteGuard<'_>, oracle: &mut Oracle, operation: Operation) {
    match operation {
        Operation::Insert(mapping) => {
            oracle.mapped.push((guard.insert(mapping).unwrap(), mapping));
        }
        Operation::Query(range) => {
            let found: Vec<_> = guard.overlapping(range).collect();
            assert_eq!(found, oracle.overlapping(range));
        }
        _ if oracle.mapped.is_empty() => {}
        Operation::Remove(of) => {
            let (of, mapping) = oracle.mapped.swap_remove(of.index(oracle.mapped.len()));
            assert_eq!(guard.remove(of), Some(mapping));
        }
        Operation::Change(of, mapping) => {
            let at = of.index(oracle.mapped.len());
            let of = oracle.mapped[at].0;
            guard.change(of, mapping).unwrap();
            oracle.mapped[at].1 = mapping;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_tree_agrees_with_a_plain_list(operations in prop::collection::vec(operation(), 1..150)) {
        let (maps, object, mut oracle) = (small(512), IMmap::default(), Oracle::default());
        let mut guard = object.i_mmap_lock_write(&maps);
        for operation in operations {
            apply(&mut guard, &mut oracle, operation);
            prop_assert_eq!(guard.check(), oracle.mapped.len());
        }
        let all: Vec<_> = guard.overlapping(ObjectRange::ALL).collect();
        prop_assert_eq!(all, oracle.overlapping(ObjectRange::ALL));
        while let Some((of, mapping)) = oracle.mapped.pop() {
            prop_assert_eq!(guard.remove(of), Some(mapping));
            prop_assert_eq!(guard.remove(of), None);
            prop_assert_eq!(guard.change(of, mapping), None);
        }
        prop_assert_eq!(guard.check(), oracle.mapped.len());
    }
}

#[test]
fn a_tree_that_grows_and_shrinks_at_its_ends_stays_balanced() {
    let (maps, object) = (small(4096), IMmap::default());
    let mut guard = object.i_mmap_lock_write(&maps);
    let mut mapped: Vec<_> =
        (0..4096).map(|at| guard.insert(mapping(at * 2, 3, at)).unwrap()).collect();
    assert_eq!(guard.check(), 4096);
    for of in mapped.drain(..2048) {
        guard.remove(of).unwrap();
    }
    assert_eq!(guard.check(), 2048);
    let starts: Vec<u64> = guard
        .overlapping(ObjectRange::new(ObjectPage(6002), 4))
        .map(|(_, mapping)| mapping.pages.start.0)
        .collect();
    assert_eq!(starts, [6000, 6002, 6004]);
    while let Some(of) = mapped.pop() {
        guard.remove(of).unwrap();
    }
    assert_eq!(guard.check(), 0);
}

#[test]
fn a_walk_looks_at_little_more_than_what_it_finds() {
    let (maps, object) = (small(1 << 15), IMmap::default());
    let mut guard = object.i_mmap_lock_write(&maps);
    for at in 0..(1 << 15) - 1 {
        guard.insert(mapping(at * 4, 2, at)).unwrap();
    }
    // One that begins first and ends last is on the way of every walk.
    guard.insert(mapping(0, 4 << 15, 0)).unwrap();
    let looks_before = tree::tests::LOOKS.with(|looks| looks.replace(0));
    let found = guard.overlapping(ObjectRange::new(ObjectPage(70_000), 16)).count();
    let looks = tree::tests::LOOKS.with(|looks| looks.replace(looks_before));
    assert_eq!(found, 5);
    assert!(looks < 60, "{looks} nodes of {}", 1 << 15);
}

#[test]
fn a_full_table_refuses_and_changes_nothing() {
    let (maps, object) = (small(2), IMmap::default());
    let mut guard = object.i_mmap_lock_write(&maps);
    let first = guard.insert(mapping(0, 8, 0)).unwrap();
    let second = guard.insert(mapping(4, 8, 100)).unwrap();
    assert_eq!(guard.insert(mapping(0, 1, 200)), Err(Errno::NOMEM));
    assert_eq!(guard.check(), 2);
    guard.remove(second).unwrap();
    assert_eq!(guard.remove(first), Some(mapping(0, 8, 0)));
    guard.insert(mapping(0, 1, 200)).unwrap();
    guard.insert(mapping(0, 1, 300)).unwrap();
    assert_eq!(guard.check(), 2);
}

#[test]
fn a_reference_into_another_objects_tree_finds_nothing() {
    let (maps, object, other) = (small(8), IMmap::default(), IMmap::default());
    let theirs = other.i_mmap_lock_write(&maps).insert(mapping(0, 4, 0)).unwrap();
    let mut guard = object.i_mmap_lock_write(&maps);
    guard.insert(mapping(0, 4, 50)).unwrap();
    assert_eq!(guard.remove(theirs), None);
    assert_eq!(guard.check(), 1);
    drop(guard);
    let mut guard = other.i_mmap_lock_write(&maps);
    assert_eq!(guard.remove(theirs), Some(mapping(0, 4, 0)));
}

#[test]
fn a_mapping_says_where_the_pages_of_a_range_are() {
    let of = mapping(10, 6, 1000);
    let range = |start, count| ObjectRange::new(ObjectPage(start), count);
    assert_eq!(of.arena_range(range(12, 2)), PageRange::new(PageNum(1002), 2));
    assert_eq!(of.arena_range(range(0, 12)), PageRange::new(PageNum(1000), 2));
    assert_eq!(of.arena_range(range(14, 100)), PageRange::new(PageNum(1004), 2));
    assert!(of.arena_range(range(0, 10)).is_empty());
    assert!(of.arena_range(range(16, 1)).is_empty());
}

#[test]
fn walks_share_the_lock_and_told_to_be_exclusive_they_do_not() {
    let (maps, object) = (small(1), IMmap::default());
    let shared = object.i_mmap_lock_read(&maps);
    let beside = object.i_mmap_trylock_read(&maps).expect("walks share");
    assert!(!object.lock.try_lock(Side::Writer));
    maps.set_walks_exclusive(true);
    assert!(object.i_mmap_trylock_read(&maps).is_none());
    // Each gives back what it took, whatever is said meanwhile.
    drop((shared, beside));
    let alone = object.i_mmap_lock_read(&maps);
    assert!(object.i_mmap_trylock_read(&maps).is_none());
    maps.set_walks_exclusive(false);
    assert!(object.i_mmap_trylock_read(&maps).is_none());
    drop(alone);
    assert!(object.lock.try_lock(Side::Writer));
}

/// One page of an object, and which places of the arena show it: what the page tables know.
struct Moving {
    maps: IMmaps,
    object: IMmap,
    is_there: [AtomicBool; 2],
}

const PAGE: ObjectRange = ObjectRange { start: ObjectPage(5), end: ObjectPage(6) };

impl Moving {
    /// Mapped at the second place, in the tree's second slot: the next mapping comes before it.
    fn new() -> (Moving, MappingRef) {
        let moving = Moving {
            maps: small(2),
            object: IMmap::default(),
            is_there: [AtomicBool::new(false), AtomicBool::new(true)],
        };
        let mut guard = moving.object.i_mmap_lock_write(&moving.maps);
        let first = guard.insert(Moving::at(0)).unwrap();
        let second = guard.insert(Moving::at(1)).unwrap();
        guard.remove(first).unwrap();
        drop(guard);
        (moving, second)
    }

    fn at(place: u64) -> ObjectMapping {
        mapping(PAGE.start.0, 1, place)
    }

    fn has_page(&self, of: &ObjectMapping) -> bool {
        // Relaxed, as in `move_page`: the lock orders them.
        self.is_there[of.arena_start.index()].load(Ordering::Relaxed)
    }

    fn move_page(&self, from: usize, to: usize) {
        self.is_there[from].store(false, Ordering::Relaxed);
        self.is_there[to].store(true, Ordering::Relaxed);
    }

    fn walk(&self) -> usize {
        let guard = self.object.i_mmap_lock_read(&self.maps);
        guard.overlapping(PAGE).filter(|(_, mapping)| self.has_page(mapping)).count()
    }
}

#[test]
fn a_walker_finds_a_page_that_is_only_being_moved_at_one_place_and_not_at_none() {
    const MOVES: usize = 20_000;
    let (moving, mut of) = Moving::new();
    let is_over = AtomicBool::new(false);
    let walks = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let found = moving.walk();
                    walks.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(found, 1, "the page was missed, or met twice");
                }
            });
        }
        let mut from = 1;
        while walks.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        for _ in 0..MOVES {
            let mut guard = moving.object.i_mmap_lock_write(&moving.maps);
            let new = guard.insert(Moving::at(1 - from as u64)).unwrap();
            moving.move_page(from, 1 - from);
            guard.remove(of).unwrap();
            drop(guard);
            (of, from) = (new, 1 - from);
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// The kernel's mistake, by hand: who moves a mapping shares the lock with a walker.
#[test]
fn under_the_shared_lock_a_walker_misses_a_page_that_moves_behind_its_back() {
    let (moving, of) = Moving::new();
    let mover = moving.object.i_mmap_lock_read(&moving.maps);
    mover.tree.insert(Moving::at(0)).unwrap();
    let walker = moving.object.i_mmap_trylock_read(&moving.maps).expect("the mistake: it shares");
    let mut walk = walker.overlapping(PAGE);
    let (_, at_new) = walk.next().unwrap();
    let mut found = usize::from(moving.has_page(&at_new));
    moving.move_page(1, 0);
    for (_, mapping) in walk {
        found += usize::from(moving.has_page(&mapping));
    }
    mover.tree.remove(of).unwrap();
    assert_eq!(found, 0, "the page was there all the time, and the walk finds that out");
}

#[test]
fn what_moves_a_mapping_keeps_walkers_out_at_every_step() {
    let (moving, of) = Moving::new();
    let try_walk = || moving.object.i_mmap_trylock_read(&moving.maps).is_some();
    assert_eq!(moving.walk(), 1);
    let mut mover = moving.object.i_mmap_lock_write(&moving.maps);
    mover.insert(Moving::at(0)).unwrap();
    assert!(!try_walk());
    moving.move_page(1, 0);
    assert!(!try_walk());
    mover.remove(of).unwrap();
    assert!(!try_walk());
    drop(mover);
    assert_eq!(moving.walk(), 1);
}

/// The same mistake inside the tree: the mapping goes from ahead of the walker to behind it.
#[test]
fn under_the_shared_lock_a_walker_misses_a_mapping_that_changes_its_pages() {
    let (maps, object) = (small(8), IMmap::default());
    let mut guard = object.i_mmap_lock_write(&maps);
    guard.insert(mapping(10, 1, 0)).unwrap();
    guard.insert(mapping(20, 1, 2)).unwrap();
    let moved = guard.insert(mapping(30, 1, 1)).unwrap();
    drop(guard);
    let mover = object.i_mmap_lock_read(&maps);
    let walker = object.i_mmap_trylock_read(&maps).expect("the mistake: it shares");
    let mut walk = walker.overlapping(ObjectRange::ALL);
    assert_eq!(walk.next().unwrap().1.id, 0);
    mover.tree.change(moved, mapping(0, 1, 1)).unwrap();
    assert!(walk.all(|(_, mapping)| mapping.id != 1), "it was mapped all the time");
}
