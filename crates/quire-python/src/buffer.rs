//! A range of bytes as a buffer of Python's protocol.

use std::ffi::{CString, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use quire::library::{Mapping, MappingCopy, MappingMut, Pattern};

use crate::failure::{raised, waiting};
use crate::memory::{Counted, Memory};
use crate::own::{Bequest, Inheritance, Own};
use crate::pin::Pin;
use crate::report::Reported;

/// Ranges whose reads are begun before the first of them is waited for.
const PREFETCH_DEPTH: usize = 64;

/// A mapping, by its rights.
pub enum Mapped {
    Read(Mapping),
    Write(MappingMut),
    Copy(MappingCopy),
}

/// Does the same with a mapping of any rights.
macro_rules! of_any {
    ($mapped:expr, $map:ident => $what:expr) => {
        match $mapped {
            Mapped::Read($map) => $what,
            Mapped::Write($map) => $what,
            Mapped::Copy($map) => $what,
        }
    };
}

impl Mapped {
    pub fn address(&self) -> usize {
        of_any!(self, map => map.as_ptr() as usize)
    }

    pub fn len(&self) -> usize {
        of_any!(self, map => map.len())
    }

    pub fn object(&self) -> &quire::library::Object {
        of_any!(self, map => map.object())
    }
}

/// What the bytes are: items of a format, in C's or Fortran's order.
pub struct Layout {
    format: CString,
    itemsize: isize,
    shape: Vec<isize>,
    strides: Vec<isize>,
    is_c_order: bool,
    is_fortran_order: bool,
}

impl Layout {
    pub fn new(format: &str, itemsize: usize, shape: Vec<usize>, order: &str) -> PyResult<Layout> {
        let too_large =
            || PyValueError::new_err(format!("{shape:?} items are more than memory can have"));
        let items =
            shape.iter().try_fold(itemsize, |bytes, &items| bytes.checked_mul(items.max(1)));
        items.and_then(|bytes| isize::try_from(bytes).ok()).ok_or_else(too_large)?;
        let is_wanted_fortran = match order {
            "C" => false,
            "F" => true,
            other => {
                return Err(PyValueError::new_err(format!("order {other:?}: give \"C\" or \"F\"")));
            }
        };
        let shape: Vec<isize> = shape.iter().map(|&items| items as isize).collect();
        let mut strides = vec![0; shape.len()];
        let mut stride = itemsize as isize;
        for at in 0..shape.len() {
            let axis = if is_wanted_fortran { at } else { shape.len() - 1 - at };
            strides[axis] = stride;
            stride *= shape[axis].max(1);
        }
        // Axes of one item have no order.
        let is_flat = shape.iter().filter(|&&items| items != 1).count() <= 1 || shape.contains(&0);
        Ok(Layout {
            format: CString::new(format)?,
            itemsize: itemsize as isize,
            shape,
            strides,
            is_c_order: is_flat || !is_wanted_fortran,
            is_fortran_order: is_flat || is_wanted_fortran,
        })
    }

    /// How many bytes the items have; None where no memory has so many.
    pub fn bytes(&self) -> Option<usize> {
        let items = self.shape.iter().try_fold(self.itemsize, |bytes, &n| bytes.checked_mul(n));
        items.and_then(|bytes| usize::try_from(bytes).ok())
    }
}

/// What a buffer has while it is open.
struct Opened {
    mapped: Own<Arc<Mapped>>,
    bequest: Option<Bequest>,
    reported: Reported,
    /// Dropped last: the memory may be closed from then on.
    counted: Counted,
}

/// A range of bytes under a [`Memory`](crate::memory::Memory)'s bound. Ranges of its methods are in
/// bytes from its first one, and end where it ends.
#[pyclass(frozen, weakref, module = "quire")]
pub struct Buffer {
    /// None once it is closed.
    opened: Mutex<Option<Opened>>,
    /// Views that other objects have by the buffer protocol.
    views: AtomicUsize,
    layout: Layout,
    address: usize,
    /// Of the first byte, in what it is of.
    offset: u64,
    is_read_only: bool,
    name: String,
    memory: Py<Memory>,
}

impl Buffer {
    pub fn new(
        py: Python<'_>,
        mapped: Arc<Mapped>,
        offset: u64,
        layout: Layout,
        inheritance: Option<Inheritance>,
        memory: Py<Memory>,
    ) -> Buffer {
        let name = mapped.object().name().to_owned();
        Buffer {
            views: AtomicUsize::new(0),
            layout,
            address: mapped.address(),
            offset,
            is_read_only: matches!(*mapped, Mapped::Read(_)),
            opened: Mutex::new(Some(Opened {
                bequest: inheritance.map(|inheritance| Bequest::new(py, inheritance)),
                reported: Reported::new(&name, offset, mapped.address(), mapped.len()),
                mapped: Own::new(mapped),
                counted: memory.get().count_buffer(),
            })),
            name,
            memory,
        }
    }

    fn place(&self) -> MutexGuard<'_, Option<Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mapping, for a call of this process.
    pub fn mapped(&self) -> PyResult<Arc<Mapped>> {
        let place = self.place();
        let opened = place.as_ref().ok_or_else(|| self.is_closed())?;
        Ok(Arc::clone(opened.mapped.get()?))
    }

    fn is_closed(&self) -> PyErr {
        PyValueError::new_err(format!("{}: the buffer is closed", self.name))
    }

    /// Fails where the bytes are not there in this process.
    fn check_there(&self, py: Python<'_>) -> PyResult<()> {
        let place = self.place();
        let opened = place.as_ref().ok_or_else(|| self.is_closed())?;
        match &opened.bequest {
            Some(bequest) if bequest.is_mapped_by_kernel(py) => Ok(()),
            _ => opened.mapped.get().map(|_| ()),
        }
    }

    /// Ends it; what is dirty is written without the interpreter's lock.
    fn end(&self, py: Python<'_>, opened: Opened) {
        let Opened { mapped, bequest, reported, counted } = opened;
        if let Some(bequest) = bequest {
            bequest.withdraw(py);
        }
        // Its lock is taken with the interpreter's only, so that a fork's child finds it unlocked.
        drop(reported);
        py.detach(|| drop(mapped));
        drop(counted);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let opened = self.opened.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(opened) = opened {
            Python::attach(|py| self.end(py, opened));
        }
    }
}

#[pymethods]
impl Buffer {
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.layout.bytes().unwrap_or(0)
    }

    #[getter]
    fn itemsize(&self) -> isize {
        self.layout.itemsize
    }

    #[getter]
    fn format(&self) -> std::borrow::Cow<'_, str> {
        self.layout.format.to_string_lossy()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.layout.shape)
    }

    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.layout.strides)
    }

    #[getter]
    fn readonly(&self) -> bool {
        self.is_read_only
    }

    /// Where the first byte is in the file.
    #[getter]
    fn offset(&self) -> u64 {
        self.offset
    }

    #[getter]
    fn memory(&self, py: Python<'_>) -> Py<Memory> {
        self.memory.clone_ref(py)
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    #[getter]
    fn closed(&self) -> bool {
        self.place().is_none()
    }

    /// Whether the bytes are there in this process: a fork's child has those of files that are only read.
    #[getter]
    fn is_there(&self, py: Python<'_>) -> bool {
        self.check_there(py).is_ok()
    }

    /// Writes what was written to the file, and makes it durable.
    fn flush(&self, py: Python<'_>, start: usize, stop: usize) -> PyResult<()> {
        let mapped = self.mapped()?;
        match &*mapped {
            Mapped::Write(map) => waiting(py, || map.flush_range(start..stop)),
            Mapped::Read(_) | Mapped::Copy(_) => Ok(()),
        }
    }

    /// Drops what is in memory of it, after writing what was written; returns how many bytes.
    fn evict(&self, py: Python<'_>, start: usize, stop: usize) -> PyResult<usize> {
        self.flush(py, start, stop)?;
        let mapped = self.mapped()?;
        Ok(py.detach(|| of_any!(&*mapped, map => map.dont_need(start..stop))))
    }

    /// Reads ranges into memory, many at once; waits until each was read, and mapped as far as memory
    /// goes, or returns at once.
    fn prefetch(&self, py: Python<'_>, ranges: Vec<(usize, usize)>, wait: bool) -> PyResult<()> {
        let mapped = self.mapped()?;
        let begin = |&(start, stop): &(usize, usize)| {
            of_any!(&*mapped, map => map.will_need(start..stop));
        };
        if !wait {
            py.detach(|| ranges.iter().for_each(begin));
            return Ok(());
        }
        py.detach(|| ranges.iter().take(PREFETCH_DEPTH).for_each(begin));
        for (at, &(start, stop)) in ranges.iter().enumerate() {
            waiting(py, || {
                ranges.get(at + PREFETCH_DEPTH).into_iter().for_each(begin);
                of_any!(&*mapped, map => map.populate(start..stop))
            })?;
        }
        Ok(())
    }

    /// Says how a range will be used.
    fn advise(&self, py: Python<'_>, how: &str, start: usize, stop: usize) -> PyResult<()> {
        let pattern = match how {
            "normal" => Pattern::Normal,
            "sequential" => Pattern::Sequential,
            "random" => Pattern::Random,
            "willneed" => return self.prefetch(py, vec![(start, stop)], false),
            "dontneed" => return self.evict(py, start, stop).map(|_| ()),
            other => {
                return Err(PyValueError::new_err(format!(
                    "advice {other:?} is not known; give \"normal\", \"sequential\", \"random\", \
                     \"willneed\" or \"dontneed\""
                )));
            }
        };
        let mapped = self.mapped()?;
        let said = of_any!(&*mapped, map => map.advise(pattern, start..stop));
        said.map_err(|error| raised(&error))
    }

    /// The bytes of a range, with an exception where they cannot be read.
    fn try_read<'py>(
        &self,
        py: Python<'py>,
        start: usize,
        stop: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mapped = self.mapped()?;
        let len = stop.min(mapped.len()).saturating_sub(start);
        PyBytes::new_with(py, len, |into| {
            let read = || of_any!(&*mapped, map => map.try_read(start, into)).map(|_| ());
            waiting(py, read)
        })
    }

    /// Keeps a range in memory; with `write`, it can be written without a fault too.
    fn pin(&self, py: Python<'_>, start: usize, stop: usize, write: bool) -> PyResult<Pin> {
        Pin::new(py, self.mapped()?, start..stop, write)
    }

    /// Bytes in memory of the object, those of them that are dirty, and those that are mapped here.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mapped = self.mapped()?;
        let (cached, dirty) = mapped.object().cached();
        let pages = of_any!(&*mapped, map => map.mapped_pages());
        let stats = PyDict::new(py);
        stats.set_item("nbytes", self.nbytes())?;
        stats.set_item("cached", cached)?;
        stats.set_item("dirty", dirty)?;
        stats.set_item("mapped", pages * 4096)?;
        Ok(stats)
    }

    /// Writes what is dirty, and unmaps. Fails with BufferError while there are views.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut place = self.place();
        let Some(opened) = place.as_ref() else { return Ok(()) };
        let views = self.views.load(Ordering::Relaxed);
        if views != 0 || Arc::strong_count(opened.mapped.get()?) > 1 {
            return Err(PyBufferError::new_err(format!(
                "{}: the buffer cannot be closed while there are views of it, pins, or calls; there \
                 are {views} views",
                self.name
            )));
        }
        let opened = place.take();
        drop(place);
        if let Some(opened) = opened {
            self.end(py, opened);
        }
        Ok(())
    }

    fn __enter__(slf: Py<Buffer>) -> Py<Buffer> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _exception: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }

    fn __len__(&self) -> usize {
        self.layout.shape.first().map_or(0, |&items| items as usize)
    }

    /// Fills a view in, which lives no longer than the buffer.
    ///
    /// # Safety
    /// `view` is the interpreter's.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: the caller's; a view that was refused is of nothing.
        unsafe { (*view).obj = std::ptr::null_mut() };
        this.check_there(slf.py())?;
        let wants = |flag: c_int| flags & flag == flag;
        let refuse = |why: &str| PyBufferError::new_err(format!("{}: {why}", this.name));
        let layout = &this.layout;
        if wants(ffi::PyBUF_WRITABLE) && this.is_read_only {
            return Err(refuse("it can only be read"));
        }
        if !layout.is_c_order && (wants(ffi::PyBUF_C_CONTIGUOUS) || !wants(ffi::PyBUF_STRIDES)) {
            return Err(refuse("it is in Fortran's order, and C's is wanted"));
        }
        if !layout.is_fortran_order && wants(ffi::PyBUF_F_CONTIGUOUS) {
            return Err(refuse("it is in C's order, and Fortran's is wanted"));
        }
        let pointer = |wanted: bool, items: &[isize]| {
            if wanted { items.as_ptr().cast_mut() } else { std::ptr::null_mut() }
        };
        this.views.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the view is the caller's to fill; what it points to lives as long as this buffer,
        // which the view keeps, and is changed by nobody.
        unsafe {
            (*view).buf = this.address as *mut c_void;
            (*view).len = this.nbytes() as isize;
            (*view).readonly = c_int::from(this.is_read_only);
            (*view).itemsize = layout.itemsize;
            (*view).format = if wants(ffi::PyBUF_FORMAT) {
                layout.format.as_ptr().cast_mut()
            } else {
                std::ptr::null_mut()
            };
            (*view).ndim = layout.shape.len() as c_int;
            (*view).shape = pointer(wants(ffi::PyBUF_ND), &layout.shape);
            (*view).strides = pointer(wants(ffi::PyBUF_STRIDES), &layout.strides);
            (*view).suboffsets = std::ptr::null_mut();
            (*view).internal = std::ptr::null_mut();
            (*view).obj = slf.into_any().into_ptr();
        }
        Ok(())
    }

    /// # Safety
    /// `_view` is one of this buffer's, which is not used any more.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.views.fetch_sub(1, Ordering::Relaxed);
    }
}
