"""Arrays that are larger than memory.

``quire.set_limit("2G")`` bounds what arrays hold of memory. ``quire.zeros``, ``empty``, ``full`` and
``array`` make arrays without a file, ``quire.open`` and ``quire.memmap`` arrays of a file in numpy.memmap's words,
``quire.load`` arrays of .npy and .npz files, ``quire.load_safetensors`` those of a safetensors file. They are
`memmap` objects, a subclass of numpy.ndarray, and work where arrays do.

Without numpy ``quire.buffer`` and ``quire.open_buffer`` make objects of the buffer protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._buffers import buffer, open_buffer
from ._memory import Memory, Stats, adopt_numpy, default_memory, release_numpy, set_limit
from ._quire import Buffer, Error, Pin, __version__

if TYPE_CHECKING:
    from ._arrays import array, empty, full, memmap, open, zeros
    from ._files import Npz, load
    from ._progress import load_ipython_extension, progress
    from ._safetensors import Safetensors, load_safetensors

__all__ = [
    "Buffer",
    "Error",
    "Memory",
    "Npz",
    "Pin",
    "Safetensors",
    "Stats",
    "__version__",
    "adopt_numpy",
    "array",
    "buffer",
    "default_memory",
    "empty",
    "full",
    "load",
    "load_safetensors",
    "memmap",
    "open",
    "open_buffer",
    "progress",
    "release_numpy",
    "set_limit",
    "zeros",
]

# What needs numpy is loaded when it is first used.
_LATER = {
    **dict.fromkeys(("array", "empty", "full", "memmap", "open", "zeros"), "_arrays"),
    **dict.fromkeys(("Npz", "load"), "_files"),
    **dict.fromkeys(("load_ipython_extension", "progress"), "_progress"),
    **dict.fromkeys(("Safetensors", "load_safetensors"), "_safetensors"),
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
