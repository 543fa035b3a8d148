//! How often a page is touched, where no more is known than that it was in the course of several looks.
//!
//! What is touched all the time is looked at now and then, and tells then whether it was touched since. To take it as
//! touched at each look since would have it come back after each time that it went: the less memory, the more often.
//! So from what has been seen of the page is estimated at how many looks it is touched, and by chance, at which.

use fastrand::Rng;

/// What looks count for when one more has passed, those that there were before.
const KEPT: f64 = 0.98;

/// At how many of the last looks a page was touched, and how many they were.
#[derive(Clone, Copy)]
pub(super) struct Rate {
    touched: f32,
    looks: f32,
}

impl Default for Rate {
    /// Of a page of which nothing is known.
    fn default() -> Rate {
        Rate { touched: 0.5, looks: 1.0 }
    }
}

impl Rate {
    /// Notes whether the page was touched in the course of so many looks. If it was, returns by what chance it was at
    /// each of them beside the one at which it was for certain.
    pub(super) fn note(&mut self, looks: u16, is_touched: bool) -> Option<f64> {
        let (count, power) = (f64::from(looks), i32::from(looks));
        let rate = f64::from(self.touched / self.looks).clamp(0.001, 1.0);
        let touched =
            if is_touched { count * rate / (1.0 - (1.0 - rate).powi(power)) } else { 0.0 };
        let kept = KEPT.powi(power);
        self.touched = (f64::from(self.touched) * kept + touched) as f32;
        self.looks = (f64::from(self.looks) * kept + count) as f32;
        is_touched.then(|| (touched - 1.0) / (count - 1.0).max(1.0))
    }
}

/// At which of so many looks a page was touched: at one, and by this chance at each of the others.
pub(super) fn draw(looks: u16, others: f64, mut chance: Rng) -> impl Iterator<Item = usize> {
    let certain = chance.u16(..looks);
    let is_touched = move |look: &u16| chance.f64() < others || *look == certain;
    (0..looks).filter(is_touched).map(usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At how many looks a page is drawn, on average, that is touched in one of so many courses of 16; before, it was
    /// looked at each time.
    fn drawn(one_in: usize) -> f64 {
        let (mut rate, mut touches) = (Rate::default(), 0);
        (0..16).for_each(|_| _ = rate.note(1, true));
        let courses = (0..4000).map(|course| course % one_in == 0);
        for (course, is_touched) in courses.enumerate() {
            let others = rate.note(16, is_touched).filter(|_| course >= 2000);
            let drawn =
                others.map(|others| draw(16, others, Rng::with_seed(course as u64)).count());
            touches += drawn.unwrap_or(0);
        }
        touches as f64 / (2000 / one_in) as f64
    }

    #[test]
    fn what_is_always_touched_is_so_at_each_look_and_what_seldom_is_at_one() {
        assert!(drawn(1) > 14.0, "{}", drawn(1));
        // One of two: 1 - (1 - p)^16 = 1/2, so at each look by a chance of 4 %.
        assert!((1.2..1.6).contains(&drawn(2)), "{}", drawn(2));
        assert!((1.0..1.2).contains(&drawn(20)), "{}", drawn(20));
    }

    #[test]
    fn a_page_that_is_looked_at_each_time_was_touched_when_it_says_so() {
        let mut rate = Rate::default();
        for _ in 0..3 {
            let others = rate.note(1, true).unwrap();
            assert_eq!(Vec::from_iter(draw(1, others, Rng::with_seed(7))), [0]);
            assert_eq!(rate.note(1, false), None);
        }
    }
}
