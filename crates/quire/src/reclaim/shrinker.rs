//! Shrinkers: what holds memory and can free some.
//!
//! The arena and the objects' caches share every turn of reclaim, each in proportion to what it
//! holds. Private copies are pages of the arena. The compressed pool has no share, because to free
//! some of it takes writes to the swap file: the background thread asks it for what it has in
//! excess, and where the others free nothing.

use super::Reclaimer;
use crate::mmu::Mmu;
use crate::scratch::Scratch;
use crate::space::VmSpace;

/// Something that holds pages and can free some.
pub trait Shrinker {
    /// Pages that it holds, or of which it should give some.
    fn count(&self) -> usize;

    /// Frees about `target` pages and returns how many became free; fewer only where all that it
    /// holds was looked at. It only tries locks. Without a scratch there is little stack, and
    /// nothing can be packed.
    fn scan(&self, target: usize, who: Reclaimer, scratch: Option<&mut Scratch>) -> usize;
}

/// Has each shrinker free its share of `target` pages, in proportion to what it holds; returns how
/// many became free. One that holds too little to have a share is asked where the others free
/// nothing: 0 means that all were looked at.
pub(super) fn share_out(
    shrinkers: &[&dyn Shrinker],
    target: usize,
    who: Reclaimer,
    mut scratch: Option<&mut Scratch>,
) -> usize {
    let held: usize = shrinkers.iter().map(|shrinker| shrinker.count()).sum();
    let share_of = |shrinker: &dyn Shrinker| (target * shrinker.count() / held.max(1)).min(target);
    let mut freed = 0;
    for &shrinker in shrinkers.iter().filter(|&&shrinker| share_of(shrinker) > 0) {
        freed += shrinker.scan(share_of(shrinker), who, scratch.as_deref_mut());
    }
    if freed > 0 {
        return freed;
    }
    let is_small = |shrinker: &dyn Shrinker| shrinker.count() > 0 && share_of(shrinker) == 0;
    for &shrinker in shrinkers.iter().filter(|&&shrinker| is_small(shrinker)) {
        freed += shrinker.scan(target, who, scratch.as_deref_mut());
    }
    freed
}

/// Of an address space without objects.
pub struct NoCaches;

impl Shrinker for NoCaches {
    fn count(&self) -> usize {
        0
    }

    fn scan(&self, _: usize, _: Reclaimer, _: Option<&mut Scratch>) -> usize {
        0
    }
}

/// The arena, with limbo: all that is charged and is in no cache.
pub(super) struct Arena<'a, M: Mmu> {
    space: &'a VmSpace<M>,
    held: usize,
}

impl<'a, M: Mmu> Arena<'a, M> {
    pub(super) fn beside(space: &'a VmSpace<M>, caches: &impl Shrinker) -> Arena<'a, M> {
        let held = space.budget().held().saturating_sub(caches.count());
        Arena { space, held }
    }
}

impl<M: Mmu> Shrinker for Arena<'_, M> {
    fn count(&self) -> usize {
        self.held
    }

    fn scan(&self, target: usize, who: Reclaimer, scratch: Option<&mut Scratch>) -> usize {
        scratch.map_or(0, |scratch| self.space.shrink_arena(target, who, scratch))
    }
}

/// The compressed pool; the background thread alone scans it.
pub(crate) struct Pool<'a, M: Mmu>(pub &'a VmSpace<M>);

impl<M: Mmu> Shrinker for Pool<'_, M> {
    /// What the tree's pools have more than their share of the budget, and this one more than it
    /// would have if all were alike.
    fn count(&self) -> usize {
        let Pool(space) = self;
        if !space.swap.has_file() {
            return 0;
        }
        let pool = space.border.share_of(space.budget.limit());
        let all = space.border.share_of(space.budget.tree_limit());
        let own = all / space.budget.members();
        let share = own.max(all.saturating_sub(space.budget.pool_pages_of_others()));
        space.swap.zpool.pages().saturating_sub(share.min(pool))
    }

    /// Writes packed pages to the swap file, a segment at a time.
    fn scan(&self, target: usize, _: Reclaimer, scratch: Option<&mut Scratch>) -> usize {
        let (Pool(space), Some(scratch)) = (self, scratch) else { return 0 };
        let mut freed = 0;
        while freed < target {
            let before = space.swap.zpool.pages();
            if space.write_back(scratch) == 0 {
                break;
            }
            // Slabs that are taken meanwhile hide what was freed.
            freed += before.saturating_sub(space.swap.zpool.pages()).max(1);
        }
        freed
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    /// Holds so many pages and frees what it is asked for, unless all are busy.
    #[derive(Default)]
    struct Fake {
        held: Cell<usize>,
        is_busy: bool,
        asked: Cell<usize>,
    }

    impl Fake {
        fn holding(pages: usize) -> Fake {
            Fake { held: Cell::new(pages), ..Fake::default() }
        }
    }

    impl Shrinker for Fake {
        fn count(&self) -> usize {
            self.held.get()
        }

        fn scan(&self, target: usize, who: Reclaimer, scratch: Option<&mut Scratch>) -> usize {
            assert!(who == Reclaimer::Kswapd && scratch.is_none(), "they are handed on");
            self.asked.set(self.asked.get() + target);
            let freed = if self.is_busy { 0 } else { target.min(self.held.get()) };
            self.held.set(self.held.get() - freed);
            freed
        }
    }

    fn share_out_to(shrinkers: &[&Fake], target: usize) -> usize {
        let shrinkers: std::vec::Vec<_> =
            shrinkers.iter().map(|&shrinker| shrinker as &dyn Shrinker).collect();
        share_out(&shrinkers, target, Reclaimer::Kswapd, None)
    }

    #[test]
    fn each_gives_in_proportion_to_what_it_holds() {
        let (large, small) = (Fake::holding(300), Fake::holding(100));
        assert_eq!(share_out_to(&[&large, &small], 64), 64);
        assert_eq!((large.held.get(), small.held.get()), (252, 84));
    }

    #[test]
    fn one_that_has_nothing_is_not_asked_and_the_others_give_all() {
        let (empty, full) = (Fake::default(), Fake::holding(1000));
        assert_eq!(share_out_to(&[&empty, &full], 128), 128);
        assert_eq!((empty.asked.get(), full.asked.get()), (0, 128));
        assert_eq!(share_out_to(&[&empty], 128), 0);
    }

    #[test]
    fn one_that_frees_nothing_keeps_no_other_from_giving() {
        let busy = Fake { is_busy: true, ..Fake::holding(1000) };
        let free = Fake::holding(1000);
        assert_eq!(share_out_to(&[&busy, &free], 32), 16);
    }

    #[test]
    fn one_that_holds_little_is_asked_only_where_the_others_free_nothing() {
        let (large, small) = (Fake::holding(1000), Fake::holding(1));
        assert_eq!(share_out_to(&[&large, &small], 32), 31);
        assert_eq!(small.asked.get(), 0);
        let busy = Fake { is_busy: true, ..Fake::holding(1000) };
        assert_eq!(share_out_to(&[&busy, &small], 32), 1);
        assert_eq!(busy.asked.get(), 31, "it is not looked through twice");
    }
}
