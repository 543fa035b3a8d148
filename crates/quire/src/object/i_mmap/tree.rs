//! The interval tree: where an object's pages are mapped, in order of the object's pages.
//!
//! An AVL tree in order of first page, mappings that begin alike in order of slot; each node knows
//! where the last page in its subtree ends. The nodes of all objects of an address space are in one
//! table; links are slot numbers, and a slot is a node for ever.
//!
//! A thread that has a [`Tree`] holds the lock of the [`super::IMmap`] it was made for, and for
//! writing where it calls what changes the tree. All fields are atomics that are loaded and stored
//! Relaxed: that lock orders them.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::{MappingRef, ObjectMapping};
use crate::object::numbers::Numbers;
use crate::space::vma::VMAS_MAX;
use crate::sys::Errno;
use crate::sys::memory::{Table, zeroed};
use crate::units::{ObjectPage, ObjectRange, PageNum};

/// No node: slot 0 is never used.
const NONE: u32 = 0;
/// Nodes of an address space and the one that is none: a mapping is a VMA.
const NODES_MAX: usize = VMAS_MAX + 1;
const HEIGHT_MAX: usize = height_max(NODES_MAX);

/// The height of the tallest AVL tree that `count` nodes can make.
const fn height_max(count: usize) -> usize {
    // The fewest nodes of trees of this height, and of the next one.
    let (mut fewest, mut next, mut height) = (0, 1, 0);
    while next <= count {
        (fewest, next) = (next, fewest + next + 1);
        height += 1;
    }
    height
}

/// A side of a node.
const LEFT: usize = 0;
const RIGHT: usize = 1;

/// One mapping. Guarded by the lock of the tree it is in.
struct Node {
    start: AtomicU64,
    end: AtomicU64,
    /// Where the last page of the subtree ends.
    subtree_end: AtomicU64,
    /// Arena page of the first page.
    arena: AtomicU64,
    children: [AtomicU32; 2],
    height: AtomicU32,
    id: AtomicU32,
}

zeroed!(Node { start, end, subtree_end, arena, children, height, id });

/// The nodes of all objects of an address space.
pub struct Nodes {
    nodes: Table<Node>,
    /// Of a slot in use: one less.
    numbers: Numbers,
}

impl Nodes {
    /// Room for so many mappings, in memory that is taken as it is used.
    pub(super) fn with_room_for(mappings: usize) -> Result<Nodes, Errno> {
        assert!(mappings < NODES_MAX);
        Ok(Nodes { nodes: Table::new(mappings + 1)?, numbers: Numbers::new(mappings)? })
    }

    fn at(&self, slot: u32) -> &Node {
        &self.nodes[slot as usize]
    }
}

impl Node {
    fn mapping(&self) -> ObjectMapping {
        ObjectMapping {
            pages: ObjectRange {
                start: ObjectPage(self.start.load(Relaxed)),
                end: ObjectPage(self.end.load(Relaxed)),
            },
            arena_start: PageNum(self.arena.load(Relaxed)),
            id: self.id.load(Relaxed),
        }
    }

    fn set(&self, mapping: ObjectMapping) {
        debug_assert!(!mapping.pages.is_empty());
        self.start.store(mapping.pages.start.0, Relaxed);
        self.end.store(mapping.pages.end.0, Relaxed);
        self.arena.store(mapping.arena_start.0, Relaxed);
        self.id.store(mapping.id, Relaxed);
    }

    fn child(&self, side: usize) -> u32 {
        self.children[side].load(Relaxed)
    }

    fn set_child(&self, side: usize, slot: u32) {
        self.children[side].store(slot, Relaxed);
    }
}

/// An object's tree, under its lock.
pub struct Tree<'a> {
    nodes: &'a Nodes,
    root: &'a AtomicU32,
}

impl<'a> Tree<'a> {
    pub(super) const fn new(nodes: &'a Nodes, root: &'a AtomicU32) -> Tree<'a> {
        Tree { nodes, root }
    }

    /// The mappings that show any page of `range`, in order of their first page; those that begin
    /// alike in any order. Takes what the tree is high and a little for each mapping found.
    pub fn overlapping(&self, range: ObjectRange) -> Overlapping<'_> {
        let mut walk = Overlapping { nodes: self.nodes, range, ahead: [NONE; HEIGHT_MAX], len: 0 };
        if !range.is_empty() {
            walk.go_left(self.root.load(Relaxed));
        }
        walk
    }

    pub(super) fn insert(&self, mapping: ObjectMapping) -> Result<MappingRef, Errno> {
        let slot = self.nodes.numbers.take().ok_or(Errno::NOMEM)? + 1;
        self.set(slot, mapping);
        Ok(MappingRef(slot))
    }

    pub(super) fn remove(&self, of: MappingRef) -> Option<ObjectMapping> {
        let mapping = self.take_out(of)?;
        self.nodes.numbers.give_back(of.0 - 1);
        Some(mapping)
    }

    pub(super) fn change(&self, of: MappingRef, mapping: ObjectMapping) -> Option<()> {
        self.take_out(of)?;
        self.set(of.0, mapping);
        Some(())
    }

    /// Puts a mapping into the tree, in a slot that is in no tree.
    fn set(&self, slot: u32, mapping: ObjectMapping) {
        self.at(slot).set(mapping);
        self.root.store(self.link(self.root.load(Relaxed), slot), Relaxed);
    }

    fn take_out(&self, of: MappingRef) -> Option<ObjectMapping> {
        let mut at = self.root.load(Relaxed);
        while at != of.0 {
            if at == NONE {
                return None;
            }
            at = self.at(at).child(self.side(at, of.0));
        }
        self.root.store(self.unlink(self.root.load(Relaxed), of.0), Relaxed);
        Some(self.at(of.0).mapping())
    }

    fn at(&self, slot: u32) -> &'a Node {
        self.nodes.at(slot)
    }

    fn key(&self, slot: u32) -> (u64, u32) {
        (self.at(slot).start.load(Relaxed), slot)
    }

    /// On which side of `parent` a node below it is.
    fn side(&self, parent: u32, slot: u32) -> usize {
        if self.key(slot) < self.key(parent) { LEFT } else { RIGHT }
    }

    // The changes below go from the root of a subtree down and return its new root: as deep as the
    // tree is high, and in frames of a few words.

    /// Puts a node that is set into a subtree.
    fn link(&self, root: u32, slot: u32) -> u32 {
        if root == NONE {
            self.at(slot).set_child(LEFT, NONE);
            self.at(slot).set_child(RIGHT, NONE);
            self.update(slot);
            return slot;
        }
        let (node, side) = (self.at(root), self.side(root, slot));
        node.set_child(side, self.link(node.child(side), slot));
        self.balance(root)
    }

    /// Takes a node out of the subtree that it is in.
    fn unlink(&self, root: u32, slot: u32) -> u32 {
        let node = self.at(root);
        if root != slot {
            let side = self.side(root, slot);
            node.set_child(side, self.unlink(node.child(side), slot));
            return self.balance(root);
        }
        let (left, right) = (node.child(LEFT), node.child(RIGHT));
        if left == NONE || right == NONE {
            return left.max(right);
        }
        // The next in order takes its place.
        let mut heir = right;
        while self.at(heir).child(LEFT) != NONE {
            heir = self.at(heir).child(LEFT);
        }
        let rest = self.unlink(right, heir);
        self.at(heir).set_child(LEFT, left);
        self.at(heir).set_child(RIGHT, rest);
        self.balance(heir)
    }

    /// Balances a subtree whose halves are balanced; returns its new root.
    fn balance(&self, slot: u32) -> u32 {
        let node = self.at(slot);
        for (side, other) in [(LEFT, RIGHT), (RIGHT, LEFT)] {
            let tall = node.child(side);
            if self.height(tall) > self.height(node.child(other)) + 1 {
                let child = self.at(tall);
                if self.height(child.child(side)) < self.height(child.child(other)) {
                    node.set_child(side, self.raise(tall, other));
                }
                return self.raise(slot, side);
            }
        }
        self.update(slot);
        slot
    }

    /// Puts the child on one side of a node in its place, and the node below it; returns the child.
    fn raise(&self, slot: u32, side: usize) -> u32 {
        let other = 1 - side;
        let risen = self.at(slot).child(side);
        self.at(slot).set_child(side, self.at(risen).child(other));
        self.at(risen).set_child(other, slot);
        self.update(slot);
        self.update(risen);
        risen
    }

    fn height(&self, slot: u32) -> u32 {
        if slot == NONE { 0 } else { self.at(slot).height.load(Relaxed) }
    }

    fn subtree_end(&self, slot: u32) -> u64 {
        if slot == NONE { 0 } else { self.at(slot).subtree_end.load(Relaxed) }
    }

    /// What a node knows of its subtree, from its children.
    fn update(&self, slot: u32) {
        let node = self.at(slot);
        let (left, right) = (node.child(LEFT), node.child(RIGHT));
        node.height.store(1 + self.height(left).max(self.height(right)), Relaxed);
        let below = self.subtree_end(left).max(self.subtree_end(right));
        node.subtree_end.store(node.end.load(Relaxed).max(below), Relaxed);
    }
}

/// A walk over the mappings that show pages of a range. Holds the tree's guard by its borrow.
pub struct Overlapping<'a> {
    nodes: &'a Nodes,
    range: ObjectRange,
    /// Nodes that are still to come, with their right halves; the next one last.
    ahead: [u32; HEIGHT_MAX],
    len: usize,
}

impl Overlapping<'_> {
    /// Goes to the first mapping of a subtree that can show a page of the range.
    fn go_left(&mut self, mut slot: u32) {
        while slot != NONE {
            #[cfg(test)]
            tests::LOOKS.with(|looks| looks.set(looks.get() + 1));
            let node = self.nodes.at(slot);
            if node.subtree_end.load(Relaxed) <= self.range.start.0 {
                return;
            }
            // Begins one behind the range, so do all on its right.
            if node.start.load(Relaxed) < self.range.end.0 {
                self.ahead[self.len] = slot;
                self.len += 1;
            }
            slot = node.child(LEFT);
        }
    }
}

impl Iterator for Overlapping<'_> {
    type Item = (MappingRef, ObjectMapping);

    fn next(&mut self) -> Option<(MappingRef, ObjectMapping)> {
        loop {
            self.len = self.len.checked_sub(1)?;
            let slot = self.ahead[self.len];
            let node = self.nodes.at(slot);
            self.go_left(node.child(RIGHT));
            if node.end.load(Relaxed) > self.range.start.0 {
                return Some((MappingRef(slot), node.mapping()));
            }
        }
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
pub(super) mod tests;
