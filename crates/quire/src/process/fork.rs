//! fork: the gate closes, the child's share is charged, the child starts an engine of its own.
//!
//! Called by the preload library, which makes the clone itself at the one moment when no code of
//! libc's or the program's runs in between: [`Process::fork_begin`], the clone, then
//! [`ForkGuard::in_parent`] and [`ForkGuard::in_child`]. The child inherits page words, tables and
//! compressed pages; before anything in it touches managed memory it has registered the arena
//! with a userfaultfd of its own. A clone made any other way inherits no arena at all.
//!
//! # The steps
//!
//! Until the child has a userfaultfd a page that is missing reads as zeros in it, silently. All runs without the
//! program's memory. The kernel too leaves it alone: the forking thread has no [rseq](crate::sys::rseq) area in
//! it meanwhile, nor has the child's, until the gate is open.
//!
//! 1. The preload library's *prepare* handler, which runs after all others, arms a trap: Syscall User Dispatch
//!    on the forking thread, with the program's signals blocked (docs/decisions/0003). libc makes its clone;
//!    SIGSYS comes instead. All that follows runs on the trap's own stack.
//! 2. The heap's gate closes: no other thread is inside malloc.
//! 3. [`Process::fork_begin`] takes the space's lock, with nothing dying. From here on other threads' faults
//!    that need memory wait, for threads that go on writing would take every page that is freed. Reads of the
//!    swap file, which may need memory, end; only then kswapd makes room for a second process like this one and
//!    charges it ahead; the engine's gate closes and empties. Where the room is too little after all it is given
//!    back before more is asked for: no fork keeps memory while it waits.
//! 4. On an engine thread: limbo is emptied (moved back, or on to swap), free frames are given back, and the
//!    charge is made exactly what the parent holds without its packed pages: the child's share. Where there is
//!    no room fork fails with ENOMEM, after as long as a starved fault waits. All slabs are sealed.
//! 5. The managed stretches of the arena and the pool, which is empty, are made inheritable (MADV_DOFORK), and
//!    the clone is made without the kernel's writes to memory that may be managed (thread ids); these are
//!    written by hand later.
//! 6. *Child*: it starts the engine's first thread, which begins with an empty descriptor table of its own, so
//!    that it needs nothing of the program's limits. That thread calls the supervisor; while the supervisor
//!    takes the call the other threads are made, and wait: where no thread can be had, fork can still say so.
//!    The child joins by a `Hello` with the parent's slot and the fork's number: the supervisor moves the charge,
//!    copies the segment map, and makes the parent's slabs common. The child opens and registers userfaultfds,
//!    takes arena and pool out of inheritance again, forgets frames, waiters and parked faults, and lets the
//!    other threads go. Where any of this fails the child is ended, with a message; it never runs on.
//! 7. *Parent*: it takes arena and pool out of inheritance, and waits until the supervisor has moved the charge
//!    and the slabs (or the child is dead, and its charge comes back). Slabs that no child shares are unsealed.
//! 8. Both: gates open, locks are released, thread ids are written, the trap goes, and libc sees its clone
//!    return.
//!
//! Each step has a name in [`steps`](crate::steps). [`crate::control::fork`] tells what happens to each side when
//! the other is killed. A child that cannot join ends and is reaped, and fork fails (`meaning_of`).

use core::sync::atomic::{AtomicBool, Ordering};

use super::threads::SpawnOthers;
use super::{Descriptors, Process, close, join};
use crate::control::{Child, Hello, Obituary};
use crate::space::Layout;
use crate::steps::{self, Step, reach};
use crate::sys::Errno;
use crate::sys::rseq::RseqUnregistered;
use crate::sys::thread::{self, SignalsBlocked};

/// How often a fork asks for room again that other processes have taken.
const TRIES_MAX: u32 = 100;

/// How long a parent waits before it looks whether the child still lives, in milliseconds.
const CHILD_POLL_MS: u64 = 20;
/// Looks after which a supervisor that is moving a dead child's charge has died as well: 5 s.
const TAKEN_LOOKS_MAX: u32 = 250;

/// A fork in progress: the gate is closed, the space locked, the child's share charged.
pub struct ForkGuard {
    process: &'static Process,
    layout: Layout<'static>,
    /// Pages that are charged for the child.
    charged: usize,
    number: u32,
    rseq: Option<RseqUnregistered>,
    signals: SignalsBlocked,
}

impl Process {
    /// Closes the gate and prepares this process to be cloned.
    ///
    /// # Errors
    /// `NOMEM` where the budget cannot hold both processes; nothing has changed then.
    pub fn fork_begin(&'static self) -> Result<ForkGuard, Errno> {
        let signals = SignalsBlocked::new();
        let rseq = self.rseq.unregister_in(&self.arena());
        let (layout, charged) = self.charge_fork()?;
        reach(Step::Charged);
        let number = self.space.budget().member().fork.begin();
        for stretch in self.space.managed_stretches(&layout) {
            let _ = self.space.mmu().set_inherited(stretch, true);
        }
        // The pool is empty now: the child gets its addresses, and nothing else.
        let _ = self.space.mmu().set_pool_inherited(true);
        reach(Step::Inheritable);
        Ok(ForkGuard { process: self, layout, charged, number, rseq, signals })
    }

    /// Takes the space's lock, closes the gate, and charges the child's share. Another process may
    /// take the room first that was made, so it is tried again.
    fn charge_fork(&'static self) -> Result<(Layout<'static>, usize), Errno> {
        // The child has no thread that would finish an unmap.
        let mut layout = self.space.lock_over(&[self.space.arena()]);
        reach(Step::Locked);
        let mut charged = Err(Errno::NOMEM);
        self.space.begin_fork_demand(&layout);
        for _ in 0..TRIES_MAX {
            self.space.swap().wait_for_reads();
            if !self.space.wait_for_fork_room(&layout) {
                break;
            }
            reach(Step::RoomMade);
            self.gate.close();
            reach(Step::GateClosed);
            // A reader may need the background thread, which is stopped with all the others.
            if !self.space.swap().is_reading() {
                charged = self.space.proxy_calls.send(|| {
                    self.space.mmu().open_pagemap();
                    self.space.prepare_fork(&mut layout)
                });
                if charged.is_ok() {
                    break;
                }
            }
            self.gate.open();
            self.space.return_fork_room(&layout);
        }
        self.space.end_fork_demand(&layout);
        charged.map(|charged| (layout, charged))
    }

    /// Says once why forks fail, where there is no supervisor that says it.
    fn say_why_forks_fail(&self, errno: Errno) {
        static IS_SAID: AtomicBool = AtomicBool::new(false);
        if meaning_of(errno) == Errno::PERM
            && let Some(why) = self.name.why_not(errno)
            // Relaxed: of two that come at once either may say it.
            && !IS_SAID.swap(true, Ordering::Relaxed)
        {
            let pid = thread::process_id();
            super::say(format_args!("quire: process {pid} cannot fork: {why}"));
        }
    }
}

impl ForkGuard {
    fn close_to_inheritance(&self) {
        let space = &self.process.space;
        for stretch in space.managed_stretches(&self.layout) {
            let _ = space.mmu().set_inherited(stretch, false);
        }
        let _ = space.mmu().set_pool_inherited(false);
    }

    /// In the parent, after the clone (or its failure, a negative errno): waits until the child
    /// has taken its charge over, and goes on. Returns what fork is to return: an error where the
    /// child could not be managed and has ended.
    #[must_use]
    pub fn in_parent(self, result: isize) -> isize {
        steps::note_child(result);
        reach(Step::Cloned);
        self.close_to_inheritance();
        reach(Step::Closed);
        let fork = &self.process.space.budget().member().fork;
        let end = if result > 0 { self.wait_for_child(result) } else { End::Ended };
        reach(Step::ChildKnown);
        if end != End::Joined {
            self.process.space.budget().uncharge(self.charged);
            fork.end(self.number);
        }
        self.process.space.swap().zpool.after_fork_in_parent();
        self.process.gate.open();
        reach(Step::GateOpened);
        drop(self.layout);
        drop(self.rseq);
        drop(self.signals);
        match end {
            End::Refused(errno) => {
                reap(result);
                self.process.say_why_forks_fail(errno);
                -(meaning_of(errno).raw_os_error() as isize)
            }
            End::Joined | End::Ended => result,
        }
    }

    fn wait_for_child(&self, pid: isize) -> End {
        let fork = &self.process.space.budget().member().fork;
        let mut lives = true;
        let mut looks = 0;
        loop {
            let child = fork.child();
            match child {
                Child::Joined => return End::Joined,
                Child::Refused(errno) => {
                    return End::Refused(Errno::from_raw_os_error(errno.cast_signed()));
                }
                // Only this thread ends a fork.
                Child::None => return End::Ended,
                Child::UnderWay if !lives && fork.give_up(self.number) => return End::Ended,
                // No process is left that would move the charge, or give back what has been moved.
                Child::Taken if looks > TAKEN_LOOKS_MAX => return End::Joined,
                Child::UnderWay | Child::Taken => {
                    fork.wait(self.number, child, CHILD_POLL_MS);
                    lives = is_alive(pid);
                    looks = if lives { 0 } else { looks + 1 };
                }
            }
        }
    }

    /// In the child, before it touches anything managed: starts an engine of its own.
    ///
    /// # Errors
    /// Where it failed the child must not run, for it would read zeros.
    pub fn in_child(mut self) -> Result<(), Errno> {
        reach(Step::Born);
        let result = self.start_child();
        if let Err(errno) = result {
            let parent = self.process.space.budget();
            let errno = errno.raw_os_error().unsigned_abs();
            let detail = u64::from(errno) << 32 | u64::from(thread::process_id());
            parent.leave_obituary(Obituary::ChildNotManaged, detail);
            // The parent need not wait any longer. Where the child had joined already, the supervisor
            // gives back its charge.
            parent.member().fork.refuse(self.number, errno);
        }
        drop(self.layout);
        // Its faults are served now.
        drop(self.rseq);
        drop(self.signals);
        result
    }

    fn start_child(&mut self) -> Result<(), Errno> {
        let process = self.process;
        let mut result = Err(Errno::AGAIN);
        process.threads.start_by(&mut |spawn_others| {
            result = self.open_child(spawn_others);
            result
        })
    }

    /// Joins the run and registers the arena; on the engine's first thread, whose descriptor table is
    /// empty.
    fn open_child(&self, spawn_others: SpawnOthers<'_>) -> Result<(), Errno> {
        let process = self.process;
        // The supervisor takes the call while the other threads are made.
        let connection = process.name.connect()?;
        spawn_others()?;
        let space = &process.space;
        let budget = space.budget();
        let parent = budget.member();
        let managed = parent.managed_pages.load(Ordering::Relaxed);
        let hello = Hello {
            fork: self.number,
            parent_slot: budget.slot(),
            held_pages: self.charged as u64,
            wanted_pages: parent.wanted_pages.load(Ordering::Relaxed),
            ..Hello::OF_PROGRAM
        };
        reach(Step::FirstThread);
        let joined = join::join(connection, &hello)?;
        reach(Step::Welcomed);
        let slot = joined.slot;
        // The limit on descriptors may be a handful, so none is kept without need: the control page
        // is mapped already.
        let mut descriptors = Descriptors::take(joined);
        descriptors.control.take().into_iter().for_each(close);
        space.mmu().attach(descriptors.device, descriptors.memory)?;
        descriptors.device.take().into_iter().for_each(close);
        space.mmu().open_pagemap_in_child();
        reach(Step::Attached);
        let has_foreign = !space.managed_stretches(&self.layout).eq([space.arena()]);
        space.mmu().begin_modes_in_child(has_foreign);
        for stretch in space.managed_stretches(&self.layout) {
            space.mmu().register_rest(stretch)?;
        }
        reach(Step::Registered);
        self.close_to_inheritance();
        reach(Step::Disinherited);
        space.after_fork_in_child(&self.layout, slot);
        budget.add_managed(managed as isize);
        process.connection.store(descriptors.connection, Ordering::Relaxed);
        let swap_file = descriptors.swap_file.unwrap_or(-1);
        process.swap_file.store(swap_file, Ordering::Relaxed);
        // SAFETY: the descriptor stays open in the engine threads' table.
        unsafe { space.swap().set_descriptor(descriptors.swap_file) };
        process.gate.reset();
        process.call_stack.after_fork_in_child();
        reach(Step::Ready);
        Ok(())
    }
}

/// How a fork ended, for the parent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The child has taken its charge over.
    Joined,
    /// The child died before it could join, or was never made.
    Ended,
    /// The child cannot be managed, for this reason, and ends.
    Refused(Errno),
}

/// fork's errno for a child that could not join for the reason `errno`.
fn meaning_of(errno: Errno) -> Errno {
    match errno {
        // The supervisor cannot be reached from a network namespace of the child's own: fork fails as
        // where namespaces are not allowed. Or there is none any more: no later try will find one.
        Errno::CONNREFUSED | Errno::CONNRESET => Errno::PERM,
        _ => Errno::AGAIN,
    }
}

/// `__WALL`: waits for children that end with another signal than SIGCHLD as well.
const WALL: u32 = 0x4000_0000;

/// Waits for the end of a child of which the program must not learn.
fn reap(pid: isize) {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let options = WaitIdOptions::EXITED | WaitIdOptions::from_bits_retain(WALL);
    let Some(pid) = Pid::from_raw(pid as i32) else { return };
    while waitid(WaitId::Pid(pid), options).is_err_and(|errno| errno == Errno::INTR) {}
}

/// Whether a child of the clone still lives.
fn is_alive(pid: isize) -> bool {
    use rustix::process::{Pid, WaitId, WaitIdOptions, test_kill_process, waitid};
    let Some(pid) = Pid::from_raw(pid as i32) else { return false };
    let options = WaitIdOptions::EXITED
        | WaitIdOptions::NOHANG
        | WaitIdOptions::NOWAIT
        | WaitIdOptions::from_bits_retain(WALL);
    match waitid(WaitId::Pid(pid), options) {
        Ok(ended) => ended.is_none(),
        // It is the child of this process's parent (CLONE_PARENT), which learns of its end; or it has
        // ended, and the program ignores ends of children.
        Err(_) => test_kill_process(pid) != Err(Errno::SRCH) && !has_ended(pid),
    }
}

/// Whether the process has ended, though it was not waited for. Where no descriptor can be had for the
/// look it counts as alive.
fn has_ended(pid: rustix::process::Pid) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Ok(pidfd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else {
        return false;
    };
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}
