//! numpy's own arrays under a bound: a handler of its data memory (NEP 49).
//!
//! What is large is a mapping of its own under the bound; what is small, and whatever a fork's child asks
//! for, is the C library's. A handler is never freed, since arrays that it made may outlive all else.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use quire::library::{AddressSpace, MapOptions, MappingCopy, OpenOptions};

use crate::memory::{Counted, Memory};
use crate::own::Own;

/// From this size on an array is under the bound.
const LARGE_BYTES: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;
/// `PyDataMem_SetHandler` in numpy's table of functions, in all versions from 1.22 on.
const SET_HANDLER: usize = 304;
const HANDLER_NAME: &CStr = c"mem_handler";

/// numpy's `PyDataMemAllocator`.
#[repr(C)]
struct Allocator {
    context: *const Handler,
    malloc: unsafe extern "C" fn(*const Handler, usize) -> *mut c_void,
    calloc: unsafe extern "C" fn(*const Handler, usize, usize) -> *mut c_void,
    realloc: unsafe extern "C" fn(*const Handler, *mut c_void, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*const Handler, *mut c_void, usize),
}

/// numpy's `PyDataMem_Handler`, and what its functions are called with.
#[repr(C)]
struct Handler {
    name: [c_char; 127],
    version: u8,
    allocator: Allocator,
    space: Own<AddressSpace>,
    /// Large ones, by their address.
    blocks: Mutex<HashMap<usize, MappingCopy>>,
    /// The memory is not closed any more.
    _counted: Counted,
}

impl Handler {
    fn blocks(&self) -> MutexGuard<'_, HashMap<usize, MappingCopy>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Zeroed memory under the bound; None where there is none left.
    fn map(&self, bytes: usize) -> Option<NonNull<c_void>> {
        let space = self.space.get().ok()?;
        let object = OpenOptions::new().len_max(bytes as u64).memory(space, bytes as u64).ok()?;
        // As a copy its pages go to swap, and come back, as those of programs do.
        // SAFETY: nobody else has the object.
        let mut map = unsafe { MapOptions::new().map_copy(&object) }.ok()?;
        let address = NonNull::new(map.as_mut_ptr().cast::<c_void>())?;
        self.blocks().insert(address.as_ptr() as usize, map);
        Some(address)
    }

    /// How many bytes a block of this handler's own has; None for the C library's.
    fn block_bytes(&self, pointer: *mut c_void) -> Option<usize> {
        // A block begins with a page, which saves most arrays the look.
        if !(pointer as usize).is_multiple_of(PAGE_BYTES) {
            return None;
        }
        if self.space.is_inherited() {
            // Another thread of the parent's may have had the lock. Nothing is written to the map then
            // but by that thread, which did not come along: 0 bytes are left alone.
            return self.blocks.try_lock().map_or(Some(0), |blocks| len_of(&blocks, pointer));
        }
        len_of(&self.blocks(), pointer)
    }

    fn is_large(&self, bytes: usize) -> bool {
        bytes >= LARGE_BYTES && !self.space.is_inherited()
    }
}

fn len_of(blocks: &HashMap<usize, MappingCopy>, pointer: *mut c_void) -> Option<usize> {
    blocks.get(&(pointer as usize)).map(|map| map.len())
}

unsafe extern "C" fn malloc(handler: *const Handler, bytes: usize) -> *mut c_void {
    // SAFETY: handlers are never freed.
    let handler = unsafe { &*handler };
    if handler.is_large(bytes) {
        return handler.map(bytes).map_or(null_mut(), NonNull::as_ptr);
    }
    // SAFETY: any size may be asked for.
    unsafe { libc::malloc(bytes.max(1)) }
}

unsafe extern "C" fn calloc(handler: *const Handler, items: usize, bytes: usize) -> *mut c_void {
    // SAFETY: handlers are never freed.
    let handler = unsafe { &*handler };
    match items.checked_mul(bytes) {
        None => null_mut(),
        Some(all) if handler.is_large(all) => handler.map(all).map_or(null_mut(), NonNull::as_ptr),
        // SAFETY: any size may be asked for.
        Some(all) => unsafe { libc::calloc(all.max(1), 1) },
    }
}

unsafe extern "C" fn realloc(
    handler: *const Handler,
    pointer: *mut c_void,
    bytes: usize,
) -> *mut c_void {
    // SAFETY: handlers are never freed; numpy gives what this handler has given it.
    unsafe {
        let shared = &*handler;
        let block = shared.block_bytes(pointer);
        if block.is_none() && !shared.is_large(bytes) {
            return libc::realloc(pointer, bytes.max(1));
        }
        let before = match block {
            Some(before) => before,
            None if pointer.is_null() => 0,
            None => libc::malloc_usable_size(pointer),
        };
        // A fork's child cannot read what was its parent's.
        let is_there = block.is_none() || !shared.space.is_inherited();
        let fresh = if is_there { malloc(handler, bytes) } else { null_mut() };
        if !fresh.is_null() {
            std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), fresh.cast(), before.min(bytes));
            free(handler, pointer, before);
        }
        fresh
    }
}

unsafe extern "C" fn free(handler: *const Handler, pointer: *mut c_void, _bytes: usize) {
    // SAFETY: handlers are never freed.
    let handler = unsafe { &*handler };
    if handler.block_bytes(pointer).is_none() {
        // SAFETY: numpy gives back what it got, once.
        unsafe { libc::free(pointer) };
    } else if !handler.space.is_inherited() {
        let map = handler.blocks().remove(&(pointer as usize));
        drop(map);
    }
}

/// Has numpy's own arrays of a mebibyte and more made under `memory`, or where numpy makes them by
/// itself. `api` is numpy's table of functions. It is for the calling thread, as numpy has it.
///
/// # Errors
/// ValueError where `api` is something else.
#[pyfunction]
pub fn hand_over(
    py: Python<'_>,
    api: &Bound<'_, PyCapsule>,
    memory: Option<&Memory>,
) -> PyResult<()> {
    let table = api.pointer_checked(None)?.as_ptr().cast::<*const c_void>();
    // SAFETY: numpy's table has the function at this place from 1.22 on, as the package has checked.
    let set_handler = unsafe {
        let place = *table.add(SET_HANDLER);
        if place.is_null() {
            return Err(PyValueError::new_err("this numpy takes no allocator; it needs 1.22"));
        }
        std::mem::transmute::<
            *const c_void,
            unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject,
        >(place)
    };
    let capsule = match memory {
        None => null_mut(),
        Some(memory) => {
            let handler = Box::leak(Box::new(Handler {
                name: [0; 127],
                version: 1,
                allocator: Allocator { context: std::ptr::null(), malloc, calloc, realloc, free },
                space: Own::new(memory.space()?),
                blocks: Mutex::default(),
                _counted: memory.count_buffer(),
            }));
            for (into, byte) in handler.name.iter_mut().zip(b"quire") {
                *into = byte.cast_signed();
            }
            let place: *mut Handler = handler;
            // SAFETY: just made, and nobody else's yet.
            unsafe {
                (*place).allocator.context = place;
                ffi::PyCapsule_New(place.cast(), HANDLER_NAME.as_ptr(), None)
            }
        }
    };
    if memory.is_some() && capsule.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a capsule as numpy wants it, or NULL for numpy's own; what comes back is the one before.
    unsafe {
        let before = set_handler(capsule);
        ffi::Py_XDECREF(capsule);
        if before.is_null() {
            return Err(PyErr::fetch(py));
        }
        ffi::Py_DECREF(before);
    }
    Ok(())
}
