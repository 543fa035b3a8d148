//! USDT probes, for perf, bpftrace and gdb: `pagefault:spf_vma_changed` and its like.
//!
//! Each is an instruction that does nothing, and a note in the binary (`.note.stapsdt`) that says
//! where it is and in which registers its arguments are: the address, the VMA's first address, the
//! address behind it, and the kernel's id of the thread. The tools put their breakpoint there.
//!
//! The notes are written here and not by the crate `probe`, for the sake of one flag. A note names
//! the section `.stapsdt.base` beside the instruction's address. perf takes the difference between
//! that section's address and its offset in the file, and applies it to the instruction as well. So
//! the section must lie in the code's segment ("x"): lld, the linker here, has another difference in
//! any other segment, and perf's breakpoint would hit the middle of some instruction elsewhere.

use core::arch::asm;

crate::named::named! {
    /// A moment on the way of a fault that can be watched; its name is like those of the kernel's tracepoints.
    pub enum Tracepoint {
        /// The VMA changed while a fault was served speculatively, or was being changed.
        SpfVmaChanged = "pagefault:spf_vma_changed",
        /// The VMA's memory was not prepared for it.
        SpfVmaNoanon = "pagefault:spf_vma_noanon",
        /// VMAs of that kind are not served so.
        SpfVmaNotsup = "pagefault:spf_vma_notsup",
        /// The VMA does not allow the access.
        SpfVmaAccess = "pagefault:spf_vma_access",
        /// The page's state changed meanwhile.
        SpfPmdChanged = "pagefault:spf_pmd_changed",
    }
}

/// What is told of such a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trace {
    /// When, by CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// Where.
    pub tracepoint: Tracepoint,
    /// The kernel's id of the thread that faulted; 0 where it is not known.
    pub thread: u32,
    /// The address that was accessed, down to its page.
    pub address: u64,
    /// First address of the VMA; 0, as its end, where there is none.
    pub vma_start: u64,
    /// The address behind the VMA.
    pub vma_end: u64,
}

/// The notes are in every binary that has the engine: tools look for them before anything runs, and
/// say that there is no such probe where they find none.
#[used]
static KEPT: fn(&Trace) = fire;

macro_rules! probe {
    ($name:literal, $trace:expr) => {
        // SAFETY: the instruction does nothing; the rest is no code.
        unsafe {
            asm!(
                "990: nop",
                // Header: bytes of the owner's name and of what follows it, and the note's type.
                ".pushsection .note.stapsdt, \"?\", \"note\"",
                ".balign 4",
                ".4byte 992f - 991f, 994f - 993f, 3",
                "991: .asciz \"stapsdt\"",
                "992: .balign 4",
                // The instruction, the base, and no semaphore: passing costs nothing anyway.
                "993: .8byte 990b, _.stapsdt.base, 0",
                ".asciz \"pagefault\"",
                concat!(".asciz \"", $name, "\""),
                // Bytes and place of each argument, unsigned.
                ".asciz \"8@%rdi 8@%rsi 8@%rdx 4@%ecx\"",
                "994: .balign 4",
                ".popsection",
                // Once in a binary, which may have other probes.
                ".ifndef _.stapsdt.base",
                ".pushsection .stapsdt.base, \"axGR\", \"progbits\", .stapsdt.base, comdat",
                ".weak _.stapsdt.base",
                ".hidden _.stapsdt.base",
                "_.stapsdt.base: .space 1",
                ".size _.stapsdt.base, 1",
                ".popsection",
                ".endif",
                in("rdi") $trace.address,
                in("rsi") $trace.vma_start,
                in("rdx") $trace.vma_end,
                in("ecx") $trace.thread,
                options(readonly, nostack, preserves_flags),
            );
        }
    };
}

/// Passes the place of a tracepoint.
#[inline(never)]
pub fn fire(trace: &Trace) {
    match trace.tracepoint {
        Tracepoint::SpfVmaChanged => probe!("spf_vma_changed", trace),
        Tracepoint::SpfVmaNoanon => probe!("spf_vma_noanon", trace),
        Tracepoint::SpfVmaNotsup => probe!("spf_vma_notsup", trace),
        Tracepoint::SpfVmaAccess => probe!("spf_vma_access", trace),
        Tracepoint::SpfPmdChanged => probe!("spf_pmd_changed", trace),
    }
}
