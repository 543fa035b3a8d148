//! What `quire profile` is told: which pages the program touches, group by group.
//!
//! A group that is looked at is unmapped, to limbo: what is mapped at the next look was touched meanwhile, each
//! page by a fault of its own, for no neighbour comes with it from limbo while there is sampling. A group that is
//! touched at two looks running is left mapped for many, mostly: what counts is when pages come that were not touched
//! for long, and so the few pages with which a program works cost it little.
//! [`crate::control::sampling`] has what is told; what it means is its reader's affair.
//!
//! Locks: those of [`super::evict`]. The stamp of a page that is in memory has after which look it was touched, and that
//! of a group's first page when the group is due: reclaim's is written when a page leaves. Both halves are written by
//! different threads, and what is lost by that is a number in a sample.

use core::sync::atomic::Ordering::Relaxed;

use super::Reclaimer;
use crate::control::sampling::{
    GROUP_PAGES, GROUPS, GroupSample, LOOK_MASK, PATIENCE_MAX, Sample, Told, first_page, group_of,
    is_sampled,
};
use crate::mmu::{FrameId, Mmu};
use crate::page::State;
use crate::scratch::Scratch;
use crate::space::VmSpace;
use crate::swap::compress::{Compressed, decompress};
use crate::sys::monotonic_ns;
use crate::units::{PAGE_SIZE, PageNum, PageRange};

/// Pages that are packed at a look, to see what it brings, up to twice as many.
const TRIED: u64 = 2;
/// Of the regions that are touched again one in so many, as a power of two, is left mapped until the next look only: that
/// shows how often it is touched.
const SHORT_ONE_IN: u32 = 2;
const NS_PER_MS: u64 = 1_000_000;

/// What the background thread knows of its looks.
#[derive(Default)]
pub struct Sampler {
    due_ns: u64,
    /// Groups with content that the last look has seen.
    seen: u64,
}

/// When a group is looked at next, and whether it was touched when it was last: the upper half of its first page's stamp.
#[derive(Clone, Copy)]
struct Turn {
    due: u16,
    was_touched: bool,
}

impl Turn {
    const TOUCHED: u16 = !LOOK_MASK;

    fn of(stamp: u32) -> Turn {
        let half = (stamp >> u16::BITS) as u16;
        Turn { due: half & LOOK_MASK, was_touched: half & Self::TOUCHED != 0 }
    }

    fn get(self) -> u32 {
        let touched = if self.was_touched { Self::TOUCHED } else { 0 };
        u32::from(touched | self.due & LOOK_MASK) << u16::BITS
    }

    /// Whether the group is looked at. What the stamp says may be reclaim's: no group waits longer than the
    /// most patient one.
    fn is_due(self, look: u16) -> bool {
        let left = self.due.wrapping_sub(look) & LOOK_MASK;
        left == 0 || left > 1 << PATIENCE_MAX
    }

    /// For how many looks the group is left mapped now, as a power of two. The groups of a region that are touched
    /// together stay together.
    fn patience(self, group: u64, look: u16, is_touched: bool) -> u32 {
        let is_short = is_sampled(look.into(), group, SHORT_ONE_IN);
        if is_touched && self.was_touched && !is_short { PATIENCE_MAX } else { 0 }
    }
}

/// Samples that are filled, and sent when they are full.
struct Letter<'a, M: Mmu> {
    space: &'a VmSpace<M>,
    sample: Sample,
    groups: [Option<GroupSample>; GROUPS],
    count: usize,
}

impl<M: Mmu> Letter<'_, M> {
    fn push(&mut self, group: GroupSample) {
        self.groups[self.count] = Some(group);
        self.count += 1;
        if self.count == GROUPS {
            let groups = core::mem::replace(&mut self.groups, [None; GROUPS]);
            self.count = 0;
            self.send(Told::Groups(groups));
        }
    }

    fn send(&self, told: Told) {
        self.space.budget.control().sampling.push(Sample { told, ..self.sample });
    }
}

impl<M: Mmu> VmSpace<M> {
    /// Looks at the groups that are sampled, where there are any and it is time; returns how many milliseconds
    /// there are to the next look.
    pub fn sample(&self, sampler: &mut Sampler, scratch: &mut Scratch) -> Option<u64> {
        let sampling = &self.budget.control().sampling;
        let shift = sampling.shift()?;
        let now = monotonic_ns();
        if sampler.due_ns == 0 {
            // Not at once: a fork's child may be about to execute another program.
            sampler.due_ns = now + sampling.period_ms() * NS_PER_MS;
        }
        if now < sampler.due_ns {
            return Some((sampler.due_ns - now).div_ceil(NS_PER_MS));
        }
        let look = self.look.fetch_add(1, Relaxed).wrapping_add(1);
        let pid = self.budget.member().pid.load(Relaxed);
        let sample = Sample::new(pid, look);
        let mut letter = Letter { space: self, sample, groups: [None; GROUPS], count: 0 };
        // Of all that there are, by chance: what is touched, and what lies there.
        let seen = core::mem::take(&mut sampler.seen);
        let one_in = (seen > 0).then(|| (seen / TRIED).max(1).ilog2());
        let is_tried = |group| one_in.is_some_and(|shift| is_sampled(look.into(), group, shift));
        for block in 0..self.pages.used_arena().len() {
            let range = self.pages.block_range(block);
            if self.pages.block(range.start).is_used.load(Relaxed) == 0 {
                continue;
            }
            for group in group_of(range.start)..group_of(range.end) {
                if !is_sampled(pid, group, shift) {
                    continue;
                }
                let is_there = self.sample_group(group, &mut letter, scratch);
                sampler.seen += u64::from(is_there);
                if is_there && is_tried(group) {
                    let told = self.try_packing(group, look, scratch);
                    told.into_iter().for_each(|told| letter.send(told));
                }
            }
        }
        if letter.sample.is_census() {
            self.frames.retire_emptied();
        }
        letter.send(Told::Groups(letter.groups));
        let wanted = self.budget.member().wanted_pages.load(Relaxed);
        letter.send(Told::End { windows: self.frames.windows_touched(), wanted });
        let period_ms = sampling.period_ms();
        sampler.due_ns = monotonic_ns() + period_ms * NS_PER_MS;
        Some(period_ms)
    }

    /// Tells of a group and unmaps it, if it is due; returns whether it has content.
    fn sample_group(&self, group: u64, letter: &mut Letter<'_, M>, scratch: &mut Scratch) -> bool {
        let range = PageRange::new(first_page(group), GROUP_PAGES);
        let look = letter.sample.look;
        let (mut touched, mut present) = (0u16, 0u16);
        for (at, page) in range.pages().enumerate() {
            let state = self.snapshot(page).state();
            touched |= u16::from(state == State::Mapped) << at;
            present |= u16::from(!matches!(state, State::None | State::Poisoned)) << at;
        }
        if present == 0 {
            return false;
        }
        let stamp = self.pages.stamp(range.start);
        let has_turn = !self.snapshot(range.start).state().is_swapped();
        let turn = Turn::of(stamp.load(Relaxed));
        if has_turn && !turn.is_due(look) {
            if letter.sample.is_census() {
                letter.push(GroupSample {
                    group,
                    touched: 0,
                    ages: [0; GROUP_PAGES],
                    present,
                    patience: None,
                });
            }
            return true;
        }
        let patience = turn.patience(group, look, touched != 0);
        let ages = core::array::from_fn(|at| self.age(range.start.add(at), look));
        if has_turn {
            let due = look.wrapping_add(1 << patience);
            stamp.store(Turn { due, was_touched: touched != 0 }.get(), Relaxed);
        }
        if touched != 0 {
            self.evict_range(range, Reclaimer::Advice, scratch);
        }
        if touched != 0 || letter.sample.is_census() {
            letter.push(GroupSample { group, touched, ages, present, patience: Some(patience) });
        }
        true
    }

    /// How many looks before this one the page was touched, as its stamp says; the most there is where that is longer ago.
    fn age(&self, page: PageNum, look: u16) -> u8 {
        let touched_after = self.pages.stamp(page).load(Relaxed) as u16;
        u8::try_from(look.wrapping_sub(touched_after).wrapping_sub(1)).unwrap_or(u8::MAX)
    }

    /// Notes that a page is touched that a look has unmapped.
    pub(crate) fn note_touched(&self, page: PageNum) {
        let stamp = self.pages.stamp(page);
        let turn = stamp.load(Relaxed) >> u16::BITS << u16::BITS;
        stamp.store(turn | u32::from(self.look.load(Relaxed)), Relaxed);
    }

    /// How a page of the group packs that is in limbo.
    fn try_packing(&self, group: u64, look: u16, scratch: &mut Scratch) -> Option<Told> {
        let range = PageRange::new(first_page(group), GROUP_PAGES);
        let start = usize::from(look) % GROUP_PAGES;
        let page = (0..GROUP_PAGES)
            .map(|at| range.start.add((start + at) % GROUP_PAGES))
            .find_map(|page| self.try_lock_if(page, |seen| seen.state() == State::Limbo))?;
        let frame = FrameId(page.content().payload());
        // SAFETY: a frame in limbo belongs to its owner, which is locked.
        let bytes = unsafe { &*self.mmu.frame(frame) };
        Some(match scratch.compressor().compress(bytes, self.strength()) {
            Compressed::Same(_) => Told::Packed { bytes: 0, unpack_ns: 0 },
            Compressed::Packed(kind, packed) => {
                let mut unpacked = [0; PAGE_SIZE];
                let start = monotonic_ns();
                let _ = decompress(kind, packed, &mut unpacked);
                Told::Packed {
                    bytes: packed.len() as u64,
                    unpack_ns: monotonic_ns().saturating_sub(start),
                }
            }
            Compressed::Raw => Told::Packed { bytes: PAGE_SIZE as u64, unpack_ns: 0 },
        })
    }
}
