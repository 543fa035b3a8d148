//! The sampled pages in miniature: what would have been in memory, packed and in the swap file with another budget.
//!
//! A miniature is a budget scaled down as the pages are: it holds the sampled pages alone, in the part of the
//! budget that falls to them, and does with them what reclaim does with all: the hand of a clock goes over the
//! groups, a page that a fault asked for is passed once, one that goes is in limbo for a while, is packed then, and
//! written to the swap file where the pool's share is full. (Waldspurger and others, Cache Modeling and
//! Optimization using Miniature Simulations, 2017.)

use std::collections::VecDeque;

use quire::control::managed_part;
use quire::control::sampling::GROUP_PAGES;
use quire::units::PAGE_SIZE;

use super::border::{Border, NEAR_PART};
use super::misses::{Costs, Misses};

/// How fast what is known of the use of neighbours changes, and how often they are tried where they are of none.
const USE_CHANGE: f64 = 1.0 / 64.0;
const TRY_ONE_IN: u32 = 16;
/// Of a budget: what is kept free, and what is in limbo while memory is short.
const FREE_PART: f64 = 1.0 / 40.0;
const LIMBO_PART: f64 = 1.0 / 16.0;
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

/// Pages of a group that were touched at a look.
#[derive(Clone, Copy)]
pub(super) struct Touch {
    /// Its place among those of the look.
    pub turn: u64,
    pub group: usize,
    pub pages: u16,
    /// Whether some were at the look before: then it is no stream that comes by.
    pub is_again: bool,
}

pub(super) struct Miniature {
    pub budget_bytes: u64,
    pages: Vec<[Page; GROUP_PAGES]>,
    /// Mapped pages by group.
    mapped_of: Vec<u32>,
    pub mapped: usize,
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
    border: Border,
    /// Which part of the pages that come along is used.
    along_use: f64,
    untried: u32,
    /// Most pages that there were, for each that there was room for.
    fullest: f64,
    /// What happened, in pages of the whole program.
    pub misses: Misses,
}

/// What all miniatures go by.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    pub costs: Costs,
    /// Length of a packed page, as a part of a page.
    pub packed: f64,
    pub has_file: bool,
    /// Pages of the program for each of those sampled.
    pub scale: f64,
}

impl Miniature {
    /// Of a budget, with room for so many groups.
    pub(super) fn new(budget_bytes: u64, groups: usize) -> Miniature {
        Miniature {
            budget_bytes,
            pages: vec![[Page::default(); GROUP_PAGES]; groups],
            mapped_of: vec![0; groups],
            mapped: 0,
            in_limbo: 0,
            in_pool: 0,
            hand: 0,
            limbo: VecDeque::new(),
            pool: VecDeque::new(),
            unmapped: 0,
            evicted: 0,
            written: 0,
            border: Border::default(),
            along_use: 0.5,
            untried: 0,
            fullest: 0.0,
            misses: Misses::default(),
        }
    }

    /// Has room for one group more.
    pub(super) fn add_group(&mut self) {
        self.pages.push([Page::default(); GROUP_PAGES]);
        self.mapped_of.push(0);
    }

    /// What happens in it when these pages are touched, one group after another, while so many pages are not managed.
    pub(super) fn play(&mut self, touches: &[Touch], unmanaged_pages: u64, terms: &Terms) {
        let budget_pages = self.budget_bytes / PAGE_SIZE as u64;
        let limit = managed_part(budget_pages, unmanaged_pages, 0) as f64 / terms.scale;
        let mut misses = Misses::default();
        for &touch in touches {
            misses += self.touch(touch, limit, terms);
            self.settle(limit, terms);
        }
        self.misses += misses * terms.scale;
    }

    /// What happened in it, in all.
    pub(super) fn played(&self, terms: &Terms) -> Played {
        Played {
            budget_bytes: self.budget_bytes,
            misses: self.misses,
            fits: terms.has_file || self.fullest * terms.packed <= 1.0,
        }
    }

    /// A page is nowhere any more.
    pub(super) fn leave(&mut self, group: usize, at: usize) {
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

    /// A page is mapped, as one that a fault has asked for.
    pub(super) fn enter(&mut self, group: usize, at: usize) {
        self.pages[group][at].place = Place::Accessed;
        self.mapped += 1;
        self.mapped_of[group] += 1;
    }

    /// Pages of a group are touched: those that are not in memory come back.
    fn touch(&mut self, touch: Touch, limit: f64, terms: &Terms) -> Misses {
        let Touch { group, pages, .. } = touch;
        let (mut pool, mut file) = (0u16, 0u16);
        let mut misses = Misses::default();
        for at in pages_in(pages) {
            let page = self.pages[group][at];
            if page.is_along {
                self.pages[group][at].is_along = false;
                self.note_used();
            }
            match page.place {
                Place::Mapped | Place::Accessed => continue,
                Place::Nowhere => {}
                // One fault has all of the group back.
                Place::Limbo => misses.limbo = 1.0,
                Place::Pool => pool |= 1 << at,
                Place::File => file |= 1 << at,
            }
            self.note_refault(page, limit, terms);
            self.leave(group, at);
            self.enter(group, at);
        }
        if misses.limbo > 0.0 {
            self.bring_along(group, Place::Limbo);
        }
        if pool | file != 0 {
            self.count_missed(touch, pool, file, &mut misses);
        }
        misses
    }

    /// Pages of a group have come back from the pool, and others from the file: how many faults that were, and what came
    /// along with them.
    fn count_missed(&mut self, touch: Touch, pool: u16, file: u16, misses: &mut Misses) {
        let missed = (pool | file).count_ones();
        let [from_pool, from_file] = [pool, file].map(|mask| f64::from(mask.count_ones()));
        self.untried += 1;
        if missed as usize == GROUP_PAGES && !touch.is_again {
            // A stream's: its windows are much longer than a group.
            misses.add([0.0, from_pool], [0.0, from_file]);
        } else if self.along_use > 0.5 || self.untried.is_multiple_of(TRY_ONE_IN) {
            // Those that were touched at the same look would have come with the first of them.
            (1..missed).for_each(|_| self.note_used());
            let along = from_pool + self.bring_along(touch.group, Place::Pool);
            if file == 0 {
                misses.add([1.0, along - 1.0], [0.0; 2]);
            } else {
                let along_from_file = from_file + self.bring_along(touch.group, Place::File);
                misses.add([0.0, along], [1.0, along_from_file - 1.0]);
            }
        } else {
            misses.add([from_pool, 0.0], [from_file, 0.0]);
        }
    }

    /// A page comes back from the pool, or from the file.
    fn note_refault(&mut self, page: Page, limit: f64, terms: &Terms) {
        let near = limit * NEAR_PART;
        match page.place {
            Place::Pool => {
                let is_near = ((self.evicted - page.stamp) as f64) < near;
                let oldest = self.pool.get(self.pool.len() / 4).map_or(0, |entry| entry.2);
                self.border.note_hit(is_near, page.stamp <= oldest, &terms.costs);
            }
            Place::File => {
                let is_near = ((self.written - page.stamp) as f64) * terms.packed < near;
                self.border.note_read(is_near, &terms.costs);
            }
            _ => {}
        }
    }

    /// A page that came along is used.
    fn note_used(&mut self) {
        self.along_use += (1.0 - self.along_use) * USE_CHANGE;
    }

    /// The pages of a group that are at a place come along with a fault; returns how many.
    fn bring_along(&mut self, group: usize, place: Place) -> f64 {
        let mut count = 0.0;
        for at in 0..GROUP_PAGES {
            if self.pages[group][at].place == place {
                self.leave(group, at);
                self.enter(group, at);
                let page = &mut self.pages[group][at];
                (page.place, page.is_along) = (Place::Mapped, place != Place::Limbo);
                count += 1.0;
            }
        }
        count
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
        if terms.has_file {
            self.write_oldest(limit, terms);
        }
        self.tidy();
        self.border.settle(self.evicted, self.in_pool, limit, terms);
    }

    /// Writes to the file what is too much for the pool's share.
    fn write_oldest(&mut self, limit: f64, terms: &Terms) {
        while self.in_pool as f64 * terms.packed > self.border.share() * limit {
            let Some((group, at, stamp)) = self.pool.pop_front() else { break };
            let page = &mut self.pages[group][at];
            if page.place == Place::Pool && page.stamp == stamp {
                self.in_pool -= 1;
                self.written += 1;
                *page = Page { place: Place::File, stamp: self.written, is_along: false };
            }
        }
    }

    /// Takes entries out of the queues that pages have left behind which came back.
    fn tidy(&mut self) {
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
    }

    fn held(&self, terms: &Terms) -> f64 {
        (self.mapped + self.in_limbo) as f64 + self.in_pool as f64 * terms.packed
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
pub(super) fn pages_in(mask: u16) -> impl Iterator<Item = usize> {
    (0..GROUP_PAGES).filter(move |at| mask >> at & 1 != 0)
}
