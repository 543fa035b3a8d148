//! The record of open stretches beside a plain set of pages.

use std::collections::BTreeSet;
use std::vec::Vec;

use super::rights::Rights;
use super::vma::SpaceLocked;
use quire_simulated::Generator;

use crate::units::{PageNum, PageRange};

const PAGES: u64 = 200;

fn range(start: u64, end: u64) -> PageRange {
    PageRange { start: PageNum(start), end: PageNum(end) }
}

/// The stretches of a set, as long as they can be.
fn stretches(pages: &BTreeSet<u64>) -> Vec<PageRange> {
    let mut all: Vec<PageRange> = Vec::new();
    for &page in pages {
        match all.last_mut() {
            Some(last) if last.end.0 == page => last.end = PageNum(page + 1),
            _ => all.push(range(page, page + 1)),
        }
    }
    all
}

#[test]
fn the_record_is_a_set_of_pages_as_few_stretches() {
    let locked = SpaceLocked(());
    let rights = Rights::new().unwrap();
    let mut oracle = BTreeSet::new();
    let mut generator = Generator::new(7);
    for _ in 0..20_000 {
        let start = generator.below(PAGES as usize) as u64;
        let most = if generator.one_in(4) { 60 } else { 6 };
        let len = 1 + generator.below(most) as u64;
        let some = range(start, (start + len).min(PAGES));
        if generator.one_in(2) {
            assert!(rights.add(some, &locked));
            oracle.extend(some.start.0..some.end.0);
        } else {
            assert_eq!(rights.take(some, &locked), None);
            oracle.retain(|&page| !some.contains(PageNum(page)));
        }
        assert_eq!(rights.all(), stretches(&oracle));
        let some = range(start, (start + 3).min(PAGES));
        let inside = some.pages().filter(|page| oracle.contains(&page.0)).count();
        assert_eq!(rights.covers(some, &locked), inside == some.len());
        assert_eq!(rights.overlaps(some, &locked), inside > 0);
        let page = some.start;
        let holding = stretches(&oracle).into_iter().find(|open| open.contains(page));
        assert_eq!(rights.stretch_of(page, &locked), holding);
    }
}

#[test]
fn a_full_record_says_what_is_to_be_sealed_for_want_of_room() {
    let locked = SpaceLocked(());
    let rights = Rights::new().unwrap();
    let mut at = 0;
    while rights.add(range(at, at + 3), &locked) {
        at += 4;
    }
    // It still can grow, shrink and join what is there.
    assert!(rights.add(range(3, 4), &locked), "joined, two become one");
    assert!(rights.add(range(at, at + 3), &locked), "which leaves room for one");
    assert!(!rights.add(range(at + 4, at + 5), &locked));
    assert_eq!(rights.take(range(8, 9), &locked), None);
    assert_eq!(rights.take(range(1, 2), &locked), Some(range(2, 7)), "its other side is let go");
    assert!(rights.covers(range(0, 1), &locked));
    assert!(!rights.overlaps(range(1, 7), &locked));
}
