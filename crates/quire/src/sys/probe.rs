//! Places where debuggers and tracers of others can look in (USDT): `pagefault:spf_vma_changed` and
//! its kin.
//!
//! Each is an instruction that does nothing, and a note in the binary that says where it is, and in
//! which registers its arguments are: the address, the VMA's first address, the address behind it,
//! and the kernel's id of the thread. perf, bpftrace and gdb put their breakpoint there.

use probe::probe;

use crate::control::{Trace, Tracepoint};

/// Passes the place of a tracepoint.
#[inline(never)]
pub fn fire(trace: &Trace) {
    let Trace { tracepoint, thread, address, vma_start: start, vma_end: end, .. } = *trace;
    match tracepoint {
        Tracepoint::SpfVmaChanged => {
            probe!(pagefault, spf_vma_changed, address, start, end, thread)
        }
        Tracepoint::SpfVmaNoanon => probe!(pagefault, spf_vma_noanon, address, start, end, thread),
        Tracepoint::SpfVmaNotsup => probe!(pagefault, spf_vma_notsup, address, start, end, thread),
        Tracepoint::SpfVmaAccess => probe!(pagefault, spf_vma_access, address, start, end, thread),
        Tracepoint::SpfPmdChanged => {
            probe!(pagefault, spf_pmd_changed, address, start, end, thread)
        }
    }
}
