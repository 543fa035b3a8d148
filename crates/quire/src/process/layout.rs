//! The program's calls: mmap and its family, by their C shapes.
//!
//! Addresses and lengths come as the program gave them; each method checks them as the kernel
//! does, and has the errors of its manual page. All run on program threads, as [`super::call`] has it, under
//! the space's lock.

use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};

use linux_raw_sys::general as c;
use rustix::process::{Resource, getrlimit};

use super::Process;
use crate::control::Event;
use crate::mmu::{Access, Prot};
use crate::space::remap::Placement;
use crate::space::vma::{Attributes, Kind, Pattern};
use crate::space::{Advice, Layout};
use crate::sys::call::syscall;
use crate::sys::thread;
use crate::sys::{Errno, memory};
use crate::units::{PAGE_SHIFT, PAGE_SIZE, PageNum, PageRange};

/// The rights that a managed mapping can have.
const PROT_MASK: i32 = 7;
/// PROT_SEM, which changes nothing.
const PROT_SEM: i32 = 8;
/// Those that let a mapping of a stack's kind grow.
const PROT_GROWS: i32 = (c::PROT_GROWSDOWN | c::PROT_GROWSUP) as i32;
/// Behind all addresses that a program can have.
const USER_END: usize = 1 << 47;
/// Mappings from this size on are held against RLIMIT_AS: 1 MiB.
const LIMITED_PAGES_MIN: usize = 256;

impl Process {
    /// Addresses that are managed.
    pub fn arena(&self) -> Range<usize> {
        let mmu = self.space.mmu();
        let start = mmu.address(PageNum(0));
        start..start + (mmu.arena_pages() << PAGE_SHIFT)
    }

    fn pages(&self, address: usize, len: usize) -> Result<PageRange, Errno> {
        let arena = self.arena();
        let len = len.checked_next_multiple_of(PAGE_SIZE).ok_or(Errno::NOMEM)?;
        let end = address.checked_add(len).ok_or(Errno::NOMEM)?;
        if !address.is_multiple_of(PAGE_SIZE) {
            return Err(Errno::INVAL);
        }
        if address < arena.start || end > arena.end {
            return Err(Errno::NOMEM);
        }
        Ok(PageRange::new(self.space.mmu().page(address), len >> PAGE_SHIFT))
    }

    /// Does `act` to the layout, after waiting for dying VMAs in `ranges`.
    fn locked<R: 'static, const RANGES: usize>(
        &'static self,
        ranges: [PageRange; RANGES],
        act: impl FnOnce(&mut Layout<'_>) -> R + 'static,
    ) -> R {
        self.call(move || {
            let mut layout = self.space.lock_over(&ranges);
            act(&mut layout)
        })
    }

    /// The same on an engine thread, which can map and move pages.
    fn on_proxy_call<R: 'static, const RANGES: usize>(
        &'static self,
        ranges: [PageRange; RANGES],
        act: impl FnOnce(&mut Layout<'_>) -> R + 'static,
    ) -> R {
        self.locked(ranges, |layout| self.space.proxy_calls.send(|| act(layout)))
    }

    /// The same on an engine thread where `needs_engine`, else here: a proxy call costs two switches of
    /// thread.
    fn locked_or_proxy_call<R: 'static, const RANGES: usize>(
        &'static self,
        ranges: [PageRange; RANGES],
        needs_engine: impl FnOnce(&Layout<'_>) -> bool + 'static,
        act: impl FnOnce(&mut Layout<'_>) -> R + 'static,
    ) -> R {
        self.locked(ranges, |layout| {
            let needs_engine = needs_engine(layout);
            self.on_engine_if(needs_engine, || act(layout))
        })
    }

    fn on_engine_if<R>(&self, needs_engine: bool, act: impl FnOnce() -> R) -> R {
        if needs_engine { self.space.proxy_calls.send(act) } else { act() }
    }

    /// Refuses a large mapping beyond RLIMIT_AS; small ones are not checked.
    fn check_address_limit(&'static self, pages: usize) -> Result<(), Errno> {
        if pages < LIMITED_PAGES_MIN {
            return Ok(());
        }
        let managed = self.space.budget().member().managed_pages.load(Ordering::Relaxed);
        let bytes = (managed + pages as u64) << PAGE_SHIFT;
        let limit = self.address_limit.known().unwrap_or_else(|| {
            let ask = || getrlimit(Resource::As).current;
            self.on_proxy_call([], move |_| self.address_limit.learn(ask))
        });
        if bytes <= limit { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Notes that the program has changed a limit of its own, or of another process.
    pub fn limits_changed(&self) {
        self.address_limit.forget();
    }

    /// mmap of private anonymous memory, without MAP_FIXED.
    pub fn mmap(
        &'static self,
        hint: usize,
        len: usize,
        prot: i32,
        flags: i32,
    ) -> Result<usize, Errno> {
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let bytes = len.checked_next_multiple_of(PAGE_SIZE).ok_or(Errno::NOMEM)?;
        let hint = self.pages(hint & !(PAGE_SIZE - 1), bytes).ok().map(|range| range.start);
        let pages = bytes >> PAGE_SHIFT;
        self.check_address_limit(pages)?;
        let mapped = self.locked_or_proxy_call(
            [],
            move |_| is_populated(flags),
            move |layout| {
                let start = self.space.map(layout, hint, pages, Prot((prot & PROT_MASK) as u32))?;
                self.populate_if_asked(layout, PageRange::new(start, pages), flags);
                Ok::<_, Errno>(start)
            },
        );
        if mapped == Err(Errno::NOMEM) {
            self.explain_refusal();
        }
        Ok(self.space.mmu().address(mapped?))
    }

    /// Says once, after the kernel has refused rights to memory of the arena, where the engine's own
    /// tables may be the reason.
    fn explain_refusal(&'static self) {
        static HAS_EXPLAINED: AtomicBool = AtomicBool::new(false);
        let is_limited = self.on_proxy_call([], |_| getrlimit(Resource::Data).current.is_some());
        if is_limited && !HAS_EXPLAINED.swap(true, Ordering::Relaxed) {
            super::say(format_args!(
                "quire: memory is refused to process {}: RLIMIT_DATA counts quire's tables too; \
                 set the limit before the program starts, or to at least 4 GiB",
                thread::process_id()
            ));
        }
    }

    fn populate_if_asked(&self, layout: &mut Layout<'_>, range: PageRange, flags: i32) {
        if is_populated(flags) {
            // As with the kernel, a mapping that cannot be populated is still made.
            let _ = self.space.advise(layout, range, Advice::Populate(Access::Read));
        }
    }

    /// mmap of private anonymous memory at an address of the arena, over whatever is there.
    pub fn mmap_fixed(
        &'static self,
        address: usize,
        len: usize,
        prot: i32,
        flags: i32,
    ) -> Result<usize, Errno> {
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let range = self.pages(address, len)?;
        let needs_engine =
            move |layout: &Layout<'_>| is_populated(flags) || self.space.has_foreign(layout, range);
        self.locked_or_proxy_call([range], needs_engine, move |layout| {
            if flags as u32 & c::MAP_FIXED_NOREPLACE == c::MAP_FIXED_NOREPLACE
                && self.space.is_mapped(layout, range)
            {
                return Err(Errno::EXIST);
            }
            self.space.map_fixed(layout, range, Prot((prot & PROT_MASK) as u32))?;
            self.populate_if_asked(layout, range, flags);
            Ok(address)
        })
    }

    /// Shared memory of so many pages can be touched from now on, once this returns: see
    /// [`crate::budget`]'s part on what is not managed.
    pub fn announce(&self, pages: usize) {
        self.space.budget().announce(pages);
    }

    /// Any other mapping at an address of the arena: a file, shared memory, code.
    #[allow(clippy::too_many_arguments, reason = "mmap's own")]
    pub fn mmap_foreign(
        &'static self,
        address: usize,
        len: usize,
        prot: i32,
        flags: i32,
        file: i32,
        offset: i64,
    ) -> Result<usize, Errno> {
        let range = self.pages(address, len)?;
        let map = move |address, flags: u32| {
            let [prot, flags, file] = [prot as usize, flags as usize, file as usize];
            // SAFETY: at an address of the kernel's choice, or in the arena, which was emptied there.
            unsafe { syscall(c::__NR_mmap, [address, len, prot, flags, file, offset as usize]) }
        };
        let replaces = flags as u32 & c::MAP_FIXED_NOREPLACE == 0;
        let is_refused =
            move |layout: &Layout<'_>| !replaces && self.space.is_mapped(layout, range);
        if !replaces && self.locked([range], move |layout| is_refused(layout)) {
            return Err(Errno::EXIST);
        }
        let flags = flags as u32 & !(c::MAP_FIXED | c::MAP_FIXED_NOREPLACE);
        // Elsewhere first: what the kernel refuses leaves whole what is there.
        let trial = map(0, flags & !c::MAP_POPULATE)?;
        let trial = NonNull::new(trial as *mut u8).ok_or(Errno::NOMEM)?;
        // SAFETY: what was just mapped, and nothing has used.
        unsafe { memory::release(trial, len) };
        // Faults there are the kernel's from now on.
        self.space.budget().count(Event::LayoutUnmanaged, 1);
        self.locked([range], move |layout| {
            if is_refused(layout) {
                return Err(Errno::EXIST);
            }
            let needs_engine =
                self.space.has_foreign(layout, range) || !self.space.mmu().is_protectable();
            self.on_engine_if(needs_engine, || self.space.map_foreign(layout, range))?;
            let mapped = map(address, flags | c::MAP_FIXED);
            if mapped.is_err() {
                let _ = self.space.unmap(layout, range);
            }
            mapped
        })
    }

    pub fn munmap(&'static self, address: usize, len: usize) -> Result<(), Errno> {
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let range = self.pages(address, len).map_err(|_| Errno::INVAL)?;
        self.call(move || {
            let mut layout = self.space.lock_over(&[range]);
            if self.space.has_foreign(&layout, range) {
                return self.space.proxy_calls.send(|| self.space.unmap(&mut layout, range));
            }
            self.space.unmap_and_unlock(layout, range)
        })
    }

    pub fn mprotect(&'static self, address: usize, len: usize, prot: i32) -> Result<(), Errno> {
        let range = self.pages(address, len)?;
        if range.is_empty() {
            return Ok(());
        }
        if prot & !(PROT_MASK | PROT_SEM | PROT_GROWS) != 0 {
            return Err(Errno::INVAL);
        }
        let rights = Prot((prot & PROT_MASK) as u32);
        let needs_engine = move |_: &Layout<'_>| {
            !rights.is_movable() && self.space.used_parts(range).next().is_some()
        };
        self.locked_or_proxy_call([range], needs_engine, move |layout| {
            if prot & PROT_GROWS != 0 {
                // No mapping of the arena can.
                let is_mapped = self.space.is_mapped(layout, range);
                return Err(if is_mapped { Errno::INVAL } else { Errno::NOMEM });
            }
            self.each_until_hole(layout, range, |layout, part, vma| match vma.kind {
                Kind::Anonymous | Kind::Private => self.space.protect(layout, part, rights),
                Kind::Foreign | Kind::Object => self.by_kernel(c::__NR_mprotect, part, prot),
                // None is left in the range after the wait.
                Kind::Dying => Err(Errno::NOMEM),
            })
        })
    }

    fn bytes(&self, range: PageRange) -> (usize, usize) {
        (self.space.mmu().address(range.start), range.len() << PAGE_SHIFT)
    }

    /// Calls `act` for each part of `range` that is mapped. Holes are an error of `NOMEM`, after all
    /// parts were done.
    fn each_mapped(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        mut act: impl FnMut(&mut Layout<'_>, PageRange, Attributes) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut at = range.start;
        let mut result = Ok(());
        while at < range.end {
            let Some(vma) = self.space.next_vma(layout, at).filter(|v| v.range.start < range.end)
            else {
                return Err(Errno::NOMEM);
            };
            if !vma.range.contains(at) {
                result = Err(Errno::NOMEM);
            }
            let part = vma.range.intersect(PageRange { start: at, end: range.end });
            at = part.end;
            act(layout, part, vma.attributes)?;
        }
        result
    }

    /// The same, but a hole is the end.
    fn each_until_hole(
        &self,
        layout: &mut Layout<'_>,
        range: PageRange,
        mut act: impl FnMut(&mut Layout<'_>, PageRange, Attributes) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut next = range.start;
        self.each_mapped(layout, range, |layout, part, attributes| {
            if part.start != core::mem::replace(&mut next, part.end) {
                return Err(Errno::NOMEM);
            }
            act(layout, part, attributes)
        })
    }

    /// Makes a call with a range and one more argument for a foreign mapping in the arena.
    fn by_kernel(&self, number: u32, part: PageRange, third: i32) -> Result<(), Errno> {
        let (start, bytes) = self.bytes(part);
        // SAFETY: the program's own mapping, and its own call.
        unsafe { syscall(number, [start, bytes, third as usize, 0, 0, 0]) }.map(drop)
    }

    /// The kernel takes all of the arena for mapped.
    pub fn msync(&'static self, address: usize, len: usize, flags: i32) -> Result<(), Errno> {
        let range = self.pages(address, len)?;
        let is_refused_locked = flags as u32 & c::MS_INVALIDATE != 0;
        self.locked([range], move |layout| {
            self.each_mapped(layout, range, |_, part, vma| match vma.kind {
                Kind::Foreign | Kind::Object => self.by_kernel(c::__NR_msync, part, flags),
                // None is left in the range after the wait.
                Kind::Dying => Err(Errno::NOMEM),
                _ if is_refused_locked && vma.is_mlocked => Err(Errno::BUSY),
                Kind::Anonymous | Kind::Private => Ok(()),
            })
        })
    }

    pub fn madvise(&'static self, address: usize, len: usize, advice: i32) -> Result<(), Errno> {
        let range = self.pages(address, len).map_err(|error| match error {
            Errno::NOMEM => Errno::INVAL,
            other => other,
        })?;
        if range.is_empty() {
            return Ok(());
        }
        // The former wants a shared mapping; the latter is not supported.
        let is_refused = matches!(advice as u32, c::MADV_REMOVE | c::MADV_WIPEONFORK);
        let managed = match advice as u32 {
            _ if is_refused => None,
            c::MADV_NORMAL => Some(Advice::Pattern(Pattern::Normal)),
            c::MADV_SEQUENTIAL => Some(Advice::Pattern(Pattern::Sequential)),
            c::MADV_RANDOM => Some(Advice::Pattern(Pattern::Random)),
            c::MADV_WILLNEED => Some(Advice::WillNeed),
            c::MADV_DONTNEED | c::MADV_DONTNEED_LOCKED => Some(Advice::DontNeed),
            c::MADV_FREE => Some(Advice::Free),
            c::MADV_COLD => Some(Advice::Cold),
            c::MADV_PAGEOUT => Some(Advice::PageOut),
            c::MADV_POPULATE_READ => Some(Advice::Populate(Access::Read)),
            c::MADV_POPULATE_WRITE => Some(Advice::Populate(Access::Write)),
            c::MADV_DONTFORK => Some(Advice::DontFork(true)),
            c::MADV_DOFORK => Some(Advice::DontFork(false)),
            // Advice about huge pages, merging and dumping is ignored.
            c::MADV_KEEPONFORK
            | c::MADV_HUGEPAGE
            | c::MADV_NOHUGEPAGE
            | c::MADV_COLLAPSE
            | c::MADV_MERGEABLE
            | c::MADV_UNMERGEABLE
            | c::MADV_DONTDUMP
            | c::MADV_DODUMP => None,
            _ => return Err(Errno::INVAL),
        };
        let maps = matches!(
            managed,
            Some(Advice::WillNeed | Advice::Free | Advice::PageOut | Advice::Populate(_))
        );
        // What is locked in memory stays there.
        let takes_memory = advice as u32 == c::MADV_DONTNEED
            || matches!(managed, Some(Advice::Free | Advice::Cold | Advice::PageOut));
        self.locked_or_proxy_call(
            [range],
            move |_| maps,
            move |layout| {
                let act = |layout: &mut Layout<'_>, part, vma: Attributes| match (vma.kind, managed)
                {
                    (Kind::Foreign | Kind::Object, _) => {
                        self.by_kernel(c::__NR_madvise, part, advice)
                    }
                    // None is left in the range after the wait.
                    (Kind::Dying, _) => Err(Errno::NOMEM),
                    _ if is_refused => Err(Errno::INVAL),
                    _ if takes_memory && vma.is_mlocked => Err(Errno::INVAL),
                    (_, Some(advice)) => self.space.advise(layout, part, advice),
                    (_, None) => Ok(()),
                };
                if matches!(managed, Some(Advice::Populate(_))) {
                    self.each_until_hole(layout, range, act)
                } else {
                    self.each_mapped(layout, range, act)
                }
            },
        )
    }

    /// MREMAP_DONTUNMAP is `INVAL`.
    pub fn mremap(
        &'static self,
        old: usize,
        old_len: usize,
        new_len: usize,
        flags: i32,
        new_address: usize,
    ) -> Result<usize, Errno> {
        let flags = flags as u32;
        if new_len == 0 || flags & !(c::MREMAP_MAYMOVE | c::MREMAP_FIXED) != 0 {
            return Err(Errno::INVAL);
        }
        let range = self.pages(old, old_len).map_err(|_| Errno::INVAL)?;
        let pages = new_len.checked_next_multiple_of(PAGE_SIZE).ok_or(Errno::NOMEM)? >> PAGE_SHIFT;
        let placement = if flags & c::MREMAP_FIXED != 0 {
            if flags & c::MREMAP_MAYMOVE == 0 {
                return Err(Errno::INVAL);
            }
            Placement::At(self.pages(new_address, new_len).map_err(|_| Errno::INVAL)?.start)
        } else if flags & c::MREMAP_MAYMOVE != 0 {
            Placement::Anywhere
        } else {
            Placement::InPlace
        };
        let target = match placement {
            Placement::At(start) => PageRange::new(start, pages),
            Placement::InPlace | Placement::Anywhere => PageRange::new(range.start, 0),
        };
        let remap = move |layout: &mut Layout<'_>| {
            let vma = self.space.next_vma(layout, range.start);
            let kind = vma.map_or(Kind::Anonymous, |vma| vma.attributes.kind);
            if kind == Kind::Foreign && !target.is_empty() {
                return self.move_foreign(layout, range, target);
            }
            self.space.remap(layout, range, pages, placement)
        };
        let start = self.on_proxy_call([range, target], remap)?;
        Ok(self.space.mmu().address(start))
    }

    /// Moves what the kernel has mapped in the arena to another place there. It is not made longer: what lies
    /// behind it is reserved, and to the kernel that is mapped.
    fn move_foreign(
        &self,
        layout: &mut Layout<'_>,
        old: PageRange,
        target: PageRange,
    ) -> Result<PageNum, Errno> {
        let old =
            self.space.cut_for_remap(layout, old, target.len(), Placement::At(target.start))?;
        if old.len() < target.len() {
            return Err(Errno::NOMEM);
        }
        self.space.map_foreign(layout, target)?;
        let ((from, bytes), (to, _)) = (self.bytes(old), self.bytes(target));
        // The old place is never free for another mapping.
        let flags = c::MREMAP_MAYMOVE | c::MREMAP_FIXED | c::MREMAP_DONTUNMAP;
        // SAFETY: the program's own mapping goes to where the arena was emptied.
        let moved = unsafe { syscall(c::__NR_mremap, [from, bytes, bytes, flags as usize, to, 0]) };
        self.space.unmap(layout, if moved.is_ok() { old } else { target })?;
        moved.map(|_| target.start)
    }

    /// mlock2: with MLOCK_ONFAULT what is not in memory is locked once it comes.
    pub fn mlock(&'static self, address: usize, len: usize, flags: u32) -> Result<(), Errno> {
        let range = self.outer_pages(address, len)?;
        let is_on_fault = flags & c::MLOCK_ONFAULT != 0;
        self.on_proxy_call([range], move |layout| {
            // All of it stays, also where some of it cannot come now.
            self.each_until_hole(layout, range, |layout, part, vma| match vma.kind {
                Kind::Foreign | Kind::Object => {
                    self.by_kernel(c::__NR_mlock2, part, c::MLOCK_ONFAULT as i32)
                }
                _ => self.space.mlock_on_fault(layout, part),
            })?;
            if is_on_fault {
                return Ok(());
            }
            self.each_mapped(layout, range, |layout, part, vma| match vma.kind {
                Kind::Foreign | Kind::Object => self.by_kernel(c::__NR_mlock2, part, 0),
                _ => self.space.mlock(layout, part),
            })
        })
    }

    pub fn munlock(&'static self, address: usize, len: usize) -> Result<(), Errno> {
        let range = self.outer_pages(address, len)?;
        self.locked([range], move |layout| {
            self.each_until_hole(layout, range, |layout, part, vma| match vma.kind {
                Kind::Foreign | Kind::Object => self.by_kernel(c::__NR_munlock, part, 0),
                _ => self.space.munlock(layout, part),
            })
        })
    }

    /// The pages that hold any byte of a range, which need not be aligned.
    fn outer_pages(&self, address: usize, len: usize) -> Result<PageRange, Errno> {
        let start = address & !(PAGE_SIZE - 1);
        self.pages(start, len.checked_add(address - start).ok_or(Errno::NOMEM)?)
    }

    /// mlockall, for what is managed: `NOMEM` where it would be more than half of the budget.
    pub fn mlockall(&'static self, flags: i32) -> Result<(), Errno> {
        let flags = flags as u32;
        self.on_proxy_call([self.space.arena()], move |layout| {
            self.space.lock_future(flags & c::MCL_FUTURE != 0);
            if flags & c::MCL_CURRENT != 0 { self.space.mlock_current(layout) } else { Ok(()) }
        })
    }

    /// munlockall, for what is managed.
    pub fn munlockall(&'static self) {
        self.locked([self.space.arena()], move |layout| {
            self.space.lock_future(false);
            let mut at = PageNum(0);
            while let Some(vma) = self.space.next_vma(layout, at) {
                at = vma.range.end;
                let _ = self.space.munlock(layout, vma.range);
            }
        });
    }

    /// # Safety
    /// `into` has a byte for every page, or is an address that nothing is at.
    pub unsafe fn mincore(&self, address: usize, len: usize, into: *mut u8) -> Result<(), Errno> {
        let range = self.pages(address, len)?;
        if self.space.find_vma(range.start).is_none() && (into as usize) < USER_END {
            return Err(Errno::NOMEM);
        }
        // The kernel's answer comes first: it is right but for managed pages, of which it does not know that they
        // are in limbo, and it says whether there is room for one.
        // SAFETY: the program's own call.
        unsafe { syscall(c::__NR_mincore, [address, len, into as usize, 0, 0, 0]) }?;
        // The answers go through memory that may itself be managed: look first, write last, with
        // no lock held.
        for (at, page) in range.pages().enumerate() {
            let vma = self.space.find_vma(page).ok_or(Errno::NOMEM)?;
            let is_resident = match vma.attributes.kind {
                Kind::Anonymous | Kind::Private => self.space.is_resident(page),
                Kind::Foreign | Kind::Object => continue,
                Kind::Dying => return Err(Errno::NOMEM),
            };
            // SAFETY: the caller's promise.
            unsafe { into.add(at).write(u8::from(is_resident)) };
        }
        Ok(())
    }
}

fn is_populated(flags: i32) -> bool {
    flags as u32 & (c::MAP_POPULATE | c::MAP_LOCKED) != 0
}
