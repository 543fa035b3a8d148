//! What can be watched of the way of a fault: tracepoints, and how long faults take.
//!
//! A tracepoint is three things at once: a counter, a record in the member's ring, which tools read
//! in the control page while the program runs, and a probe for tracers of others. Nothing here
//! waits or takes a lock.

use super::Outcome;
use crate::control::{FaultKind, Trace, Tracepoint};
use crate::mmu::{Access, Mmu};
use crate::page::State;
use crate::space::VmSpace;
use crate::sys::clock::Moment;
use crate::sys::thread::ThreadId;
use crate::sys::{monotonic_ns, probe};
use crate::units::{PageNum, PageRange};

impl<M: Mmu> VmSpace<M> {
    /// Tells what happened to the fault of a thread on `page`: counts it, leaves a trace in the
    /// member's ring, and passes the tracepoint's probe. `vma` is empty where there is none;
    /// `thread` is the one that faulted.
    #[cold]
    pub fn trace(&self, tracepoint: Tracepoint, page: PageNum, vma: PageRange, thread: ThreadId) {
        let member = self.budget.member();
        member.count(tracepoint.event(), 1);
        let [vma_start, vma_end] = if vma.is_empty() {
            [0; 2]
        } else {
            [vma.start, vma.end].map(|page| self.mmu.address_of(page) as u64)
        };
        let trace = Trace {
            time_ns: monotonic_ns(),
            tracepoint,
            thread: thread.0,
            address: self.mmu.address_of(page) as u64,
            vma_start,
            vma_end,
        };
        self.budget.control().traces[self.budget.slot() as usize].push(&trace);
        probe::fire(&trace);
    }

    /// What a fault on a page of no object will have to do, as its word says it now: another fault
    /// may come first, and then this one is spurious.
    #[inline]
    #[must_use]
    pub fn kind_of_fault(&self, page: PageNum, access: Access) -> FaultKind {
        match self.snapshot(page).state() {
            State::Limbo => FaultKind::Limbo,
            State::Same | State::Pool => FaultKind::Memory,
            State::File => FaultKind::File,
            State::Mapped if access == Access::WriteProtected => FaultKind::Protected,
            State::Mapped | State::Cached => FaultKind::Spurious,
            State::None | State::Poisoned => FaultKind::Fresh,
        }
    }

    /// Notes how long a fault of a kind took that came at `since`, where it is served now. Where it
    /// waits it comes again, or the thread that ends its wait notes the time; where nothing can be
    /// served there is no time to note.
    #[inline]
    pub fn note_fault(&self, kind: FaultKind, outcome: Outcome, since: Moment) {
        let kind = match outcome {
            Outcome::Served => kind,
            Outcome::Spurious => FaultKind::Spurious,
            Outcome::Parked | Outcome::NoVma | Outcome::Poisoned | Outcome::Unfilled => return,
        };
        self.note_time(kind, since.elapsed_ns());
    }

    /// Notes how long a fault of a kind took that is served now.
    #[inline]
    pub(super) fn note_time(&self, kind: FaultKind, ns: u64) {
        self.budget.count_fault_time(kind, ns);
        self.border.note_time(kind, ns);
    }
}
