//! For tests: whether the accounts of a tree are the sum of its members'.

#![deny(unsafe_code)]

use core::sync::atomic::Ordering;

impl super::Process {
    /// By how much the account differs from the facts: pages that this process holds, members that ask
    /// for memory, segments of the swap file with fewer references than members that hold them, those with
    /// more, and segments in use. All are 0 while no member charges anything, but for the fourth: a member
    /// that dies between the two steps of taking or letting go of a segment leaves one (`swap/file.rs`).
    #[must_use]
    pub fn account_gaps(&self) -> [i64; 5] {
        // Relaxed, all: a test looks until nothing changes any more.
        let space = &self.space;
        let control = space.budget().control();
        let account = control.seats[space.budget().slot() as usize].account.get();
        let (mut wrong, mut left, mut used) = (0, 0, 0);
        for segment in 0..control.segments_max.load(Ordering::Relaxed) as usize {
            let has = |slot: usize| {
                let bits = control.segment_maps[slot][segment / 64].load(Ordering::Relaxed);
                (bits >> (segment % 64) & 1) as u32
            };
            let holders: u32 = control.present().map(|(slot, _)| has(slot)).sum();
            let refs = control.segment_refs[segment].load(Ordering::Relaxed);
            wrong += i64::from(refs < holders);
            left += i64::from(refs > holders);
            used += i64::from(refs != 0);
        }
        [
            i64::from(account.held) - space.pages_there() as i64,
            control.askers().count() as i64,
            wrong,
            left,
            i64::from(control.segments_used.load(Ordering::Relaxed)) - used,
        ]
    }
}
