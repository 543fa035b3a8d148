//! A bound on memory, which buffers share.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quire::library::{AddressSpace, Delivery};

use crate::failure::raised;
use crate::own::Own;
use crate::report;
use crate::size::Size;

/// A segment of the swap file.
const SEGMENT_BYTES: u64 = 256 << 10;

/// A bound on memory. See `quire.Memory`, which says how it is made.
#[pyclass(frozen, weakref, subclass, module = "quire")]
pub struct Memory {
    limit: usize,
    /// None once it is closed.
    space: Mutex<Option<Own<AddressSpace>>>,
    /// Buffers that are open under it.
    buffers: Arc<AtomicUsize>,
}

/// One buffer more of a memory, which is not closed while this exists.
pub struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        // Relaxed: it is read and changed under the interpreter's lock.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Memory {
    fn place(&self) -> MutexGuard<'_, Option<Own<AddressSpace>>> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address space.
    pub fn space(&self) -> PyResult<AddressSpace> {
        let place = self.place();
        let space = place.as_ref().ok_or_else(|| {
            PyValueError::new_err("the memory is closed; make another by quire.Memory(limit)")
        })?;
        Ok(space.get()?.clone())
    }

    pub fn count_buffer(&self) -> Counted {
        self.buffers.fetch_add(1, Ordering::Relaxed);
        Counted(Arc::clone(&self.buffers))
    }
}

#[pymethods]
impl Memory {
    #[new]
    #[pyo3(signature = (limit, swap, swap_max, delivery, workers, store_deadline))]
    fn new(
        py: Python<'_>,
        limit: Size,
        swap: Option<PathBuf>,
        swap_max: Size,
        delivery: &str,
        workers: Option<usize>,
        store_deadline: Option<f64>,
    ) -> PyResult<Memory> {
        let bytes = usize::try_from(limit.0).unwrap_or(usize::MAX);
        let mut builder = AddressSpace::builder().memory(bytes);
        builder = builder.delivery(match delivery {
            "handlers" => Delivery::Handlers,
            "inline" => Delivery::Inline,
            other => {
                return Err(PyValueError::new_err(format!(
                    "delivery {other:?} is not known; give \"handlers\" or \"inline\""
                )));
            }
        });
        if let Some(folder) = swap {
            builder = builder.swap(folder, swap_max.0);
        }
        if let Some(workers) = workers {
            builder = builder.workers(workers);
        }
        if let Some(seconds) = store_deadline {
            let deadline = Duration::try_from_secs_f64(seconds).map_err(|error| {
                PyValueError::new_err(format!("store_deadline {seconds} s: {error}"))
            })?;
            builder = builder.store_deadline(deadline);
        }
        report::install()?;
        let space = py.detach(|| builder.build()).map_err(|error| raised(&error))?;
        Ok(Memory {
            limit: space.memory(),
            space: Mutex::new(Some(Own::new(space))),
            buffers: Arc::default(),
        })
    }

    /// Bytes that may be held.
    #[getter]
    fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes held now.
    #[getter]
    fn held(&self) -> PyResult<usize> {
        Ok(self.space()?.held().0)
    }

    /// Whether a system call can be given bytes that are not in memory.
    #[getter]
    fn serves_system_calls(&self) -> PyResult<bool> {
        Ok(self.space()?.serves_system_calls())
    }

    #[getter]
    fn closed(&self) -> bool {
        self.place().is_none()
    }

    /// What it holds and has done, all in bytes but for the counters, which are those of /proc/vmstat.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let space = self.space()?;
        let (held, held_max) = space.held();
        let (packed, segments) = space.swap_usage();
        let stats = PyDict::new(py);
        stats.set_item("limit", self.limit)?;
        stats.set_item("held", held)?;
        stats.set_item("held_max", held_max)?;
        stats.set_item("packed", packed)?;
        stats.set_item("swap_file", u64::from(segments) * SEGMENT_BYTES)?;
        stats.set_item("pinned", space.pinned().0)?;
        stats.set_item("buffers", self.buffers.load(Ordering::Relaxed))?;
        for (name, value) in space.counters() {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }

    /// Ends it. Buffers under it must be gone.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let buffers = self.buffers.load(Ordering::Relaxed);
        let mut place = self.place();
        let Some(space) = place.as_ref() else { return Ok(()) };
        space.get()?;
        if buffers != 0 {
            return Err(PyBufferError::new_err(format!(
                "the memory cannot be closed while {buffers} arrays or buffers are under it; delete \
                 them, and their views, first"
            )));
        }
        let space = place.take();
        drop(place);
        py.detach(|| drop(space));
        Ok(())
    }

    fn __enter__(slf: Py<Memory>) -> Py<Memory> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        exception: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        match self.close(py) {
            // The exception that ends the block holds the arrays; it says more than this one.
            Err(error) if error.is_instance_of::<PyBufferError>(py) && !exception.is_none() => {
                Ok(())
            }
            closed => closed,
        }
    }
}
