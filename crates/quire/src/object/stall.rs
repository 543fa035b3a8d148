//! Writers that a store stops, and for how long.
//!
//! More may not be dirty than a share of the budget, so a store that takes nothing stops the threads
//! that write its object, in the middle of a fault, where none of them can be told why. Where that has
//! lasted, without a break, as long as a writer is to wait, without one write of the object that succeeded, and the last
//! try failed or was held back by the barrier, the fault is a SIGBUS. What is dirty stays so, and is
//! tried on.
//!
//! A refused page is unmapped and marked in the mapping that wrote to it, so that reads of it fail
//! there as well, and is listed; as soon as writers need not wait the background thread takes the
//! marks away. While the list is full, writers wait on. With inline delivery the thread that faults is
//! told, and there is no mark.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::window::View;
use super::{Objects, VmObject};
use crate::mmu::object::ObjectMmu;
use crate::space::vma::Kind;
use crate::sys::monotonic_ns;
use crate::sys::mutex::Mutex;
use crate::sys::rank;
use crate::units::{PageNum, PageRange};

/// How long a writer waits, unless said otherwise: 30 s.
const PATIENCE_NS: u64 = 30_000_000_000;
/// Pages that can be marked at once.
const REFUSED_MAX: usize = 512;

/// Whether writers of an object make no way.
#[derive(Default)]
pub(super) struct Stall {
    /// Since when writers have waited without a write that succeeded; 0: they do not.
    since_ns: AtomicU64,
    /// In which episode that was.
    episode: AtomicU32,
    /// The last write failed, or was held back.
    is_failing: AtomicBool,
}

impl Stall {
    /// Notes how a write ended. Relaxed, here and below: a writer that misses it waits once more.
    pub fn note_write(&self, is_good: bool) {
        self.is_failing.store(!is_good, Ordering::Relaxed);
        if is_good {
            self.since_ns.store(0, Ordering::Relaxed);
        }
    }
}

struct RefusedList {
    pages: [(PageNum, u32); REFUSED_MAX],
    len: usize,
}

/// Refused writers of a space.
pub(super) struct Stalls {
    patience_ns: AtomicU64,
    /// When the writers that wait are to look again; 0: none does.
    check_ns: AtomicU64,
    /// Goes on when writers need not wait: what they waited before counts no more.
    episode: AtomicU32,
    /// Pages that are marked, and in which mapping.
    refused: Mutex<rank::Refused, RefusedList>,
}

impl Stalls {
    pub const fn new() -> Stalls {
        Stalls {
            patience_ns: AtomicU64::new(PATIENCE_NS),
            check_ns: AtomicU64::new(0),
            episode: AtomicU32::new(0),
            refused: Mutex::new(RefusedList { pages: [(PageNum(0), 0); REFUSED_MAX], len: 0 }),
        }
    }
}

impl<M: ObjectMmu> Objects<M> {
    /// How long a writer waits at most for a store that takes nothing.
    pub fn set_writer_patience(&self, patience_ns: u64) {
        self.stalls.patience_ns.store(patience_ns, Ordering::Relaxed);
    }

    /// A writer is to wait; says whether it has been long enough.
    pub(super) fn is_stalled(&self, object: &VmObject) -> bool {
        let stall = &object.stall;
        let now = monotonic_ns();
        let episode = self.stalls.episode.load(Ordering::Relaxed);
        if stall.episode.swap(episode, Ordering::Relaxed) != episode {
            stall.since_ns.store(now, Ordering::Relaxed);
            return false;
        }
        let first = stall.since_ns.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        let Err(since) = first else { return false };
        let patience = self.stalls.patience_ns.load(Ordering::Relaxed);
        now.saturating_sub(since) >= patience && stall.is_failing.load(Ordering::Relaxed)
    }

    /// Has writers that wait from now on look again when they have waited long enough.
    pub(super) fn check_writers_later(&self) {
        let due = monotonic_ns().saturating_add(self.stalls.patience_ns.load(Ordering::Relaxed));
        let check = &self.stalls.check_ns;
        let _ = check.compare_exchange(0, due, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Makes the access to a page a SIGBUS in one mapping, until writers need not wait; `false` where too many are so.
    pub(super) fn refuse_writer(&self, view: &mut View<'_>, page: PageNum) -> bool {
        if self.space.mmu().is_inline() {
            return true;
        }
        {
            let mut list = self.stalls.refused.lock();
            let len = list.len;
            if len == REFUSED_MAX {
                return false;
            }
            list.pages[len] = (page, view.vma.attributes.backing.mapping);
            list.len += 1;
        }
        let one = PageRange::new(page, 1);
        // It is clean: the cache has its bytes.
        self.space.mmu().unmap(one);
        view.window.clear(one);
        self.poison(page, &view.window);
        true
    }

    /// What the background thread sees to: writers that have waited long enough look again, and
    /// refused pages can be accessed again where writers need not wait any more.
    pub(super) fn look_after_writers(&self) {
        let due = self.stalls.check_ns.load(Ordering::Relaxed);
        if due != 0 && monotonic_ns() >= due {
            self.stalls.check_ns.store(0, Ordering::Relaxed);
            self.answer_unclean();
        }
        if self.is_too_dirty() {
            return;
        }
        self.stalls.episode.fetch_add(1, Ordering::Relaxed);
        loop {
            let (page, mapping) = {
                let mut list = self.stalls.refused.lock();
                let Some(last) = list.len.checked_sub(1) else { return };
                list.len = last;
                list.pages[last]
            };
            // The mapping may be gone, and another be there: that one has no such mark.
            let Some(vma) = self.space.find_vma(page) else { continue };
            let window = self.windows.lock(page);
            let is_its = vma.attributes.kind == Kind::Object
                && vma.attributes.backing.mapping == mapping
                && self.space.vmas.is_current(&vma);
            if is_its && !window.is_present(page) {
                self.space.mmu().unmap(PageRange::new(page, 1));
            }
        }
    }

    /// Whether pages are marked.
    pub(super) fn has_refused(&self) -> bool {
        self.stalls.refused.lock().len > 0
    }
}
