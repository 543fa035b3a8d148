//! The pages that were asked for last while memory was short: reclaim does not take them, unless the program
//! says so.
//!
//! One instruction may need two pages at once: a load over their boundary, a copy from one to the other. Where
//! all but a page or two is full of what cannot go, each of their faults would have the other one taken,
//! for ever, and as that is progress nobody would see that memory has run out.

#![deny(unsafe_code)]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::budget::FLOOR_MIN;
use crate::units::PageNum;

/// Each is one more than the page's number; 0 is none. Relaxed, all: a page that is missed is asked for
/// again.
#[derive(Default)]
pub(crate) struct AskedLast {
    pages: [AtomicU64; FLOOR_MIN],
    next: AtomicU32,
}

impl AskedLast {
    pub fn note(&self, page: PageNum) {
        if !self.has(page) {
            let at = self.next.fetch_add(1, Relaxed) as usize % FLOOR_MIN;
            self.pages[at].store(page.0 + 1, Relaxed);
        }
    }

    pub fn has(&self, page: PageNum) -> bool {
        self.pages.iter().any(|asked| asked.load(Relaxed) == page.0 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_asked_for_in_turn_stay_until_so_many_others_were() {
        let asked = AskedLast::default();
        assert!(!asked.has(PageNum(0)));
        (0..100).for_each(|turn| asked.note(PageNum(1 + turn % FLOOR_MIN as u64)));
        assert!((1..=FLOOR_MIN as u64).all(|page| asked.has(PageNum(page))));
        (0..FLOOR_MIN as u64).for_each(|other| asked.note(PageNum(1000 + other)));
        assert!((1..=FLOOR_MIN as u64).all(|page| !asked.has(PageNum(page))));
    }
}
