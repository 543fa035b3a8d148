//! At which looks a page was touched, where no more is known than when it was first in the course of several.
//!
//! What is touched all the time is looked at now and then, and tells then when it was touched first. To take it as
//! touched at each look since would have it come back after each time that it went, and so would looks far apart: the
//! less memory, the more often. Most pages are used for a while, and then not for long. So of each page it is seen how
//! often it is touched in the course after, which tells how soon its use ends.

use fastrand::Rng;

/// While a page is used, it is touched at one look by this chance.
const AGAIN: f64 = 0.4;
/// What courses count for when one more has passed, those that there were before.
const KEPT: f32 = 0.6;

/// In how many of the last courses a page was touched after it had been before, and how many they were.
#[derive(Clone, Copy)]
pub(super) struct Uses {
    went_on: f32,
    courses: f32,
}

impl Default for Uses {
    /// Of a page of which nothing is known.
    fn default() -> Uses {
        Uses { went_on: 0.7, courses: 1.0 }
    }
}

impl Uses {
    /// Notes whether the page, which had been touched before, was touched in a course.
    pub(super) fn note(&mut self, is_touched: bool) {
        self.went_on = self.went_on * KEPT + f32::from(is_touched);
        self.courses = self.courses * KEPT + 1.0;
    }

    /// At which of the last looks it was touched, a bit each: first so many looks ago, and after that until its use ends.
    pub(super) fn draw(self, first: u16, mut chance: Rng) -> u32 {
        let went_on = f64::from(self.went_on / self.courses);
        // Of a use that ends by this chance at each look, such a part is touched again before.
        let ends = AGAIN * (1.0 - went_on) / went_on;
        let mut touched = 1 << first;
        for look in (0..first).rev() {
            if chance.f64() < ends {
                break;
            }
            touched |= u32::from(chance.f64() < AGAIN) << look;
        }
        touched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At how many of 32 looks a page is drawn on average that is touched in one of so many courses, and over how many
    /// these are spread.
    fn drawn(one_in: u64) -> [f64; 2] {
        let (mut count, mut length) = (0, 0);
        let (mut uses, draws) = (Uses::default(), 1000);
        for draw in 0..draws {
            (0..one_in).for_each(|course| uses.note(course == 0));
            let looks = uses.draw(31, Rng::with_seed(draw));
            count += looks.count_ones();
            length += 32 - looks.leading_zeros() - looks.trailing_zeros();
        }
        [count, length].map(|sum| f64::from(sum) / draws as f64)
    }

    #[test]
    fn a_use_that_goes_on_is_spread_and_one_that_ends_is_short() {
        let [count, length] = drawn(1);
        assert!((12.0..15.0).contains(&count) && length > 28.0, "{count} over {length}");
        let [count, length] = drawn(2);
        assert!((1.1..1.4).contains(&count) && length < 1.5, "{count} over {length}");
        let [count, length] = drawn(8);
        assert!(count < 1.1 && length < 1.2, "{count} over {length}");
    }

    #[test]
    fn a_page_is_not_touched_before_it_was_first() {
        for (first, seed) in (0..32).flat_map(|first| (0..9).map(move |seed| (first, seed))) {
            let looks = Uses::default().draw(first, Rng::with_seed(seed));
            assert_eq!(looks.ilog2(), u32::from(first));
        }
    }
}
