//! The system call instruction itself, for calls that rustix does not carry.

use super::Errno;

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("quire needs Linux on x86-64");

/// # Safety
/// The arguments must be what the call takes; what the kernel writes through them must be memory
/// that the caller may have written.
#[inline]
pub unsafe fn syscall(number: u32, args: [usize; 6]) -> Result<usize, Errno> {
    let result: isize;
    // SAFETY: the kernel clobbers rcx and r11 only; the caller answers for the arguments.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    if (-4095..0).contains(&result) {
        Err(Errno::from_raw_os_error(-result as i32))
    } else {
        Ok(result as usize)
    }
}
