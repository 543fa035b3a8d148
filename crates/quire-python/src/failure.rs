//! Errors as exceptions, and calls that wait.

use std::time::Duration;

use pyo3::create_exception;
use pyo3::exceptions::{PyBufferError, PyException, PyInterruptedError, PyOSError, PyValueError};
use pyo3::prelude::*;
use quire::library::{Error as EngineError, Patience};

create_exception!(
    quire,
    Error,
    PyException,
    "What Quire cannot do, where no exception of Python's says it better."
);

/// How long a call waits before it looks whether Ctrl-C was pressed.
const GLANCE: Duration = Duration::from_millis(200);

/// An error of the engine as an exception.
pub fn raised(error: &EngineError) -> PyErr {
    let text = error.to_string();
    let errno = error.errno().raw_os_error();
    match error {
        EngineError::TooLittleMemory { .. }
        | EngineError::TooMuchMemory { .. }
        | EngineError::BadRange { .. }
        | EngineError::TooLong { .. } => PyValueError::new_err(text),
        EngineError::Pinned { .. } => PyBufferError::new_err(text),
        EngineError::Interrupted { .. } => PyInterruptedError::new_err((errno, text)),
        // The text has the path and the offset, so the exception needs no file name of its own.
        EngineError::NoUserfaultfd { .. }
        | EngineError::NoSwapFile { .. }
        | EngineError::ReadOnly { .. }
        | EngineError::Store(_)
        | EngineError::HeldBack { .. }
        | EngineError::Poisoned { .. } => PyOSError::new_err((errno, text)),
        _ => Error::new_err(text),
    }
}

/// Makes a call that may wait, without the interpreter's lock. Ctrl-C, or what any other signal's
/// handler raises, ends it: what it has begun goes on.
pub fn waiting<T: Send>(
    py: Python<'_>,
    mut call: impl FnMut() -> Result<T, EngineError> + Send,
) -> PyResult<T> {
    loop {
        let result = py.detach(|| Patience::new().timeout(GLANCE).during(&mut call));
        match result {
            Err(EngineError::Interrupted { .. }) => py.check_signals()?,
            result => return result.map_err(|error| raised(&error)),
        }
    }
}
