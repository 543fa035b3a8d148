//! The interval tree: where an object's pages are mapped, in order of the object's pages.
//!
//! Owns the nodes, which all objects of an address space take from one table, and their links.
//! Leaves to its caller the lock: whoever has a [`Tree`] holds the lock of the [`super::IMmap`] it
//! was made for, and whoever calls what changes it holds that for writing.
//!
//! An AVL tree in order of first page, mappings that begin alike in order of slot; each node knows
//! where the last page in its subtree ends. Links are slot numbers. A slot is a node for ever, so an
//! old [`MappingRef`] finds an old node or a new one, never something else, and tells them apart by
//! the generation, which every change of a node bumps.
//!
//! All fields are atomics that are loaded and stored Relaxed: the lock orders them. (They are read
//! without it only through a reference into another object's tree, which the search then denies.)
//!
//! Locks: the mutex of the free slots, a leaf, taken under the lock of a tree.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::{Mapping, MappingRef};
use crate::space::vma::VMAS_MAX;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::sys::{
    Errno,
    memory::{Table, Zeroed},
};
use crate::units::{ObjectPage, ObjectRange, PageNum};

/// No node: slot 0 is never used.
const NONE: u32 = 0;
/// Nodes of an address space and the one that is none: a mapping is a VMA.
const NODES_MAX: usize = VMAS_MAX + 1;
/// Height of the tallest tree.
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

/// One mapping. Guarded by the lock of the tree it is in; while it is free, by that of the free
/// slots.
struct Node {
    start: AtomicU64,
    end: AtomicU64,
    /// Where the last page of the subtree ends.
    subtree_end: AtomicU64,
    /// Arena page of the first page.
    arena: AtomicU64,
    /// While it is free: the next free slot.
    left: AtomicU32,
    right: AtomicU32,
    height: AtomicU32,
    id: AtomicU32,
    generation: AtomicU32,
}

// SAFETY: atomics, for which zero is valid.
unsafe impl Zeroed for Node {}

struct FreeSlots {
    first: u32,
    /// Slots that were ever used.
    used: u32,
}

/// The nodes of all objects of an address space.
pub struct Nodes {
    nodes: Table<Node>,
    free: Mutex<rank::MapSlots, FreeSlots>,
}

impl Nodes {
    /// Room for as many mappings as there can be VMAs, in memory that is taken as it is used.
    ///
    /// # Errors
    /// `NOMEM`.
    pub fn new() -> Result<Nodes, Errno> {
        Nodes::with_room_for(VMAS_MAX)
    }

    pub(super) fn with_room_for(mappings: usize) -> Result<Nodes, Errno> {
        assert!(mappings < NODES_MAX);
        let nodes = Table::new(mappings + 1)?;
        Ok(Nodes { nodes, free: Mutex::new(FreeSlots { first: NONE, used: 0 }) })
    }

    /// In a fork's child, before any other thread runs there. No thread of the parent was adding or
    /// removing a mapping at that moment: a fork holds the space's lock.
    pub fn after_fork_in_child(&self) {
        if self.free.is_locked() {
            // SAFETY: the thread that held it does not exist in this process.
            unsafe { self.free.force_unlock() };
        }
    }

    fn take_slot(&self) -> Option<u32> {
        let mut free = self.free.lock();
        if free.first != NONE {
            let slot = free.first;
            free.first = self.at(slot).left.load(Relaxed);
            return Some(slot);
        }
        if free.used as usize + 1 == self.nodes.len() {
            return None;
        }
        free.used += 1;
        Some(free.used)
    }

    fn give_slot_back(&self, slot: u32) {
        let mut free = self.free.lock();
        self.at(slot).left.store(free.first, Relaxed);
        free.first = slot;
    }

    fn at(&self, slot: u32) -> &Node {
        &self.nodes[slot as usize]
    }
}

impl Node {
    fn mapping(&self) -> Mapping {
        Mapping {
            pages: ObjectRange {
                start: ObjectPage(self.start.load(Relaxed)),
                end: ObjectPage(self.end.load(Relaxed)),
            },
            arena_start: PageNum(self.arena.load(Relaxed)),
            id: self.id.load(Relaxed),
        }
    }

    fn set(&self, mapping: Mapping) {
        debug_assert!(!mapping.pages.is_empty());
        self.start.store(mapping.pages.start.0, Relaxed);
        self.end.store(mapping.pages.end.0, Relaxed);
        self.arena.store(mapping.arena_start.0, Relaxed);
        self.id.store(mapping.id, Relaxed);
        self.bump();
    }

    fn bump(&self) {
        self.generation.store(self.generation.load(Relaxed).wrapping_add(1), Relaxed);
    }
}

/// The slots from the root down to a node.
struct Path {
    slots: [u32; HEIGHT_MAX],
    len: usize,
}

impl Path {
    const fn new() -> Path {
        Path { slots: [NONE; HEIGHT_MAX], len: 0 }
    }

    fn push(&mut self, slot: u32) {
        self.slots[self.len] = slot;
        self.len += 1;
    }

    fn pop(&mut self) -> Option<u32> {
        self.len = self.len.checked_sub(1)?;
        Some(self.slots[self.len])
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
    #[must_use]
    pub fn overlapping(&self, range: ObjectRange) -> Overlapping<'_> {
        let mut walk = Overlapping { nodes: self.nodes, range, ahead: Path::new() };
        if !range.is_empty() {
            walk.go_left(self.root.load(Relaxed));
        }
        walk
    }

    /// A mapping of this object, unless it was changed or removed since.
    #[must_use]
    pub fn get(&self, of: MappingRef) -> Option<Mapping> {
        self.find(of).map(|_| self.at(of.slot).mapping())
    }

    /// Whether the object is mapped nowhere.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.root.load(Relaxed) == NONE
    }

    pub(super) fn insert(&self, mapping: Mapping) -> Result<MappingRef, Errno> {
        let slot = self.nodes.take_slot().ok_or(Errno::NOMEM)?;
        self.at(slot).set(mapping);
        self.link(slot);
        Ok(self.reference(slot))
    }

    pub(super) fn remove(&self, of: MappingRef) -> Option<Mapping> {
        let path = self.find(of)?;
        let mapping = self.at(of.slot).mapping();
        self.unlink(path);
        self.at(of.slot).bump();
        self.nodes.give_slot_back(of.slot);
        Some(mapping)
    }

    pub(super) fn change(&self, of: MappingRef, mapping: Mapping) -> Option<MappingRef> {
        let path = self.find(of)?;
        self.unlink(path);
        self.at(of.slot).set(mapping);
        self.link(of.slot);
        Some(self.reference(of.slot))
    }

    fn at(&self, slot: u32) -> &'a Node {
        self.nodes.at(slot)
    }

    fn reference(&self, slot: u32) -> MappingRef {
        MappingRef { slot, generation: self.at(slot).generation.load(Relaxed) }
    }

    fn key(&self, slot: u32) -> (u64, u32) {
        (self.at(slot).start.load(Relaxed), slot)
    }

    /// The link that leads to `slot`, which is below the last of `path`, or to be put there.
    fn link_to(&self, path: &[u32], slot: u32) -> &'a AtomicU32 {
        match path.last() {
            None => self.root,
            Some(&parent) if self.key(slot) < self.key(parent) => &self.at(parent).left,
            Some(&parent) => &self.at(parent).right,
        }
    }

    /// The way to a node, which is its last; `None` where it is not in this tree, or changed.
    fn find(&self, of: MappingRef) -> Option<Path> {
        if of.slot == NONE || self.reference(of.slot) != of {
            return None;
        }
        let key = self.key(of.slot);
        let mut path = Path::new();
        let mut at = self.root.load(Relaxed);
        while at != NONE {
            path.push(at);
            if at == of.slot {
                return Some(path);
            }
            let node = self.at(at);
            at = if key < self.key(at) { &node.left } else { &node.right }.load(Relaxed);
        }
        None
    }

    /// Puts a node that is set into the tree.
    fn link(&self, slot: u32) {
        let node = self.at(slot);
        node.left.store(NONE, Relaxed);
        node.right.store(NONE, Relaxed);
        let mut path = Path::new();
        let mut link = self.root;
        while link.load(Relaxed) != NONE {
            path.push(link.load(Relaxed));
            link = self.link_to(&path.slots[..path.len], slot);
        }
        link.store(slot, Relaxed);
        self.update(slot);
        self.retrace(path);
    }

    /// Takes the last node of `path` out of the tree.
    fn unlink(&self, mut path: Path) {
        let position = path.len - 1;
        let slot = path.slots[position];
        let node = self.at(slot);
        let link = self.link_to(&path.slots[..position], slot);
        let (left, right) = (node.left.load(Relaxed), node.right.load(Relaxed));
        if left == NONE || right == NONE {
            link.store(left.max(right), Relaxed);
            path.len = position;
            return self.retrace(path);
        }
        // The next in order takes its place.
        let mut heir = right;
        while self.at(heir).left.load(Relaxed) != NONE {
            path.push(heir);
            heir = self.at(heir).left.load(Relaxed);
        }
        let orphan = self.at(heir).right.load(Relaxed);
        self.link_to(&path.slots[..path.len], heir).store(orphan, Relaxed);
        self.at(heir).left.store(left, Relaxed);
        // Not `right`: that may have been the heir itself.
        self.at(heir).right.store(node.right.load(Relaxed), Relaxed);
        link.store(heir, Relaxed);
        path.slots[position] = heir;
        self.retrace(path);
    }

    /// From a change at its end back to the root: brings heights and ends up to date, and balances.
    fn retrace(&self, mut path: Path) {
        while let Some(slot) = path.pop() {
            let link = self.link_to(&path.slots[..path.len], slot);
            link.store(self.balance(slot), Relaxed);
        }
    }

    /// Balances a subtree whose halves are balanced; returns its new root.
    fn balance(&self, slot: u32) -> u32 {
        let node = self.at(slot);
        let (left, right) = (node.left.load(Relaxed), node.right.load(Relaxed));
        let (on_the_left, on_the_right) = (self.height(left), self.height(right));
        if on_the_left > on_the_right + 1 {
            let child = self.at(left);
            if self.height(child.left.load(Relaxed)) < self.height(child.right.load(Relaxed)) {
                node.left.store(self.rotate_left(left), Relaxed);
            }
            self.rotate_right(slot)
        } else if on_the_right > on_the_left + 1 {
            let child = self.at(right);
            if self.height(child.right.load(Relaxed)) < self.height(child.left.load(Relaxed)) {
                node.right.store(self.rotate_right(right), Relaxed);
            }
            self.rotate_left(slot)
        } else {
            self.update(slot);
            slot
        }
    }

    fn rotate_left(&self, slot: u32) -> u32 {
        let risen = self.at(slot).right.load(Relaxed);
        self.at(slot).right.store(self.at(risen).left.load(Relaxed), Relaxed);
        self.at(risen).left.store(slot, Relaxed);
        self.update(slot);
        self.update(risen);
        risen
    }

    fn rotate_right(&self, slot: u32) -> u32 {
        let risen = self.at(slot).left.load(Relaxed);
        self.at(slot).left.store(self.at(risen).right.load(Relaxed), Relaxed);
        self.at(risen).right.store(slot, Relaxed);
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
        let (left, right) = (node.left.load(Relaxed), node.right.load(Relaxed));
        node.height.store(1 + self.height(left).max(self.height(right)), Relaxed);
        let below = self.subtree_end(left).max(self.subtree_end(right));
        node.subtree_end.store(node.end.load(Relaxed).max(below), Relaxed);
    }

    /// Asserts order, balance, and what each node says of its subtree; returns how many there are.
    #[cfg(any(test, feature = "simulated"))]
    pub fn check(&self) -> usize {
        self.check_subtree(self.root.load(Relaxed), (0, NONE), (u64::MAX, u32::MAX))
    }

    /// As deep as the tree is high.
    #[cfg(any(test, feature = "simulated"))]
    fn check_subtree(&self, slot: u32, above: (u64, u32), below: (u64, u32)) -> usize {
        if slot == NONE {
            return 0;
        }
        let (node, key) = (self.at(slot), self.key(slot));
        assert!(above <= key && key < below, "slot {slot} is out of order");
        let (left, right) = (node.left.load(Relaxed), node.right.load(Relaxed));
        let count =
            1 + self.check_subtree(left, above, key) + self.check_subtree(right, key, below);
        let (on_the_left, on_the_right) = (self.height(left), self.height(right));
        assert!(on_the_left.abs_diff(on_the_right) <= 1, "slot {slot} is out of balance");
        assert_eq!(node.height.load(Relaxed), 1 + on_the_left.max(on_the_right));
        let end = self.subtree_end(left).max(self.subtree_end(right)).max(node.end.load(Relaxed));
        assert_eq!(node.subtree_end.load(Relaxed), end, "slot {slot} knows a wrong end");
        assert!(!node.mapping().pages.is_empty());
        count
    }
}

/// A walk over the mappings that show pages of a range. Holds the tree's guard by its borrow.
pub struct Overlapping<'a> {
    nodes: &'a Nodes,
    range: ObjectRange,
    /// Nodes that are still to come, with their right halves; the next one last.
    ahead: Path,
}

impl Overlapping<'_> {
    /// Goes to the first mapping of a subtree that can show a page of the range.
    fn go_left(&mut self, mut slot: u32) {
        while slot != NONE {
            #[cfg(test)]
            LOOKS.with(|looks| looks.set(looks.get() + 1));
            let node = self.nodes.at(slot);
            if node.subtree_end.load(Relaxed) <= self.range.start.0 {
                return;
            }
            // Begins one behind the range, so do all on its right.
            if node.start.load(Relaxed) < self.range.end.0 {
                self.ahead.push(slot);
            }
            slot = node.left.load(Relaxed);
        }
    }
}

impl Iterator for Overlapping<'_> {
    type Item = (MappingRef, Mapping);

    fn next(&mut self) -> Option<(MappingRef, Mapping)> {
        loop {
            let slot = self.ahead.pop()?;
            let node = self.nodes.at(slot);
            self.go_left(node.right.load(Relaxed));
            if node.end.load(Relaxed) > self.range.start.0 {
                let generation = node.generation.load(Relaxed);
                return Some((MappingRef { slot, generation }, node.mapping()));
            }
        }
    }
}

#[cfg(test)]
std::thread_local! {
    /// Nodes that this thread's walks have looked at.
    pub(super) static LOOKS: core::cell::Cell<usize> = const { core::cell::Cell::new(0) };
}
