//! The shared reverse map: where an object is mapped, for walks that must reach all its mappings.
//!
//! For each object an interval tree of mappings (`tree.rs`) and the reader-writer lock that guards it
//! (`lock.rs`, `word.rs`), eight bytes together.
//!
//! A thread that adds, removes, moves or resizes a mapping holds the lock for writing; one that only
//! walks the tree to change pages shares it: reclaim, write-back, truncation. Reclaim only tries it,
//! and goes on to the next page; a fault never takes it. What moves a mapping excludes walkers for
//! the whole of the move, until the pages are at the new place: a walker that came in between would
//! find them at neither.
//!
//! All walks of an address space can be made exclusive, to compare
//! ([`IMmaps::set_walks_exclusive`]).

pub mod lock;
mod tree;
mod word;

use core::ops::Deref;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::space::vma::VMAS_MAX;
use crate::sys::Errno;
use crate::sys::rank::{self, Rank};
use crate::units::{ObjectRange, PageNum, PageRange};
use lock::{Futex, RwSem, Side};
use tree::{Nodes, Tree};

/// Pages of an object at a place of the arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectMapping {
    /// Which pages of the object. Not none.
    pub pages: ObjectRange,
    /// Where the first of them is mapped.
    pub arena_start: PageNum,
    /// Its user's name for it.
    pub id: u32,
}

impl ObjectMapping {
    /// Where the pages of `range` that this mapping shows are in the arena.
    pub fn arena_range(&self, range: ObjectRange) -> PageRange {
        let shown = self.pages.intersect(range);
        if shown.is_empty() {
            return PageRange::new(self.arena_start, 0);
        }
        let before = (shown.start.0 - self.pages.start.0) as usize;
        PageRange::new(self.arena_start.add(before), shown.len())
    }
}

/// A mapping in the tree. Void once it is removed: the next one may have the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappingRef(u32);

/// What the reverse maps of an address space share.
pub struct IMmaps {
    nodes: Nodes,
    walks_exclusive: AtomicBool,
}

impl IMmaps {
    pub fn new() -> Result<IMmaps, Errno> {
        let nodes = Nodes::with_room_for(VMAS_MAX)?;
        Ok(IMmaps { nodes, walks_exclusive: AtomicBool::new(false) })
    }

    /// Makes every walk that begins from now on keep all others out, or share again.
    pub fn set_walks_exclusive(&self, are_exclusive: bool) {
        // Relaxed: each guard knows how it was taken, and either way is safe.
        self.walks_exclusive.store(are_exclusive, Ordering::Relaxed);
    }

    fn walk_side(&self) -> Side {
        // Relaxed: as in `set_walks_exclusive`.
        if self.walks_exclusive.load(Ordering::Relaxed) { Side::Writer } else { Side::Reader }
    }
}

const _: () = assert!(size_of::<IMmap>() == 8);

/// Where an object is mapped.
#[derive(Default)]
pub struct IMmap {
    lock: RwSem,
    root: AtomicU32,
}

impl IMmap {
    /// Takes the lock to change the tree. The same `maps` at every call, for an object.
    pub fn i_mmap_lock_write<'a>(&'a self, maps: &'a IMmaps) -> WriteGuard<'a> {
        WriteGuard(self.lock(maps, Side::Writer))
    }

    /// Takes the lock to walk the tree, beside other walkers.
    pub fn i_mmap_lock_read<'a>(&'a self, maps: &'a IMmaps) -> ReadGuard<'a> {
        self.lock(maps, maps.walk_side())
    }

    /// As [`Self::i_mmap_lock_read`], if that is possible at once.
    pub(crate) fn i_mmap_trylock_read<'a>(&'a self, maps: &'a IMmaps) -> Option<ReadGuard<'a>> {
        let side = maps.walk_side();
        self.lock.try_lock(side).then(|| self.guard(maps, side))
    }

    fn lock<'a>(&'a self, maps: &'a IMmaps, side: Side) -> ReadGuard<'a> {
        rank::sleeps_for(Rank::IMmap);
        self.lock.lock(side, &Futex);
        self.guard(maps, side)
    }

    fn guard<'a>(&'a self, maps: &'a IMmaps, side: Side) -> ReadGuard<'a> {
        rank::taken(Rank::IMmap, 1);
        ReadGuard { lock: &self.lock, tree: Tree::new(&maps.nodes, &self.root), side }
    }
}

/// The tree may be walked, and no thread changes it.
#[must_use = "the lock is given back at once"]
pub struct ReadGuard<'a> {
    lock: &'a RwSem,
    tree: Tree<'a>,
    /// How the lock was taken.
    side: Side,
}

impl<'a> Deref for ReadGuard<'a> {
    type Target = Tree<'a>;

    fn deref(&self) -> &Tree<'a> {
        &self.tree
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        rank::released(Rank::IMmap, 1);
        self.lock.unlock(self.side, &Futex);
    }
}

/// The tree may be changed, and no other thread sees it.
#[must_use = "the lock is given back at once"]
pub struct WriteGuard<'a>(ReadGuard<'a>);

impl WriteGuard<'_> {
    /// Adds a mapping; there may be others of the same pages. `NOMEM` where the table is full.
    pub fn insert(&mut self, mapping: ObjectMapping) -> Result<MappingRef, Errno> {
        self.tree.insert(mapping)
    }

    /// Removes a mapping and returns it; `None` where it is not in this tree.
    pub fn remove(&mut self, of: MappingRef) -> Option<ObjectMapping> {
        self.tree.remove(of)
    }

    /// Moves or resizes a mapping; `None` where it is not in this tree. Needs no memory.
    pub(crate) fn change(&mut self, of: MappingRef, mapping: ObjectMapping) -> Option<()> {
        self.tree.change(of, mapping)
    }
}

impl<'a> Deref for WriteGuard<'a> {
    type Target = ReadGuard<'a>;

    fn deref(&self) -> &ReadGuard<'a> {
        &self.0
    }
}

#[cfg(test)]
#[path = "i_mmap_tests.rs"]
mod tests;
