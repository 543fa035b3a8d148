//! Sizes, as numbers of bytes or as text.

use parse_size::Config;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};

/// A number of bytes: an `int`, or text as `quire run` takes it ("512M", "1.5GiB"; 1024-based).
pub struct Size(pub u64);

impl<'a, 'py> FromPyObject<'a, 'py> for Size {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Size> {
        if let Ok(text) = value.cast::<PyString>() {
            let text = text.to_string_lossy();
            let bytes = Config::new().with_binary().parse_size(text.trim());
            return bytes.map(Size).map_err(|error| {
                PyValueError::new_err(format!(
                    "{text:?} is not a size: {error}; write a number and K, M, G or T, as 512M"
                ))
            });
        }
        if let Ok(number) = value.cast::<PyInt>() {
            return number.extract().map(Size).map_err(|_| {
                PyValueError::new_err(format!(
                    "{number:?} bytes are not a size; give 0 to 2^64 - 1"
                ))
            });
        }
        let given = value.get_type().name()?;
        Err(PyTypeError::new_err(format!("a size is an int or a str as \"512M\", not {given}")))
    }
}
