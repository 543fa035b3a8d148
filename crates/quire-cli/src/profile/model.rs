//! The sampled pages in miniature: what would have been in memory, packed and in the swap file with other budgets.
//!
//! A miniature is a budget scaled down as the pages are: it holds the sampled pages alone, in the part of the
//! budget that falls to them, and does with them what reclaim does with all: the hand of a clock goes over the
//! groups in order of their addresses, a page that a fault asked for is passed once, one that goes is in limbo for a
//! while, is packed then, and written to the swap file where the pool's share is full. (Waldspurger and others,
//! Cache Modeling and Optimization using Miniature Simulations, 2017.)

use std::collections::{BTreeMap, VecDeque};
use std::ops::{AddAssign, Mul};

use quire::control::managed_part;
use quire::control::sampling::{GROUP_PAGES, GroupSample};
use quire::units::PAGE_SIZE;

/// How fast what is known of the use of neighbours changes, and how often they are tried where they are of none.
const USE_CHANGE: f64 = 1.0 / 64.0;
const TRY_ONE_IN: u32 = 16;
/// Of a budget: what is kept free, and what is in limbo while memory is short.
const FREE_PART: f64 = 1.0 / 40.0;
const LIMBO_PART: f64 = 1.0 / 16.0;
/// What the pool has of a budget at first, at least, and at most, where there is a swap file behind it.
const SHARE_AT_FIRST: f64 = 0.25;
const SHARE_MIN: f64 = 1.0 / 128.0;
const SHARE_MAX: f64 = 0.75;
/// What is missed after less than such a part of the budget has left counts when the pool's share is moved.
const NEAR_PART: f64 = 1.0 / 16.0;
/// By how much at a time, and where more than this part of what leaves is missed so soon.
const STEP_PART: f64 = 1.0 / 64.0;
const FEW_PART: f64 = 1.0 / 16.0;

/// What faults cost, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Costs {
    /// A fault on a page in limbo.
    pub limbo: f64,
    /// A fault on a page in the pool, and each page that comes along, with what it takes to pack others in their
    /// place.
    pub pool: [f64; 2],
    /// The same of the swap file.
    pub file: [f64; 2],
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(super) struct Misses {
    /// Faults on pages in limbo.
    pub limbo: f64,
    /// Faults on pages in the pool, and pages that came along.
    pub pool: [f64; 2],
    pub file: [f64; 2],
}

impl Misses {
    /// Pages that came back from swap.
    pub(super) fn swapped_in(&self) -> f64 {
        self.pool.iter().chain(&self.file).sum()
    }

    pub(super) fn seconds(&self, costs: &Costs) -> f64 {
        let of = |pages: [f64; 2], ns: [f64; 2]| pages[0] * ns[0] + pages[1] * ns[1];
        (self.limbo * costs.limbo + of(self.pool, costs.pool) + of(self.file, costs.file)) / 1e9
    }
}

impl AddAssign for Misses {
    fn add_assign(&mut self, other: Misses) {
        self.limbo += other.limbo;
        for at in 0..2 {
            self.pool[at] += other.pool[at];
            self.file[at] += other.file[at];
        }
    }
}

impl Mul<f64> for Misses {
    type Output = Misses;

    fn mul(self, factor: f64) -> Misses {
        let both = |pages: [f64; 2]| pages.map(|pages| pages * factor);
        Misses { limbo: self.limbo * factor, pool: both(self.pool), file: both(self.file) }
    }
}

/// What happened in a budget.
#[derive(Clone, Copy, Debug)]
pub(super) struct Played {
    pub budget_bytes: u64,
    pub misses: Misses,
    /// Whether all of the program fitted in, packed, or had a swap file.
    pub fits: bool,
}

/// Where a page is in a miniature.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Place {
    #[default]
    Nowhere,
    Mapped,
    /// Mapped, and asked for by a fault since the hand last came.
    Accessed,
    Limbo,
    Pool,
    File,
}

#[derive(Clone, Copy, Default)]
struct Page {
    place: Place,
    /// Came along with another, and was not used yet.
    is_along: bool,
    /// How many pages had gone there when it did.
    stamp: u64,
}

/// Pages by group and place in it, and their stamps when they came.
type Queue = VecDeque<(usize, usize, u64)>;

/// A group's process, and its number there.
type Key = (u32, u64);

/// What is known of a sampled group.
#[derive(Default)]
struct Group {
    present: u16,
    /// Pages that were touched at the last look.
    touched: u16,
    /// Pages that are touched all the time, as far as is known.
    hot: u16,
    /// Whether any were at the look before.
    was_touched: bool,
    /// The last look that told of it.
    look: u16,
}

/// Pages of a group that were touched at a look.
#[derive(Clone, Copy)]
struct Touch {
    /// Its place among those of the look.
    turn: u64,
    group: usize,
    pages: u16,
    /// Whether some were at the look before: then it is no stream that comes by.
    is_again: bool,
}

struct Miniature {
    budget_bytes: u64,
    pages: Vec<[Page; GROUP_PAGES]>,
    /// Mapped pages by group.
    mapped_of: Vec<u32>,
    mapped: usize,
    in_limbo: usize,
    in_pool: usize,
    /// The group behind the one that was looked at last.
    hand: usize,
    limbo: Queue,
    pool: Queue,
    /// Pages that went to limbo, from there to the pool, and from there to the file.
    unmapped: u64,
    evicted: u64,
    written: u64,
    share: f64,
    near: f64,
    frames_gain: f64,
    pool_gain: f64,
    pool_worth: f64,
    looked_at: u64,
    /// Which part of the pages that come along is used.
    along_use: f64,
    untried: u32,
    /// Most pages that there were, for each that there was room for.
    fullest: f64,
    misses: Misses,
}

/// What all miniatures go by.
#[derive(Clone, Copy)]
struct Terms {
    costs: Costs,
    /// Length of a packed page, as a part of a page.
    packed: f64,
    has_file: bool,
}

impl Miniature {
    fn leave(&mut self, group: usize, at: usize) {
        match self.pages[group][at].place {
            Place::Mapped | Place::Accessed => {
                self.mapped -= 1;
                self.mapped_of[group] -= 1;
            }
            Place::Limbo => self.in_limbo -= 1,
            Place::Pool => self.in_pool -= 1,
            Place::Nowhere | Place::File => {}
        }
        self.pages[group][at] = Page::default();
    }

    fn enter(&mut self, group: usize, at: usize) {
        self.pages[group][at].place = Place::Accessed;
        self.mapped += 1;
        self.mapped_of[group] += 1;
    }

    /// Pages of a group are touched.
    fn touch(&mut self, Touch { group, pages, is_again, .. }: Touch, limit: f64, terms: &Terms) {
        let (mut pool, mut file) = (0u16, 0u16);
        let mut is_in_limbo = false;
        for at in pages_in(pages) {
            let page = self.pages[group][at];
            if page.is_along {
                self.pages[group][at].is_along = false;
                self.along_use += (1.0 - self.along_use) * USE_CHANGE;
            }
            match page.place {
                Place::Mapped | Place::Accessed => continue,
                Place::Nowhere => {}
                Place::Limbo => is_in_limbo = true,
                Place::Pool => pool |= 1 << at,
                Place::File => file |= 1 << at,
            }
            self.note_refault(page, limit, terms);
            self.leave(group, at);
            self.enter(group, at);
        }
        if is_in_limbo {
            // One fault has all of them back.
            self.misses.limbo += 1.0;
            self.bring_along(group, |place| place == Place::Limbo);
        }
        let missed = pool | file;
        if missed == 0 {
            return;
        }
        let pages = [pool, file].map(|mask| f64::from(mask.count_ones()));
        let is_stream = missed.count_ones() as usize == GROUP_PAGES && !is_again;
        self.untried += 1;
        let comes_along = self.along_use > 0.5 || self.untried.is_multiple_of(TRY_ONE_IN);
        let faults = match (is_stream, comes_along) {
            // Its windows are much longer than a group.
            (true, _) => [0.0; 2],
            (false, true) if file != 0 => [0.0, 1.0],
            (false, true) => [1.0, 0.0],
            (false, false) => pages,
        };
        let mut along = [pages[0] - faults[0], pages[1] - faults[1]].map(|pages| pages.max(0.0));
        if comes_along && !is_stream {
            // Those that were touched at the same look would have come with the first of them.
            for _ in 1..missed.count_ones() {
                self.along_use += (1.0 - self.along_use) * USE_CHANGE;
            }
            along[0] += self.bring_along(group, |place| place == Place::Pool);
            if file != 0 {
                along[1] += self.bring_along(group, |place| place == Place::File);
            }
        }
        for at in 0..2 {
            let into = if at == 0 { &mut self.misses.pool } else { &mut self.misses.file };
            into[0] += faults[at];
            into[1] += along[at];
        }
    }

    /// The pages of a group that are there come along with a fault; returns how many.
    fn bring_along(&mut self, group: usize, is_there: impl Fn(Place) -> bool) -> f64 {
        let mut count = 0.0;
        for at in 0..GROUP_PAGES {
            let place = self.pages[group][at].place;
            if is_there(place) {
                self.leave(group, at);
                self.enter(group, at);
                self.pages[group][at].place = Place::Mapped;
                self.pages[group][at].is_along = place != Place::Limbo;
                count += 1.0;
            }
        }
        count
    }

    /// A page comes back: what a little more of frames, or of pool, would have saved.
    fn note_refault(&mut self, page: Page, limit: f64, terms: &Terms) {
        let [memory, file] = [terms.costs.pool[0], terms.costs.file[0]];
        match page.place {
            Place::Pool => {
                if ((self.evicted - page.stamp) as f64) < limit * NEAR_PART {
                    self.near += 1.0;
                    self.frames_gain += memory;
                }
                let oldest = self.pool.get(self.pool.len() / 4).map_or(0, |entry| entry.2);
                if page.stamp <= oldest {
                    self.pool_worth += file - memory;
                }
            }
            Place::File => {
                let since = (self.written - page.stamp) as f64;
                if since * terms.packed < limit * NEAR_PART {
                    self.pool_gain += file - memory;
                }
            }
            _ => {}
        }
    }

    /// Reclaims what is too much, where the miniature has room for `limit` pages.
    fn settle(&mut self, limit: f64, terms: &Terms) {
        let room = limit * (1.0 - FREE_PART);
        let mut rounds = 0;
        while self.held(terms) > room && rounds < 2 {
            if self.in_limbo as f64 > limit * LIMBO_PART || self.mapped == 0 {
                if !self.pack_oldest() {
                    break;
                }
            } else if !self.move_hand() {
                rounds += 1;
            }
        }
        let all = (self.mapped + self.in_limbo + self.in_pool) as f64;
        self.fullest = self.fullest.max(all / room);
        let share = if terms.has_file { self.share * limit } else { f64::INFINITY };
        while self.in_pool as f64 * terms.packed > share {
            let Some((group, at, stamp)) = self.pool.pop_front() else { break };
            let page = &mut self.pages[group][at];
            if page.place == Place::Pool && page.stamp == stamp {
                self.in_pool -= 1;
                self.written += 1;
                *page = Page { place: Place::File, stamp: self.written, is_along: false };
            }
        }
        // Entries of pages that have come back are left behind.
        let pages = &self.pages;
        let tidy = |queue: &mut Queue, place, count: usize| {
            if queue.len() > 2 * count + GROUP_PAGES {
                queue.retain(|&(group, at, stamp)| {
                    let page = pages[group][at];
                    page.place == place && page.stamp == stamp
                });
            }
        };
        tidy(&mut self.limbo, Place::Limbo, self.in_limbo);
        tidy(&mut self.pool, Place::Pool, self.in_pool);
        self.settle_border(limit);
    }

    fn held(&self, terms: &Terms) -> f64 {
        (self.mapped + self.in_limbo) as f64 + self.in_pool as f64 * terms.packed
    }

    /// Moves the border between frames and pool, as reclaim does.
    fn settle_border(&mut self, limit: f64) {
        let left = (self.evicted - self.looked_at) as f64;
        if left < (limit * NEAR_PART).max(1.0) {
            return;
        }
        self.looked_at = self.evicted;
        let quarter = (self.in_pool as f64 / 4.0).max(1.0);
        let worth = self.pool_worth * limit * NEAR_PART / quarter;
        let step = left / limit * STEP_PART * 16.0;
        let few = left * FEW_PART;
        if self.near < few / 2.0 || self.pool_gain > self.frames_gain * 1.25 {
            self.share = (self.share + step).min(SHARE_MAX);
        } else if self.near > few && self.frames_gain > worth * 1.25 {
            self.share = (self.share - step).max(SHARE_MIN);
        }
        for gain in
            [&mut self.near, &mut self.frames_gain, &mut self.pool_gain, &mut self.pool_worth]
        {
            *gain /= 2.0;
        }
    }

    /// The page that is longest in limbo is packed. `false`: there is none.
    fn pack_oldest(&mut self) -> bool {
        while let Some((group, at, stamp)) = self.limbo.pop_front() {
            let page = self.pages[group][at];
            if page.place == Place::Limbo && page.stamp == stamp {
                self.evicted += 1;
                let stamp = self.evicted;
                self.pages[group][at] = Page { place: Place::Pool, stamp, is_along: false };
                self.in_limbo -= 1;
                self.in_pool += 1;
                self.pool.push_back((group, at, stamp));
                return true;
            }
        }
        false
    }

    /// Looks at the next group that has mapped pages, in the order in which they were seen first. `false` where the
    /// hand begins anew.
    fn move_hand(&mut self) -> bool {
        let mut left = self.mapped_of.iter().skip(self.hand);
        let Some(passed) = left.position(|&mapped| mapped > 0) else {
            self.hand = 0;
            return false;
        };
        let group = self.hand + passed;
        self.hand = group + 1;
        for at in 0..GROUP_PAGES {
            let page = &mut self.pages[group][at];
            match page.place {
                Place::Accessed => page.place = Place::Mapped,
                Place::Mapped => {
                    if page.is_along {
                        self.along_use -= self.along_use * USE_CHANGE;
                    }
                    self.unmapped += 1;
                    let stamp = self.unmapped;
                    *page = Page { place: Place::Limbo, stamp, is_along: false };
                    self.mapped -= 1;
                    self.mapped_of[group] -= 1;
                    self.in_limbo += 1;
                    self.limbo.push_back((group, at, stamp));
                }
                _ => {}
            }
        }
        true
    }
}

/// The pages of a group that a mask has.
fn pages_in(mask: u16) -> impl Iterator<Item = usize> {
    (0..GROUP_PAGES).filter(move |at| mask >> at & 1 != 0)
}

/// A number that is as good as chance.
fn mixed(number: u64) -> u64 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// What was seen of all sampled groups, and the miniatures that live by it.
pub(super) struct World {
    terms: Terms,
    groups: Vec<Group>,
    unused: Vec<usize>,
    order: BTreeMap<Key, usize>,
    miniatures: Vec<Miniature>,
    /// What happened in each, in pages of the whole program.
    totals: Vec<Misses>,
    /// Pages of the program for each of those sampled.
    scale: f64,
    /// Pages that are sampled and have content, and how many were touched since this was last asked for.
    present: usize,
    touched: usize,
    packed: [f64; 2],
}

impl World {
    pub(super) fn new(costs: Costs, has_file: bool) -> World {
        World {
            terms: Terms { costs, packed: 1.0 / 3.0, has_file },
            groups: Vec::new(),
            unused: Vec::new(),
            order: BTreeMap::new(),
            miniatures: Vec::new(),
            totals: Vec::new(),
            scale: 1.0,
            present: 0,
            touched: 0,
            packed: [0.0; 2],
        }
    }

    pub(super) fn present(&self) -> usize {
        self.present
    }

    /// Sampled pages that were touched since this was last asked for.
    pub(super) fn take_touched(&mut self) -> usize {
        std::mem::take(&mut self.touched)
    }

    /// A packed page's length, as a part of a page.
    pub(super) fn packed(&self) -> f64 {
        self.terms.packed
    }

    pub(super) fn note_packed(&mut self, bytes: usize) {
        self.packed[0] += 1.0;
        self.packed[1] += bytes as f64 / PAGE_SIZE as f64;
        // A packed page has a head, and slabs have gaps.
        self.terms.packed = (self.packed[1] / self.packed[0] * 1.05).clamp(0.01, 1.0);
    }

    /// Notes that the program has so many pages with content: the sampled ones stand for these.
    pub(super) fn note_wanted(&mut self, pages: u64, shift: u32) {
        let nominal = f64::from(1u32 << shift);
        let counted = pages as f64 / self.present.max(1) as f64;
        self.scale = counted.clamp(nominal / 2.0, nominal * 2.0);
    }

    /// Begins a miniature of a budget, in which all that is there is in memory.
    pub(super) fn begin(&mut self, budget_bytes: u64) {
        let mut miniature = Miniature {
            budget_bytes,
            pages: vec![[Page::default(); GROUP_PAGES]; self.groups.len()],
            mapped_of: vec![0; self.groups.len()],
            mapped: 0,
            in_limbo: 0,
            in_pool: 0,
            hand: 0,
            limbo: VecDeque::new(),
            pool: VecDeque::new(),
            unmapped: 0,
            evicted: 0,
            written: 0,
            share: SHARE_AT_FIRST,
            near: 0.0,
            frames_gain: 0.0,
            pool_gain: 0.0,
            pool_worth: 0.0,
            looked_at: 0,
            along_use: 0.5,
            untried: 0,
            fullest: 0.0,
            misses: Misses::default(),
        };
        for (number, group) in self.groups.iter().enumerate() {
            for at in pages_in(group.present) {
                miniature.enter(number, at);
            }
        }
        self.miniatures.push(miniature);
        self.totals.push(Misses::default());
    }

    /// What happened in each of the miniatures.
    pub(super) fn results(&self) -> impl Iterator<Item = Played> {
        self.miniatures.iter().zip(&self.totals).map(|(miniature, &misses)| Played {
            budget_bytes: miniature.budget_bytes,
            misses,
            fits: self.terms.has_file || miniature.fullest * self.terms.packed <= 1.0,
        })
    }

    /// Ends the miniatures of budgets that are of no interest any more.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(u64) -> bool) {
        let keep: Vec<bool> =
            self.miniatures.iter().map(|miniature| is_wanted(miniature.budget_bytes)).collect();
        let mut kept = keep.iter();
        self.miniatures.retain(|_| kept.next() == Some(&true));
        let mut kept = keep.iter();
        self.totals.retain(|_| kept.next() == Some(&true));
    }

    /// A member tells of a group.
    pub(super) fn see(&mut self, pid: u32, look: u16, seen: GroupSample) {
        let group = self.group((pid, seen.group));
        let gone = self.groups[group].present & !seen.present;
        self.free(group, gone);
        let known = &mut self.groups[group];
        self.present += (seen.present & !known.present).count_ones() as usize;
        (known.present, known.look) = (seen.present, look);
        known.touched = seen.touched;
        if let Some(patience) = seen.patience {
            known.hot = if patience > 0 { seen.touched } else { 0 };
        }
        self.touched += seen.touched.count_ones() as usize;
    }

    /// A member has told all of a look: what it touched happens in the miniatures. In which order it did so is not
    /// known; the order of addresses, which is the clock's, would be the worst of all.
    pub(super) fn end_look(&mut self, pid: u32, look: u16, unmanaged_pages: u64) {
        let mine = self.order.range((pid, 0)..=(pid, u64::MAX));
        let mut touches: Vec<Touch> = Vec::new();
        for (&(_, number), &group) in mine {
            let known = &mut self.groups[group];
            let pages = (std::mem::take(&mut known.touched) | known.hot) & known.present;
            let is_again = std::mem::replace(&mut known.was_touched, pages != 0);
            if pages != 0 {
                let turn = mixed(number ^ u64::from(look) << 32);
                touches.push(Touch { turn, group, pages, is_again });
            }
        }
        touches.sort_unstable_by_key(|touch| touch.turn);
        for (miniature, total) in self.miniatures.iter_mut().zip(&mut self.totals) {
            let limit = limit_pages(miniature.budget_bytes, unmanaged_pages) / self.scale;
            for &touch in &touches {
                miniature.touch(touch, limit, &self.terms);
                miniature.settle(limit, &self.terms);
            }
            *total += std::mem::take(&mut miniature.misses) * self.scale;
        }
    }

    fn group(&mut self, key: Key) -> usize {
        if let Some(&group) = self.order.get(&key) {
            return group;
        }
        let known = Group::default();
        let group = match self.unused.pop() {
            Some(group) => {
                self.groups[group] = known;
                group
            }
            None => {
                self.groups.push(known);
                for miniature in &mut self.miniatures {
                    miniature.pages.push([Page::default(); GROUP_PAGES]);
                    miniature.mapped_of.push(0);
                }
                self.groups.len() - 1
            }
        };
        self.order.insert(key, group);
        group
    }

    /// Pages of a group have no content any more.
    fn free(&mut self, group: usize, gone: u16) {
        self.present -= gone.count_ones() as usize;
        for at in pages_in(gone) {
            self.miniatures.iter_mut().for_each(|miniature| miniature.leave(group, at));
        }
    }

    /// Forgets groups: those of which a census did not tell, of a process that has ended, or that are not sampled
    /// any more.
    pub(super) fn forget(&mut self, is_gone: impl Fn(u32, u64, u16) -> bool) {
        let gone: Vec<Key> = self
            .order
            .iter()
            .filter(|&(&(pid, number), &group)| is_gone(pid, number, self.groups[group].look))
            .map(|(&key, _)| key)
            .collect();
        for key in gone {
            let Some(group) = self.order.remove(&key) else { continue };
            self.free(group, self.groups[group].present);
            self.groups[group].present = 0;
            self.unused.push(group);
        }
    }
}

/// Pages that managed memory has of a budget.
fn limit_pages(budget_bytes: u64, unmanaged_pages: u64) -> f64 {
    managed_part(budget_bytes / PAGE_SIZE as u64, unmanaged_pages, 0) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs =
        Costs { limbo: 10_000.0, pool: [50_000.0, 5_000.0], file: [200_000.0, 10_000.0] };
    const MIB: u64 = 1 << 20;
    const PID: u32 = 7;
    const ALL: u16 = ((1u32 << GROUP_PAGES) - 1) as u16;

    /// A program that touches groups, all of which are sampled.
    struct Program {
        world: World,
        look: u16,
        groups: u64,
    }

    impl Program {
        /// With miniatures of these budgets, in MiB.
        fn new(budgets: &[u64], has_file: bool) -> Program {
            let mut world = World::new(COSTS, has_file);
            budgets.iter().for_each(|mib| world.begin(mib * MIB));
            Program { world, look: 0, groups: 0 }
        }

        /// Touches these pages of groups between two looks.
        fn touch(&mut self, groups: impl IntoIterator<Item = u64>, pages: u16, patience: u32) {
            self.look += 1;
            for group in groups {
                self.groups = self.groups.max(group + 1);
                let patience = Some(patience);
                let seen = GroupSample { group, touched: pages, present: ALL, patience };
                self.world.see(PID, self.look, seen);
            }
            self.world.note_wanted(self.world.present() as u64, 0);
            self.world.end_look(PID, self.look, 0);
        }

        fn misses(&self) -> Vec<Misses> {
            self.world.results().map(|played| played.misses).collect()
        }
    }

    const GROUP_BYTES: u64 = (GROUP_PAGES * PAGE_SIZE) as u64;

    #[test]
    fn a_loop_over_more_than_there_is_misses_and_one_over_less_does_not() {
        let mut program = Program::new(&[24, 64], false);
        let groups = 40 * MIB / GROUP_BYTES;
        for round in 0..4 {
            for at in (0..groups).step_by(32) {
                program.touch(at..(at + 32).min(groups), ALL, 0);
            }
            if round == 0 {
                program.world.totals.fill(Misses::default());
            }
        }
        let [small, large] = program.misses()[..] else { panic!("two budgets") };
        let pages = (3 * groups * GROUP_PAGES as u64) as f64;
        assert!(small.swapped_in() > pages * 0.5, "{small:?} of {pages}");
        assert_eq!(small.pool[0], 0.0, "a stream's windows are long");
        assert_eq!(large, Misses::default());
    }

    #[test]
    fn what_is_touched_all_the_time_stays_and_what_was_freed_takes_no_room() {
        let mut program = Program::new(&[24], false);
        let hot = 4 * MIB / GROUP_BYTES;
        program.touch(0..hot, ALL, 3);
        // A stream goes by.
        for at in (hot..36 * MIB / GROUP_BYTES).step_by(16) {
            program.touch(at..at + 16, ALL, 0);
        }
        let streamed = program.misses()[0];
        let hot_pages = (hot as usize * GROUP_PAGES) as f64;
        assert!(streamed.swapped_in() < hot_pages, "nearly all stay: {streamed:?}");
        assert!(streamed.limbo > 0.0, "they pass through limbo");
        // All but the hot ones is freed: the rest has room.
        program.world.forget(|_, group, _| group >= hot);
        assert_eq!(program.world.present(), (hot as usize) * GROUP_PAGES);
        let before = program.misses()[0].swapped_in();
        for _ in 0..10 {
            program.touch(0..20 * MIB / GROUP_BYTES, 1, 0);
        }
        assert_eq!(program.misses()[0].swapped_in(), before);
    }

    #[test]
    fn with_a_swap_file_the_pool_keeps_to_its_share_and_the_rest_comes_from_the_file() {
        for has_file in [false, true] {
            let mut program = Program::new(&[24], has_file);
            let groups = 96 * MIB / GROUP_BYTES;
            (0..100).for_each(|_| program.world.note_packed(PAGE_SIZE / 2));
            for _ in 0..3 {
                for at in (0..groups).step_by(32) {
                    program.touch(at..(at + 32).min(groups), ALL, 0);
                }
            }
            let played = program.world.results().next().unwrap();
            assert_eq!(played.misses.file[1] > 0.0, has_file, "{played:?}");
            assert_eq!(played.fits, has_file, "half of 96 MiB does not fit into 24");
        }
    }

    #[test]
    fn a_miniature_that_begins_late_has_all_that_is_there_and_nothing_that_was() {
        let mut program = Program::new(&[], false);
        program.touch(0..100, ALL, 0);
        program.world.forget(|_, group, _| group % 2 == 0);
        program.world.begin(64 * MIB);
        assert_eq!(program.world.miniatures[0].mapped, 50 * GROUP_PAGES);
        program.touch(0..100, ALL, 0);
        assert_eq!(program.world.miniatures[0].mapped, 100 * GROUP_PAGES);
        program.world.retain(|bytes| bytes > 64 * MIB);
        assert_eq!(program.world.results().count(), 0);
    }

    #[test]
    fn neighbours_come_along_only_where_they_are_used() {
        // Pages of a group are touched at the same look, or at different ones that are far apart.
        let run = |masks: [u16; 2]| {
            let mut program = Program::new(&[24], false);
            let groups = 96 * MIB / GROUP_BYTES;
            for round in 0..8 {
                let mask = if round == 0 { ALL } else { masks[round % 2] };
                for at in (0..groups).step_by(64) {
                    program.touch((at..at + 64).map(|group| group * 37 % groups), mask, 0);
                }
            }
            program.misses()[0]
        };
        let together = run([0x7f, 0x7f]);
        let apart = run([1, 16]);
        assert!(together.pool[1] > together.pool[0], "{together:?}");
        assert!(apart.pool[1] < apart.pool[0], "{apart:?}");
    }
}
