//! The VMA index against a plain range map.

use std::vec::Vec;

use proptest::prelude::*;
use rangemap::RangeMap;

use super::vma::{Attributes, Kind, Pattern, SpaceLocked, VmaIndex};
use crate::mmu::Prot;
use crate::units::{PageNum, PageRange};

/// Pages of the small arena that the operations fall into.
const PAGES: u64 = 64;

#[derive(Clone, Copy, Debug)]
enum Operation {
    Map(PageRange, Prot),
    Unmap(PageRange),
    Die(PageRange),
    Protect(PageRange, Prot),
    Advise(PageRange, Pattern),
    Room(usize, u64),
}

fn range() -> impl Strategy<Value = PageRange> {
    (0..PAGES - 1).prop_flat_map(|start| {
        (1..=(PAGES - start).min(24))
            .prop_map(move |len| PageRange { start: PageNum(start), end: PageNum(start + len) })
    })
}

fn prot() -> impl Strategy<Value = Prot> {
    prop_oneof![Just(Prot::NONE), Just(Prot::READ), Just(Prot::READ_WRITE)]
}

fn operation() -> impl Strategy<Value = Operation> {
    let pattern = prop_oneof![Just(Pattern::Normal), Just(Pattern::Random)];
    prop_oneof![
        3 => (range(), prot()).prop_map(|(range, prot)| Operation::Map(range, prot)),
        2 => range().prop_map(Operation::Unmap),
        2 => range().prop_map(Operation::Die),
        2 => (range(), prot()).prop_map(|(range, prot)| Operation::Protect(range, prot)),
        1 => (range(), pattern).prop_map(|(range, pattern)| Operation::Advise(range, pattern)),
        2 => (1..40usize, 0..PAGES).prop_map(|(pages, hint)| Operation::Room(pages, hint)),
    ]
}

/// Attributes as a value that the oracle can compare.
fn oracle_value(attributes: Attributes) -> (u32, u8) {
    (attributes.prot.0, attributes.pattern as u8)
}

fn attributes(value: (u32, u8)) -> Attributes {
    let pattern = if value.1 == Pattern::Random as u8 { Pattern::Random } else { Pattern::Normal };
    Attributes { pattern, ..Attributes::anonymous(Prot(value.0)) }
}

fn apply(
    index: &VmaIndex,
    oracle: &mut RangeMap<u64, (u32, u8)>,
    operation: Operation,
    locked: &SpaceLocked,
) {
    let parts = |oracle: &RangeMap<u64, (u32, u8)>, range: PageRange| -> Vec<_> {
        oracle
            .overlapping(range.start.0..range.end.0)
            .map(|(r, value)| (r.start.max(range.start.0)..r.end.min(range.end.0), *value))
            .collect()
    };
    match operation {
        Operation::Map(range, prot) => {
            index.remove(range, locked).unwrap();
            index.insert(range, Attributes::anonymous(prot), locked).unwrap();
            oracle.insert(range.start.0..range.end.0, (prot.0, 0));
        }
        Operation::Unmap(range) => {
            index.remove(range, locked).unwrap();
            oracle.remove(range.start.0..range.end.0);
        }
        Operation::Die(range) => {
            let copies: Vec<_> =
                range.pages().filter_map(|page| index.lookup(page).unwrap()).collect();
            let dying = Attributes { kind: Kind::Dying, ..Attributes::anonymous(Prot::NONE) };
            index.replace(range, dying, locked).unwrap();
            let found = index.next_from(range.start, locked).unwrap();
            assert_eq!((found.range, found.attributes), (range, dying));
            for copy in copies {
                assert!(!index.is_current(&copy), "a fault takes no notice: {copy:?}");
            }
            index.remove(range, locked).unwrap();
            oracle.remove(range.start.0..range.end.0);
        }
        Operation::Protect(range, prot) => {
            index.change_attributes(range, locked, |old| Attributes { prot, ..old }).unwrap();
            for (part, value) in parts(oracle, range) {
                oracle.insert(part, (prot.0, value.1));
            }
        }
        Operation::Advise(range, pattern) => {
            index.change_attributes(range, locked, |old| Attributes { pattern, ..old }).unwrap();
            for (part, value) in parts(oracle, range) {
                oracle.insert(part, (value.0, pattern as u8));
            }
        }
        Operation::Room(pages, hint) => {
            let is_free = |start: u64| {
                let end = start + pages as u64;
                end <= PAGES && oracle.gaps(&(start..end)).any(|gap| gap == (start..end))
            };
            let found = index.find_gap(pages, 1, Some(PageNum(hint)), PAGES, locked);
            match found {
                Some(start) => assert!(is_free(start.0), "{start:?} is not free"),
                None => assert!((0..PAGES).all(|start| !is_free(start)), "there was room"),
            }
            if is_free(hint) {
                assert_eq!(found, Some(PageNum(hint)), "the hint was free");
            }
            for align in [1, 8] {
                let lowest = (0..PAGES).step_by(align).find(|&start| is_free(start)).map(PageNum);
                let found = index.find_gap(pages, align as u64, None, PAGES, locked);
                assert_eq!(found, lowest, "the lowest gap of {pages} pages");
            }
        }
    }
}

fn compare(index: &VmaIndex, oracle: &RangeMap<u64, (u32, u8)>, locked: &SpaceLocked) {
    let mut at = PageNum(0);
    let mut found = Vec::new();
    while let Some(vma) = index.next_from(at, locked) {
        assert!(vma.range.start >= at && !vma.range.is_empty(), "out of order: {vma:?}");
        at = vma.range.end;
        found.push((vma.range.start.0..vma.range.end.0, oracle_value(vma.attributes)));
    }
    let expected: Vec<_> = oracle.iter().map(|(range, value)| (range.clone(), *value)).collect();
    assert_eq!(found, expected, "neighbours alike must be joined, all else kept");
    assert_eq!(index.len(), expected.len());
    for page in 0..PAGES {
        let vma = index.lookup(PageNum(page)).expect("nothing changes meanwhile");
        let value = oracle.get(&page).copied();
        assert_eq!(vma.map(|vma| vma.attributes), value.map(attributes));
        assert!(vma.is_none_or(|vma| index.is_current(&vma)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_index_agrees_with_a_range_map(operations in prop::collection::vec(operation(), 1..60)) {
        let (index, mut oracle) = (VmaIndex::new().unwrap(), RangeMap::new());
        let locked = SpaceLocked(());
        for operation in operations {
            apply(&index, &mut oracle, operation, &locked);
            compare(&index, &oracle, &locked);
        }
    }

    /// A copy stays current exactly as long as nothing changed that it says.
    #[test]
    fn a_copy_is_current_until_its_vma_changes(
        before in prop::collection::vec(operation(), 1..20),
        operation in operation(),
        page in 0..PAGES,
    ) {
        let (index, mut oracle) = (VmaIndex::new().unwrap(), RangeMap::new());
        let locked = SpaceLocked(());
        for operation in before {
            apply(&index, &mut oracle, operation, &locked);
        }
        let Some(vma) = index.lookup(PageNum(page)).expect("nothing changes meanwhile") else {
            return Ok(());
        };
        apply(&index, &mut oracle, operation, &locked);
        if index.is_current(&vma) {
            let now = index.lookup(PageNum(page)).expect("nothing changes meanwhile");
            prop_assert_eq!(now, Some(vma));
        }
    }
}
