//! The clone as it is made.
//!
//! From the gate's closing to its opening no fault is served, and none of the child's until it is
//! registered. So the kernel must not read or write the program's memory meanwhile: what the call
//! points to is copied first, and the thread ids that the kernel was to write are written here
//! afterwards.

use crate::sys::{self, Call};

/// clone3's arguments, as far as they are known; newer fields are handed on unread.
const ARGS_BYTES_MAX: usize = 128;
/// Bytes of clone3's first version.
const ARGS_BYTES_MIN: usize = 64;
/// Nested pid namespaces, and so ids in `set_tid`.
const SET_TID_MAX: usize = 32;

// Words of clone3's arguments.
const FLAGS: usize = 0;
const PIDFD: usize = 1;
const CHILD_TID: usize = 2;
const PARENT_TID: usize = 3;
const STACK: usize = 5;
const STACK_SIZE: usize = 6;
const SET_TID: usize = 8;
const SET_TID_SIZE: usize = 9;

/// clone's flags are an int, with the exit signal in the lowest byte.
const CLONE_VM: u64 = libc::CLONE_VM as u64;
const CLONE_PIDFD: u64 = libc::CLONE_PIDFD as u64;
const CLONE_CHILD_SETTID: u64 = libc::CLONE_CHILD_SETTID as u64;
const CLONE_PARENT_SETTID: u64 = libc::CLONE_PARENT_SETTID as u64;
/// What the kernel is not asked for. Ids are written here; CLONE_VFORK is left out: a parent that
/// slept in the clone could not open the gate, and a vfork that shares no memory may be a fork.
const TAKEN_OUT: u64 = CLONE_CHILD_SETTID | CLONE_PARENT_SETTID | libc::CLONE_VFORK as u64;

/// Whether the call `number` is one that makes a process or a thread.
pub fn is_clone(number: libc::c_long) -> bool {
    matches!(number, libc::SYS_clone | libc::SYS_clone3 | libc::SYS_fork | libc::SYS_vfork)
}

/// Whether that call, with its first argument, makes something that shares its parent's memory.
pub fn shares_memory(number: libc::c_long, first: usize) -> bool {
    let flags = match number {
        libc::SYS_clone => first as u64,
        libc::SYS_fork => 0,
        // A null pointer is refused by the kernel.
        libc::SYS_clone3 if first == 0 => CLONE_VM,
        // SAFETY: the caller of clone3 gives a structure that begins with the flags.
        libc::SYS_clone3 => unsafe { (first as *const u64).read_unaligned() },
        _ => CLONE_VM,
    };
    flags & CLONE_VM != 0
}

/// A clone ready to be made. [`Request::make`] has the kernel point into it.
#[derive(Default)]
pub struct Request {
    number: libc::c_long,
    args: [usize; 6],
    flags: u64,
    child_tid: usize,
    parent_tid: usize,
    pidfd_at: usize,
    /// Where the child's stack starts, or 0 for where the parent's is.
    pub stack_top: usize,
    pidfd: i32,
    /// Bytes of clone3's arguments, 0 where they were not copied.
    clone3_bytes: usize,
    clone3: [u64; ARGS_BYTES_MAX / 8],
    set_tid: [i32; SET_TID_MAX],
}

impl Request {
    /// The clone that the program asks for with `call`, which does not share memory.
    pub fn new(call: &Call) -> Request {
        let mut request =
            Request { number: call.number, args: call.args, pidfd: -1, ..Default::default() };
        match call.number {
            libc::SYS_clone => request.read_clone(),
            libc::SYS_clone3 => request.read_clone3(),
            _ => {}
        }
        request
    }

    fn read_clone(&mut self) {
        let [flags, stack, parent_tid, child_tid, ..] = self.args;
        self.flags = flags as u64;
        self.stack_top = stack;
        self.child_tid = child_tid;
        // clone has one pointer for both, and refuses to do both.
        self.parent_tid = parent_tid;
        self.pidfd_at = parent_tid;
        self.args[0] = (self.flags & !TAKEN_OUT) as usize;
        self.args[1] = 0;
    }

    fn read_clone3(&mut self) {
        let [at, bytes, ..] = self.args;
        if !(ARGS_BYTES_MIN..=ARGS_BYTES_MAX).contains(&bytes) {
            // The kernel refuses what it does not know.
            return;
        }
        // SAFETY: the caller of clone3 gives a structure of `bytes` bytes; ours holds as many.
        unsafe {
            let to = self.clone3.as_mut_ptr().cast::<u8>();
            core::ptr::copy_nonoverlapping(at as *const u8, to, bytes);
        }
        self.clone3_bytes = bytes;
        let words = &mut self.clone3;
        self.flags = words[FLAGS];
        self.child_tid = words[CHILD_TID] as usize;
        self.parent_tid = words[PARENT_TID] as usize;
        self.pidfd_at = words[PIDFD] as usize;
        words[FLAGS] &= !TAKEN_OUT;
        if words[STACK] != 0 {
            self.stack_top = (words[STACK] + words[STACK_SIZE]) as usize;
            words[STACK] = 0;
            words[STACK_SIZE] = 0;
        }
        let count = words[SET_TID_SIZE] as usize;
        if words[SET_TID] != 0 && count <= SET_TID_MAX {
            let from = words[SET_TID] as *const i32;
            // SAFETY: the caller of clone3 gives an array of `count` ids; ours holds as many.
            unsafe { core::ptr::copy_nonoverlapping(from, self.set_tid.as_mut_ptr(), count) };
        }
    }

    /// Makes the clone: 0 in the child, the child's id or an error in the parent.
    pub fn make(&mut self) -> isize {
        let pidfd = &raw mut self.pidfd as usize;
        let mut args = self.args;
        match self.number {
            libc::SYS_clone if self.flags & CLONE_PIDFD != 0 => args[2] = pidfd,
            libc::SYS_clone3 if self.clone3_bytes != 0 => {
                if self.flags & CLONE_PIDFD != 0 {
                    self.clone3[PIDFD] = pidfd as u64;
                }
                if self.clone3[SET_TID] != 0 {
                    self.clone3[SET_TID] = self.set_tid.as_ptr() as u64;
                }
                args[0] = self.clone3.as_ptr() as usize;
            }
            _ => {}
        }
        // SAFETY: the program's own clone. It returns on this very stack, of which the child has a
        // copy, and writes nowhere but to `self`.
        unsafe { Call { number: self.number, args }.make() }
    }

    /// Writes in the parent what the kernel would have written.
    pub fn finish_parent(&self, child: isize) {
        if child < 0 {
            if self.pidfd >= 0 {
                // The child was made and could not be managed.
                // SAFETY: closes the descriptor that the kernel gave for it.
                let _ = unsafe { sys::call(libc::SYS_close, [self.pidfd as usize]) };
            }
            return;
        }
        if self.flags & CLONE_PARENT_SETTID != 0 {
            // SAFETY: the place that the caller of clone named for exactly this.
            unsafe { (self.parent_tid as *mut i32).write_unaligned(child as i32) };
        }
        if self.flags & CLONE_PIDFD != 0 {
            // SAFETY: the place that the caller of clone named for exactly this.
            unsafe { (self.pidfd_at as *mut i32).write_unaligned(self.pidfd) };
        }
    }

    /// Writes in the child what the kernel would have written.
    pub fn finish_child(&self) {
        if self.flags & CLONE_CHILD_SETTID != 0 {
            let id = rustix::thread::gettid().as_raw_pid();
            // SAFETY: the place that the caller of clone named for exactly this.
            unsafe { (self.child_tid as *mut i32).write_unaligned(id) };
        }
    }
}
