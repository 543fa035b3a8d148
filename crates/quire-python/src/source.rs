//! Where buffers' bytes are: files, objects of servers, and memory alone.

use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quire::library::{MapOptions, Object, OpenOptions};
use quire::store::{FileOptions, FileStore};
use quire_url::{OpenUrl as _, UrlOptions};
use rustix::io::fcntl_dupfd_cloexec;

use crate::buffer::{Buffer, Layout, Mapped};
use crate::failure::{raised, waiting};
use crate::memory::Memory;
use crate::own::{Inheritance, Own};
use crate::size::Size;

/// The size of a page.
const PAGE_BYTES: u64 = 4096;

/// An opened object, of which buffers map ranges.
#[pyclass(frozen, module = "quire._quire")]
pub struct Source {
    object: Own<Object>,
    memory: Py<Memory>,
    /// What a fork's child can map: a plain file that is only read.
    file: Option<File>,
}

impl Source {
    fn new(memory: Py<Memory>, object: Object, file: Option<File>) -> Source {
        Source { object: Own::new(object), memory, file }
    }
}

#[pymethods]
impl Source {
    /// A file that is open already. `name` is for messages; where it ends in `.zst`, and the file is
    /// neither writable nor `plain`, the bytes are those that were packed.
    #[staticmethod]
    fn of_file(
        py: Python<'_>,
        memory: Py<Memory>,
        descriptor: RawFd,
        name: &str,
        writable: bool,
        plain: bool,
    ) -> PyResult<Source> {
        let space = memory.get().space()?;
        // SAFETY: the caller's Python object keeps it open, and has it checked.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let duplicate = || -> PyResult<File> {
            let fd = fcntl_dupfd_cloexec(descriptor, 0).map_err(std::io::Error::from)?;
            Ok(File::from(fd))
        };
        let file = duplicate()?;
        let how = if writable { FileOptions::read_write() } else { FileOptions::read_only() };
        let is_packed = !writable && !plain && name.ends_with(".zst");
        let inherited = if writable || is_packed { None } else { Some(duplicate()?) };
        let options = OpenOptions::new().write(writable).plain(plain);
        let object = py.detach(|| {
            let store = FileStore::from_file(file, name, &how)?;
            if writable {
                return options.open_store(&space, store);
            }
            options.open_read_only(&space, store)
        });
        Ok(Source::new(memory, object.map_err(|error| raised(&error))?, inherited))
    }

    /// An object of a server.
    #[staticmethod]
    fn of_url(
        py: Python<'_>,
        memory: Py<Memory>,
        url: &str,
        plain: bool,
        cache: Option<PathBuf>,
        cache_max: Size,
    ) -> PyResult<Source> {
        let space = memory.get().space()?;
        let mut of_url = UrlOptions::new();
        if let Some(cache) = cache {
            of_url = of_url.cache(cache, cache_max.0);
        }
        let options = OpenOptions::new().plain(plain);
        let object = py.detach(|| options.open_url(&space, url, &of_url));
        Ok(Source::new(memory, object.map_err(|error| raised(&error))?, None))
    }

    /// So many zeros, in memory alone.
    #[staticmethod]
    fn of_memory(py: Python<'_>, memory: Py<Memory>, len: u64) -> PyResult<Source> {
        let space = memory.get().space()?;
        let object = py.detach(|| OpenOptions::new().len_max(len).memory(&space, len));
        Ok(Source::new(memory, object.map_err(|error| raised(&error))?, None))
    }

    #[getter]
    fn name(&self) -> PyResult<&str> {
        Ok(self.object.get()?.name())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.object.get()?.len()).unwrap_or(usize::MAX))
    }

    /// Makes the file so long.
    fn set_len(&self, py: Python<'_>, len: u64) -> PyResult<()> {
        let object = self.object.get()?;
        waiting(py, || object.set_len(len))
    }

    /// The bytes of a range, as far as there are any.
    fn read_at<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        len: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let object = self.object.get()?;
        let there = object.len().saturating_sub(offset);
        let len = len.min(usize::try_from(there).unwrap_or(usize::MAX));
        PyBytes::new_with(py, len, |into| waiting(py, || object.read_at(offset, into)).map(|_| ()))
    }

    /// Maps a range as numpy.memmap's modes say: "r", "r+" or "c".
    #[allow(clippy::too_many_arguments, reason = "they are Python's, which names them")]
    fn map(
        &self,
        py: Python<'_>,
        mode: &str,
        offset: u64,
        len: u64,
        format: &str,
        itemsize: usize,
        shape: Vec<usize>,
        order: &str,
    ) -> PyResult<Buffer> {
        let object = self.object.get()?;
        let layout = Layout::new(format, itemsize, shape, order)?;
        if layout.bytes().is_none_or(|bytes| bytes as u64 > len) {
            return Err(PyValueError::new_err(format!(
                "{}: {len} bytes are fewer than the shape says",
                object.name()
            )));
        }
        let options = MapOptions::new().offset(offset).len(len);
        let mapped = py.detach(|| {
            // SAFETY: what numpy's memory maps ask of their users: bytes that are written by several
            // at once are anyone's. Rust makes no slice of them here.
            unsafe {
                Ok(match mode {
                    "r+" => Mapped::Write(options.map_mut(object)?),
                    "c" => Mapped::Copy(options.map_copy(object)?),
                    _ => Mapped::Read(options.map(object)?),
                })
            }
        });
        let mapped = mapped.map_err(|error| raised(&error))?;
        let lead = offset % PAGE_BYTES;
        let file = self.file.as_ref().filter(|_| mode == "r");
        let inheritance = file.map(|file| -> PyResult<Inheritance> {
            Ok(Inheritance {
                file: file.try_clone()?,
                offset: offset - lead,
                address: mapped.address() - lead as usize,
                len: (lead + len) as usize,
            })
        });
        let (inheritance, memory) = (inheritance.transpose()?, self.memory.clone_ref(py));
        Ok(Buffer::new(py, Arc::new(mapped), offset, layout, inheritance, memory))
    }
}
