//! The border between frames and the compressed pool, where there is a swap file behind the pool: it is moved
//! to where a page of memory saves more time.
//!
//! Every page that leaves memory is stamped with a clock of such pages, and every packed page that leaves
//! the pool for the file with a clock of those. A fault that finds its page again compares the stamp with the
//! clock: the distance is how many pages more frames, or a larger pool, would have held for the
//! page to be there still. Faults within the distance that a sixteenth of the budget makes are counted, by
//! what each would have saved; and so are faults on the oldest quarter of the pool, by what each has saved. The
//! pool grows where more of it would have saved more than more frames, and shrinks where more frames would have
//! saved more than its oldest quarter did, page for page. It grows as well where hardly a page is missed so
//! soon: then frames are enough, and what is asked for comes from farther than a little more memory reaches,
//! of which the pool holds more. (Linux has the idea of the distance in mm/workingset.c.)
//!
//! No locks: what two threads count at once may be lost, and the border moves a little later.

#![deny(unsafe_code)]

use core::cmp::Ordering;
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use crate::control::{Event, FaultKind, Gains};
use crate::mean::Mean;
use crate::mmu::Mmu;
use crate::page::{State, Stored};
use crate::space::VmSpace;
use crate::swap::blob::Packing;
use crate::units::{PAGE_SIZE, PageNum, PageRange};

/// Ticks of a clock in which as many pages pass as the budget has.
const TICKS: usize = 256;
/// The distance within which a fault is counted, in ticks: a sixteenth of the budget.
const NEAR: u16 = (TICKS / 16) as u16;
/// Ticks wrap here.
const WRAP: u16 = 1 << 15;
/// Blocks of pages whose ages are looked at before the border is moved.
const LOOKED_AT: usize = 16;
/// One page in so many is tried by Zstandard where that does not pay, to see whether it would.
const TRY_ONE_IN: u32 = 64;
/// By how much the border moves for each sixteenth of the budget that leaves, how much at most at once, where
/// it begins, and where it stays between, in parts of the budget.
const STEP: usize = 64;
const STEP_MAX: usize = 8;
const SHARE_AT_FIRST: usize = 4;
const SHARE_MIN: usize = 128;

/// When a page left memory, in ticks of the clock of such pages, and when it went on from the pool to
/// the file, in those of the other clock.
#[derive(Clone, Copy)]
struct Stamp {
    left: u16,
    written: Option<u16>,
}

impl Stamp {
    const WRITTEN: u32 = 1 << 31;

    const fn of(stamp: u32) -> Stamp {
        let written = (stamp >> 16) as u16 & (WRAP - 1);
        let is_written = stamp & Self::WRITTEN != 0;
        Stamp { left: stamp as u16, written: if is_written { Some(written) } else { None } }
    }

    fn get(self) -> u32 {
        let written = self.written.map_or(0, |ticks| u32::from(ticks) << 16 | Self::WRITTEN);
        u32::from(self.left) | written
    }
}

/// Faults of a kind.
#[derive(Default)]
struct Faults {
    ns: Mean,
    /// Sixteenths of pages that came with one.
    sixteenths: Mean,
}

impl Faults {
    /// Nanoseconds of one, for each of its pages.
    fn page_ns(&self) -> u64 {
        u64::from(self.ns.get()) * 16 / u64::from(self.sixteenths.get().max(16))
    }

    /// What so many nanoseconds a page make for one.
    fn all_pages(&self, ns: u64) -> u64 {
        ns * u64::from(self.sixteenths.get().max(16)) / 16
    }
}

/// What unmapping takes a page, of the last few thousand.
#[derive(Default)]
struct Unmapping {
    ns: AtomicU64,
    pages: AtomicU64,
}

impl Unmapping {
    const PAGES_MAX: u64 = 4096;

    fn note(&self, pages: usize, ns: u64) {
        if pages == 0 {
            return;
        }
        self.ns.fetch_add(ns, Relaxed);
        // What was counted before counts half.
        if self.pages.fetch_add(pages as u64, Relaxed) > Self::PAGES_MAX {
            for count in [&self.ns, &self.pages] {
                count.store(count.load(Relaxed) / 2, Relaxed);
            }
        }
    }

    fn page_ns(&self) -> u64 {
        self.ns.load(Relaxed) / self.pages.load(Relaxed).max(1)
    }
}

/// What is known of pages that left, and the pool's share.
pub(crate) struct Border {
    limit: usize,
    /// Pages that the pool may take.
    share: AtomicUsize,
    /// Pages that left memory, and packed pages that went to the file.
    evicted: AtomicU64,
    written: AtomicU64,
    /// `evicted` when the border was last looked at.
    looked_at: AtomicU64,
    /// Pages of faults that a sixteenth of the budget more would have saved as frames.
    near: AtomicU64,
    /// Nanoseconds that it would have saved, as frames and as pool.
    frames_gain_ns: AtomicU64,
    pool_gain_ns: AtomicU64,
    /// Nanoseconds that the oldest quarter of the pool has saved.
    pool_worth_ns: AtomicU64,
    /// The block with which the next look at the pool's ages begins.
    next_block: AtomicUsize,
    /// Faults that find their page packed in memory, and those that read the file.
    memory: Faults,
    file: Faults,
    /// Bytes of a packed page, and of one that Zstandard has packed.
    packed: Mean,
    packed_by_zstd: Mean,
    /// Nanoseconds that packing takes, by either, and by Zstandard.
    pack_ns: Mean,
    zstd_ns: Mean,
    /// Unmapping pages that move to limbo, and those that are dropped, as they are stored.
    moving: Unmapping,
    dropping: Unmapping,
    /// Pages that were not tried by Zstandard because it did not pay.
    untried: AtomicU32,
    /// Ticks since they left, from which on packed pages are old enough for the file.
    old: AtomicU16,
}

impl Border {
    pub fn new(limit: usize) -> Border {
        Border {
            limit,
            share: AtomicUsize::new(limit / SHARE_AT_FIRST),
            evicted: AtomicU64::new(0),
            written: AtomicU64::new(0),
            looked_at: AtomicU64::new(0),
            near: AtomicU64::new(0),
            frames_gain_ns: AtomicU64::new(0),
            pool_gain_ns: AtomicU64::new(0),
            pool_worth_ns: AtomicU64::new(0),
            next_block: AtomicUsize::new(0),
            memory: Faults::default(),
            file: Faults::default(),
            packed: Mean::new(),
            packed_by_zstd: Mean::new(),
            pack_ns: Mean::new(),
            zstd_ns: Mean::new(),
            moving: Unmapping::default(),
            dropping: Unmapping::default(),
            untried: AtomicU32::new(0),
            old: AtomicU16::new(NEAR),
        }
    }

    /// Pages that the pool may take of the budget as it was when the process began.
    fn share(&self) -> usize {
        self.share.load(Relaxed)
    }

    /// Pages that it may take of a budget of `limit` pages.
    pub fn share_of(&self, limit: usize) -> usize {
        (limit as u64 * self.share() as u64 / self.limit as u64) as usize
    }

    /// A clock in ticks, of which [`TICKS`] pass with as many pages as the budget has.
    fn ticks(&self, clock: &AtomicU64) -> u16 {
        (clock.load(Relaxed) / (self.limit / TICKS).max(1) as u64) as u16 & (WRAP - 1)
    }

    /// Ticks of a clock since then.
    fn since(&self, clock: &AtomicU64, ticks: u16) -> u16 {
        self.ticks(clock).wrapping_sub(ticks) & (WRAP - 1)
    }

    /// The stamp of a page that leaves memory now.
    fn evict(&self) -> Stamp {
        self.evicted.fetch_add(1, Relaxed);
        Stamp { left: self.ticks(&self.evicted), written: None }
    }

    /// Notes the length of a page that is packed, and what that took.
    pub fn note_packed(&self, kind: Packing, bytes: usize, ns: u64) {
        self.packed.record(bytes as u64);
        self.pack_ns.record_usual(1, ns);
        if kind == Packing::Zstd {
            self.packed_by_zstd.record(bytes as u64);
            self.zstd_ns.record_usual(1, ns);
        }
    }

    /// Whether the next page is to be tried by Zstandard. What is kept in the pool takes the place of pages in
    /// memory: of each packed page as much as it is long. So packing pays where the part of a read of the
    /// file that the rest saves is more than packing and a fault on a packed page take; by half, for those
    /// keep a CPU busy, and a read does not.
    pub fn tries_zstd(&self) -> bool {
        let saved = PAGE_SIZE.saturating_sub(self.packed_by_zstd.get() as usize) as u64;
        let costs = self.memory.page_ns() + u64::from(self.zstd_ns.get());
        let is_worth_it = saved * self.read_ns() / PAGE_SIZE as u64 >= costs + costs / 2;
        is_worth_it || self.untried.fetch_add(1, Relaxed).is_multiple_of(TRY_ONE_IN)
    }

    /// Notes that so many pages were unmapped in so many nanoseconds, to limbo or, as they are stored, for good.
    pub(super) fn note_unmapped(&self, is_dropped: bool, pages: usize, ns: u64) {
        if is_dropped { &self.dropping } else { &self.moving }.note(pages, ns);
    }

    /// Whether a page in memory should keep its packed copy, for when it leaves unchanged. That saves packing, and
    /// moving it to limbo; another page in the copy's place would save, until then, as much of a fault as a frame more
    /// does.
    pub fn is_copy_worth_it(&self) -> bool {
        let gain_ns = self.frames_gain_ns.load(Relaxed) * u64::from(self.packed.get());
        // What is counted is what a sixteenth of the budget more would save while another leaves, and, as
        // what was counted before counts half, about that once more.
        let sixteenths = (self.limit - self.share()) * 16 / self.limit;
        let copy_costs_ns =
            gain_ns / ((self.limit / 16).max(1) * PAGE_SIZE) as u64 * sixteenths as u64 / 2;
        let moving_ns = self.moving.page_ns().saturating_sub(self.dropping.page_ns());
        copy_costs_ns <= u64::from(self.pack_ns.get()) + moving_ns
    }

    /// Nanoseconds for a page that is read from the file; where nothing was read yet what a disk of some
    /// kind takes.
    fn read_ns(&self) -> u64 {
        match self.file.page_ns() {
            0 => 8 * self.memory.page_ns().max(self.zstd_ns.get().into()),
            ns => ns,
        }
    }

    /// Nanoseconds that a page saves by being in the pool and not in the file.
    fn saved_ns(&self) -> u64 {
        self.read_ns().saturating_sub(self.memory.page_ns())
    }

    /// The stamp of a packed page that goes to the file now.
    fn write(&self, stamp: Stamp) -> Stamp {
        self.written.fetch_add(1, Relaxed);
        Stamp { written: Some(self.ticks(&self.written)), ..stamp }
    }

    pub fn note_time(&self, kind: FaultKind, ns: u64) {
        match kind {
            FaultKind::Memory => self.memory.ns.record(ns),
            FaultKind::File => self.file.ns.record(ns),
            _ => {}
        }
    }

    /// Notes how many pages came with a fault on a page that was stored there.
    pub fn note_window(&self, stored: Stored, pages: usize) {
        let faults = match stored {
            Stored::Pool(_) => &self.memory,
            Stored::File(_) => &self.file,
            _ => return,
        };
        faults.sixteenths.record(16 * pages as u64);
    }

    /// Whether a read of the file takes so much longer than a packed page that it is worth packing harder.
    pub fn is_file_slow(&self) -> bool {
        self.file.page_ns() > 2 * self.memory.page_ns()
    }

    /// Notes a fault of a kind on a page with this stamp, which took so many nanoseconds.
    fn note_refault(&self, stamp: Stamp, faults: &Faults, ns: u64) {
        let Some(written) = stamp.written else {
            if self.since(&self.evicted, stamp.left) <= NEAR {
                self.near.fetch_add(faults.all_pages(1), Relaxed);
                self.frames_gain_ns.fetch_add(ns, Relaxed);
            }
            return;
        };
        let packed = (self.packed.get() as usize).clamp(64, PAGE_SIZE);
        let reach = usize::from(NEAR) * PAGE_SIZE / packed;
        if usize::from(self.since(&self.written, written)) <= reach {
            self.pool_gain_ns.fetch_add(self.file.all_pages(self.saved_ns()), Relaxed);
        }
    }

    /// Notes a fault on a page in the pool with this stamp.
    fn note_hit(&self, stamp: Stamp) {
        // It is packed again when it goes the next time, and has not been in the file.
        let stamp = Stamp { written: None, ..stamp };
        let pack_ns = self.memory.all_pages(self.pack_ns.get().into());
        self.note_refault(stamp, &self.memory, u64::from(self.memory.ns.get()) + pack_ns);
        if self.is_old(stamp) {
            self.pool_worth_ns.fetch_add(self.memory.all_pages(self.saved_ns()), Relaxed);
        }
    }

    /// How many pages have left since the border was last looked at, where they are enough for a look.
    fn due(&self) -> Option<usize> {
        let evicted = self.evicted.load(Relaxed);
        let left = (evicted - self.looked_at.load(Relaxed)) as usize;
        let is_due = left >= (self.limit / 16).max(1);
        if is_due {
            self.looked_at.store(evicted, Relaxed);
        }
        is_due.then_some(left)
    }

    /// Moves the border, where so many pages have left since it was last moved, and the pool has so many.
    fn settle(&self, left: usize, pool_pages: usize) {
        // What was counted before counts half.
        let counted = [&self.near, &self.frames_gain_ns, &self.pool_gain_ns, &self.pool_worth_ns];
        let [near, frames_ns, pool_ns, worth] = counted.map(|counter| {
            let count = counter.load(Relaxed);
            counter.fetch_sub(count / 2, Relaxed);
            count
        });
        // For as much memory as the gains are of.
        let quarter = (pool_pages / 4).max(1) as u64;
        let worth_ns = worth * (self.limit / 16) as u64 / quarter;
        let page_ns = self.memory.page_ns().max(self.file.page_ns());
        let gains = Gains { left: left as u64, near, frames_ns, pool_ns, worth_ns, page_ns };
        let step = (left * 16 / STEP).min(self.limit / STEP_MAX).max(1);
        let share = self.share();
        let next = match gains.pool_goes() {
            Ordering::Greater => (share + step).min(self.limit / 4 * 3),
            Ordering::Less => share.saturating_sub(step).max(self.limit / SHARE_MIN),
            Ordering::Equal => share,
        };
        self.share.store(next, Relaxed);
    }

    /// As what a fault on a page with this stamp is counted.
    fn distance(&self, stamp: Stamp) -> Event {
        let ticks = self.since(&self.evicted, stamp.left).max(NEAR);
        let doublings = ticks.div_ceil(NEAR).next_power_of_two().ilog2() as usize;
        Event::REFAULTS[doublings.min(Event::REFAULTS.len() - 1)]
    }

    fn is_old(&self, stamp: Stamp) -> bool {
        self.since(&self.evicted, stamp.left) >= self.old.load(Relaxed)
    }

    /// After a look at `seen` packed pages of which so many were old. A quarter of them should be.
    fn note_search(&self, seen: usize, old: usize) {
        let age = self.old.load(Relaxed);
        let next = if old * 2 > seen {
            (age + age / 4 + 1).min(WRAP / 2)
        } else if old * 8 < seen {
            age - age.div_ceil(4)
        } else {
            age
        };
        self.old.store(next, Relaxed);
    }
}

impl<M: Mmu> VmSpace<M> {
    fn stamp(&self, page: PageNum) -> Stamp {
        Stamp::of(self.pages.stamp(page).load(Relaxed))
    }

    /// Notes that a page leaves memory.
    pub(crate) fn note_evicted(&self, page: PageNum) {
        self.pages.stamp(page).store(self.border.evict().get(), Relaxed);
    }

    /// Notes that a page goes from the pool to the file.
    pub(super) fn note_written_back(&self, page: PageNum) {
        let stamp = self.border.write(self.stamp(page));
        self.pages.stamp(page).store(stamp.get(), Relaxed);
    }

    /// Notes that a fault asked for a page that is stored there.
    pub(crate) fn note_refault(&self, page: PageNum, stored: Stored) {
        let (border, stamp) = (&self.border, self.stamp(page));
        let faults = match stored {
            Stored::Nothing => return,
            Stored::Pool(_) => {
                border.note_hit(stamp);
                &border.memory
            }
            Stored::File(_) => {
                border.note_refault(stamp, &border.file, border.file.ns.get().into());
                &border.file
            }
            Stored::Same(_) => &border.memory,
        };
        let distance = border.distance(stamp);
        if distance == Event::Refault16th {
            self.budget.count(Event::Refault16thNs, faults.ns.get() as usize);
        }
        self.budget.count(Event::WorkingsetRefaultAnon, 1);
        self.budget.count(distance, 1);
    }

    /// Looks at how old the pool's pages are, at a few blocks of them, and moves the border.
    pub(super) fn look_at_border(&self) {
        let Some(left) = self.border.due().filter(|_| self.swap.has_file()) else { return };
        let blocks = self.pages.swap_blocks();
        let start = self.border.next_block.fetch_add(LOOKED_AT, Relaxed);
        let looked_at = (start..start + LOOKED_AT.min(blocks)).map(|block| block % blocks);
        let (mut seen, mut old) = (0, 0);
        for range in looked_at.filter_map(|block| self.pages.swap_block(block)) {
            let packed = self.count_packed(range);
            (seen, old) = (seen + packed.0, old + packed.1);
        }
        if seen > 0 {
            self.border.note_search(seen, old);
        }
        self.border.settle(left, self.swap.zpool.pages());
    }

    /// How many pages of a range are packed, and how many of those left memory so long ago that they are
    /// for the file.
    pub(super) fn count_packed(&self, range: PageRange) -> (usize, usize) {
        let (mut packed, mut old) = (0, 0);
        for page in range.pages().filter(|&page| self.snapshot(page).state() == State::Pool) {
            packed += 1;
            old += usize::from(self.border.is_old(self.stamp(page)));
        }
        (packed, old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 16 * TICKS;

    impl Border {
        /// The stamp of a page that left so many ticks ago.
        fn evict_stamp(&self, ticks: u16) -> Stamp {
            Stamp { left: self.ticks(&self.evicted).wrapping_sub(ticks), written: None }
        }

        fn write_stamp(&self, ticks: u16) -> Stamp {
            let written = self.ticks(&self.written).wrapping_sub(ticks) & (WRAP - 1);
            Stamp { written: Some(written), ..self.evict_stamp(ticks) }
        }
    }

    fn border() -> Border {
        let border = Border::new(LIMIT);
        border.note_packed(Packing::Lz4, 1024, 5_000);
        for _ in 0..100 {
            border.note_time(FaultKind::Memory, 10_000);
            border.note_time(FaultKind::File, 100_000);
        }
        border
    }

    /// Has so many budgets' pages leave, with `fault` after each.
    fn run(border: &Border, budgets: usize, mut fault: impl FnMut(&Border)) {
        for _ in 0..budgets * LIMIT {
            border.evict();
            border.write(border.evict_stamp(0));
            fault(border);
            if let Some(left) = border.due() {
                border.settle(left, LIMIT / 4);
            }
        }
    }

    #[test]
    fn the_pool_shrinks_where_frames_would_have_saved_more_and_grows_where_it_would() {
        let border = border();
        run(&border, 8, |border| border.note_refault(border.evict_stamp(3), &border.file, 10_000));
        assert_eq!(border.share(), LIMIT / SHARE_MIN);
        run(&border, 8, |border| {
            border.note_refault(border.evict_stamp(3), &border.file, 10_000);
            border.note_refault(border.write_stamp(3), &border.file, 100_000);
        });
        assert_eq!(border.share(), LIMIT / 4 * 3);
    }

    #[test]
    fn the_pool_grows_where_hardly_a_page_is_missed_soon() {
        let border = border();
        let mut left = 0;
        run(&border, 8, |border| {
            left += 1;
            if left % 100 == 0 {
                border.note_refault(border.evict_stamp(3), &border.file, 10_000);
            }
            border.note_refault(border.evict_stamp(200), &border.file, 10_000);
        });
        assert_eq!(border.share(), LIMIT / 4 * 3);
    }

    #[test]
    fn one_slow_read_of_the_file_does_not_make_the_pool_grow() {
        let border = Border::new(LIMIT);
        border.note_packed(Packing::Lz4, 1024, 5_000);
        border.note_time(FaultKind::File, 500_000);
        border.note_time(FaultKind::Memory, 10_000);
        let mut left = 0;
        run(&border, 8, |border| {
            left += 1;
            if left % 8 == 0 {
                border.note_hit(border.evict_stamp(3));
            }
            border.note_hit(border.evict_stamp(100));
        });
        assert!(border.share() <= LIMIT / SHARE_AT_FIRST, "{}", border.share());
    }

    #[test]
    fn the_pool_keeps_its_share_while_its_oldest_pages_are_asked_for() {
        let border = border();
        run(&border, 8, |border| {
            border.note_refault(border.evict_stamp(3), &border.file, 10_000);
            border.note_hit(border.evict_stamp(100));
        });
        assert_eq!(border.share(), LIMIT / SHARE_AT_FIRST);
    }

    #[test]
    fn a_copy_is_worth_its_room_unless_a_frame_more_saves_more_than_packing() {
        let border = border();
        assert!(border.is_copy_worth_it(), "nobody misses a frame");
        run(&border, 8, |border| {
            border.note_refault(border.evict_stamp(100), &border.file, 100_000)
        });
        assert!(border.is_copy_worth_it(), "a few frames more would save none of these");
        run(&border, 8, |border| border.note_refault(border.evict_stamp(3), &border.file, 100_000));
        assert!(!border.is_copy_worth_it());
        border.note_unmapped(true, 64, 64_000);
        border.note_unmapped(false, 1, 2_000_000);
        assert!(border.is_copy_worth_it(), "moving it takes longer than that saves");
        (0..8000).for_each(|_| border.note_unmapped(false, 1, 1_000));
        assert!(!border.is_copy_worth_it(), "what was known before is forgotten");
        border.note_unmapped(false, 0, u64::MAX / 2);
        assert!(!border.is_copy_worth_it(), "nothing was moved");
    }

    #[test]
    fn a_page_packed_to_a_quarter_is_within_reach_four_times_as_long() {
        let border = border();
        for (distance, is_within) in [(4 * NEAR, true), (4 * NEAR + 1, false)] {
            border.pool_gain_ns.store(0, Relaxed);
            border.note_refault(border.write_stamp(distance), &border.file, 100_000);
            assert_eq!(border.pool_gain_ns.load(Relaxed) > 0, is_within, "{distance}");
        }
    }

    #[test]
    fn a_distance_is_counted_by_what_part_of_the_budget_has_left_since() {
        let border = border();
        for (ticks, event) in [
            (0, Event::Refault16th),
            (NEAR, Event::Refault16th),
            (NEAR + 1, Event::Refault8th),
            (TICKS as u16, Event::RefaultOnce),
            (TICKS as u16 + 1, Event::RefaultTwice),
            (4 * TICKS as u16, Event::RefaultFour),
            (4 * TICKS as u16 + 1, Event::RefaultFar),
            (WRAP - 1, Event::RefaultFar),
        ] {
            for stamp in [border.evict_stamp(ticks), border.write_stamp(ticks)] {
                let stamp = Stamp::of(stamp.get());
                assert_eq!(border.distance(stamp), event, "{ticks} ticks ago");
            }
        }
    }

    #[test]
    fn zstandard_is_tried_where_what_it_saves_of_a_read_is_more_than_it_takes() {
        let tries = |border: &Border| (0..640).filter(|_| border.tries_zstd()).count();
        assert_eq!(tries(&Border::new(LIMIT)), 640, "nothing is known");
        for (length, ns, is_tried) in [
            (2500, 15_000, true),
            (2500, 20_000, false),
            (1000, 40_000, true),
            (3900, 1_000, false),
        ] {
            let border = border();
            (0..100).for_each(|_| border.note_packed(Packing::Zstd, length, ns));
            let expected = if is_tried { 640 } else { 640 / TRY_ONE_IN as usize };
            assert_eq!(tries(&border), expected, "{length} bytes in {ns} ns");
        }
    }

    #[test]
    fn the_age_that_is_old_follows_what_a_search_finds() {
        let border = border();
        (0..40).for_each(|_| border.note_search(100, 0));
        assert!(border.is_old(border.evict()), "all are old where none was found");
        (0..40).for_each(|_| border.note_search(100, 100));
        let stamp = border.evict();
        assert!(!border.is_old(stamp));
    }
}
