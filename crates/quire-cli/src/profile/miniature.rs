//! The sampled pages in miniature: what would have been in memory, packed and in the swap file with another budget.
//!
//! A miniature is a budget scaled down as the pages are: it holds the sampled pages alone, in the part of the
//! budget that falls to them, and does with them what reclaim does with all: the hand of a clock goes over the
//! groups, a page that a fault asked for is passed once, one that goes is in limbo for a while, is packed then, and
//! written to the swap file where the pool's share is full. What comes along with a fault is decided as the engine
//! does, within a region ([`super::along`]). (Waldspurger and others, Cache Modeling and
//! Optimization using Miniature Simulations, 2017.)

use std::collections::VecDeque;

use quire::control::managed_part;
use quire::control::sampling::{GROUP_PAGES, REGION_GROUPS};
use quire::control::watermarks::{BOOST_MAX, reserve, watermarks};
use quire::units::PAGE_SIZE;

use super::along::Along;
use super::border::{Border, NEAR_PART};
use super::misses::{Costs, Misses};
use super::world::{Key, Order};

/// Of a budget: what is in limbo while memory is short.
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
    /// How many pages had gone there when it did.
    stamp: u64,
}

/// Pages of a region, all of which are sampled or none.
pub(super) const REGION_PAGES: usize = REGION_GROUPS * GROUP_PAGES;
/// Of a region's pages so many are touched at once, a little more than half: a stream comes by.
pub(super) const STREAM_PAGES: u32 = REGION_PAGES as u32 / 16 * 9;

/// Pages by region and place in it, and their stamps when they came.
type Queue = VecDeque<(usize, usize, u64)>;

/// Pages of a region that were touched at a look, all at once.
#[derive(Clone, Copy)]
pub(super) struct Touch {
    /// Its place among those of the look.
    pub turn: u64,
    pub region: usize,
    pub pages: u32,
}

pub(super) struct Miniature {
    pub budget_bytes: u64,
    pages: Vec<[Page; REGION_PAGES]>,
    /// Mapped pages by group.
    mapped_of: Vec<u32>,
    /// Pages that it has, wherever they are, and pages of the program for each of those.
    present: usize,
    scale: f64,
    pub mapped: usize,
    in_limbo: usize,
    in_pool: usize,
    /// The region of the group that was looked at last, and the place behind it there.
    hand: (Key, usize),
    limbo: Queue,
    pool: Queue,
    /// Pages that went to limbo, from there to the pool, and from there to the file.
    unmapped: u64,
    evicted: u64,
    written: u64,
    border: Border,
    along: Along,
    /// Most pages that there were, packed, for each that there was room for.
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
    /// How many of the program's pages are not managed.
    pub unmanaged_pages: u64,
    /// How many pages of it have content.
    pub wanted_pages: u64,
    /// One region in so many is sampled.
    pub one_in: f64,
}

impl Miniature {
    /// Of a budget, with room for so many regions.
    pub(super) fn new(budget_bytes: u64, regions: usize) -> Miniature {
        Miniature {
            budget_bytes,
            pages: vec![[Page::default(); REGION_PAGES]; regions],
            mapped_of: vec![0; regions * REGION_GROUPS],
            present: 0,
            scale: 1.0,
            mapped: 0,
            in_limbo: 0,
            in_pool: 0,
            hand: ((0, 0), 0),
            limbo: VecDeque::new(),
            pool: VecDeque::new(),
            unmapped: 0,
            evicted: 0,
            written: 0,
            border: Border::default(),
            along: Along::default(),
            fullest: 0.0,
            misses: Misses::default(),
        }
    }

    /// Has room for one region more.
    pub(super) fn add_region(&mut self) {
        self.pages.push([Page::default(); REGION_PAGES]);
        self.mapped_of.extend([0; REGION_GROUPS]);
    }

    /// What happens in it when these pages are touched, one touch after another.
    pub(super) fn play(&mut self, touches: &[Touch], order: &Order, terms: &Terms) {
        self.scale = self.scale_of(touches, terms);
        let budget_pages = self.budget_bytes / PAGE_SIZE as u64;
        let limit = managed_part(budget_pages, terms.unmanaged_pages, 0) as f64 / self.scale;
        let mut misses = Misses::default();
        for &touch in touches {
            misses += self.touch(touch, limit, terms);
            self.settle(limit, order, terms);
        }
        self.misses += misses * self.scale;
    }

    /// Pages of the program for each of those here when all that was touched at the look is: where twice as much is
    /// sampled as before, much is new here that is not new to the program.
    fn scale_of(&self, touches: &[Touch], terms: &Terms) -> f64 {
        let new = |touch: &Touch| touch.pages & self.pages_at(touch.region, &[Place::Nowhere]);
        let new: u32 = touches.iter().map(|touch| new(touch).count_ones()).sum();
        let counted = terms.wanted_pages as f64 / (self.present + new as usize).max(1) as f64;
        counted.clamp(terms.one_in / 2.0, terms.one_in * 2.0)
    }

    /// What happened in it, in all.
    pub(super) fn played(&self, has_file: bool) -> Played {
        Played {
            budget_bytes: self.budget_bytes,
            misses: self.misses,
            fits: has_file || self.fullest <= 1.0,
        }
    }

    /// A page is nowhere any more.
    pub(super) fn leave(&mut self, region: usize, at: usize) {
        match self.pages[region][at].place {
            Place::Mapped | Place::Accessed => {
                self.mapped -= 1;
                self.mapped_of[group_of(region, at)] -= 1;
            }
            Place::Limbo => self.in_limbo -= 1,
            Place::Pool => self.in_pool -= 1,
            Place::File => {}
            Place::Nowhere => return,
        }
        self.present -= 1;
        self.pages[region][at] = Page::default();
    }

    /// None of a region's pages is known any more, and its number is for another.
    pub(super) fn forget(&mut self, region: usize) {
        (0..REGION_PAGES).for_each(|at| self.leave(region, at));
        self.along.forget(region);
    }

    /// A page is mapped, as one that a fault has asked for.
    pub(super) fn enter(&mut self, region: usize, at: usize) {
        self.pages[region][at].place = Place::Accessed;
        self.present += 1;
        self.mapped += 1;
        self.mapped_of[group_of(region, at)] += 1;
    }

    /// Pages of a region are there and are not known here yet: they are mapped.
    pub(super) fn find(&mut self, region: usize, pages: u32) {
        self.bring(region, pages_in(pages), &[Place::Nowhere]);
    }

    /// Pages of a region are touched: those that are not in memory come back.
    fn touch(&mut self, touch: Touch, limit: f64, terms: &Terms) -> Misses {
        let Touch { region, pages, .. } = touch;
        let mut misses = Misses::default();
        let missed = self.pages_at(region, &[Place::Pool, Place::File]) & pages;
        if missed != 0 && pages.count_ones() >= STREAM_PAGES {
            // Its windows are much longer than a region.
            for place in [Place::Pool, Place::File] {
                let count = self.bring(region, 0..REGION_PAGES, &[place]);
                let along = [0.0, f64::from(count)];
                misses.add_at(place == Place::File, along);
            }
        }
        for at in pages_in(pages) {
            let page = self.pages[region][at];
            match page.place {
                Place::Mapped | Place::Accessed => continue,
                Place::Nowhere => {}
                Place::Limbo => {
                    // One fault has all of the group back.
                    misses.limbo += 1.0;
                    let first = at / GROUP_PAGES * GROUP_PAGES;
                    self.bring(region, first..first + GROUP_PAGES, &[Place::Limbo]);
                }
                Place::Pool | Place::File => {
                    self.note_refault(page, limit, terms);
                    let count = self.fault(region, at, limit);
                    misses.add_at(page.place == Place::File, [1.0, f64::from(count - 1)]);
                }
            }
            self.leave(region, at);
            self.enter(region, at);
        }
        self.along.note_touched(region, pages);
        misses
    }

    /// A fault on a page in swap has it back, and what comes along; returns how many these are.
    fn fault(&mut self, region: usize, at: usize, limit: f64) -> u32 {
        let places: &[Place] = match self.pages[region][at].place {
            Place::File => &[Place::Pool, Place::File],
            _ => &[Place::Pool],
        };
        let swapped = self.pages_at(region, &[Place::Pool, Place::File]);
        let limit_pages = limit * self.scale;
        let order = self.along.order(region, at, swapped, limit_pages, self.scale);
        let first = at >> order << order;
        self.bring(region, first..first + (1 << order), places)
    }

    /// The pages of a region that are at one of these places.
    fn pages_at(&self, region: usize, places: &[Place]) -> u32 {
        let pages = self.pages[region].iter().zip(0..);
        pages.fold(0, |mask, (page, at)| mask | u32::from(places.contains(&page.place)) << at)
    }

    /// Those of these pages of a region that are at one of these places are mapped; returns how many.
    fn bring(
        &mut self,
        region: usize,
        pages: impl Iterator<Item = usize>,
        places: &[Place],
    ) -> u32 {
        let mut count = 0;
        for at in pages {
            if places.contains(&self.pages[region][at].place) {
                self.leave(region, at);
                self.enter(region, at);
                self.pages[region][at].place = Place::Mapped;
                count += 1;
            }
        }
        count
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

    /// Reclaims what is too much, where the miniature has room for `limit` pages.
    fn settle(&mut self, limit: f64, order: &Order, terms: &Terms) {
        let pages = (limit * self.scale) as usize;
        let free = kept_free(pages);
        let room = limit - free as f64 / self.scale;
        let mut rounds = 0;
        while self.held(terms) > room && rounds < 2 {
            if self.in_limbo as f64 > limit * LIMBO_PART || self.mapped == 0 {
                if !self.pack_oldest() {
                    break;
                }
            } else if !self.move_hand(order) {
                rounds += 1;
            }
        }
        let all = (self.mapped + self.in_limbo + self.in_pool) as f64;
        self.fullest = self.fullest.max(all * terms.packed / room);
        if terms.has_file {
            self.write_oldest(limit, terms);
        }
        self.tidy();
        self.border.settle(self.evicted, self.in_pool, limit, self.scale);
    }

    /// Writes to the file what is too much for the pool's share.
    fn write_oldest(&mut self, limit: f64, terms: &Terms) {
        while self.in_pool as f64 * terms.packed > self.border.share() * limit {
            let Some((region, at, stamp)) = self.pool.pop_front() else { break };
            let page = &mut self.pages[region][at];
            if page.place == Place::Pool && page.stamp == stamp {
                self.in_pool -= 1;
                self.written += 1;
                *page = Page { place: Place::File, stamp: self.written };
            }
        }
    }

    /// Takes entries out of the queues that pages have left behind which came back.
    fn tidy(&mut self) {
        let pages = &self.pages;
        let tidy = |queue: &mut Queue, place, count: usize| {
            if queue.len() > 2 * count + GROUP_PAGES {
                queue.retain(|&(region, at, stamp)| {
                    let page = pages[region][at];
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
        while let Some((region, at, stamp)) = self.limbo.pop_front() {
            let page = self.pages[region][at];
            if page.place == Place::Limbo && page.stamp == stamp {
                self.evicted += 1;
                let stamp = self.evicted;
                self.pages[region][at] = Page { place: Place::Pool, stamp };
                self.in_limbo -= 1;
                self.in_pool += 1;
                self.pool.push_back((region, at, stamp));
                return true;
            }
        }
        false
    }

    /// Looks at the next group that has mapped pages, in the order of addresses. `false` where the hand begins anew.
    fn move_hand(&mut self, order: &Order) -> bool {
        let (last, behind) = self.hand;
        let next = order.range(last..).find_map(|(&key, &region)| {
            let from = if key == last { behind } else { 0 };
            let is_mapped = |at: &usize| self.mapped_of[region * REGION_GROUPS + at] > 0;
            (from..REGION_GROUPS).find(is_mapped).map(|at| (key, region, at))
        });
        let Some((key, region, group)) = next else {
            self.hand = ((0, 0), 0);
            return false;
        };
        self.hand = (key, group + 1);
        let first = group * GROUP_PAGES;
        for at in first..first + GROUP_PAGES {
            let page = &mut self.pages[region][at];
            match page.place {
                Place::Accessed => page.place = Place::Mapped,
                Place::Mapped => {
                    self.unmapped += 1;
                    let stamp = self.unmapped;
                    *page = Page { place: Place::Limbo, stamp };
                    self.mapped -= 1;
                    self.mapped_of[group_of(region, at)] -= 1;
                    self.in_limbo += 1;
                    self.limbo.push_back((region, at, stamp));
                }
                _ => {}
            }
        }
        true
    }
}

/// Of a budget's pages, those that are kept free while memory is short. Then faults wait now and then, and each of these
/// boosts the watermarks to their most: that goes more slowly.
fn kept_free(pages: usize) -> usize {
    let [_, high] = watermarks(pages, BOOST_MAX);
    reserve(pages) + high
}

/// The group, of all of all regions, that a page is in.
fn group_of(region: usize, at: usize) -> usize {
    region * REGION_GROUPS + at / GROUP_PAGES
}

/// The pages of a region that a mask has.
pub(super) fn pages_in(mask: u32) -> impl Iterator<Item = usize> {
    (0..REGION_PAGES).filter(move |at| mask >> at & 1 != 0)
}
