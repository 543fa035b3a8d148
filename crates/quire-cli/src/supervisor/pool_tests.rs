use std::sync::atomic::AtomicBool;

use quire::control::{Hello, MAGIC, MEMBERS_MAX, VERSION};
use quire::units::PAGE_SIZE;
use rustix::io::Errno;

use super::super::members::Members;
use super::*;
use crate::sys::control::ControlMap;

const NOBODY: u32 = u32::MAX;

/// A tree without processes: what members do is done for them.
struct Tree {
    control: ControlMap,
    members: Members,
    pool: Pool,
}

impl Tree {
    fn new() -> Tree {
        let control = ControlMap::create().unwrap();
        Tree { control, members: Members::new(MEMBERS_MAX), pool: Pool::create(64 << 20).unwrap() }
    }

    fn join(&mut self, parent_slot: u32) -> u32 {
        let (magic, version) = (MAGIC, VERSION);
        let fork = match parent_slot {
            NOBODY => 0,
            parent => self.control.members[parent as usize].fork.begin(),
        };
        let hello = Hello { magic, version, fork, parent_slot, held_pages: 0, wanted_pages: 0 };
        let slot = self.members.join(&self.control, &hello, 1).unwrap();
        if parent_slot != NOBODY {
            self.pool.inherit(&self.control, parent_slot, slot);
        }
        slot
    }

    fn leave(&mut self, member: u32) {
        self.pool.leave(&self.control, member);
        self.members.leave(&self.control, member);
    }

    fn charge(&self, member: u32, pages: usize) {
        self.control.seats[member as usize].account.put_in(pages);
    }

    fn uncharge(&self, member: u32, pages: usize) {
        self.control.seats[member as usize].account.uncharge(pages, 0);
    }

    /// Takes a slab as a member would, and writes to it.
    fn take(&self, member: u32, slot: u32, pages: usize) {
        self.charge(member, pages);
        assert!(self.pool.table.take(slot, member, pages));
        let bytes = vec![slot as u8 + 1; pages * PAGE_SIZE];
        let offset = self.pool.table.offset_of(slot) as u64;
        assert_eq!(rustix::io::pwrite(&self.pool.table, &bytes, offset), Ok(bytes.len()));
    }

    /// A member that has no blob in a slab any more.
    fn drop_slab(&self, member: u32, slot: u32) {
        while let SlabUse::Common { .. } = self.used(slot) {
            if self.pool.table.let_go(slot, member) {
                return;
            }
        }
        let own = self.used(slot);
        let SlabUse::Own { member: owner, pages } = own else { panic!("{slot} is {own:?}") };
        assert_eq!(owner, member);
        self.pool.table.punch(self.pool.table.offset_of(slot), SLOT_BYTES);
        assert!(self.pool.table.change(slot, own, SlabUse::Free));
        self.uncharge(member, pages);
    }

    fn used(&self, slot: u32) -> SlabUse {
        self.pool.table.slab_use(slot)
    }

    /// Bytes of a slot that have memory.
    fn has_memory(&self, slot: u32) -> bool {
        let mut bytes = vec![0; SLOT_BYTES];
        let offset = self.pool.table.offset_of(slot) as u64;
        assert_eq!(rustix::io::pread(&self.pool.table, &mut bytes, offset), Ok(bytes.len()));
        bytes.iter().any(|byte| *byte != 0)
    }

    fn held(&self, member: u32) -> u64 {
        self.control.seats[member as usize].account.get().held.into()
    }

    /// What the members hold, what is common, what the tree holds.
    fn accounts(&self) -> (u64, u64, u64) {
        let held = self.control.present().map(|(slot, _)| self.held(slot as u32)).sum();
        let tree = self.control.held();
        (held, self.control.common_pages.load(Relaxed), tree)
    }

    fn assert_empty(&self) {
        assert_eq!(self.accounts(), (0, 0, 0));
        assert!(self.pool.common.iter().all(|bits| *bits == 0));
        for slot in 1..self.pool.table.slots() as u32 {
            assert_eq!(self.used(slot), SlabUse::Free, "slot {slot}");
        }
        let slots = self.pool.table.offset_of(0) as u64;
        let memory = rustix::fs::seek(&self.pool.table, rustix::fs::SeekFrom::Data(slots));
        assert_eq!(memory, Err(Errno::NXIO), "there is memory behind the table");
    }
}

#[test]
fn a_slab_that_a_fork_shares_is_common_until_one_is_left() {
    let mut tree = Tree::new();
    let parent = tree.join(NOBODY);
    tree.take(parent, 1, 4);
    tree.take(parent, 70, 8);
    let child = tree.join(parent);
    assert_eq!(tree.accounts(), (0, 12, 12), "no member's, and counted once");
    let grandchild = tree.join(child);
    assert_eq!(tree.accounts(), (0, 12, 12));
    tree.take(child, 2, 5);
    tree.drop_slab(parent, 1);
    tree.pool.settle_if_let_go(&tree.control);
    assert_eq!(tree.used(1), SlabUse::Common { pages: 4 }, "two have it still");
    tree.drop_slab(grandchild, 1);
    tree.pool.settle_if_let_go(&tree.control);
    assert_eq!(tree.used(1), SlabUse::Own { member: child, pages: 4 });
    assert_eq!((tree.held(child), tree.accounts()), (9, (9, 8, 17)));
    tree.leave(child);
    assert_eq!([1, 2].map(|slot| tree.used(slot)), [SlabUse::Free; 2]);
    assert_eq!([1, 2, 70].map(|slot| tree.has_memory(slot)), [false, false, true]);
    tree.leave(grandchild);
    assert_eq!((tree.held(parent), tree.accounts()), (8, (8, 0, 8)));
    tree.drop_slab(parent, 70);
    assert_eq!(tree.accounts(), (0, 0, 0));
    tree.leave(parent);
}

#[test]
fn the_last_to_let_go_frees_the_memory_and_the_account() {
    let mut tree = Tree::new();
    let parent = tree.join(NOBODY);
    for slot in 1..200 {
        tree.take(parent, slot, 4 + slot as usize % 5);
    }
    let child = tree.join(parent);
    for slot in 1..200 {
        tree.drop_slab(parent, slot);
        tree.drop_slab(child, slot);
    }
    assert_eq!(tree.accounts().1, tree.accounts().2, "the supervisor gives it back");
    tree.pool.settle_if_let_go(&tree.control);
    tree.assert_empty();
}

/// A member is killed between any two steps of what it does with a slab.
#[test]
fn a_member_that_is_killed_leaves_nothing() {
    type Steps = fn(&Tree, u32);
    let until: [(&str, Steps); 7] = [
        ("charged", |tree, member| tree.charge(member, 6)),
        ("taken, not written", |tree, member| {
            tree.charge(member, 6);
            assert!(tree.pool.table.take(9, member, 6));
        }),
        ("written", |tree, member| tree.take(member, 9, 6)),
        ("its memory given back", |tree, member| {
            tree.take(member, 9, 6);
            tree.pool.table.punch(tree.pool.table.offset_of(9), SLOT_BYTES);
        }),
        ("given back, still charged", |tree, member| {
            tree.take(member, 9, 6);
            tree.drop_slab(member, 9);
            tree.charge(member, 6);
        }),
        ("a common one let go", |tree, member| assert!(tree.pool.table.let_go(3, member))),
        ("a common one let go, not counted", |tree, member| {
            assert_ne!(tree.pool.table.forget(member, 0, 1 << 3), 0);
        }),
    ];
    for (step, steps) in until {
        for is_last in [false, true] {
            let mut tree = Tree::new();
            let parent = tree.join(NOBODY);
            tree.take(parent, 3, 4);
            let child = tree.join(parent);
            if is_last {
                tree.leave(parent);
                // Own again; once more in two hands.
                let other = tree.join(child);
                steps(&tree, child);
                tree.leave(child);
                assert_eq!(tree.used(3), SlabUse::Own { member: other, pages: 4 }, "{step}");
                tree.leave(other);
            } else {
                steps(&tree, child);
                tree.leave(child);
                assert_eq!(tree.used(3), SlabUse::Own { member: parent, pages: 4 }, "{step}");
                assert!(tree.has_memory(3), "{step}");
                assert_eq!((tree.held(parent), tree.accounts()), (4, (4, 0, 4)), "{step}");
                tree.leave(parent);
            }
            tree.assert_empty();
        }
    }
}

/// The parent has seen its child die, and goes on, before the supervisor hears of the child.
#[test]
fn a_child_that_is_dead_when_it_inherits_harms_nobody() {
    let mut tree = Tree::new();
    let parent = tree.join(NOBODY);
    for slot in 1..=3 {
        tree.take(parent, slot, 4);
    }
    let child = tree.join(parent);
    // A member that believes the slabs to be its own, as in `zpool::Home::give_back`.
    tree.drop_slab(parent, 1);
    tree.leave(child);
    assert_eq!(tree.used(1), SlabUse::Free);
    assert_eq!((tree.held(parent), tree.accounts()), (8, (8, 0, 8)));
    tree.leave(parent);
    tree.assert_empty();
}

/// One thread lets go while the supervisor makes what one has that one's own.
#[test]
fn who_lets_go_and_who_is_given_the_slab_agree() {
    const SLABS: u32 = 64;
    for _ in 0..200 {
        let mut tree = Tree::new();
        let parent = tree.join(NOBODY);
        for slot in 1..=SLABS {
            tree.charge(parent, 4);
            assert!(tree.pool.table.take(slot, parent, 4));
        }
        let child = tree.join(parent);
        for slot in 1..=SLABS {
            tree.drop_slab(child, slot);
        }
        let Tree { control, pool, .. } = &mut tree;
        let control: &Control = control;
        let is_done = AtomicBool::new(false);
        // A second view of the same table, for the member's thread.
        let view = pool.table.view().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for slot in 1..=SLABS {
                    if view.let_go(slot, parent) {
                        continue;
                    }
                    let own = SlabUse::Own { member: parent, pages: 4 };
                    assert!(view.change(slot, own, SlabUse::Free), "{:?}", view.slab_use(slot));
                    control.seats[parent as usize].account.uncharge(4, 0);
                }
                is_done.store(true, Relaxed);
            });
            while !is_done.load(Relaxed) {
                pool.settle(control);
            }
        });
        pool.settle(control);
        tree.assert_empty();
    }
}
