"""Buffers: what arrays are made of, and what there is without numpy."""

from __future__ import annotations

import builtins
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import IO, Literal, cast

from ._memory import default_memory, flush_at_exit
from ._quire import Buffer, Memory, Source

Order = Literal["C", "F"]
Path = str | os.PathLike[str]

_SCHEMES = ("s3://", "https://", "http://")


def is_url(path: object) -> bool:
    """Whether a path is an object of a server."""
    return isinstance(path, str) and path.startswith(_SCHEMES)


def open_source(
    path: Path | IO[bytes],
    mode: str,
    memory: Memory | None,
    plain: bool = False,
    cache: Path | None = None,
    cache_max: int | str = "4G",
) -> Source:
    """Opens what `mode`, one of numpy.memmap's, is for; a file object is one that is open already."""
    memory = default_memory() if memory is None else memory
    if is_url(path):
        if mode not in ("r", "c"):
            raise ValueError(f"{path}: an object of a server can only be read; give mode 'r' or 'c', not {mode!r}")
        return Source.of_url(memory, cast(str, path), plain, cache, cache_max)
    with _opened(path, mode) as file:
        name = file.name if isinstance(getattr(file, "name", None), str) else f"descriptor {file.fileno()}"
        return Source.of_file(memory, file.fileno(), name, mode in ("r+", "w+"), plain)


@contextmanager
def _opened(path: Path | IO[bytes], mode: str) -> Iterator[IO[bytes]]:
    if not isinstance(path, (str, bytes, os.PathLike)):
        # What it has written is to be in the file, and so in its length.
        path.seek(0, os.SEEK_END)
        yield path
        return
    with builtins.open(path, ("r" if mode == "c" else mode) + "b", buffering=0) as file:
        yield cast("IO[bytes]", file)


def map_source(
    source: Source, mode: str, offset: int, count: int, format: str, itemsize: int, shape: Sequence[int], order: str
) -> Buffer:
    """Maps `count` bytes of a source."""
    made = source.map("r+" if mode == "w+" else mode, offset, count, format, itemsize, shape, order)
    if mode in ("r+", "w+"):
        flush_at_exit(made)
    return made


def buffer(
    shape: int | Sequence[int], format: str = "B", *, order: Order = "C", memory: Memory | None = None
) -> Buffer:
    """Makes a buffer of zeros, without a file.

    Parameters
    ----------
    shape : int or sequence of int
        Items along each axis.
    format : str, optional
        What an item is, a character of the struct module: ``"d"`` for float64, ``"B"`` for bytes.
    order : {"C", "F"}, optional
        Which axis' items lie side by side: the last one, or the first.
    memory : Memory, optional
        By default the default one.

    Returns
    -------
    Buffer
        An object of the buffer protocol: ``memoryview(b)[i, j]`` is an item.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    itemsize = _itemsize(format)
    if any(items < 0 for items in shape):
        raise ValueError(f"a shape has no negative items: {shape}")
    count = max(prod(shape) * itemsize, 1)
    _check_size(count, shape)
    source = Source.of_memory(default_memory() if memory is None else memory, count)
    return source.map("c", 0, count, format, itemsize, shape, order)


def open_buffer(
    path: Path,
    mode: str = "r",
    format: str = "B",
    shape: int | Sequence[int] | None = None,
    *,
    offset: int = 0,
    order: Order = "C",
    memory: Memory | None = None,
) -> Buffer:
    """Opens a file as a buffer.

    Parameters
    ----------
    path : path
        A file, or the URL of an object.
    mode : {"r", "r+", "c"}, optional
        To be read; to be read and written; to be written in memory only.
    format, shape, order, memory
        As for `buffer`; by default the shape is what there is.
    offset : int, optional
        Where the first item is, in bytes.

    Returns
    -------
    Buffer
    """
    if mode not in ("r", "r+", "c"):
        raise ValueError(f"mode {mode!r} is not known; give 'r', 'r+' or 'c'")
    itemsize = _itemsize(format)
    if offset < 0:
        raise ValueError(f"{path}: an offset of {offset} bytes is before the file")
    source = open_source(path, mode, memory)
    there = len(source) - offset
    if shape is None:
        shape = max(there, 0) // itemsize
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = prod(shape) * itemsize
    check_there(path, there, count, offset)
    return map_source(source, mode, offset, max(count, 1), format, itemsize, shape, order)


def check_there(path: object, there: int, count: int, offset: int) -> None:
    """Raises ValueError where a file has fewer bytes from `offset` on than are wanted, or none."""
    if there <= 0:
        raise ValueError(f"{path}: there is nothing to map from byte {offset} on: an empty file, or too short")
    if count > there:
        raise ValueError(f"{path}: {count} bytes are wanted from byte {offset} on, and there are {there}")


def _check_size(count: int, shape: Sequence[int]) -> None:
    if count >= 1 << 63:
        raise ValueError(f"a shape of {tuple(shape)} has more bytes than addresses")


def _itemsize(format: str) -> int:
    try:
        return struct.calcsize(format)
    except struct.error as error:
        raise ValueError(f"format {format!r}: {error}; give a character of the struct module") from None
