//! Real forks over a real memfd; the tests stand in for the supervisor.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::vec::Vec;

use super::super::Handle;
use super::super::tests::{Dice, Packer, Purse, free, load};
use super::*;
use crate::control::slabs::{SLOT_BYTES, SlabTable, SlabUse, slots_for};
use crate::swap::compress::PageBytes;

const PARENT: u32 = 0;
const CHILD: u32 = 1;

/// A pool in a memfd, with pages in it.
struct World {
    memfd: OwnedFd,
    pool: Zpool,
    purse: Purse,
    packer: Packer,
    dice: Dice,
    pages: Vec<(PageNum, Handle, PageBytes)>,
}

/// A fork's child, to be waited for.
#[must_use]
struct Child(libc::pid_t);

impl Child {
    fn ends(self) {
        let mut status = 0;
        // SAFETY: a child of ours, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(self.0, &raw mut status, 0) }, self.0);
        assert_eq!(status, 0, "the child failed");
    }
}

impl World {
    fn with_pages(count: u64) -> World {
        let slots = slots_for(0);
        let memfd =
            rustix::fs::memfd_create(c"quire-pool", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memfd, SlabTable::pool_bytes(slots) as u64).unwrap();
        // SAFETY: made for so many slots just now, and nobody shrinks it.
        let pool = unsafe { Zpool::shared(memfd.as_fd(), slots, PARENT) }.unwrap();
        let (purse, packer, dice) = (Purse::with(1 << 20), Packer::new(), Dice(5));
        let mut world = World { memfd, pool, purse, packer, dice, pages: Vec::new() };
        (0..count).for_each(|owner| world.store(PageNum(owner)));
        world
    }

    fn store(&mut self, owner: PageNum) {
        let page = self.dice.page();
        let handle = self.packer.store(&self.pool, owner, &page, &self.purse).unwrap();
        self.pages.push((owner, handle, page));
    }

    fn table(&self) -> &SlabTable {
        self.pool.home.table()
    }

    /// What the supervisor does when a fork's child joins.
    fn share(&self, parent: u32, child: u32) {
        let table = self.table();
        table.count_move();
        for word in 0..table.slots_end().div_ceil(64) {
            table.share(child, word, table.shared_slots(parent, word));
        }
        for slot in 1..table.slots_end() as u32 {
            let own = table.slab_use(slot);
            let SlabUse::Own { member, pages } = own else { continue };
            if member == parent {
                let (word, bit) = (slot as usize / 64, 1 << (slot % 64));
                table.share(parent, word, bit);
                table.share(child, word, bit);
                assert!(table.change(slot, own, SlabUse::Common { pages }));
                self.purse.uncharge(pages);
            }
        }
        table.count_move();
    }

    /// What it does when members have let go: `member` gets what is its alone.
    fn settle(&self, member: u32) {
        let table = self.table();
        table.count_move();
        for slot in 1..table.slots_end() as u32 {
            let common = table.slab_use(slot);
            let SlabUse::Common { pages } = common else { continue };
            let (word, bit) = (slot as usize / 64, 1 << (slot % 64));
            let users: Vec<u32> =
                (0..4).filter(|&user| table.shared_slots(user, word) & bit != 0).collect();
            if users == [member] {
                assert!(self.purse.try_charge(pages));
                let own = SlabUse::Own { member, pages };
                assert!(table.change(slot, common, own));
                assert_ne!(table.forget(member, word, bit), 0);
            }
        }
        table.count_move();
    }

    /// Lets go of all that a member shares, as at its end.
    fn bury(&self, member: u32) {
        for word in 0..self.table().slots_end().div_ceil(64) {
            let _ = self.table().forget(member, word, u64::MAX);
        }
    }

    fn common(&self) -> Vec<u32> {
        let is_common = |slot: &u32| matches!(self.table().slab_use(*slot), SlabUse::Common { .. });
        (1..self.table().slots_end() as u32).filter(is_common).collect()
    }

    fn check_all(&self) {
        for (owner, handle, page) in &self.pages {
            assert!(load(&self.pool, *handle, *owner) == Ok(*page), "{owner:?}");
        }
    }

    /// Forks; the child does `work` and ends.
    fn fork(&mut self, member: u32, work: impl FnOnce(&mut World)) -> Child {
        self.pool.seal(&self.purse);
        assert_eq!(self.pool.own_pages(), 0);
        let joined = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        // SAFETY: the child does what the tests of this module do, which the C library allows in a
        // fork's child, and ends without going back to the harness.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let result = std::panic::catch_unwind(AssertUnwindSafe(|| {
                let mut bytes = [0; 8];
                rustix::io::read(&joined, &mut bytes).unwrap();
                self.pool.after_fork_in_child(member);
                // An account of its own, with nothing on it yet.
                self.purse = Purse::with(1 << 20);
                work(self);
            }));
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(i32::from(result.is_err())) }
        }
        self.share(PARENT, member);
        self.pool.after_fork_in_parent();
        rustix::io::write(&joined, &1u64.to_ne_bytes()).unwrap();
        Child(pid)
    }

    /// The bytes of slots as they lie in the memfd.
    fn bytes(&self, slots: &[u32]) -> Vec<u8> {
        let mut all = std::vec![0; slots.len() * SLOT_BYTES];
        for (bytes, slot) in all.chunks_mut(SLOT_BYTES).zip(slots) {
            let offset = self.table().offset_of(*slot) as u64;
            assert_eq!(rustix::io::pread(&self.memfd, bytes, offset), Ok(SLOT_BYTES));
        }
        all
    }

    /// Everything that one side does with its pages.
    fn churn(&mut self, first_owner: u64) {
        self.check_all();
        let pages = core::mem::take(&mut self.pages);
        for (number, (owner, handle, page)) in pages.into_iter().enumerate() {
            match number % 3 {
                0 => free(&self.pool, handle, &self.purse),
                1 => {
                    let to = PageNum(first_owner + owner.0);
                    // SAFETY: one thread.
                    let moved = unsafe { self.pool.set_owner(handle, owner, to, &self.purse) };
                    self.pages.push((to, moved.unwrap(), page));
                }
                _ => self.pages.push((owner, handle, page)),
            }
        }
        (0..300).for_each(|number| self.store(PageNum(2 * first_owner + number)));
        let words = &mut self.pages;
        let relocate = |owner: PageNum, old: Handle, new: Handle| {
            let word = words.iter_mut().find(|word| word.0 == owner && word.1 == old);
            word.map(|word| word.1 = new).is_some()
        };
        self.pool.compact(usize::MAX, relocate, &self.purse);
        self.check_all();
    }

    fn free_all(&mut self) {
        for (_, handle, _) in core::mem::take(&mut self.pages) {
            free(&self.pool, handle, &self.purse);
        }
        self.pool.compact(usize::MAX, |_, _, _| panic!("nothing is left"), &self.purse);
    }
}

#[test]
fn what_a_fork_shares_is_right_for_both_and_written_by_neither() {
    let mut world = World::with_pages(2000);
    let held = world.purse.held();
    let forked = world.fork(CHILD, |child| {
        child.churn(10_000);
        child.churn(1_000_000);
        child.free_all();
        assert_eq!((child.pool.pages(), child.purse.held()), (0, 0));
    });
    assert_eq!((world.purse.held(), world.pool.own_pages()), (0, 0), "all of it is common");
    assert_eq!(world.pool.pages(), held);
    let sealed = world.common();
    let before = world.bytes(&sealed);
    world.churn(100_000);
    forked.ends();
    assert!(world.bytes(&sealed) == before, "a sealed slab was written to");
    world.churn(1_000_000);
    world.bury(CHILD);
    world.settle(PARENT);
    world.churn(3_000_000);
    assert_eq!(world.pool.own_pages(), world.purse.held());
    world.free_all();
    assert_eq!((world.pool.pages(), world.purse.held()), (0, 0));
    let blocks = rustix::fs::fstat(&world.memfd).unwrap().st_blocks as usize * 512;
    // Slabs that parent and child both let go of are for the supervisor to free.
    let unused: usize = world.common().len() * SLOT_BYTES;
    assert!(blocks <= unused + (64 << 10), "{blocks} bytes, {unused} of them common");
}

#[test]
fn a_child_reads_what_its_parent_freed_and_a_grandchild_too() {
    let mut world = World::with_pages(600);
    let forked = world.fork(CHILD, |child| {
        child.check_all();
        // Nobody else is in the pool; here too the supervisor's part is played.
        let forked = child.fork_of(CHILD, 2, World::check_all);
        child.free_all();
        forked.ends();
    });
    world.free_all();
    forked.ends();
    assert_eq!(world.pool.pages(), 0);
}

impl World {
    /// A fork of a fork's child.
    fn fork_of(&mut self, parent: u32, member: u32, work: fn(&World)) -> Child {
        self.pool.seal(&self.purse);
        self.share(parent, member);
        // SAFETY: as in `fork`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            self.pool.after_fork_in_child(member);
            // Time for the others to free theirs.
            std::thread::sleep(std::time::Duration::from_millis(20));
            let result = std::panic::catch_unwind(AssertUnwindSafe(|| work(self)));
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(i32::from(result.is_err())) }
        }
        self.pool.after_fork_in_parent();
        Child(pid)
    }
}

#[test]
fn a_sealed_blob_gets_another_owner_by_a_copy_or_not_at_all() {
    let mut world = World::with_pages(50);
    world.fork(CHILD, |_| ()).ends();
    world.purse = Purse::with(0);
    let (owner, handle, page) = world.pages[7];
    // SAFETY: one thread.
    let moved = unsafe { world.pool.set_owner(handle, owner, PageNum(999), &world.purse) };
    assert_eq!(moved, Err(crate::swap::zpool::Full));
    assert!(load(&world.pool, handle, owner) == Ok(page));
    world.purse = Purse::with(100);
    // SAFETY: one thread.
    let moved = unsafe { world.pool.set_owner(handle, owner, PageNum(999), &world.purse) };
    let moved = moved.unwrap();
    assert_ne!(moved, handle);
    assert!(load(&world.pool, moved, PageNum(999)) == Ok(page));
    assert!(load(&world.pool, handle, owner).is_err(), "it was freed");
}

#[test]
fn a_blob_is_shared_from_the_fork_until_one_process_alone_has_its_slab() {
    let mut world = World::with_pages(400);
    let (_, handle, _) = world.pages[7];
    let is_shared = |world: &World| world.pool.is_shared(handle);
    assert!(!is_shared(&world));
    world.fork(CHILD, |_| ()).ends();
    assert!(is_shared(&world));
    world.store(PageNum(5000));
    let (_, new, _) = world.pages[400];
    assert!(!world.pool.is_shared(new), "it is in a slab of the parent's own");
    world.bury(CHILD);
    world.settle(PARENT);
    world.pool.at_rest(|own| own);
    assert!(!is_shared(&world));
    world.free_all();
}

#[test]
fn where_no_child_came_of_it_or_it_has_gone_all_is_as_it_was() {
    let mut world = World::with_pages(400);
    let (held, slabs) = (world.purse.held(), world.table().slots_end());
    world.pool.seal(&world.purse);
    world.pool.after_fork_in_parent();
    assert_eq!((world.pool.own_pages(), world.purse.held()), (held, held));
    world.fork(CHILD, |_| ()).ends();
    world.bury(CHILD);
    world.settle(PARENT);
    assert_eq!(world.pool.at_rest(|own| own), held);
    assert_eq!(world.purse.held(), held);
    // New blobs go where old ones are.
    world.store(PageNum(5000));
    assert!(world.table().slots_end() <= slabs + 1);
    world.check_all();
    world.free_all();
    assert_eq!((world.pool.pages(), world.purse.held()), (0, 0));
}

#[test]
fn what_another_process_frees_is_given_back_by_engine_threads_alone() {
    let mut world = World::with_pages(400);
    let held = world.purse.held();
    for (_, handle, _) in core::mem::take(&mut world.pages) {
        free(&world.pool, handle, &world.purse);
    }
    assert_eq!(world.purse.held(), held, "whoever frees may be a thread of the program's");
    // Empty slabs serve again, whatever their class was.
    (0..400).for_each(|owner| world.store(PageNum(owner)));
    assert!(world.purse.held() < held + held / 4, "{} of {held}", world.purse.held());
    world.free_all();
    assert_eq!((world.pool.pages(), world.purse.held()), (0, 0));
}
