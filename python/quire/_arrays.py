"""Arrays: a subclass of numpy's, over buffers."""

from __future__ import annotations

import builtins
import operator
import os
import warnings
from collections.abc import Sequence
from math import prod
from types import TracebackType
from typing import IO, Any, Literal, Self, SupportsIndex, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import _fork
from ._buffers import Order, Path, check_there, is_url, map_source, open_source
from ._memory import Memory, Stats, default_memory, size
from ._quire import Buffer, Pin, Source

Shape = SupportsIndex | Sequence[SupportsIndex]
Mode = Literal["r", "r+", "w+", "c", "readonly", "copyonwrite", "readwrite", "write"]

_MODES = {"readonly": "r", "copyonwrite": "c", "readwrite": "r+", "write": "w+"}
#: An array without a file that is larger is pickled with a warning.
_PICKLED_SILENTLY = 64 << 20


class memmap(np.ndarray[Any, Any]):
    """An array whose bytes are in a file, or nowhere, and in memory as far as a limit allows.

    The arguments are those of numpy.memmap, and it can stand for that. What was written reaches the file
    some time later, at the latest when the array and all its views are gone, or the interpreter ends:
    `flush` waits for it. Views keep the array alive.

    Parameters
    ----------
    filename : path or file object
        A file; with mode "r" or "c" also the URL of an object (``s3://``, ``https://``), and a file whose
        name ends in ``.zst``, which appears as what was packed.
    dtype : data type, optional
        Of the items: uint8 by default.
    mode : {"r+", "r", "w+", "c"}, optional
        To be read and written, to be read, made anew, or written in memory only.
    offset : int, optional
        Where the first item is, in bytes.
    shape : int or sequence of int, optional
        By default what there is, in one dimension.
    order : {"C", "F"}, optional
        The order of the items.
    memory : Memory, optional
        What it is under; by default the default one.
    cache, cache_max : path, int or str, optional
        A folder that keeps what was fetched of an object, and how many bytes it keeps ("4G").

    Attributes
    ----------
    filename : path or None
        None without a file.
    offset : int
        Where the array's first item is in the file, in bytes; for a view, its array's.
    mode : str

    Raises
    ------
    ValueError
        A mode, a shape or an offset that does not fit the file.
    OSError
        What the file system says.
    """

    __array_priority__ = -100.0

    _mmap: Buffer | None
    filename: Path | None
    offset: int | None
    mode: str | None
    _is_plain: bool

    def __new__(
        cls,
        filename: Path | IO[bytes],
        dtype: DTypeLike = np.uint8,
        mode: Mode = "r+",
        offset: int = 0,
        shape: Shape | None = None,
        order: Order = "C",
        *,
        memory: Memory | None = None,
        cache: Path | None = None,
        cache_max: int | str = "4G",
    ) -> Self:
        how = _MODES.get(mode, mode)
        if how not in ("r", "r+", "w+", "c"):
            known = ["r", "c", "r+", "w+", *_MODES]
            raise ValueError(f"mode must be one of {known!r} (got {mode!r})")
        if how == "w+" and shape is None:
            raise ValueError("shape must be given if mode == 'w+'")
        if offset < 0:
            raise ValueError(f"{filename}: an offset of {offset} bytes is before the file")
        items = _dtype(dtype)
        wanted = None if shape is None else _shape(shape, items)
        source = open_source(filename, how, memory, cache=cache, cache_max=cache_max)
        if wanted is None:
            there = len(source) - offset
            if there % items.itemsize:
                raise ValueError(
                    f"{filename}: Size of available data is not a multiple of the data-type size: "
                    f"{there} bytes from {offset} on, items of {items.itemsize}"
                )
            wanted = (max(there, 0) // items.itemsize,)
        count = prod(wanted) * items.itemsize
        if how in ("r+", "w+"):
            # An empty file cannot be mapped, so an empty array takes a byte.
            if len(source) < max(offset + count, 1):
                source.set_len(max(offset + count, 1))
            if count == 0:
                offset_mapped = min(offset, len(source) - 1)
                return cls._over(source, how, offset_mapped, items, wanted, order, filename, offset)
        check_there(filename, len(source) - offset, count, offset)
        return cls._over(source, how, offset, items, wanted, order, filename, offset)

    @classmethod
    def _over(
        cls,
        source: Source,
        mode: str,
        at: int,
        items: np.dtype[Any],
        shape: tuple[int, ...],
        order: Order,
        filename: Path | IO[bytes] | None = None,
        offset: int = 0,
    ) -> Self:
        """An array of the bytes of a source from `at` on."""
        count = max(prod(shape) * items.itemsize, 1)
        # Without a file it is a copy of zeros: its pages go to swap, and come back, as those of programs do.
        how = mode if filename is not None else "c"
        buffer = map_source(source, how, at, count, "B", 1, (count,), "C")
        self = super().__new__(cls, shape, items, buffer=cast(Any, buffer), order=order)
        self._mmap = buffer
        self.mode = mode
        self.offset = offset
        self.filename = _full_name(filename)
        return self

    def __array_finalize__(self, obj: object) -> None:
        # An empty slice shares nothing, but is still a view.
        if (
            isinstance(obj, memmap)
            and obj._mmap is not None
            and self.base is not None
            and (self.size == 0 or np.may_share_memory(self, obj))
        ):
            self._mmap = obj._mmap
            self.filename = obj.filename
            self.offset = obj.offset
            self.mode = obj.mode
        else:
            self._mmap = None
            self.filename = None
            self.offset = None
            self.mode = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        array = super().__array_wrap__(array, context)
        # As numpy.memmap: what is computed is no memory map, but where a subclass wants it.
        if self is array or type(self) is not memmap:
            return array
        return array[()] if return_scalar else array.view(np.ndarray)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if type(found) is memmap and found._mmap is None:
            return found.view(np.ndarray)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Flushes; the memory goes with the last view."""
        self.flush()

    def _range(self) -> tuple[Buffer, int, int]:
        """The buffer, and which of its bytes the array's items lie in."""
        if self._mmap is None:
            raise ValueError("this array is a copy in plain memory: no file or limit is behind it")
        first, end = _bounds(self)
        if self.size == 0:
            return self._mmap, 0, 0
        return self._mmap, first - self._mmap.address, end - self._mmap.address

    @property
    def memory(self) -> Memory:
        """The memory that the array is under."""
        return cast(Memory, self._range()[0].memory)

    def flush(self) -> None:
        """Writes what was written of the array or view to the file, and makes it durable.

        Raises
        ------
        OSError
            What could not be written, which is tried again later.
        """
        # As numpy's: a copy has nothing to write.
        if self._mmap is not None:
            buffer, start, stop = self._range()
            buffer.flush(start, stop)

    def evict(self) -> int:
        """Drops the array or view from memory, after writing what was written.

        Returns
        -------
        int
            How many bytes were dropped.
        """
        buffer, start, stop = self._range()
        return buffer.evict(start, stop)

    def prefetch(self, rows: ArrayLike | None = None, *, wait: bool = True) -> None:
        """Reads the array or view into memory, many reads at once, as far as the limit allows.

        Parameters
        ----------
        rows : array of int, optional
            Only these items along the first axis, in any order: ``a.prefetch(i); a[i]``.
        wait : bool, optional
            Whether it returns when all is there, or at once. Only who waits learns of errors.

        Raises
        ------
        OSError
            What cannot be read, with the file and the offset.
        IndexError
            A row that there is not.
        """
        buffer, start, stop = self._range()
        ranges = [(start, stop)] if rows is None else self._ranges_of(rows, buffer)
        buffer.prefetch(ranges, wait)

    def _ranges_of(self, rows: ArrayLike, buffer: Buffer) -> list[tuple[int, int]]:
        """The bytes of items along the first axis, those that touch as one."""
        if self.ndim == 0:
            raise IndexError("an array without axes has no rows")
        at = np.unique(np.asarray(rows))
        if at.size == 0:
            return []
        if not np.issubdtype(at.dtype, np.integer):
            raise TypeError(f"rows are integers, not {at.dtype}")
        if at[0] < -len(self) or at[-1] >= len(self):
            raise IndexError(f"rows {at[0]} to {at[-1]} of an array that has {len(self)}")
        at = np.unique(np.where(at < 0, at + len(self), at)).astype(np.int64)
        low, high = _bounds(self[0:1])
        firsts = np.sort(at * self.strides[0]) + (low - buffer.address)
        ends = firsts + (high - low)
        breaks = np.flatnonzero(firsts[1:] > ends[:-1])
        starts, stops = firsts[np.r_[0, breaks + 1]], ends[np.r_[breaks, len(ends) - 1]]
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def advise(self, how: Literal["normal", "sequential", "random", "willneed", "dontneed"]) -> None:
        """Says how the array or view will be used, as madvise does: ``"random"`` reads nothing ahead."""
        buffer, start, stop = self._range()
        buffer.advise(how, start, stop)

    def pin(self, write: bool = False) -> Pin:
        """Keeps the array or view in memory, until the result is released or its block ends.

        The kernel can be given these bytes whatever the memory's delivery is: ``with a.pin():
        sock.send(a)``.

        Parameters
        ----------
        write : bool, optional
            Whether the kernel writes them: ``with a.pin(write=True): f.readinto(a)``.

        Raises
        ------
        Error
            More would be pinned than half of the limit.
        OSError
            What cannot be read.
        """
        buffer, start, stop = self._range()
        return buffer.pin(start, stop, write)

    def try_read(self) -> NDArray[Any]:
        """A copy in plain memory, with an exception instead of a SIGBUS where bytes cannot be read.

        Raises
        ------
        OSError
            What cannot be read, with the file and the offset.
        """
        buffer, start, stop = self._range()
        copy = np.ndarray(
            self.shape,
            self.dtype,
            buffer.try_read(start, stop),
            self.__array_interface__["data"][0] - buffer.address - start,
            self.strides,
        )
        return copy.copy(order="K")

    def stats(self) -> Stats:
        """What is in memory of the array's file.

        Returns
        -------
        Stats
            ``nbytes`` of the array; ``cached`` bytes of its file in memory, ``dirty`` of them not yet written,
            ``mapped`` of them mapped.
        """
        return Stats(self._range()[0].stats(), nbytes=self.nbytes)

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:
        if self._mmap is None or self.memory.serves_system_calls or sep or not self.flags.c_contiguous:
            super().tofile(fid, sep, format)
            return
        # The kernel would be given bytes that are not in memory.
        if isinstance(fid, (str, os.PathLike)):
            with builtins.open(fid, "wb") as file:
                self.tofile(file)
            return
        flat = self.reshape(-1)
        step = max(self.memory.limit // 8 // self.itemsize, 1)
        for at in range(0, flat.size, step):
            part = cast(memmap, flat[at : at + step])
            with part.pin():
                np.ndarray.tofile(part, fid)

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._mmap is None or self.mode != "r" or self.filename is None or self.dtype.hasobject:
            if self._mmap is not None and self.nbytes > _PICKLED_SILENTLY:
                warnings.warn(
                    f"all {size(self.nbytes)} of an array are pickled; an array of a file that was opened with mode "
                    "'r' is pickled as the file's name",
                    stacklevel=2,
                )
            return np.asarray(self).__reduce_ex__(protocol)
        buffer, start, stop = self._range()
        lead = self.__array_interface__["data"][0] - buffer.address - start if self.size else 0
        where = (os.fspath(self.filename), buffer.offset + start, stop - start, lead)
        return _reopen, (type(self), *where, self.dtype, self.shape, self.strides, buffer.memory.limit)


def _reopen(
    cls: type[memmap],
    path: str,
    at: int,
    count: int,
    lead: int,
    items: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    limit: int,
) -> memmap:
    """What a pickled array of a file is."""
    source = open_source(path, "r", default_memory(limit))
    check_there(path, len(source) - at, count, at)
    buffer = source.map("r", at, max(count, 1), "B", 1, (max(count, 1),), "C")
    self = np.ndarray.__new__(cls, shape, items, cast(Any, buffer), lead, strides)
    self._mmap, self.mode, self.offset, self.filename = buffer, "r", at + lead, path
    return self


_fork.guard(memmap)


def open(
    path: Path | IO[bytes],
    mode: Mode = "r",
    dtype: DTypeLike = np.uint8,
    shape: Shape | None = None,
    offset: int = 0,
    order: Order = "C",
    *,
    memory: Memory | None = None,
    cache: Path | None = None,
    cache_max: int | str = "4G",
) -> memmap:
    """Opens a file as an array: `memmap`, in the order of use, and read-only by default."""
    return memmap(
        path, dtype, mode, offset, shape, order, memory=memory, cache=cache, cache_max=cache_max
    )


def empty(
    shape: Shape, dtype: DTypeLike = np.float64, order: Order = "C", *, memory: Memory | None = None
) -> memmap:
    """An array without a file, of zeros until it is written.

    What does not fit into the limit is compressed, and goes to the swap file.

    Parameters
    ----------
    shape : int or sequence of int
        Items along each axis.
    dtype : data type, optional
        Any but objects.
    order : {"C", "F"}, optional
        The order of the items.
    memory : Memory, optional
        What it is under; by default the default one.
    """
    items = _dtype(dtype)
    wanted = _shape(shape, items)
    memory = default_memory() if memory is None else memory
    source = Source.of_memory(memory, max(prod(wanted) * items.itemsize, 1))
    return memmap._over(source, "w+", 0, items, wanted, order)


def zeros(
    shape: Shape, dtype: DTypeLike = np.float64, order: Order = "C", *, memory: Memory | None = None
) -> memmap:
    """An array of zeros without a file: see `empty`."""
    return empty(shape, dtype, order, memory=memory)


def full(
    shape: Shape,
    fill_value: Any,
    dtype: DTypeLike | None = None,
    order: Order = "C",
    *,
    memory: Memory | None = None,
) -> memmap:
    """An array of one value without a file: see `empty`."""
    made = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order, memory=memory)
    made[...] = fill_value
    return made


def array(
    object: ArrayLike,
    dtype: DTypeLike | None = None,
    order: Order | None = None,
    *,
    memory: Memory | None = None,
) -> memmap:
    """A copy of an array, or of what can be one, without a file: see `empty`."""
    given = np.asanyarray(object, dtype)
    if order is None:
        order = "F" if given.flags.fnc else "C"
    made = empty(given.shape, given.dtype, order, memory=memory)
    made[...] = given
    return made


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    """The addresses of an array's first byte and behind its last one."""
    first = end = int(array.__array_interface__["data"][0])
    for count, stride in zip(array.shape, array.strides, strict=True):
        first += min((count - 1) * stride, 0)
        end += max((count - 1) * stride, 0)
    return first, end + array.itemsize


def _dtype(dtype: DTypeLike) -> np.dtype[Any]:
    items = np.dtype(dtype)
    if items.hasobject:
        raise TypeError(f"items of {items} are references to objects, which no file and no swap can hold")
    if items.itemsize == 0:
        raise TypeError(f"items of {items} have no size; give one, as 'S10'")
    return items


def _shape(shape: Shape, items: np.dtype[Any]) -> tuple[int, ...]:
    try:
        axes: tuple[int, ...] = (operator.index(cast(SupportsIndex, shape)),)
    except TypeError:
        axes = tuple(operator.index(n) for n in cast(Sequence[SupportsIndex], shape))
    if any(n < 0 for n in axes):
        raise ValueError(f"a shape has no negative items: {axes}")
    if prod(axes) * items.itemsize >= 1 << 63:
        raise ValueError(f"a shape of {axes} with items of {items.itemsize} bytes has more bytes than addresses")
    return axes


def _full_name(filename: Path | IO[bytes] | None) -> Path | None:
    if filename is None or is_url(filename):
        return cast(Path | None, filename)
    if isinstance(filename, os.PathLike):
        import pathlib

        return pathlib.Path(filename).resolve()
    name = filename if isinstance(filename, str) else getattr(filename, "name", None)
    return os.path.abspath(name) if isinstance(name, str) else None
