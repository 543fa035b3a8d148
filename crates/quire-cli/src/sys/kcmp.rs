//! Whether two processes share their memory.

const VM: libc::c_ulong = 1;

/// Whether two processes are in the same memory, as a vfork's child is in its parent's until it
/// executes something. Not, as far as is known, where the kernel does not tell.
pub(crate) fn have_same_memory(one: u32, other: u32) -> bool {
    let [one, other] = [one, other].map(libc::c_ulong::from);
    // SAFETY: kcmp compares, and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, VM, 0, 0) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_executed_something_has_memory_of_its_own() {
        let own = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let shared = have_same_memory(own, child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!shared && have_same_memory(own, own));
    }
}
