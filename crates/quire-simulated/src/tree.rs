//! A space over an MMU, and the settings that `quire run` would have made for it.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::os::fd::{AsRawFd, OwnedFd};

use quire::budget::Budget;
use quire::control::{CONTROL_BYTES, Control, MAGIC, VERSION};
use quire::space::VmSpace;
use quire::swap::Swap;

/// The settings of a tree, as `quire run` would make them.
#[derive(Clone, Copy, Debug)]
pub struct Tree {
    pub budget_pages: usize,
    pub folio_order: i32,
    pub is_batched: bool,
    /// Segments of the swap file; 0 is none.
    pub segments: u32,
}

impl Default for Tree {
    fn default() -> Tree {
        Tree { budget_pages: 4096, folio_order: -1, is_batched: true, segments: 0 }
    }
}

/// Makes a control page of one's own. It is never unmapped: spaces refer to it.
pub fn control(tree: Tree) -> NonNull<Control> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    // SAFETY: a new mapping; zero is valid for all of it.
    let place = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            CONTROL_BYTES,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }
    .unwrap();
    let place = NonNull::new(place.cast::<Control>()).unwrap();
    // SAFETY: just mapped, never unmapped.
    let control = unsafe { place.as_ref() };
    control.magic.store(MAGIC, Ordering::Relaxed);
    control.version.store(VERSION, Ordering::Relaxed);
    control.budget_pages.store(tree.budget_pages as u64, Ordering::Relaxed);
    control.folio_order.store(tree.folio_order, Ordering::Relaxed);
    control.no_batch_unmap.store(u32::from(!tree.is_batched), Ordering::Relaxed);
    control.segments_max.store(tree.segments, Ordering::Relaxed);
    control.take_slot(0, std::process::id());
    place
}

/// A swap file without a name.
pub fn swap_file() -> OwnedFd {
    rustix::fs::memfd_create(c"quire-test-swap", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

/// A space over `mmu`, with its swap file.
pub fn space<M: quire::mmu::Mmu>(
    mmu: M,
    tree: Tree,
    pages: usize,
    frames: usize,
) -> (VmSpace<M>, Option<OwnedFd>) {
    let file = (tree.segments > 0).then(swap_file);
    // SAFETY: the control page is never unmapped.
    let budget = unsafe { Budget::new(control(tree).as_ptr(), 0) };
    space_on(budget, mmu, pages, frames, file)
}

/// The same for a member of a tree.
///
/// # Panics
/// Where there is no memory for it.
pub fn space_on<M: quire::mmu::Mmu>(
    budget: Budget,
    mmu: M,
    pages: usize,
    frames: usize,
    file: Option<OwnedFd>,
) -> (VmSpace<M>, Option<OwnedFd>) {
    let descriptor = file.as_ref().map(AsRawFd::as_raw_fd);
    // SAFETY: the file is returned and kept open beside the space.
    let swap = unsafe { Swap::new(descriptor, None, &budget) }.unwrap();
    (VmSpace::new(mmu, budget, swap, pages, frames).unwrap(), file)
}
