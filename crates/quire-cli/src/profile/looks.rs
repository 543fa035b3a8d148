//! What a process has told of its last looks, until they are played.

use std::collections::VecDeque;

use quire::control::sampling::{LOOK_MASK, PATIENCE_MAX};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::miniature::Terms;

/// Looks that are waited for before one is played: as many as a group is passed over at most.
pub(super) const PLAYED_AFTER: usize = 1 << PATIENCE_MAX;

/// Pages of a region, by its number.
pub(super) type Pages = (u64, u32);

/// What was seen at a look, and what was so when it ended; `None` where it has not.
#[derive(Default)]
pub(super) struct Look {
    pub gone: Vec<Pages>,
    /// Pages that are there, and not touched: they have been there.
    pub found: Vec<Pages>,
    pub touched: Vec<Pages>,
    pub terms: Option<Terms>,
}

/// The looks of a process that are not played yet, the oldest first. What is touched all the time is looked at now
/// and then, and only then it is known that it was.
pub(super) struct Looks {
    /// The number of the last, which the process is telling of.
    pub last: u16,
    /// Pages with content that it had at the last that was played.
    pub wanted_pages: u64,
    pub waiting: VecDeque<Look>,
}

impl Looks {
    pub(super) fn new(last: u16) -> Looks {
        Looks { last, wanted_pages: 0, waiting: VecDeque::from([Look::default()]) }
    }

    /// These pages of a region were touched at the last looks, the last first.
    pub(super) fn note_touched(&mut self, number: u64, pages: &[u32]) {
        for (look, &pages) in self.waiting.iter_mut().rev().zip(pages) {
            if pages != 0 {
                look.touched.push((number, pages));
            }
        }
    }

    pub(super) fn last_mut(&mut self) -> &mut Look {
        self.waiting.back_mut().expect("the one that is told of")
    }
}

/// How many looks one number is behind another.
pub(super) fn looks_since(earlier: u16, look: u16) -> u16 {
    look.wrapping_sub(earlier) & LOOK_MASK
}

/// What chance gives a number at a look.
pub(super) fn lot(number: u64, look: u16) -> u64 {
    xxh3_64_with_seed(&number.to_ne_bytes(), look.into())
}
