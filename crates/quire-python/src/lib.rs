//! The native half of the Python package `quire`: memory with a bound, and buffers under it, over the
//! engine's Rust library.
//!
//! Owns what Python objects hold, and the translation: of arguments, of errors into exceptions, of
//! forks, after which what was inherited is refused. What an array is, and files' formats, are the
//! package's Python half (`python/quire`).
//!
//! | file | what is there |
//! |---|---|
//! | `memory` | a bound on memory, which buffers share |
//! | `source` | where bytes are: a file, an object of a server, memory alone |
//! | `buffer` | a range of them, as a buffer of Python's protocol |
//! | `pin` | ranges of buffers that stay in memory and mapped |
//! | `allocator` | numpy's own arrays under a bound |
//! | `own` | what belongs to the process that made it, and what a fork's child has of it |
//! | `report` | what a SIGBUS was about, on standard error |
//! | `failure` | errors as exceptions; calls that wait, which Ctrl-C ends |
//!
//! No fault is served by a thread that needs the interpreter, and every call that waits lets other
//! threads of Python run.

mod allocator;
mod buffer;
mod failure;
mod memory;
mod own;
mod pin;
mod report;
mod size;
mod source;

#[pyo3::pymodule]
mod _quire {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::allocator::hand_over;
    #[pymodule_export]
    use crate::buffer::Buffer;
    #[pymodule_export]
    use crate::failure::Error;
    #[pymodule_export]
    use crate::memory::Memory;
    #[pymodule_export]
    use crate::own::after_fork_in_child;
    #[pymodule_export]
    use crate::pin::Pin;
    #[pymodule_export]
    use crate::source::Source;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::own::count_forks()?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
