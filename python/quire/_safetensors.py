"""Safetensors files: arrays by name, of which each is mapped when it is asked for."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from math import prod
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from ._arrays import memmap
from ._buffers import Path, open_source
from ._memory import Memory

#: What the format allows for the header.
_HEADER_MAX = 100_000_000

_DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}
#: Of the package ml_dtypes.
_MORE_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


class Safetensors(Mapping[str, memmap]):
    """The arrays of a safetensors file, by name.

    Attributes
    ----------
    metadata : dict of str to str
        What the file says about itself.
    """

    def __init__(self, path: Path, mode: Literal["r", "c"] = "r", *, memory: Memory | None = None) -> None:
        if mode not in ("r", "c"):
            raise ValueError(f"mode {mode!r} does not fit; give 'r' or 'c'")
        self._path, self._mode = path, mode
        source = open_source(path, mode, memory)
        self._source = source
        (length,) = struct.unpack("<Q", self._read(0, 8, "the header's length"))
        if length > min(_HEADER_MAX, len(source) - 8):
            raise self._wrong(f"its header has {length} bytes, and the file {len(source)}")
        try:
            header = json.loads(self._read(8, length, "the header"))
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"its header is no JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._wrong("its header is no object of JSON")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise self._wrong("__metadata__ is no object of JSON")
        self.metadata: dict[str, str] = metadata
        self._start = 8 + length
        self._tensors = {name: self._tensor(name, entry) for name, entry in header.items()}

    def _wrong(self, why: str) -> ValueError:
        return ValueError(f"{os.fspath(self._path)}: no safetensors file, or not whole: {why}")

    def _read(self, at: int, count: int, what: str) -> bytes:
        found = self._source.read_at(at, count)
        if len(found) < count:
            raise self._wrong(f"{what} is not all there")
        return found

    def _tensor(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int]:
        """Type, shape and first byte of an array, checked but for its type."""
        try:
            kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, start, end)
        except (TypeError, KeyError, ValueError):
            raise self._wrong(f"{name!r} has no dtype, shape and data_offsets") from None
        if not isinstance(kind, str) or any(type(n) is not int or n < 0 for n in numbers):
            raise self._wrong(f"{name!r} has a dtype that is no text, or numbers that are none")
        if start > end or self._start + end > len(self._source):
            raise self._wrong(f"{name!r} lies at {start} to {end} of {len(self._source) - self._start} bytes")
        if kind in _DTYPES and prod(shape) * np.dtype(_DTYPES[kind]).itemsize != end - start:
            raise self._wrong(f"{name!r} of {kind} and shape {shape} has {end - start} bytes")
        return kind, shape, start

    def __getitem__(self, name: str) -> memmap:
        """Opens an array.

        Raises
        ------
        KeyError
            There is none of this name.
        TypeError
            Items that numpy does not have.
        """
        kind, shape, start = self._tensors[name]
        if kind in _DTYPES:
            items = np.dtype(_DTYPES[kind])
        else:
            items = self._more_items(name, kind)
        at = self._start + start
        if prod(shape) == 0:
            at = 0  # There is nothing to map of it.
        elif at + prod(shape) * items.itemsize > len(self._source):
            raise self._wrong(f"{name!r} reaches over the file's end")
        return memmap._over(self._source, self._mode, at, items, shape, "C", self._path, at)

    def _more_items(self, name: str, kind: str) -> np.dtype[Any]:
        where = f"{os.fspath(self._path)}: {name!r} has items of {kind}"
        if kind not in _MORE_DTYPES:
            raise TypeError(f"{where}, which numpy does not have")
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(f"{where}, which numpy has with the package ml_dtypes: pip install ml_dtypes") from None
        items: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _MORE_DTYPES[kind]))
        return items

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Arrays that are open stay."""

    def __repr__(self) -> str:
        return f"<quire.Safetensors {os.fspath(self._path)!r} of {len(self)} arrays>"


def load_safetensors(path: Path, mode: Literal["r", "c"] = "r", *, memory: Memory | None = None) -> Safetensors:
    """Opens a safetensors file: nothing but its header is read until an array's items are.

    Parameters
    ----------
    path : path
        A file; also packed (``.zst``), or the URL of one.
    mode : {"r", "c"}, optional
        To be read, or written in memory only.
    memory : Memory, optional
        What the arrays are under; by default the default one.

    Returns
    -------
    Safetensors
        The arrays by name.

    Raises
    ------
    ValueError
        A file that is not whole, or none.
    """
    return Safetensors(path, mode, memory=memory)
