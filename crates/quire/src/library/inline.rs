//! Inline delivery: the thread that faults serves itself, in a handler of SIGBUS.
//!
//! Owns the process's SIGBUS once an address space asks for it, and the list of those address
//! spaces. What is not theirs goes on to the handler that was there before.
//!
//! The handler runs with all signals blocked and allocates nothing; the locks that it takes are
//! held elsewhere only by threads that have the program's signals blocked, so it never waits for
//! the very thread that it interrupts. A few pages it reads itself, where the store can do that in a
//! signal handler; for more it waits. A fault on an object needs nothing but the stack; one on a
//! private copy, which is anonymous memory, borrows [`buffers`] and a stack.
//!
//! In a fork's child all this is its parent's, and forgotten when it makes an address space of its
//! own.

mod buffers;

use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Once, OnceLock};

pub(super) use self::buffers::READS_MAX;
use super::Error;
use crate::fault::{Access, Outcome};
use crate::mmu::userfaultfd::Userfaultfd;
use crate::object::Objects;
use crate::sys::Errno;
use crate::sys::clock::Moment;
use crate::sys::thread::process_id;
use crate::units::PageNum;

type Space = Objects<Userfaultfd>;

/// Most address spaces of a process that are served so.
const SPACES_MAX: usize = 64;

static SPACES: [AtomicPtr<Space>; SPACES_MAX] = [const { AtomicPtr::new(null_mut()) }; SPACES_MAX];

/// Whose the list is: the process's number, twice, and one more once its parent's entries are gone.
static OWNER: AtomicU64 = AtomicU64::new(0);

/// What was done about SIGBUS before; empty until it is taken over.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Has faults of a space served by the threads that take them.
pub(super) fn add(space: &'static Space) -> Result<(), Error> {
    let failed = |errno| Error::NoMemory { doing: "take over SIGBUS", errno };
    forget_parents();
    buffers::prepare().map_err(failed)?;
    take_over().map_err(failed)?;
    let place = core::ptr::from_ref(space).cast_mut();
    let is_free = |slot: &&AtomicPtr<Space>| {
        // Release publishes the space.
        slot.compare_exchange(null_mut(), place, Ordering::Release, Ordering::Relaxed).is_ok()
    };
    SPACES.iter().find(is_free).map(drop).ok_or_else(|| failed(Errno::NFILE))
}

/// Drops what a fork has left here of the parent's: its spaces, whose addresses may be somebody
/// else's by now.
fn forget_parents() {
    let mine = u64::from(process_id()) << 1;
    loop {
        // Acquire pairs with the release below.
        let seen = OWNER.load(Ordering::Acquire);
        if seen == mine | 1 {
            return;
        }
        if seen == mine {
            // Another thread is at it.
            std::thread::yield_now();
            continue;
        }
        // Relaxed: nothing was done yet.
        if OWNER.compare_exchange(seen, mine, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // Relaxed: published below.
            SPACES.iter().for_each(|slot| slot.store(null_mut(), Ordering::Relaxed));
            buffers::forget_parents();
            OWNER.store(mine | 1, Ordering::Release);
            return;
        }
    }
}

/// Forgets a space, none of whose mappings is left.
pub(super) fn remove(space: &Space) {
    let place = core::ptr::from_ref(space).cast_mut();
    for slot in &SPACES {
        let _ = slot.compare_exchange(place, null_mut(), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Installs the handler, once for the process's life.
fn take_over() -> Result<(), Errno> {
    static ONCE: Once = Once::new();
    let mut is_done = true;
    ONCE.call_once(|| {
        // SAFETY: an all-zero sigaction is valid, and the handler does what one may.
        is_done = unsafe {
            let mut before: libc::sigaction = core::mem::zeroed();
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            // On the stack of the thread that faults: alternate ones are 8 KiB, as a rule, of which
            // the kernel takes half for registers.
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigfillset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, core::ptr::null(), &raw mut before) == 0
                && BEFORE.set(before).is_ok()
                && libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) == 0
        };
    });
    if is_done && BEFORE.get().is_some() { Ok(()) } else { Err(Errno::INVAL) }
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel's own arguments.
    let (address, code, error) = unsafe {
        let context = &*context.cast::<libc::ucontext_t>();
        let error = context.uc_mcontext.gregs[libc::REG_ERR as usize];
        ((*info).si_addr().addr(), (*info).si_code, error)
    };
    // What another process sends has no address.
    let is_fault = code > 0;
    if !(is_fault && serve(address, access_of(error))) {
        // SAFETY: as above.
        unsafe { go_on(signal, info, context) };
    }
}

/// What the processor says of an access.
const fn access_of(error: i64) -> Access {
    const WAS_PRESENT: i64 = 1;
    const IS_WRITE: i64 = 2;
    match (error & IS_WRITE != 0, error & WAS_PRESENT != 0) {
        (false, _) => Access::Read,
        (true, false) => Access::Write,
        (true, true) => Access::WriteProtected,
    }
}

/// Serves a fault; `false` where it is nobody's, or an error. Where it has to wait it does, and the
/// access is tried again.
fn serve(address: usize, access: Access) -> bool {
    for slot in &SPACES {
        // Acquire pairs with the release in `add`.
        let space = slot.load(Ordering::Acquire);
        // SAFETY: a space goes only when no mapping of it is left, and then nobody faults there.
        let Some(space) = (unsafe { space.as_ref() }) else { continue };
        let mmu = space.space.mmu();
        if !mmu.holds(address) {
            continue;
        }
        let page = mmu.page(address);
        let since = Moment::now();
        // Before the look: an answer that comes in between is not missed.
        let seen = mmu.answers(page);
        let outcome = match space.object_fault(page, access, since, None) {
            Some(outcome) => Some(outcome),
            None => private_fault(space, page, access, since),
        };
        match outcome {
            Some(Outcome::Served | Outcome::Spurious) => return true,
            Some(Outcome::Parked) => {
                mmu.wait_for_answer(page, seen);
                return true;
            }
            Some(Outcome::NoVma | Outcome::Poisoned | Outcome::Unfilled) => return false,
            // While its VMA is being changed a lookup may find none: then it is tried again.
            None => return space.is_mapping_at(page),
        }
    }
    false
}

/// Serves a fault on a private copy. The buffers are given back before anybody waits.
fn private_fault(space: &Space, page: PageNum, access: Access, since: Moment) -> Option<Outcome> {
    let kind = space.space.kind_of_fault(page, access);
    let outcome = buffers::borrow().run(|scratch| space.private_fault(page, access, scratch));
    outcome.inspect(|&outcome| space.space.note_fault(kind, outcome, since))
}

/// Does what would have been done without us.
///
/// # Safety
/// The arguments are those of a signal handler that runs just now.
unsafe fn go_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get();
    match before.map_or(libc::SIG_DFL, |before| before.sa_sigaction) {
        libc::SIG_DFL | libc::SIG_IGN => {
            // The access is tried again, and ends the process, as a fault that is ignored does.
            // SAFETY: restores a disposition that was valid.
            unsafe {
                let mut default: libc::sigaction = core::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, null_mut());
            }
        }
        handler if before.is_some_and(|before| before.sa_flags & libc::SA_SIGINFO != 0) => {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: the flag says that the handler is of this type.
            let handler = unsafe { core::mem::transmute::<usize, Handler>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without the flag it is of this type.
            let handler =
                unsafe { core::mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler) };
            handler(signal);
        }
    }
}
