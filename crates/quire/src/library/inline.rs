//! Inline delivery: the thread that faults serves itself, in a handler of SIGBUS.
//!
//! This module has the process's SIGBUS once an address space asks for it, and the list of those
//! address spaces. Signals that are not for them go on to the handler that was there before.
//!
//! The handler runs with all signals blocked and allocates nothing. The locks that it takes are held
//! elsewhere only by threads that have the program's signals blocked, as calls into the library do, so
//! it never waits for the thread that it interrupts. It reads a few pages by itself, where the store
//! can be read in a signal handler; for more it waits. A fault on an object needs the stack alone; a
//! fault on a private copy, which is anonymous memory, borrows [`buffers`] and a stack.
//!
//! Where the handler has to wait it sleeps on a count of answers, which is raised where a fault would
//! have been answered, and then the access is tried again. A page that could not be read keeps ERROR in
//! its word: a mark in the mapping would come back as the same SIGBUS.

mod buffers;

use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Once, OnceLock};

pub(super) use self::buffers::READS_MAX;
use super::{Engine, Error};
use crate::fault::Outcome;
use crate::mmu::Access;
use crate::sys::Errno;
use crate::sys::clock::Moment;
use crate::sys::thread::process_id;
use crate::units::{BLOCK_ORDER, BLOCK_PAGES, PAGE_SHIFT, PageNum};

/// The most address spaces of a process that can have inline delivery.
const SPACES_MAX: usize = 64;

static SPACES: Spaces<SPACES_MAX> = Spaces([const { SpaceSlot::empty() }; SPACES_MAX]);

/// Address spaces by where their arenas are.
struct Spaces<const N: usize>([SpaceSlot; N]);

/// One address space, or none.
struct SpaceSlot {
    /// The blocks of its arena, 0 for none: the first one, and their number in the low bits. It is one
    /// word beside the space: a thread that faults in another space reads it while this one goes.
    arena: AtomicU64,
    space: AtomicPtr<Engine>,
}

/// Bits for the number of blocks: 512 TiB.
const BLOCKS_BITS: u32 = 28;

impl SpaceSlot {
    const fn empty() -> SpaceSlot {
        SpaceSlot { arena: AtomicU64::new(0), space: AtomicPtr::new(null_mut()) }
    }

    fn holds(&self, block: u64) -> bool {
        // Acquire pairs with the release in `add`: a thread that sees the arena sees its space.
        let arena = self.arena.load(Ordering::Acquire);
        let (start, blocks) = (arena >> BLOCKS_BITS, arena & ((1 << BLOCKS_BITS) - 1));
        block.wrapping_sub(start) < blocks
    }

    fn clear(&self) {
        // Relaxed: the release below orders it before the arena of the next space in this slot.
        self.arena.store(0, Ordering::Relaxed);
        // Release pairs with the acquire in `add`, whose own stores come later.
        self.space.store(null_mut(), Ordering::Release);
    }
}

const fn block_of(address: usize) -> u64 {
    (address >> (PAGE_SHIFT + BLOCK_ORDER)) as u64
}

impl<const N: usize> Spaces<N> {
    /// Adds a space, whose arena has `bytes` bytes from `start`, a block's first, on; `false` where no
    /// slot is free.
    fn add(&self, space: *mut Engine, start: usize, bytes: usize) -> bool {
        let blocks = block_of(bytes.next_multiple_of(BLOCK_PAGES << PAGE_SHIFT));
        assert!(blocks < 1 << BLOCKS_BITS, "no arena is as large");
        let is_free = |slot: &&SpaceSlot| {
            let (old, new) = (null_mut(), space);
            // Acquire: see `SpaceSlot::clear`.
            slot.space.compare_exchange(old, new, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let Some(slot) = self.0.iter().find(is_free) else { return false };
        // Release publishes the space.
        slot.arena.store(block_of(start) << BLOCKS_BITS | blocks, Ordering::Release);
        true
    }

    fn remove(&self, space: *mut Engine) {
        // Relaxed: it is only compared, and was stored by this thread or before it knew the space.
        let is_its = |slot: &&SpaceSlot| slot.space.load(Ordering::Relaxed) == space;
        self.0.iter().filter(is_its).for_each(SpaceSlot::clear);
    }

    /// The space whose arena an address is in. It stays as long as it has a mapping; other spaces are
    /// not dereferenced, for they may be going.
    fn find(&self, address: usize) -> Option<*mut Engine> {
        let slot = self.0.iter().find(|slot| slot.holds(block_of(address)))?;
        // Relaxed: the acquire in `holds` makes it visible.
        let space = slot.space.load(Ordering::Relaxed);
        (!space.is_null()).then_some(space)
    }
}

/// The process that the list belongs to: twice its number, plus one once its parent's entries are gone.
static OWNER: AtomicU64 = AtomicU64::new(0);

/// The disposition of SIGBUS before; empty until it is taken over.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Has faults of a space served by the threads that take them.
pub(super) fn add(space: &'static Engine) -> Result<(), Error> {
    let failed = |errno| Error::NoMemory { doing: "take over SIGBUS", errno };
    forget_parents();
    buffers::prepare().map_err(failed)?;
    take_over().map_err(failed)?;
    let mmu = space.space.mmu();
    let place = core::ptr::from_ref(space).cast_mut();
    let is_added = SPACES.add(place, mmu.address(PageNum(0)), mmu.arena_pages() << PAGE_SHIFT);
    if is_added { Ok(()) } else { Err(failed(Errno::NFILE)) }
}

/// In a fork's child that makes an address space of its own, drops the parent's spaces from the list:
/// their addresses may have other uses by now.
fn forget_parents() {
    let mine = u64::from(process_id()) << 1;
    loop {
        // Acquire pairs with the release below.
        let seen = OWNER.load(Ordering::Acquire);
        if seen == mine | 1 {
            return;
        }
        if seen == mine {
            // Another thread is doing it.
            std::thread::yield_now();
            continue;
        }
        // Relaxed: nothing was done yet.
        if OWNER.compare_exchange(seen, mine, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            SPACES.0.iter().for_each(SpaceSlot::clear);
            buffers::forget_parents();
            // Release publishes what was cleared.
            OWNER.store(mine | 1, Ordering::Release);
            return;
        }
    }
}

/// Forgets a space, none of whose mappings is left.
pub(super) fn remove(space: &Engine) {
    SPACES.remove(core::ptr::from_ref(space).cast_mut());
}

/// Installs the handler, once for the process's life.
fn take_over() -> Result<(), Errno> {
    static ONCE: Once = Once::new();
    let mut is_done = true;
    ONCE.call_once(|| {
        // SAFETY: an all-zero sigaction is valid, and the handler does only what a signal handler may.
        is_done = unsafe {
            let mut before: libc::sigaction = core::mem::zeroed();
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            // It runs on the stack of the thread that faults: alternate stacks are 8 KiB, as a rule,
            // of which the kernel takes half for registers.
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
    // SAFETY: the kernel passes valid arguments.
    let (address, code, error) = unsafe {
        let context = &*context.cast::<libc::ucontext_t>();
        let error = context.uc_mcontext.gregs[libc::REG_ERR as usize];
        ((*info).si_addr().addr(), (*info).si_code, error)
    };
    // A signal that a process sends has no address.
    let is_fault = code > 0;
    // The thread keeps its errno: a store that reads in place may do so by way of libc.
    // SAFETY: it is the thread's own.
    let errno = unsafe { *libc::__errno_location() };
    let is_served = is_fault && serve(address, access_of(error));
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !is_served {
        // SAFETY: as above.
        unsafe { go_on(signal, info, context) };
    }
}

/// Decodes the processor's error code of a page fault.
const fn access_of(error: i64) -> Access {
    const WAS_PRESENT: i64 = 1;
    const IS_WRITE: i64 = 2;
    match (error & IS_WRITE != 0, error & WAS_PRESENT != 0) {
        (false, _) => Access::Read,
        (true, false) => Access::Write,
        (true, true) => Access::WriteProtected,
    }
}

/// Serves a fault, and waits where it must; then the access is tried again. Returns `false` where the
/// address is in no space, or the fault is an error.
fn serve(address: usize, access: Access) -> bool {
    let Some(space) = SPACES.find(address) else { return false };
    // SAFETY: a space goes only when no mapping of it is left, and the fault is in its arena.
    let space = unsafe { &*space };
    let mmu = space.space.mmu();
    let page = mmu.page(address);
    let since = Moment::now();
    // Before the fault is looked at: an answer that comes in between is not missed.
    let seen = mmu.answers(page);
    let outcome = match space.object_fault(page, access, since) {
        Some(outcome) => Some(outcome),
        None => private_fault(space, page, access, since),
    };
    match outcome {
        Some(Outcome::Served | Outcome::Spurious) => true,
        Some(Outcome::Parked) => {
            mmu.wait_for_answer(page, seen);
            true
        }
        Some(Outcome::NoVma | Outcome::Poisoned | Outcome::Unfilled) => false,
        // While its VMA is being changed a lookup may find none: then the access is tried again.
        None => space.is_mapping_at(page),
    }
}

/// Serves a fault on a private copy. The buffers are returned before the thread waits.
fn private_fault(space: &Engine, page: PageNum, access: Access, since: Moment) -> Option<Outcome> {
    let kind = space.space.kind_of_fault(page, access);
    let outcome = buffers::borrow().run(|scratch| space.private_fault(page, access, scratch));
    outcome.inspect(|&outcome| space.space.note_fault(kind, outcome, since))
}

/// Does what would have been done without this handler.
///
/// # Safety
/// The arguments are those of a signal handler that runs now.
unsafe fn go_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get();
    match before.map_or(libc::SIG_DFL, |before| before.sa_sigaction) {
        libc::SIG_DFL | libc::SIG_IGN => {
            // The access is tried again, and ends the process, as an ignored fault does.
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

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = BLOCK_PAGES << PAGE_SHIFT;

    #[test]
    fn a_fault_in_one_space_does_not_look_at_another_that_may_be_going() {
        let spaces = Spaces([const { SpaceSlot::empty() }; 2]);
        // These are only numbers: to dereference one of them is a crash.
        let [first, second, third] =
            [8usize, 16, 24].map(std::ptr::without_provenance_mut::<Engine>);
        assert!(spaces.add(first, 64 * BLOCK, 2 * BLOCK));
        assert!(spaces.add(second, 66 * BLOCK, BLOCK + 1));
        assert!(!spaces.add(third, 80 * BLOCK, BLOCK), "there is no room");
        let found = |block: usize, bytes: usize| spaces.find(block * BLOCK + bytes);
        assert_eq!((found(64, 0), found(65, BLOCK - 1)), (Some(first), Some(first)));
        assert_eq!((found(66, 0), found(67, 0)), (Some(second), Some(second)));
        assert_eq!((found(63, BLOCK - 1), found(68, 0), found(0, 0)), (None, None, None));
        spaces.remove(first);
        assert!(spaces.add(third, 80 * BLOCK, BLOCK));
        assert_eq!((found(64, 0), found(66, 0), found(80, 9)), (None, Some(second), Some(third)));
    }
}
