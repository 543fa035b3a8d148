//! What the processor can do.

use core::arch::x86_64::{__cpuid, __cpuid_count, CpuidResult};

/// Whether the time-stamp counter goes at the same rate whatever the processor does, and does not
/// stand still.
#[must_use]
pub fn has_invariant_tsc() -> bool {
    const LEAF_LAST: u32 = 0x8000_0000;
    const LEAF_POWER: u32 = 0x8000_0007;
    const INVARIANT_TSC: u32 = 1 << 8;
    leaf(LEAF_LAST).eax >= LEAF_POWER && leaf(LEAF_POWER).edx & INVARIANT_TSC != 0
}

#[must_use]
pub fn has_rdpid() -> bool {
    const LEAF_FEATURES: u32 = 7;
    const RDPID: u32 = 1 << 22;
    leaf(0).eax >= LEAF_FEATURES && leaf(LEAF_FEATURES).ecx & RDPID != 0
}

#[allow(unused_unsafe, reason = "it is safe with later compilers only")]
fn leaf(leaf: u32) -> CpuidResult {
    // SAFETY: every x86-64 has the instruction, which changes nothing.
    unsafe { if leaf == 7 { __cpuid_count(leaf, 0) } else { __cpuid(leaf) } }
}
