//! The members' accounts: a process that joins gets a slot, one that leaves gives back what it held.
//!
//! Owns the slots of the control page and what is left of members that have left: their counters
//! ([`quire::control::Tally`]), maxima, obituaries. Leaves sockets and processes to `supervisor`. Members change
//! their own slots while they live; the supervisor changes a slot before its member is welcomed and after its
//! connection has closed, and at a fork's join the parent's slot, while the parent waits in fork.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use quire::control::{
    Control, Event, Hello, JoinRefusal, MEMBERS_MAX, Member, NO_PARENT, Obituary, RESERVATION,
    numbers_of,
};

// Every access in this module is Relaxed: the control page's words are counters, each true by
// itself. What orders one process's updates before another's is the socket: a member's last update
// happens before its connection closes, the supervisor's before it sends Welcome.

/// The message of a member that could not go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Death {
    pub pid: u32,
    pub obituary: Obituary,
    /// A number that goes with it.
    pub detail: u64,
    pub held_pages: u64,
}

/// Why a process gets no slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Refused {
    pub refusal: JoinRefusal,
    /// A number that goes with it: see [`JoinRefusal`].
    pub detail: u64,
}

impl Refused {
    /// A refusal that needs no number.
    pub(super) fn plainly(refusal: JoinRefusal) -> Refused {
        Refused { refusal, detail: 0 }
    }

    /// Whether there is a place once a member has left.
    pub(super) fn lacks_a_place(self) -> bool {
        matches!(self.refusal, JoinRefusal::Full | JoinRefusal::NoRoom)
    }
}

/// A member's account as it was when it left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Left {
    /// Why it could not go on, where it left word.
    pub death: Option<Death>,
    pub sizes: Sizes,
}

/// What a member needed and did, as the exit log keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Sizes {
    pub held_pages_max: u64,
    pub wanted_pages_max: u64,
    pub managed_pages_max: u64,
    pub pgfault: u64,
    pub pgmajfault: u64,
    pub pswpin: u64,
    pub pswpout: u64,
}

impl Sizes {
    pub(crate) fn of(member: &Member) -> Sizes {
        let of = |word: &AtomicU64| word.load(Relaxed);
        Sizes {
            held_pages_max: of(&member.held_pages_max),
            wanted_pages_max: of(&member.wanted_pages_max),
            managed_pages_max: of(&member.managed_pages_max),
            pgfault: member.counted(Event::Pgfault),
            pgmajfault: member.counted(Event::Pgmajfault),
            pswpin: member.counted(Event::Pswpin),
            pswpout: member.counted(Event::Pswpout),
        }
    }
}

/// The slots, and sums over the members that have left.
pub(super) struct Members {
    taken: [bool; MEMBERS_MAX],
    /// Where the search for a free slot starts: slots are used in turn, so that a number is not
    /// used again soon after its member left.
    next_slot: usize,
    pub(super) count: usize,
    pub(super) most: usize,
    pub(super) joined: u64,
    /// Most address space that one member managed.
    managed_pages_max: u64,
}

impl Members {
    pub(super) fn new(most: usize) -> Members {
        Members {
            taken: [false; MEMBERS_MAX],
            next_slot: 0,
            count: 0,
            most: most.min(MEMBERS_MAX),
            joined: 0,
            managed_pages_max: 0,
        }
    }

    /// Whether `slot` belongs to a member, and to which process.
    pub(super) fn pid_of(&self, control: &Control, slot: u32) -> Option<u32> {
        let slot = slot as usize;
        (*self.taken.get(slot)?).then(|| control.members[slot].pid.load(Relaxed))
    }

    /// Gives process `pid` a slot. A fork's child takes over what its parent was charged for it,
    /// and a share in every swap segment that the parent has data in. The parent waits until that
    /// fork's word is settled, which is left to the caller.
    pub(super) fn join(
        &mut self,
        control: &Control,
        hello: &Hello,
        pid: u32,
    ) -> Result<u32, Refused> {
        if hello.parent_slot == RESERVATION {
            return self.reserve(control, hello.held_pages, pid);
        }
        let parent = match hello.parent_slot {
            NO_PARENT => None,
            slot if self.is_member(control, slot) => Some(slot as usize),
            _ => return Err(Refused::plainly(JoinRefusal::NoParent)),
        };
        if self.count >= self.most {
            return Err(self.full());
        }
        let slot = self.free_slot()?;
        // Its parent may have given it up for dead.
        if parent.is_some_and(|parent| !control.members[parent].fork.take(hello.fork)) {
            return Err(Refused::plainly(JoinRefusal::NoParent));
        }
        control.take_slot(slot, pid);
        if let Some(parent) = parent {
            inherit(control, parent, slot, hello);
        }
        control.tally.note_joined(slot);
        self.take(slot);
        self.count += 1;
        self.joined += 1;
        Ok(slot as u32)
    }

    /// Keeps `pages` of the budget for the run of supervisor `pid`, inside this one.
    fn reserve(&mut self, control: &Control, pages: u64, pid: u32) -> Result<u32, Refused> {
        let slot = self.free_slot()?;
        let budget = control.managed_limit() as u64;
        // As much as a fault leaves alone: present members must be able to reclaim.
        let limit = budget.saturating_sub((budget / 64).clamp(32, 1024));
        // Charged first, and looked at then, as every member does.
        control.reserve_slot(slot, pid, pages);
        let granted = control.granted() as u64;
        if granted > limit {
            control.free_slot(slot);
            let room = limit.saturating_sub(granted - pages);
            return Err(Refused { refusal: JoinRefusal::NoRoom, detail: room });
        }
        control.held_pages_max.fetch_max(granted, Relaxed);
        control.tally.note_slot(slot);
        self.take(slot);
        Ok(slot as u32)
    }

    fn is_member(&self, control: &Control, slot: u32) -> bool {
        self.pid_of(control, slot).is_some() && !control.members[slot as usize].is_a_reservation()
    }

    fn full(&self) -> Refused {
        Refused { refusal: JoinRefusal::Full, detail: self.most as u64 }
    }

    fn free_slot(&self) -> Result<usize, Refused> {
        let mut slots = (self.next_slot..MEMBERS_MAX).chain(0..self.next_slot);
        slots.find(|&slot| !self.taken[slot]).ok_or_else(|| self.full())
    }

    fn take(&mut self, slot: usize) {
        self.taken[slot] = true;
        self.next_slot = (slot + 1) % MEMBERS_MAX;
    }

    /// Takes the slot back from a member whose connection has closed, with all it held.
    pub(super) fn leave(&mut self, control: &Control, slot: u32) -> Option<Left> {
        let slot = slot as usize;
        if !std::mem::replace(&mut self.taken[slot], false) {
            return None;
        }
        let member = &control.members[slot];
        let held_pages = u64::from(control.seats[slot].account.get().held);
        if member.is_a_reservation() {
            control.free_slot(slot);
            control.wake_askers();
            return None;
        }
        self.count -= 1;
        control.note_wanted();
        release_segments(control, slot);
        let sizes = Sizes::of(member);
        self.managed_pages_max = self.managed_pages_max.max(sizes.managed_pages_max);
        let death = Death {
            pid: member.pid.load(Relaxed),
            obituary: obituary(member.obituary.load(Relaxed)),
            detail: member.obituary_detail.load(Relaxed),
            held_pages,
        };
        control.tally.take_in(slot, member, || control.free_slot(slot));
        if self.count == 0 {
            forget_segments(control);
        }
        // What it held is free.
        control.wake_askers();
        Some(Left { death: (death.obituary != Obituary::None).then_some(death), sizes })
    }

    pub(super) fn managed_pages_max(&self, control: &Control) -> u64 {
        let present = self.present(control).map(|member| member.managed_pages_max.load(Relaxed));
        present.max().unwrap_or(0).max(self.managed_pages_max)
    }

    /// Pages of the compressed pool now: those of each member, and what is common once.
    pub(super) fn pool_pages(&self, control: &Control) -> u64 {
        let own = self.present(control).map(|member| member.pool_pages.load(Relaxed));
        own.sum::<u64>() + control.common_pages.load(Relaxed)
    }

    pub(super) fn present<'a>(&'a self, control: &'a Control) -> impl Iterator<Item = &'a Member> {
        let members = control.members.iter().zip(&self.taken);
        members.filter_map(|(member, &is_taken)| is_taken.then_some(member))
    }
}

/// Moves what the child holds from the parent's account, which was charged for it ahead; counts the
/// data twice that both want now; and counts the child into the parent's segments.
fn inherit(control: &Control, parent: usize, child: usize, hello: &Hello) {
    let to = &control.members[child];
    let [seat_from, seat_to] = [&control.seats[parent], &control.seats[child]];
    let charged = (hello.held_pages as usize).min(seat_from.account.get().held as usize);
    // The child's first: pages that are on both accounts for a moment cannot be charged by others.
    seat_to.account.put_in(charged);
    seat_from.account.take_out(charged);
    to.held_pages_max.store(charged as u64, Relaxed);
    to.wanted_pages.store(hello.wanted_pages, Relaxed);
    to.wanted_pages_max.store(hello.wanted_pages, Relaxed);
    control.note_wanted();
    for word in 0..segment_words(control) {
        let bits = control.segment_maps[parent][word].load(Relaxed);
        for segment in numbers_of(word, bits) {
            control.segment_refs[segment].fetch_add(1, Relaxed);
        }
        // A word left alone keeps the memfd sparse.
        if bits != 0 {
            control.segment_maps[child][word].store(bits, Relaxed);
        }
    }
}

/// Drops the references of a member that has left; its bitmap is zero afterwards.
fn release_segments(control: &Control, slot: usize) {
    for word in 0..segment_words(control) {
        let map = &control.segment_maps[slot][word];
        if map.load(Relaxed) == 0 {
            continue;
        }
        // A swap, as a thread of the dying process may clear a bit at this moment: the side
        // that finds the bit set drops the reference.
        for segment in numbers_of(word, map.swap(0, Relaxed)) {
            if control.segment_refs[segment].fetch_sub(1, Relaxed) == 1 {
                control.segments_used.fetch_sub(1, Relaxed);
            }
        }
    }
}

/// Frees all segments; called when no member is left. Members that were killed may have left some
/// half taken: to take or free one changes a reference, a bit and a count, one after the other.
fn forget_segments(control: &Control) {
    if control.segments_used.swap(0, Relaxed) == 0 {
        // The references stay untouched, and the memfd sparse.
        return;
    }
    let segments = control.segments_max.load(Relaxed) as usize;
    for refs in &control.segment_refs[..segments] {
        if refs.load(Relaxed) != 0 {
            refs.store(0, Relaxed);
        }
    }
}

fn segment_words(control: &Control) -> usize {
    (control.segments_max.load(Relaxed) as usize).div_ceil(64)
}

fn obituary(number: u32) -> Obituary {
    use Obituary::{ChildNotManaged, KernelRefused, OutOfMemory, PoolCorrupt, SwapReadFailed};
    let all = [OutOfMemory, ChildNotManaged, KernelRefused, SwapReadFailed, PoolCorrupt];
    all.into_iter().find(|&obituary| obituary as u32 == number).unwrap_or(Obituary::None)
}

#[cfg(test)]
#[path = "members_tests.rs"]
mod tests;
