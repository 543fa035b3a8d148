//! A sampled region: what is known of its groups and pages, and what was touched at which of the last looks.

use fastrand::Rng;
use quire::control::sampling::{GROUP_PAGES, REGION_GROUPS};

use super::looks::{PLAYED_AFTER, looks_since, lot};
use super::miniature::{REGION_PAGES, pages_in};
use super::uses::Uses;

/// What is known of a sampled region.
#[derive(Default)]
pub(super) struct Region {
    pub present: u32,
    /// Pages that were touched at the last look that was played and had any, and its number.
    pub touched: u32,
    pub touched_at: u16,
    pub groups: [Known; REGION_GROUPS],
    uses: [Uses; REGION_PAGES],
}

impl Region {
    /// One of its groups was looked at, and will be again `wait` looks later: these pages were touched since the last
    /// time, each first so many looks ago. Returns which of them were touched at the last looks, the last first.
    pub(super) fn note_look(
        &mut self,
        number: u64,
        at: usize,
        look: u16,
        wait: u16,
        touched: u32,
        ages: [u8; GROUP_PAGES],
    ) -> [u32; PLAYED_AFTER] {
        let group = &mut self.groups[at];
        // Left mapped, it was touched at some of the looks since; unmapped, only since the last one.
        let is_since = looks_since(group.look, look) == group.wait;
        let count = if is_since { group.wait.max(1) } else { 1 };
        if group.wait > 1 {
            for page in pages_in(group.touched) {
                self.uses[page].note(is_since && touched >> page & 1 != 0);
            }
        }
        (group.look, group.wait, group.touched) = (look, wait, touched);
        // Pages that were touched first at the same look are taken to be used together.
        let chance = Rng::with_seed(lot(number, look));
        let mut touches = [0; PLAYED_AFTER];
        for page in pages_in(touched) {
            // What has no age of this course came without a fault that tells it.
            let age = u16::from(ages[page % GROUP_PAGES]);
            let first = if age < count { age } else { 0 };
            let looks = self.uses[page].draw(first, chance.clone());
            for (back, pages) in touches.iter_mut().enumerate() {
                *pages |= (looks >> back & 1) << page;
            }
        }
        touches
    }
}

/// What is known of a group.
#[derive(Clone, Copy, Default)]
pub(super) struct Known {
    /// The last look that told of it.
    pub told: u16,
    /// The last at which it was looked at, and how many looks later it is again.
    look: u16,
    wait: u16,
    /// The pages of the region that were touched then.
    touched: u32,
}

/// The region that a group is in, and its place there.
pub(super) fn region_of(group: u64) -> (u64, usize) {
    (group / REGION_GROUPS as u64, group as usize % REGION_GROUPS)
}

/// Pages of the group at this place in a region, a bit each, as a region has them.
pub(super) fn pages_at(at: usize, pages: u16) -> u32 {
    u32::from(pages) << (at * GROUP_PAGES)
}

/// The pages of a region's group.
pub(super) fn pages_of(at: usize) -> u32 {
    pages_at(at, (1 << GROUP_PAGES) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_was_touched_at_the_look_that_it_names_where_that_is_of_this_course() {
        let mut region = Region::default();
        let ages = [3, 40, 0, 31, 32, 255, 3, 3];
        region.note_look(0, 1, 100, 32, 0, ages);
        let touches = region.note_look(0, 1, 132, 32, 0x3f00, ages);
        let first = |page: u32| touches.iter().rposition(|pages| pages >> page & 1 != 0);
        let firsts = [3, 0, 0, 31, 0, 0].map(Some);
        assert_eq!([8, 9, 10, 11, 12, 13].map(first), firsts);
        assert_eq!([14, 15, 0].map(first), [None; 3], "not touched");
    }

    #[test]
    fn what_is_used_for_a_while_now_and_then_is_drawn_seldom() {
        // Left mapped, and touched meanwhile: each time, or every second time.
        let drawn = |pause: u16| {
            let (mut region, mut look, mut drawn) = (Region::default(), 0, 0);
            for _ in 0..100 {
                region.note_look(0, 0, look, 32, 0xff, [31; GROUP_PAGES]);
                let touches = region.note_look(0, 0, look + 32, 32, 0xff, [31; GROUP_PAGES]);
                drawn += touches.iter().map(|pages| pages.count_ones()).sum::<u32>();
                look += 64 + pause;
            }
            f64::from(drawn) / 800.0
        };
        let (always, seldom) = (drawn(0), drawn(32));
        assert!(always > 10.0 && seldom < 5.0, "{always} and {seldom}");
    }
}
