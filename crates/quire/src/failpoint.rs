//! Places in the way of a fault, of an unmap and of reclaim, where a test may step in, on the real MMU too.
//!
//! Without the feature `simulated` there is nothing here: a failpoint costs no instruction.

#![deny(unsafe_code)]

/// A place in the way of a fault, of an unmap, or of reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Failpoint {
    /// The fault has come; nothing is known of it yet.
    Arrived,
    /// The VMA was found, and room was made; no lock is held.
    Prepared,
    /// The last look at the VMA is done, under the lock of what is about to be mapped.
    Checked,
    /// An unmap has dropped the pages of the range that begins here, whose VMA is still dying. No
    /// lock is held.
    Dropped,
    /// Reclaim has found a mapped page that can go, and is about to try its lock.
    Evicting,
    /// A fault that found no memory is in the list of those that wait, and about to look once more.
    Starved,
    /// Compaction has copied a packed page's bytes to another place, and is about to try the page's lock.
    Relocating,
    /// A segment of the swap file is written; a page of it is about to be tried.
    Written,
}

#[cfg(not(feature = "simulated"))]
#[inline(always)]
#[allow(clippy::inline_always, reason = "nothing is left of it")]
pub(crate) fn hit(_: Failpoint, _: crate::units::PageNum) {}

#[cfg(feature = "simulated")]
pub(crate) use self::hooks::hit;
#[cfg(feature = "simulated")]
pub use self::hooks::set;

#[cfg(feature = "simulated")]
mod hooks {
    use std::boxed::Box;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, PoisonError, RwLock};

    use super::Failpoint;
    use crate::units::PageNum;

    type Hook = Arc<dyn Fn(PageNum) + Send + Sync>;

    const PLACES: usize = Failpoint::Written as usize + 1;

    static IS_SET: AtomicBool = AtomicBool::new(false);
    static HOOKS: RwLock<[Option<Hook>; PLACES]> = RwLock::new([const { None }; PLACES]);

    /// Has `hook` called wherever a thread of this process comes by `place`.
    pub fn set(place: Failpoint, hook: Option<Box<dyn Fn(PageNum) + Send + Sync>>) {
        let mut hooks = HOOKS.write().unwrap_or_else(PoisonError::into_inner);
        hooks[place as usize] = hook.map(Arc::from);
        // Relaxed: a test sets its hooks before the fault that it means.
        IS_SET.store(hooks.iter().any(Option::is_some), Ordering::Relaxed);
    }

    pub(crate) fn hit(place: Failpoint, page: PageNum) {
        // Threads of a managed program have no hooks, and must not take the lock.
        if !IS_SET.load(Ordering::Relaxed) {
            return;
        }
        let hook = HOOKS.read().unwrap_or_else(PoisonError::into_inner)[place as usize].clone();
        if let Some(hook) = hook {
            hook(page);
        }
    }
}
