//! What a handle is, and whether it may be used.

use std::ffi::{CStr, c_char};

use crate::failure::Failure;
use crate::fork::{number_process, process_number};

/// Something that C has a pointer to.
pub trait Handle {
    /// What a message says where the pointer is NULL.
    const IS_NULL: &'static str;
}

/// A handle in memory: C's pointer is to the first field.
#[repr(C)]
struct Opened<H> {
    handle: H,
    /// The number of the process that it was opened in.
    process: u64,
}

/// The number of this process, given to it now where it has none.
pub fn own_number() -> Result<u64, Failure> {
    number_process().map_err(|errno| Failure::Os("number the process", errno))
}

/// Hands a handle to C, which closes it.
pub fn hand_out<H: Handle>(handle: H) -> Result<*mut H, Failure> {
    Ok(Box::into_raw(Box::new(Opened { handle, process: own_number()? })).cast())
}

/// What a pointer of C's refers to.
///
/// # Safety
/// It is NULL, or from [`hand_out`] and not closed as long as the reference is used.
pub unsafe fn get<'a, H: Handle>(pointer: *const H) -> Result<&'a H, Failure> {
    // SAFETY: the caller's promise.
    let opened = unsafe { pointer.cast::<Opened<H>>().as_ref() };
    let opened = opened.ok_or(Failure::Argument(H::IS_NULL))?;
    if opened.process != process_number() {
        // Its threads run in the parent, and its locks are in any state.
        return Err(Failure::Inherited);
    }
    Ok(&opened.handle)
}

/// The same, to be changed.
///
/// # Safety
/// As for [`get`], and no other thread uses it meanwhile.
pub unsafe fn get_mut<'a, H: Handle>(pointer: *mut H) -> Result<&'a mut H, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        get(pointer.cast_const())?;
        Ok(&mut *pointer)
    }
}

/// Ends a handle. An inherited one stays as it is: what it refers to is another process's.
///
/// # Safety
/// As for [`get`]; it is not used any more.
pub unsafe fn close<H: Handle>(pointer: *mut H) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        get(pointer.cast_const())?;
        drop(Box::from_raw(pointer.cast::<Opened<H>>()));
    }
    Ok(())
}

/// A string of C's.
///
/// # Safety
/// It is NULL, or ends with a NUL and does not change as long as the reference is used.
pub unsafe fn string<'a>(text: *const c_char) -> Result<&'a CStr, Failure> {
    if text.is_null() {
        return Err(Failure::Argument("the string is NULL; give one that ends with a NUL"));
    }
    // SAFETY: not null; the caller's promise.
    Ok(unsafe { CStr::from_ptr(text) })
}
