//! What is known of the sampled pages: which there are, which were touched, and what that makes of each budget.

use std::collections::BTreeMap;

use quire::control::sampling::GroupSample;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::miniature::{Miniature, Played, Terms, Touch, pages_in};
use super::misses::{Costs, Packs};

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

/// What was seen of all sampled groups, and the miniatures that live by it.
pub(super) struct World {
    terms: Terms,
    groups: Vec<Group>,
    unused: Vec<usize>,
    order: BTreeMap<Key, usize>,
    miniatures: Vec<Miniature>,
    /// Pages that are sampled and have content, and how many were touched since this was last asked for.
    present: usize,
    touched: usize,
    packs: Packs,
    /// What faults cost on the pages with which that was measured.
    costs: Costs,
}

impl World {
    pub(super) fn new(costs: Costs, has_file: bool) -> World {
        World {
            terms: Terms { costs, packed: Packs::default().part(), has_file, scale: 1.0 },
            groups: Vec::new(),
            unused: Vec::new(),
            order: BTreeMap::new(),
            miniatures: Vec::new(),
            present: 0,
            touched: 0,
            packs: Packs::default(),
            costs,
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

    pub(super) fn note_packed(&mut self, bytes: u64, unpack_ns: u64) {
        self.packs.note(bytes, unpack_ns);
        self.terms.packed = self.packs.part();
        self.terms.costs = self.packs.costs(self.costs);
    }

    /// What faults cost on the program's pages.
    pub(super) fn costs(&self) -> Costs {
        self.terms.costs
    }

    /// Notes that the program has so many pages with content: the sampled ones stand for these.
    pub(super) fn note_wanted(&mut self, pages: u64, shift: u32) {
        let nominal = f64::from(1u32 << shift);
        let counted = pages as f64 / self.present.max(1) as f64;
        self.terms.scale = counted.clamp(nominal / 2.0, nominal * 2.0);
    }

    /// Begins a miniature of a budget, in which all that is there is in memory.
    pub(super) fn begin(&mut self, budget_bytes: u64) {
        let mut miniature = Miniature::new(budget_bytes, self.groups.len());
        for (number, group) in self.groups.iter().enumerate() {
            for at in pages_in(group.present) {
                miniature.enter(number, at);
            }
        }
        self.miniatures.push(miniature);
    }

    /// What happened in each of the miniatures.
    pub(super) fn results(&self) -> impl Iterator<Item = Played> {
        self.miniatures.iter().map(|miniature| miniature.played(&self.terms))
    }

    /// Ends the miniatures of budgets that are of no interest any more.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(u64) -> bool) {
        self.miniatures.retain(|miniature| is_wanted(miniature.budget_bytes));
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
    /// known; that of addresses, in which the clock's hand goes as well, would be the worst of all.
    pub(super) fn end_look(&mut self, pid: u32, look: u16, unmanaged_pages: u64) {
        let mine = self.order.range((pid, 0)..=(pid, u64::MAX));
        let mut touches: Vec<Touch> = Vec::new();
        for (&(_, number), &group) in mine {
            let known = &mut self.groups[group];
            let pages = (std::mem::take(&mut known.touched) | known.hot) & known.present;
            let is_again = std::mem::replace(&mut known.was_touched, pages != 0);
            if pages != 0 {
                let turn = xxh3_64_with_seed(&number.to_ne_bytes(), look.into());
                touches.push(Touch { turn, group, pages, is_again });
            }
        }
        touches.sort_unstable_by_key(|touch| touch.turn);
        for miniature in &mut self.miniatures {
            miniature.play(&touches, unmanaged_pages, &self.terms);
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
                self.miniatures.iter_mut().for_each(Miniature::add_group);
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

#[cfg(test)]
mod tests {
    use quire::control::sampling::GROUP_PAGES;
    use quire::units::PAGE_SIZE;

    use super::super::misses::Misses;
    use super::*;

    const COSTS: Costs = Costs {
        limbo: 10_000.0,
        pool: [50_000.0, 5_000.0],
        file: [200_000.0, 10_000.0],
        unpack: 1_000.0,
    };
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

        fn forget_misses(&mut self) {
            let miniatures = self.world.miniatures.iter_mut();
            miniatures.for_each(|miniature| miniature.misses = Misses::default());
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
                program.forget_misses();
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
            (0..100).for_each(|_| program.world.note_packed(PAGE_SIZE as u64 / 2, 1_000));
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
