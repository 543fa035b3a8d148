"""numpy's own files: .npy and .npz."""

from __future__ import annotations

import ast
import io
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from math import prod
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.lib import format as npy

from ._arrays import memmap
from ._buffers import Path, check_there, open_source
from ._memory import Memory
from ._quire import Source

_HEADER_MAX = 1 << 20


def load(path: Path, mode: Literal["r", "r+", "c"] = "r", *, memory: Memory | None = None) -> memmap | Npz:
    """Opens a file that numpy.save or numpy.savez wrote.

    Parameters
    ----------
    path : path
        An .npy or .npz file; with mode "r" or "c" also packed (``.npy.zst``), or the URL of one.
    mode : {"r", "r+", "c"}, optional
        As for `memmap`. Of an .npz file only "r" and "c".
    memory : Memory, optional
        What the arrays are under; by default the default one.

    Returns
    -------
    memmap or Npz
        The array; of an .npz file its arrays by name, each of which is opened when it is asked for.

    Raises
    ------
    ValueError
        A file that is not whole, or none of these; arrays of objects, or compressed ones, which cannot be
        mapped: the message has the path.
    """
    if mode not in ("r", "r+", "c"):
        raise ValueError(f"mode {mode!r} is not known; give 'r', 'r+' or 'c'")
    source = open_source(path, mode, memory)
    if source.read_at(0, 4) in (b"PK\x03\x04", b"PK\x05\x06"):
        if mode == "r+":
            raise ValueError(f"{os.fspath(path)}: the arrays of an .npz file can only be read; give mode 'r' or 'c'")
        return Npz(source, mode, path)
    return _array(source, 0, len(source), mode, path)


def _array(source: Source, start: int, end: int, mode: str, path: Path, member: str = "") -> memmap:
    """The array of an .npy file that lies from `start` to `end` in a source."""
    shown = f"{os.fspath(path)}{':' if member else ''}{member}"
    try:
        items, is_fortran, shape, length = _header(source.read_at(start, min(end - start, _HEADER_MAX)))
    except OSError:
        raise
    except Exception as error:  # numpy's parser of types raises what it comes across.
        raise ValueError(f"{shown}: no .npy file, or not whole: {error!r}") from error
    if items.hasobject:
        raise ValueError(f"{shown}: its items are pickled objects, which cannot be mapped; numpy.load reads them")
    at = start + length
    count = prod(shape) * items.itemsize
    if count == 0:
        # There is nothing to map: the array is of the header's first byte, and has none of it.
        at = start
    check_there(shown, end - at, count, at)
    return memmap._over(source, mode, at, items, shape, "F" if is_fortran else "C", path, at)


def _header(raw: bytes) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Items, order and shape of an .npy file, and where its items begin."""
    major, _ = npy.read_magic(io.BytesIO(raw))
    layout, encoding = {1: ("<H", "latin1"), 2: ("<I", "latin1"), 3: ("<I", "utf8")}[major]
    begin = npy.MAGIC_LEN + struct.calcsize(layout)
    end = begin + struct.unpack_from(layout, raw, npy.MAGIC_LEN)[0]
    header = ast.literal_eval(raw[begin:end].decode(encoding))
    is_fortran, shape = header["fortran_order"], header["shape"]
    if end > len(raw) or not isinstance(is_fortran, bool) or not isinstance(shape, tuple):
        raise ValueError(f"the header is {header}")
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"the shape is {shape}")
    return npy.descr_to_dtype(header["descr"]), is_fortran, shape, end


class Npz(Mapping[str, memmap]):
    """The arrays of an .npz file, by name; each is opened when it is asked for.

    Attributes
    ----------
    files : list of str
        The names.
    """

    def __init__(self, source: Source, mode: str, path: Path) -> None:
        self._mode, self._path = mode, path
        self._source: Source | None = source
        try:
            with zipfile.ZipFile(cast(Any, _Reader(source))) as archive:
                self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        except OSError:
            raise
        except Exception as error:  # zipfile raises what it comes across.
            raise ValueError(f"{os.fspath(path)}: no .npz file, or not whole: {error}") from error

    @property
    def files(self) -> list[str]:
        return list(self._members)

    def __getitem__(self, name: str) -> memmap:
        if self._source is None:
            raise ValueError(f"{os.fspath(self._path)}: it is closed")
        info = self._members[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"{os.fspath(self._path)}:{name}: it is compressed, and cannot be mapped; numpy.savez stores it as it is"
            )
        # The name and the extra field before the bytes are as long as the local header says.
        local = self._source.read_at(max(info.header_offset, 0), 30)
        if info.header_offset < 0 or len(local) < 30 or local[:4] != b"PK\x03\x04":
            raise ValueError(f"{os.fspath(self._path)}:{name}: the archive is not whole")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
        return _array(self._source, start, start + info.file_size, self._mode, self._path, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def close(self) -> None:
        """Opens no more arrays; those that are open stay."""
        self._source = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<quire.Npz {os.fspath(self._path)!r} of {', '.join(self._members)}>"


class _Reader(io.RawIOBase):
    """A source as a file that is read."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._source)}[whence]
        if start + offset < 0:
            raise ValueError("before the file")
        self._at = start + offset
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        there = max(len(self._source) - self._at, 0)
        found = self._source.read_at(self._at, there if count is None or count < 0 else min(count, there))
        self._at += len(found)
        return found
