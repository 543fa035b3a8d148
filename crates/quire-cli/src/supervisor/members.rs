//! The members' accounts: who joins gets a slot, who leaves gives back what it held.
//!
//! Owns the slots of the control page and what is left of members that have left: their counters
//! ([`quire::control::Tally`]), maxima, obituaries. Leaves sockets and processes to `supervisor`. Members change their own slots while
//! they live; the supervisor changes a slot before its member is welcomed and after its connection
//! has closed, and at a fork's join the parent's slot, while the parent waits in fork.

use std::sync::atomic::Ordering::Relaxed;

use quire::control::{Control, Event, Hello, MEMBERS_MAX, Member, Obituary};

// Every access in this module is Relaxed: the control page's words are counters, each true by
// itself. What orders one process's updates before another's is the socket: a member's last update
// happens before its connection closes, the supervisor's before it sends Welcome.

/// What a member left behind that could not go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Death {
    /// Process id.
    pub pid: u32,
    /// Why.
    pub obituary: Obituary,
    /// A number that goes with it.
    pub detail: u64,
}

/// Why a process gets no slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// All slots are taken.
    Full,
    /// A fork's child whose parent is not a member any more: what it inherits is given back.
    NoParent,
}

/// Slots and what became of those who had one.
pub struct Members {
    /// Whether each slot is taken.
    taken: [bool; MEMBERS_MAX],
    /// Where the search for a free slot starts: slots are used in turn, so that a number is not
    /// used again soon after its member left.
    next_slot: usize,
    /// Members now.
    count: usize,
    /// Members ever.
    joined: u64,
    /// Most address space that one member managed.
    managed_pages_max: u64,
}

impl Members {
    /// No members.
    pub fn new() -> Members {
        Members {
            taken: [false; MEMBERS_MAX],
            next_slot: 0,
            count: 0,
            joined: 0,
            managed_pages_max: 0,
        }
    }

    /// Members now.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Members ever.
    pub fn joined(&self) -> u64 {
        self.joined
    }

    /// Whether `slot` belongs to a member, and to which process.
    pub fn pid_of(&self, control: &Control, slot: u32) -> Option<u32> {
        let slot = slot as usize;
        (*self.taken.get(slot)?).then(|| control.members[slot].pid.load(Relaxed))
    }

    /// Gives process `pid` a slot. A fork's child takes over what its parent was charged for it,
    /// and a share in every swap segment that the parent has data in.
    pub fn join(&mut self, control: &Control, hello: &Hello, pid: u32) -> Result<u32, Refused> {
        let parent = match hello.parent_slot {
            u32::MAX => None,
            slot if self.pid_of(control, slot).is_some() => Some(slot as usize),
            _ => return Err(Refused::NoParent),
        };
        let slot = (self.next_slot..MEMBERS_MAX)
            .chain(0..self.next_slot)
            .find(|&slot| !self.taken[slot])
            .ok_or(Refused::Full)?;
        control.take_slot(slot, pid);
        if let Some(parent) = parent {
            inherit(control, parent, slot, hello);
        }
        control.tally.note_joined(slot);
        self.taken[slot] = true;
        self.next_slot = (slot + 1) % MEMBERS_MAX;
        self.count += 1;
        self.joined += 1;
        Ok(slot as u32)
    }

    /// Takes the slot back from a member whose connection has closed, with all it held.
    pub fn leave(&mut self, control: &Control, slot: u32) -> Option<Death> {
        let slot = slot as usize;
        if !std::mem::replace(&mut self.taken[slot], false) {
            return None;
        }
        self.count -= 1;
        let member = &control.members[slot];
        subtract(&control.held_pages, member.held_pages.load(Relaxed));
        subtract(&control.wanted_pages, member.wanted_pages.load(Relaxed));
        release_segments(control, slot);
        let hungry = control.hungry.load(Relaxed);
        if hungry as u32 == slot as u32 + 1 {
            let _ = control.hungry.compare_exchange(hungry, 0, Relaxed, Relaxed);
        }
        let managed = member.managed_pages_max.load(Relaxed);
        self.managed_pages_max = self.managed_pages_max.max(managed);
        let death = Death {
            pid: member.pid.load(Relaxed),
            obituary: obituary(member.obituary.load(Relaxed)),
            detail: member.obituary_detail.load(Relaxed),
        };
        control.tally.take_in(member, |_| control.free_slot(slot));
        if self.count == 0 {
            // Whatever is still on the account was lost by a process killed between two words.
            control.held_pages.store(0, Relaxed);
            control.wanted_pages.store(0, Relaxed);
            forget_segments(control);
        }
        (death.obituary != Obituary::None).then_some(death)
    }

    /// A counter over all members, present and past.
    pub fn event(&self, control: &Control, event: Event) -> u64 {
        self.present(control).map(|member| member.counted(event)).sum::<u64>()
            + control.tally.counted(event)
    }

    /// Most address space that one member managed, in pages.
    pub fn managed_pages_max(&self, control: &Control) -> u64 {
        let present = self.present(control).map(|member| member.managed_pages_max.load(Relaxed));
        present.max().unwrap_or(0).max(self.managed_pages_max)
    }

    /// Pages of all compressed pools now.
    pub fn pool_pages(&self, control: &Control) -> u64 {
        self.present(control).map(|member| member.pool_pages.load(Relaxed)).sum()
    }

    fn present<'a>(&'a self, control: &'a Control) -> impl Iterator<Item = &'a Member> {
        let members = control.members.iter().zip(&self.taken);
        members.filter_map(|(member, &is_taken)| is_taken.then_some(member))
    }
}

/// Moves what the child holds from the parent's slot, which was charged for it ahead (the tree's
/// account stays as it is); counts the data twice that both want now; and counts the child into
/// the parent's segments.
fn inherit(control: &Control, parent: usize, child: usize, hello: &Hello) {
    let [from, to] = [&control.members[parent], &control.members[child]];
    to.held_pages.store(subtract(&from.held_pages, hello.held_pages), Relaxed);
    to.wanted_pages.store(hello.wanted_pages, Relaxed);
    to.wanted_pages_max.store(hello.wanted_pages, Relaxed);
    let before = control.wanted_pages.fetch_add(hello.wanted_pages, Relaxed);
    control.wanted_pages_max.fetch_max(before + hello.wanted_pages, Relaxed);
    for word in 0..segment_words(control) {
        let bits = control.segment_maps[parent][word].load(Relaxed);
        for segment in segments_of(word, bits) {
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
        // A swap, as a thread of the dying process may clear a bit at this moment: whoever finds
        // the bit set drops the reference.
        for segment in segments_of(word, map.swap(0, Relaxed)) {
            if control.segment_refs[segment].fetch_sub(1, Relaxed) == 1 {
                control.segments_used.fetch_sub(1, Relaxed);
            }
        }
    }
}

/// Frees the segments that nobody's map has: whoever takes or leaves one changes a reference, a bit
/// and a count, one after the other. For when no member is left.
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

/// The segments whose bits are set in the bitmap's word.
fn segments_of(word: usize, bits: u64) -> impl Iterator<Item = usize> {
    (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| word * 64 + bit)
}

/// Subtracts as much of `count` as is there; returns how much that was. An account that a killed
/// process left a little wrong must not wrap around.
fn subtract(account: &std::sync::atomic::AtomicU64, count: u64) -> u64 {
    let before = account.fetch_update(Relaxed, Relaxed, |now| Some(now.saturating_sub(count)));
    before.unwrap_or_default().min(count)
}

fn obituary(number: u32) -> Obituary {
    let all = [
        Obituary::OutOfMemory,
        Obituary::ChildNotManaged,
        Obituary::KernelRefused,
        Obituary::SwapReadFailed,
    ];
    all.into_iter().find(|&obituary| obituary as u32 == number).unwrap_or(Obituary::None)
}

#[cfg(test)]
#[path = "members_tests.rs"]
mod tests;
