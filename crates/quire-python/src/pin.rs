//! Ranges of buffers that stay in memory and mapped.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use quire::library::{Error as EngineError, Pinned, PinnedMut};

use crate::buffer::Mapped;
use crate::failure::waiting;
use crate::own::Own;

/// What keeps a range pinned.
enum Kept {
    Reading(#[expect(dead_code, reason = "kept until it is dropped")] Pinned<'static>),
    Writing(#[expect(dead_code, reason = "kept until it is dropped")] PinnedMut<'static>),
}

struct Held {
    _kept: Kept,
    /// Dropped last: the pin refers to it.
    _mapped: Arc<Mapped>,
}

/// A range of a buffer that stays in memory until it is released.
#[pyclass(frozen, module = "quire")]
pub struct Pin {
    held: Mutex<Option<Own<Held>>>,
}

impl Pin {
    pub fn new(
        py: Python<'_>,
        mapped: Arc<Mapped>,
        range: Range<usize>,
        write: bool,
    ) -> PyResult<Pin> {
        // SAFETY: `Held` keeps the mapping as long as what refers to it, and drops it after that.
        let kept_mapped: &'static Mapped = unsafe { &*Arc::as_ptr(&mapped) };
        let pin = || -> Result<Option<Kept>, EngineError> {
            let range = range.clone();
            Ok(Some(match (write, kept_mapped) {
                (false, Mapped::Read(map)) => Kept::Reading(map.pin(range)?),
                (false, Mapped::Write(map)) => Kept::Reading(map.pin(range)?),
                (false, Mapped::Copy(map)) => Kept::Reading(map.pin(range)?),
                (true, Mapped::Write(map)) => Kept::Writing(map.pin_write(range)?),
                (true, Mapped::Copy(map)) => Kept::Writing(map.pin_write(range)?),
                (true, Mapped::Read(_)) => return Ok(None),
            }))
        };
        let kept = waiting(py, pin)?.ok_or_else(|| {
            let name = kept_mapped.object().name();
            PyValueError::new_err(format!("{name}: it can only be read; pin it without write=True"))
        })?;
        Ok(Pin { held: Mutex::new(Some(Own::new(Held { _kept: kept, _mapped: mapped }))) })
    }
}

#[pymethods]
impl Pin {
    /// The range may leave memory from now on.
    fn release(&self, py: Python<'_>) {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(held));
    }

    fn __enter__(slf: Py<Pin>) -> Py<Pin> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _exception: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.release(py);
    }
}
