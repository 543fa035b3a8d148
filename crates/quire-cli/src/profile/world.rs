//! What is known of the sampled pages: which there are, which were touched, and what that makes of each budget.

use std::collections::BTreeMap;

use quire::control::sampling::{GroupSample, PATIENCE_MAX, REGION_GROUPS};

use super::looks::{Look, Looks, PLAYED_AFTER, Pages, looks_since, lot};
use super::miniature::{Miniature, Played, REGION_PAGES, STREAM_PAGES, Terms, Touch, pages_in};
use super::misses::{Costs, Packs};
use super::region::{Region, pages_at, pages_of, region_of};

/// A region's process, and its number there.
pub(super) type Key = (u32, u64);
/// The regions that are known, in the order of addresses.
pub(super) type Order = BTreeMap<Key, usize>;

/// Pages tried by which it is known how pages pack lately.
const LATELY: f64 = 512.0;

/// What was seen of all sampled regions, and the miniatures that live by it.
pub(super) struct World {
    terms: Terms,
    regions: Vec<Region>,
    unused: Vec<usize>,
    order: Order,
    looks: BTreeMap<u32, Looks>,
    miniatures: Vec<Miniature>,
    /// Pages that are sampled and have content, and how many were touched since this was last asked for.
    present: usize,
    touched: usize,
    /// How pages packed in all, and lately.
    packs: Packs,
    packs_lately: Packs,
    /// What faults cost on the pages with which that was measured.
    costs: Costs,
}

impl World {
    pub(super) fn new(costs: Costs, has_file: bool) -> World {
        World {
            terms: Terms {
                costs,
                packed: Packs::default().part(),
                has_file,
                unmanaged_pages: 0,
                wanted_pages: 0,
                one_in: 1.0,
            },
            regions: Vec::new(),
            unused: Vec::new(),
            order: BTreeMap::new(),
            looks: BTreeMap::new(),
            miniatures: Vec::new(),
            present: 0,
            touched: 0,
            packs: Packs::default(),
            packs_lately: Packs::default(),
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
        self.packs.part()
    }

    pub(super) fn note_packed(&mut self, bytes: u64, unpack_ns: u64) {
        self.packs.note(bytes, unpack_ns);
        self.packs_lately.note(bytes, unpack_ns);
        self.packs_lately.fade(LATELY);
        self.terms.packed = self.packs_lately.part();
        self.terms.costs = self.packs_lately.costs(self.costs);
    }

    /// What faults cost on the program's pages.
    pub(super) fn costs(&self) -> Costs {
        self.terms.costs
    }

    /// Notes how much of the program is not managed.
    pub(super) fn note_unmanaged(&mut self, pages: u64) {
        self.terms.unmanaged_pages = pages;
    }

    /// Notes that one region in so many is sampled, as a power of two.
    pub(super) fn note_one_in(&mut self, shift: u32) {
        self.terms.one_in = f64::from(1u32 << shift);
    }

    /// Begins a miniature of a budget, in which all that is there is in memory.
    pub(super) fn begin(&mut self, budget_bytes: u64) {
        let mut miniature = Miniature::new(budget_bytes, self.regions.len());
        for (number, region) in self.regions.iter().enumerate() {
            for at in pages_in(region.present) {
                miniature.enter(number, at);
            }
        }
        self.miniatures.push(miniature);
    }

    /// What happened in each of the miniatures.
    pub(super) fn results(&self) -> impl Iterator<Item = Played> {
        self.miniatures.iter().map(|miniature| miniature.played(self.terms.has_file))
    }

    /// Ends the miniatures of budgets that are of no interest any more.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(u64) -> bool) {
        self.miniatures.retain(|miniature| is_wanted(miniature.budget_bytes));
    }

    /// A member tells of a group.
    pub(super) fn see(&mut self, pid: u32, look: u16, seen: GroupSample) {
        let (number, at) = region_of(seen.group);
        let region = self.region((pid, number));
        let [present, touched] = [seen.present, seen.touched].map(|pages| pages_at(at, pages));
        let looks = self.looks.entry(pid).or_insert_with(|| Looks::new(look));
        let known = &mut self.regions[region];
        let gone = known.present & pages_of(at) & !present;
        if gone != 0 {
            looks.last_mut().gone.push((number, gone));
        }
        let found = present & !known.present & !touched;
        if found != 0 {
            looks.last_mut().found.push((number, found));
        }
        self.present += (present & !known.present).count_ones() as usize;
        self.present -= gone.count_ones() as usize;
        known.present = known.present & !gone | present;
        known.groups[at].told = look;
        if let Some(patience) = seen.patience {
            let wait = 1 << patience.min(PATIENCE_MAX);
            let touches = known.note_look(number, at, look, wait, touched, seen.ages);
            looks.note_touched(number, &touches);
            self.touched += touched.count_ones() as usize;
        }
    }

    /// A member has told all of a look, and that so many of its pages have content.
    pub(super) fn end_look(&mut self, pid: u32, look: u16, wanted_pages: u64) {
        let looks = self.looks.entry(pid).or_insert_with(|| Looks::new(look));
        looks.last_mut().terms = Some(Terms { wanted_pages, ..self.terms });
        looks.last = look.wrapping_add(1);
        looks.waiting.push_back(Look::default());
        if looks.waiting.len() > PLAYED_AFTER {
            self.play_oldest(pid);
        }
    }

    /// Plays what processes have told that are to tell nothing more, and forgets them.
    pub(super) fn end(&mut self, is_ended: impl Fn(u32) -> bool) {
        let pids = Vec::from_iter(self.looks.keys().copied().filter(|&pid| is_ended(pid)));
        for pid in pids {
            while self.play_oldest(pid) {}
            self.looks.remove(&pid);
        }
        self.forget(|pid, _| is_ended(pid));
    }

    /// A process has told of each group that has content at this look: the others have none any more.
    pub(super) fn end_census(&mut self, pid: u32, look: u16) {
        let Some(looks) = self.looks.get_mut(&pid) else { return };
        for (&(_, number), &region) in self.order.range((pid, 0)..=(pid, u64::MAX)) {
            let known = &mut self.regions[region];
            let untold = (0..REGION_GROUPS).filter(|&at| known.groups[at].told != look);
            let gone = untold.fold(0, |mask, at| mask | pages_of(at)) & known.present;
            if gone != 0 {
                looks.last_mut().gone.push((number, gone));
                self.present -= gone.count_ones() as usize;
                known.present &= !gone;
            }
        }
    }

    /// What was touched at a look happens in the miniatures. `false`: there was none.
    fn play_oldest(&mut self, pid: u32) -> bool {
        let Some(looks) = self.looks.get_mut(&pid) else { return false };
        let Some(oldest) = looks.waiting.pop_front() else { return false };
        let Look { gone, found, touched, terms } = oldest;
        looks.wanted_pages = terms.map_or(looks.wanted_pages, |terms| terms.wanted_pages);
        let look = looks_since(looks.waiting.len() as u16, looks.last);
        for (number, pages) in gone {
            self.play_gone((pid, number), pages);
        }
        for (number, pages) in found {
            let Some(&region) = self.order.get(&(pid, number)) else { continue };
            self.miniatures.iter_mut().for_each(|miniature| miniature.find(region, pages));
        }
        let touches = self.touches(pid, look, touched);
        // What faults cost, and how long packed pages are, is known better by now; and of what is sampled no more nothing
        // is left.
        let Terms { costs, packed, one_in, .. } = self.terms;
        let wanted = self.looks.values().map(|looks| looks.wanted_pages);
        let wanted_pages = wanted.fold(0, u64::saturating_add);
        let terms = Terms { costs, packed, one_in, wanted_pages, ..terms.unwrap_or(self.terms) };
        for miniature in &mut self.miniatures {
            miniature.play(&touches, &self.order, &terms);
        }
        true
    }

    /// What was touched at a look, one touch after another. In which order it was is not known; that of addresses, in which
    /// the clock's hand goes as well, would be the worst of all, and for each page one of its own is chance.
    fn touches(&mut self, pid: u32, look: u16, mut touched: Vec<Pages>) -> Vec<Touch> {
        touched.sort_unstable();
        let mut touches: Vec<Touch> = Vec::new();
        for parts in touched.chunk_by(|one, other| one.0 == other.0) {
            let number = parts[0].0;
            let Some(&region) = self.order.get(&(pid, number)) else { continue };
            let known = &mut self.regions[region];
            let pages = parts.iter().fold(0, |pages, part| pages | part.1);
            let is_again = looks_since(known.touched_at, look) == 1 && known.touched & pages != 0;
            (known.touched, known.touched_at) = (pages, look);
            // A stream comes by once. Few pages are touched together or by chance, who knows.
            let is_stream = pages.count_ones() >= STREAM_PAGES;
            if !is_again && (is_stream || lot(number, look).is_multiple_of(2)) {
                touches.push(Touch { turn: lot(number, look), region, pages });
                continue;
            }
            touches.extend(pages_in(pages).map(|at| {
                let turn = lot(number * REGION_PAGES as u64 + at as u64, look);
                Touch { turn, region, pages: 1 << at }
            }));
        }
        touches.sort_unstable_by_key(|touch| touch.turn);
        touches
    }

    fn region(&mut self, key: Key) -> usize {
        if let Some(&region) = self.order.get(&key) {
            return region;
        }
        let known = Region::default();
        let region = match self.unused.pop() {
            Some(region) => {
                self.regions[region] = known;
                region
            }
            None => {
                self.regions.push(known);
                self.miniatures.iter_mut().for_each(Miniature::add_region);
                self.regions.len() - 1
            }
        };
        self.order.insert(key, region);
        region
    }

    /// Pages of a region had no content any more at a look that is played. Where none had since, it is forgotten.
    fn play_gone(&mut self, key: Key, pages: u32) {
        let Some(&region) = self.order.get(&key) else { return };
        for miniature in &mut self.miniatures {
            pages_in(pages).for_each(|at| miniature.leave(region, at));
        }
        if self.regions[region].present == 0 {
            self.miniatures.iter_mut().for_each(|miniature| miniature.forget(region));
            self.order.remove(&key);
            self.unused.push(region);
        }
    }

    /// Forgets groups at once: those of a process that has ended, or that are not sampled any more.
    pub(super) fn forget(&mut self, is_gone: impl Fn(u32, u64) -> bool) {
        let keys = Vec::from_iter(self.order.iter().map(|(&key, &region)| (key, region)));
        for (key, region) in keys {
            let (pid, number) = key;
            let first = number * REGION_GROUPS as u64;
            let gone = (0..REGION_GROUPS).filter(|&at| is_gone(pid, first + at as u64));
            let gone = gone.fold(0, |mask, at| mask | pages_of(at));
            if gone != 0 {
                let known = &mut self.regions[region];
                self.present -= (known.present & gone).count_ones() as usize;
                known.present &= !gone;
                self.play_gone(key, gone);
            }
        }
        // What it was touched at is not played: it may be seen anew before.
        let order = &self.order;
        for (&pid, looks) in &mut self.looks {
            let is_known = |&(number, _): &Pages| order.contains_key(&(pid, number));
            for look in &mut looks.waiting {
                look.found.retain(is_known);
                look.touched.retain(is_known);
            }
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
    const ALL: u16 = (1 << GROUP_PAGES) - 1;

    /// Pages of a group that were touched just before it was looked at.
    fn sampled(group: u64, touched: u16, patience: Option<u32>) -> GroupSample {
        GroupSample { group, touched, ages: [0; GROUP_PAGES], present: ALL, patience }
    }

    /// A program that touches groups, all of which are sampled.
    struct Program {
        world: World,
        look: u16,
        groups: u64,
        /// Pages that it has for each of those sampled.
        one_in: u64,
    }

    impl Program {
        /// With miniatures of these budgets, in MiB.
        fn new(budgets: &[u64], has_file: bool) -> Program {
            let mut world = World::new(COSTS, has_file);
            budgets.iter().for_each(|mib| world.begin(mib * MIB));
            Program { world, look: 0, groups: 0, one_in: 1 }
        }

        /// Tells at the next look that these pages of groups were touched.
        fn tell(&mut self, groups: impl IntoIterator<Item = u64>, pages: u16, patience: u32) {
            for group in groups {
                self.groups = self.groups.max(group + 1);
                let patience = Some(patience);
                let seen = sampled(group, pages, patience);
                self.world.see(PID, self.look + 1, seen);
            }
        }

        /// Touches these pages of groups between two looks.
        fn touch(&mut self, groups: impl IntoIterator<Item = u64>, pages: u16, patience: u32) {
            self.tell(groups, pages, patience);
            self.look += 1;
            let wanted_pages = self.world.present() as u64 * self.one_in;
            self.world.end_look(PID, self.look, wanted_pages);
        }

        /// Touches nothing until all that it has touched is played.
        fn rest(&mut self) {
            (0..=PLAYED_AFTER).for_each(|_| self.touch([], 0, 0));
        }

        fn forget_misses(&mut self) {
            self.rest();
            let miniatures = self.world.miniatures.iter_mut();
            miniatures.for_each(|miniature| miniature.misses = Misses::default());
        }

        fn misses(&mut self) -> Vec<Misses> {
            self.rest();
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
        // A stream goes by.
        for (turn, at) in (hot..36 * MIB / GROUP_BYTES).step_by(16).enumerate() {
            if turn % 8 == 0 {
                program.tell(0..hot, ALL, 3);
            }
            program.touch(at..at + 16, ALL, 0);
        }
        let streamed = program.misses()[0];
        let hot_pages = (hot as usize * GROUP_PAGES) as f64;
        assert!(streamed.swapped_in() < hot_pages, "nearly all stay: {streamed:?}");
        assert!(streamed.limbo > 0.0, "they pass through limbo");
        // All but the hot ones is freed: the rest has room.
        program.world.forget(|_, group| group >= hot);
        assert_eq!(program.world.present(), (hot as usize) * GROUP_PAGES);
        program.touch(0..20 * MIB / GROUP_BYTES, 1, 0);
        let before = program.misses()[0].swapped_in();
        for _ in 0..10 {
            program.touch(0..20 * MIB / GROUP_BYTES, 1, 0);
        }
        assert_eq!(program.misses()[0].swapped_in(), before);
    }

    #[test]
    fn a_look_is_played_with_what_was_so_at_it() {
        let misses = |unmanaged_pages: u64, later: u64| {
            let mut program = Program::new(&[24], false);
            program.world.note_unmanaged(unmanaged_pages);
            (0..6).for_each(|_| program.touch(0..22 * MIB / GROUP_BYTES, ALL, 0));
            program.world.note_unmanaged(later);
            program.misses()[0]
        };
        assert_eq!(misses(0, 1024), Misses::default(), "all has room");
        assert!(misses(1024, 1024).limbo > 0.0, "beside 4 MiB it has not");
        assert_eq!(misses(1024, 0), misses(1024, 1024));
    }

    #[test]
    fn more_that_is_sampled_is_not_more_that_the_program_has() {
        let mut program = Program::new(&[24], false);
        let half = 10 * MIB / GROUP_BYTES;
        program.one_in = 2;
        program.world.note_one_in(1);
        (0..3).for_each(|_| program.touch(0..half, ALL, 0));
        program.one_in = 1;
        program.world.note_one_in(0);
        (0..3).for_each(|_| program.touch(0..2 * half, ALL, 0));
        assert_eq!(program.misses()[0], Misses::default(), "20 MiB have room");
        assert_eq!(program.world.miniatures[0].mapped, 2 * 10 * MIB as usize / PAGE_SIZE);
    }

    #[test]
    fn what_a_process_had_that_has_ended_takes_no_room() {
        let mut program = Program::new(&[24], false);
        let part = 10 * MIB / GROUP_BYTES;
        let groups = |world: &mut World, look: u16| {
            for group in 0..part {
                let seen = sampled(group, ALL, Some(0));
                world.see(PID + 1, look, seen);
            }
            world.end_look(PID + 1, look, part * GROUP_PAGES as u64);
        };
        for _ in 0..PLAYED_AFTER {
            groups(&mut program.world, program.look + 1);
            program.tell(0..part, ALL, 0);
            program.look += 1;
            program.world.end_look(PID, program.look, part * GROUP_PAGES as u64);
        }
        program.world.end(|pid| pid != PID);
        (0..3).for_each(|_| program.touch(0..part, ALL, 0));
        assert_eq!(program.misses()[0], Misses::default());
        assert_eq!(program.world.miniatures[0].mapped, part as usize * GROUP_PAGES);
    }

    #[test]
    fn what_was_there_before_it_was_sampled_takes_room() {
        let mut program = Program::new(&[24], false);
        for group in 0..40 {
            let seen = sampled(group, 0, None);
            program.world.see(PID, 1, seen);
        }
        program.rest();
        assert_eq!(program.world.miniatures[0].mapped, 40 * GROUP_PAGES);
    }

    #[test]
    fn pages_are_taken_to_pack_as_they_did_lately() {
        let mut world = World::new(COSTS, false);
        for bytes in [4096, 1024] {
            (0..4000).for_each(|_| world.note_packed(bytes, 1_000));
        }
        let ratio = world.packed() / world.terms.packed;
        assert!((2.4..2.6).contains(&ratio), "five eighths in all, a quarter lately: {ratio}");
    }

    #[test]
    fn what_has_the_lowest_address_goes_first_and_not_what_was_seen_first() {
        let mut program = Program::new(&[24], false);
        let part = 12 * MIB / GROUP_BYTES;
        program.touch(part..2 * part, ALL, 0);
        program.touch(0..part, ALL, 0);
        program.forget_misses();
        program.touch(part..2 * part, ALL, 0);
        assert_eq!(program.misses()[0], Misses::default());
        program.touch(0..part, ALL, 0);
        assert_ne!(program.misses()[0], Misses::default());
    }

    #[test]
    fn what_was_not_touched_any_more_does_not_come_back() {
        // Groups are told of with patience, and are not touched from then on: another part of memory is.
        let mut program = Program::new(&[24], false);
        let part = 12 * MIB / GROUP_BYTES;
        (0..4).for_each(|_| program.touch(0..part, ALL, 0));
        program.touch(0..part, ALL, PATIENCE_MAX);
        (0..40).for_each(|_| program.touch(part..2 * part, ALL, 0));
        let played = program.misses()[0];
        assert!(played.swapped_in() + played.limbo < part as f64 / 8.0, "{played:?}");
    }

    #[test]
    fn what_a_census_does_not_tell_of_is_gone_when_its_look_is_played() {
        // Each look touches something new.
        let mut program = Program::new(&[128], false);
        let part = 4 * MIB / GROUP_BYTES;
        for turn in 0..PLAYED_AFTER as u64 {
            program.touch(turn * part..(turn + 1) * part, ALL, 0);
        }
        program.world.end_census(PID, program.look);
        assert_eq!(program.world.present(), part as usize * GROUP_PAGES);
        assert_eq!(program.world.miniatures[0].mapped, 1024, "one look is played");
        program.rest();
        let miniature = &program.world.miniatures[0];
        assert_eq!(miniature.mapped, part as usize * GROUP_PAGES);
        assert_eq!(
            program.world.order.len(),
            part as usize / REGION_GROUPS,
            "the rest is forgotten"
        );
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
        program.world.forget(|_, group| group % 2 == 0);
        program.world.begin(64 * MIB);
        assert_eq!(program.world.miniatures[0].mapped, 50 * GROUP_PAGES);
        program.touch(0..100, ALL, 0);
        program.rest();
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
