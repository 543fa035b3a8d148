"""Arrays in a fork's child.

A child has the arrays of files that are only read, at the same address. All others belong to the parent: their
bytes are not there, and an access would be a SIGSEGV. So in a child every method of arrays looks first, and
raises; the parent's are as they were.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ._quire import Error

if TYPE_CHECKING:
    from ._arrays import memmap

#: What does not touch an array's items.
_HARMLESS = frozenset(
    (
        *("__array_finalize__", "__array_wrap__", "__array_prepare__", "__class__", "__class_getitem__", "__delattr__"),
        *("__dir__", "__getattribute__", "__getstate__", "__hash__", "__init__", "__init_subclass__", "__len__"),
        *("__new__", "__setattr__", "__sizeof__", "__subclasshook__", "__array_namespace__", "__dlpack_device__"),
    )
)


def guard(cls: type[memmap]) -> None:
    """Has the methods of a class of arrays look, in every child of now on, whether the items are there."""
    os.register_at_fork(after_in_child=functools.partial(_guard_now, cls))


def _guard_now(cls: type[memmap]) -> None:
    if "_is_guarded" in vars(cls):
        return
    cls._is_guarded = True  # type: ignore[attr-defined]
    for name in dir(np.ndarray):
        method = getattr(cls, name)
        if callable(method) and name not in _HARMLESS:
            setattr(cls, name, _looking(method))
    cls.__array_ufunc__ = _ufunc  # type: ignore[method-assign]
    cls.__array_function__ = _function  # type: ignore[assignment]


def _check(array: object) -> None:
    buffer = getattr(array, "_mmap", None)
    if buffer is not None and not buffer.is_there:
        raise Error(
            f"{buffer.name}: this array was made before a fork, and its items are the parent process's alone; open "
            "the file with mode 'r', which children inherit, or start processes by 'forkserver' or 'spawn'"
        )


def _looking(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def looks(self: Any, *args: Any, **more: Any) -> Any:
        _check(self)
        for arg in args:
            _check(arg)
        return method(self, *args, **more)

    return looks


def _ufunc(self: Any, ufunc: np.ufunc, method: str, *inputs: Any, **more: Any) -> Any:
    outputs = more.get("out", ())
    for array in (*inputs, *outputs):
        _check(array)
    if outputs:
        more["out"] = tuple(map(_plain, outputs))
    result = getattr(ufunc, method)(*map(_plain, inputs), **more)
    # As without this method: what was to be written is what is returned.
    return result if not outputs else outputs[0] if len(outputs) == 1 else outputs


def _plain(value: Any) -> Any:
    from ._arrays import memmap

    return value.view(np.ndarray) if isinstance(value, memmap) else value


def _function(self: Any, function: Callable[..., Any], types: Any, args: Any, more: Any) -> Any:
    for array in (self, *args, *more.values()):
        _check(array)
    return np.ndarray.__array_function__(self, function, types, args, more)
