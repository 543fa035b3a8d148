//! What members tell `quire profile`: which pages of the sampled groups are touched, and which have content.

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use common::{Machine, Tree};
use quire::control::sampling::{
    CENSUS, GROUP_PAGES, GroupSample, PATIENCE_MAX, REGION_GROUPS, Sampling, Told, group_of,
    is_sampled,
};
use quire::page::State;
use quire::reclaim::Sampler;
use quire::space::Advice;
use quire::units::{PAGE_SIZE, PageNum, PageRange};

const ALL: u16 = ((1u32 << GROUP_PAGES) - 1) as u16;

/// A member whose looks are read.
struct Watched {
    machine: Machine,
    sampler: Sampler,
    position: u64,
    /// What pages were packed to that were tried.
    packed: Vec<u64>,
}

impl Watched {
    fn new(shift: u32) -> Watched {
        let machine = Machine::new(Tree::default());
        // Each look is due at once.
        machine.space.budget().control().sampling.start(shift, 0);
        machine.space.budget().member().pid.store(7, Relaxed);
        let mut sampler = Sampler::default();
        // The first one is not due at once.
        assert_eq!(
            machine.space.sample(&mut sampler, &mut machine.scratch.lock().unwrap()),
            Some(1)
        );
        Watched { machine, sampler, position: 0, packed: Vec::new() }
    }

    fn sampling(&self) -> &'static Sampling {
        &self.machine.space.budget().control().sampling
    }

    /// What a look tells, and the number of windows.
    fn look(&mut self) -> (BTreeMap<u64, GroupSample>, u64) {
        std::thread::sleep(std::time::Duration::from_millis(2));
        let mut scratch = self.machine.scratch.lock().unwrap();
        assert_eq!(self.machine.space.sample(&mut self.sampler, &mut scratch), Some(1));
        let mut told = BTreeMap::new();
        loop {
            let sample = self.sampling().read(self.position).expect("the look has an end");
            self.position += 1;
            assert_eq!(sample.pid, 7);
            match sample.told {
                Told::Groups(groups) => {
                    told.extend(groups.into_iter().flatten().map(|seen| (seen.group, seen)));
                }
                Told::Packed { bytes, .. } => self.packed.push(bytes),
                Told::End { windows, .. } => return (told, windows),
            }
        }
    }

    fn touch(&self, pages: impl IntoIterator<Item = u64>) {
        let one = |page| PageRange::new(PageNum(page), 1);
        pages.into_iter().for_each(|page| self.machine.expect_all(one(page)));
    }
}

#[test]
fn each_look_tells_what_was_touched_since_the_last_and_loses_nothing() {
    let mut watched = Watched::new(0);
    let range = watched.machine.map(0, 4 * GROUP_PAGES);
    watched.machine.fill_all(range);
    let (told, _) = watched.look();
    let touched: Vec<u16> = told.values().map(|seen| seen.touched).collect();
    assert_eq!(touched, [ALL; 4]);
    assert!(watched.machine.states(range).iter().all(|&state| state == State::Limbo));
    let (told, _) = watched.look();
    assert!(told.is_empty(), "nothing was touched: {told:?}");
    // Each page by a fault of its own.
    let one = GROUP_PAGES as u64;
    watched.touch([one + 1, one + 3]);
    let (told, _) = watched.look();
    assert_eq!(told.len(), 1);
    assert_eq!((told[&1].touched, told[&1].present), (0b1010, ALL));
    watched.machine.expect_all(range);
    watched.machine.space.check();
}

#[test]
fn a_page_says_how_many_looks_ago_it_was_touched_first() {
    let mut watched = Watched::new(0);
    let range = watched.machine.map(0, GROUP_PAGES);
    watched.machine.fill_all(range);
    let mut patience = 0;
    // Until it is passed over for a while.
    while patience < PATIENCE_MAX {
        watched.touch(range.pages().map(|page| page.0));
        patience = watched.look().0.get(&0).and_then(|seen| seen.patience).unwrap_or(0);
    }
    let looks = 1 << PATIENCE_MAX;
    for look in 0..looks {
        // Once more is not first.
        watched.touch([look / 8, 0]);
        let (told, _) = watched.look();
        if look + 1 == looks {
            let ages = [0, 8, 16, 24].map(|since| looks as u8 - 1 - since);
            assert_eq!((told[&0].touched, &told[&0].ages[..4]), (0b1111, &ages[..]));
        }
    }
    watched.machine.expect_all(range);
    watched.machine.space.check();
}

#[test]
fn a_few_pages_are_packed_at_each_look_touched_or_not_and_none_at_the_first() {
    let mut watched = Watched::new(0);
    let range = watched.machine.map(0, 64 * GROUP_PAGES);
    watched.machine.fill_all(range);
    watched.look();
    assert!(watched.packed.is_empty(), "it is not known how many there are");
    (0..40).for_each(|_| drop(watched.look()));
    let tried = watched.packed.len();
    assert!((40..400).contains(&tried), "{tried} in 40 looks");
    assert!(watched.packed.iter().all(|&bytes| bytes <= PAGE_SIZE as u64));
    watched.machine.expect_all(range);
}

#[test]
fn a_census_tells_of_each_group_that_has_content_and_of_no_other() {
    let mut watched = Watched::new(0);
    let range = watched.machine.map(0, 4 * GROUP_PAGES);
    watched.machine.fill_all(range);
    let gone = PageRange::new(PageNum(GROUP_PAGES as u64), GROUP_PAGES + 1);
    watched.look();
    watched.machine.advise(gone, Advice::DontNeed);
    for _ in 2..CENSUS {
        assert!(watched.look().0.is_empty(), "nothing was touched");
    }
    let (told, _) = watched.look();
    let present: Vec<(u64, u16)> = told.values().map(|seen| (seen.group, seen.present)).collect();
    assert_eq!(present, [(0, ALL), (2, ALL & !1), (3, ALL)]);
}

#[test]
fn a_region_that_is_touched_all_the_time_is_passed_over_and_its_hot_pages_cost_no_fault() {
    let mut watched = Watched::new(0);
    let range = watched.machine.map(0, REGION_GROUPS * GROUP_PAGES);
    watched.machine.fill_all(range);
    let mut patience = Vec::new();
    for _ in 0..400 {
        watched.touch(range.pages().map(|page| page.0));
        let (told, _) = watched.look();
        let seen = Vec::from_iter(told.values().filter_map(|seen| seen.patience));
        assert!(seen.is_empty() || seen == [seen[0]; REGION_GROUPS], "together: {seen:?}");
        patience.extend(seen.first());
    }
    assert_eq!(patience[..2], [0, PATIENCE_MAX], "what is touched once is seen again at once");
    assert!(patience[2..].contains(&0), "now and then at once: {patience:?}");
    assert!(patience.len() < 40, "looked at {} times in 400", patience.len());
    // Once it is not, it is looked at each time.
    let quiet = (0..2 << PATIENCE_MAX).map(|_| watched.look().0).collect::<Vec<_>>();
    let mut after = quiet.iter().flat_map(BTreeMap::values).filter(|seen| seen.patience == Some(0));
    assert_eq!(after.next_back().expect("it is looked at").touched, 0);
    watched.touch([3]);
    assert_eq!(watched.look().0[&0].touched, 1 << 3);
}

#[test]
fn only_sampled_groups_are_unmapped() {
    let mut watched = Watched::new(3);
    let range = watched.machine.map(0, 256 * GROUP_PAGES);
    watched.machine.fill_all(range);
    let (told, _) = watched.look();
    assert!((16..64).contains(&told.len()), "{} of 256 groups", told.len());
    for page in range.pages() {
        let is_out = watched.machine.state(page) == State::Limbo;
        assert_eq!(is_out, is_sampled(7, group_of(page), 3), "{page:?}");
    }
    watched.machine.expect_all(range);
}

#[test]
fn windows_of_the_frame_pool_that_faults_have_emptied_are_used_again() {
    let mut watched = Watched::new(0);
    let range = watched.machine.map(0, 64 * GROUP_PAGES);
    watched.machine.fill_all(range);
    let mut windows = 0;
    for _ in 0..20 * CENSUS {
        windows = watched.look().1;
        watched.machine.expect_all(range);
    }
    // Between two of a census each look may take a window of its own.
    assert!(windows <= 2 * u64::from(CENSUS) + 4, "{windows} windows");
    watched.machine.space.check();
}
