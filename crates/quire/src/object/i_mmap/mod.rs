//! The shared reverse map: where an object is mapped, for those who must reach all its mappings.
//!
//! Owns, for each object, an interval tree of mappings (`tree.rs`) and the reader-writer lock that
//! guards it (`lock.rs`, `word.rs`), eight bytes together. Leaves to its users what a mapping's pages are and
//! their page locks.
//!
//! # The lock
//!
//! Who changes the tree has it for writing: a mapping is added, removed, moved or resized. Who only
//! walks the tree to change pages, not mappings, shares it: reclaim, write-back, truncation. The
//! guards say so: a [`ReadGuard`] can be walked, a [`WriteGuard`] changed as well.
//!
//! - *What moves a mapping excludes walkers*, for the whole of the move: a walker that comes in
//!   between would find its pages at neither place. [`WriteGuard::change`] is one step, under one
//!   guard; who moves the pages themselves keeps the guard until they are at the new place.
//! - *A fault never takes the lock.*
//! - *Reclaim tries it* ([`IMmap::i_mmap_trylock_read`]), and goes on to the next page.
//!
//! All reverse maps of an address space can be told to make every walk exclusive, to compare
//! ([`IMmaps::set_walks_exclusive`]).
//!
//! Locks: outside of this one, whatever its user says; under it, the mutex of the free slots.

pub mod lock;
pub mod tree;
mod word;

use core::ops::Deref;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::sys::rank::{self, Rank};
use crate::sys::{Errno, memory::Zeroed};
use crate::units::{ObjectPage, ObjectRange, PageNum, PageRange};
use lock::{Futex, RwSem};
use tree::{Nodes, Tree};

/// Pages of an object at a place of the arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Which pages of the object. Not none.
    pub pages: ObjectRange,
    /// Where the first of them is mapped.
    pub arena_start: PageNum,
    /// Its user's name for it.
    pub id: u32,
}

impl Mapping {
    /// Where the pages of `range` that this mapping shows are in the arena.
    #[must_use]
    pub fn arena_range(&self, range: ObjectRange) -> PageRange {
        let shown = self.pages.intersect(range);
        if shown.is_empty() {
            return PageRange::new(self.arena_start, 0);
        }
        let before = (shown.start.0 - self.pages.start.0) as usize;
        PageRange::new(self.arena_start.add(before), shown.len())
    }

    /// Those of its pages that lie before `at`, and the others; `None` where either is none.
    #[must_use]
    pub fn split(&self, at: ObjectPage) -> Option<(Mapping, Mapping)> {
        if at <= self.pages.start || at >= self.pages.end {
            return None;
        }
        let head = ObjectRange { end: at, ..self.pages };
        let tail = ObjectRange { start: at, ..self.pages };
        let arena_start = self.arena_start.add(head.len());
        Some((Mapping { pages: head, ..*self }, Mapping { pages: tail, arena_start, ..*self }))
    }
}

/// A mapping in the tree, as it was when the reference was taken: void once it is changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappingRef {
    slot: u32,
    generation: u32,
}

/// What the reverse maps of an address space share.
pub struct IMmaps {
    nodes: Nodes,
    walks_exclusive: AtomicBool,
}

impl IMmaps {
    /// No mapping; walks are shared.
    ///
    /// # Errors
    /// `NOMEM`.
    pub fn new() -> Result<IMmaps, Errno> {
        Ok(IMmaps { nodes: Nodes::new()?, walks_exclusive: AtomicBool::new(false) })
    }

    /// Makes every walk that begins from now on keep all others out, or share again.
    pub fn set_walks_exclusive(&self, are_exclusive: bool) {
        // Relaxed: each guard knows how it was taken, and either way is safe.
        self.walks_exclusive.store(are_exclusive, Ordering::Relaxed);
    }

    /// Whether walks keep all others out.
    pub fn are_walks_exclusive(&self) -> bool {
        // Relaxed: as in `set_walks_exclusive`.
        self.walks_exclusive.load(Ordering::Relaxed)
    }

    /// In a fork's child, before any other thread runs there; see [`Nodes::after_fork_in_child`].
    pub fn after_fork_in_child(&self) {
        self.nodes.after_fork_in_child();
    }
}

const _: () = assert!(size_of::<IMmap>() == 8);

/// Where an object is mapped. All zeros is an object that is mapped nowhere.
#[derive(Default)]
pub struct IMmap {
    lock: RwSem,
    root: AtomicU32,
}

// SAFETY: zero is a free lock and an empty tree, which own nothing.
unsafe impl Zeroed for IMmap {}

impl IMmap {
    /// Mapped nowhere.
    #[must_use]
    pub const fn new() -> IMmap {
        IMmap { lock: RwSem::new(), root: AtomicU32::new(0) }
    }

    /// Takes the lock to change the tree. The same `maps` at every call, for an object.
    pub fn i_mmap_lock_write<'a>(&'a self, maps: &'a IMmaps) -> WriteGuard<'a> {
        rank::sleeps_for(Rank::IMmap);
        self.lock.lock_write(&Futex);
        self.write_guard(maps)
    }

    /// As [`Self::i_mmap_lock_write`], if that is possible at once.
    pub fn i_mmap_trylock_write<'a>(&'a self, maps: &'a IMmaps) -> Option<WriteGuard<'a>> {
        self.lock.try_lock_write().then(|| self.write_guard(maps))
    }

    /// Takes the lock to walk the tree, beside other walkers.
    pub fn i_mmap_lock_read<'a>(&'a self, maps: &'a IMmaps) -> ReadGuard<'a> {
        rank::sleeps_for(Rank::IMmap);
        let is_exclusive = maps.are_walks_exclusive();
        if is_exclusive {
            self.lock.lock_write(&Futex);
        } else {
            self.lock.lock_read(&Futex);
        }
        self.read_guard(maps, is_exclusive)
    }

    /// As [`Self::i_mmap_lock_read`], if that is possible at once.
    pub fn i_mmap_trylock_read<'a>(&'a self, maps: &'a IMmaps) -> Option<ReadGuard<'a>> {
        let is_exclusive = maps.are_walks_exclusive();
        let is_taken =
            if is_exclusive { self.lock.try_lock_write() } else { self.lock.try_lock_read() };
        is_taken.then(|| self.read_guard(maps, is_exclusive))
    }

    /// In a fork's child, before any other thread runs there. Walkers of the parent do not exist
    /// here; there was no writer, for a fork holds the space's lock.
    pub fn after_fork_in_child(&self) {
        self.lock.after_fork_in_child();
    }

    fn write_guard<'a>(&'a self, maps: &'a IMmaps) -> WriteGuard<'a> {
        rank::taken(Rank::IMmap, 1);
        WriteGuard { lock: &self.lock, tree: Tree::new(&maps.nodes, &self.root) }
    }

    fn read_guard<'a>(&'a self, maps: &'a IMmaps, is_exclusive: bool) -> ReadGuard<'a> {
        rank::taken(Rank::IMmap, 1);
        let tree = Tree::new(&maps.nodes, &self.root);
        ReadGuard { lock: &self.lock, tree, is_exclusive }
    }
}

/// The tree may be walked, and nobody changes it.
#[must_use = "the lock is given back at once"]
pub struct ReadGuard<'a> {
    lock: &'a RwSem,
    tree: Tree<'a>,
    /// Taken for writing: walks are exclusive.
    is_exclusive: bool,
}

impl ReadGuard<'_> {
    /// Gives the lock back, as dropping the guard does.
    pub fn i_mmap_unlock_read(self) {}
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
        if self.is_exclusive {
            self.lock.unlock_write(&Futex);
        } else {
            self.lock.unlock_read(&Futex);
        }
    }
}

/// The tree may be changed, and nobody else sees it.
#[must_use = "the lock is given back at once"]
pub struct WriteGuard<'a> {
    lock: &'a RwSem,
    tree: Tree<'a>,
}

impl WriteGuard<'_> {
    /// Adds a mapping; there may be others of the same pages.
    ///
    /// # Errors
    /// `NOMEM` where the table is full.
    pub fn insert(&mut self, mapping: Mapping) -> Result<MappingRef, Errno> {
        self.tree.insert(mapping)
    }

    /// Removes a mapping and returns it; `None` where it was changed or removed since.
    pub fn remove(&mut self, of: MappingRef) -> Option<Mapping> {
        self.tree.remove(of)
    }

    /// Moves or resizes a mapping, or gives it other rights; `None` where it was changed or removed
    /// since. Needs no memory.
    pub fn change(&mut self, of: MappingRef, mapping: Mapping) -> Option<MappingRef> {
        self.tree.change(of, mapping)
    }

    /// Cuts a mapping in two before `at`.
    ///
    /// # Errors
    /// `NOENT` where it was changed or removed since, `INVAL` where `at` is not inside of it,
    /// `NOMEM` where the table is full: nothing is changed then.
    pub fn split(
        &mut self,
        of: MappingRef,
        at: ObjectPage,
    ) -> Result<(MappingRef, MappingRef), Errno> {
        let whole = self.tree.get(of).ok_or(Errno::NOENT)?;
        let (head, tail) = whole.split(at).ok_or(Errno::INVAL)?;
        let tail = self.tree.insert(tail)?;
        let head = self.tree.change(of, head).expect("found above, under the same guard");
        Ok((head, tail))
    }

    /// Gives the lock back, as dropping the guard does.
    pub fn i_mmap_unlock_write(self) {}
}

impl<'a> Deref for WriteGuard<'a> {
    type Target = Tree<'a>;

    fn deref(&self) -> &Tree<'a> {
        &self.tree
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        rank::released(Rank::IMmap, 1);
        self.lock.unlock_write(&Futex);
    }
}

#[cfg(test)]
#[path = "i_mmap_tests.rs"]
mod tests;
