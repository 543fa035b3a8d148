"""Bounds on memory, and the one that arrays have by default."""

from __future__ import annotations

import atexit
import os
import sys
import weakref

from . import _quire
from ._quire import Error

_SWAP_FOLDER = "/var/tmp"
_SWAP_MAX = 64 << 30

_default: Memory | None = None
#: Buffers of files that are written, which are flushed when the process ends.
_written: weakref.WeakSet[_quire.Buffer] = weakref.WeakSet()
#: Whether this is a process of multiprocessing's, which flushes them by a way of its own.
_is_worker = False


class Stats(dict[str, object]):
    """What was counted, by name; sizes are in bytes.

    It is a dict, whose ``repr`` is for people: a line for each number, with sizes in the largest unit.
    """

    _SIZES = frozenset(
        ("limit", "held", "held_max", "packed", "swap_file", "pinned", "nbytes", "cached", "dirty", "mapped")
    )

    def __repr__(self) -> str:
        shown = {
            name: size(value) if name in self._SIZES and isinstance(value, int) else str(value)
            for name, value in self.items()
            if value or name in self._SIZES
        }
        width = max(map(len, shown), default=0)
        return "\n".join(f"{name:{width}}  {value}" for name, value in shown.items())


def size(count: int) -> str:
    """A number of bytes for people: ``1.5 GiB``."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{value:.4g} {unit}"


class Memory(_quire.Memory):
    """A bound on memory, which arrays share.

    What is in memory of all arrays under it, and the tables for that, take no more than `limit`; the
    rest is in the files, or compressed in memory and in a swap file.

    Parameters
    ----------
    limit : int or str
        Bytes that may be held, at least 1 MiB: a number, or text as ``"512M"`` (1024-based).
    swap : bool or path, optional
        Where arrays without a file go that do not fit: a folder for a swap file without a name, True
        for ``/var/tmp``, False for none. Without one they must fit into `limit` compressed: beyond that the
        process is ended.
    swap_max : int or str, optional
        How large the swap file may become, in bytes: by default half of what is free in the folder, 64
        GiB at most.
    delivery : {"handlers", "inline"}, optional
        Who serves a page fault: threads of the memory, or the thread that faults itself, which is
        faster, but lets no system call be given bytes that are not in memory: see `memmap.pin`.
    workers : int, optional
        Threads that read and write files, and so how many reads are in flight: 4 by default.
    store_deadline : float, optional
        Seconds after which a read or a write that has no answer has failed. None, the default, waits
        for ever, as the kernel does.

    Raises
    ------
    ValueError
        A size that is none, or too small.
    OSError
        No right to userfaultfd, or no swap file: the message says what to do.
    """

    def __new__(
        cls,
        limit: int | str,
        *,
        swap: bool | str | os.PathLike[str] = True,
        swap_max: int | str | None = None,
        delivery: str = "handlers",
        workers: int | None = None,
        store_deadline: float | None = None,
    ) -> Memory:
        folder = None if swap is False else _SWAP_FOLDER if swap is True else swap
        if folder is None:
            swap_max = 0
        elif swap_max is None:
            there = os.statvfs(folder)
            swap_max = min(there.f_bavail * there.f_frsize // 2, _SWAP_MAX)
        return super().__new__(cls, limit, folder, swap_max, delivery, workers, store_deadline)

    def stats(self) -> Stats:
        """What it holds and has done.

        Returns
        -------
        Stats
            ``limit``, ``held``, ``held_max``, ``packed`` (compressed pages in memory), ``swap_file`` and
            ``pinned`` in bytes; ``buffers``, the arrays under it; and counters by the names of
            ``/proc/vmstat``, as ``pgfault``, ``pswpout``.
        """
        return Stats(self.counts())

    def __repr__(self) -> str:
        if self.closed:
            return "<quire.Memory, closed>"
        return f"<quire.Memory of {size(self.limit)}, {size(self.held)} held>"


def default_memory(limit: int | None = None) -> Memory:
    """The memory of arrays for which none is named, made when it is first needed.

    Its limit is what `set_limit` said; else `limit`; else half of the machine's memory, or of the container's.
    """
    global _default
    if _default is None or _default.closed:
        _default = Memory(limit or _half_of_all())
    return _default


def set_limit(
    limit: int | str,
    *,
    swap: bool | str | os.PathLike[str] = True,
    swap_max: int | str | None = None,
    delivery: str = "handlers",
    numpy: bool = False,
) -> Memory:
    """Sets the limit of the memory that arrays have by default.

    Parameters
    ----------
    limit, swap, swap_max, delivery
        As for `Memory`.
    numpy : bool, optional
        Whether numpy's own arrays and temporaries of 1 MiB and more, that the calling thread makes from
        now on, are under the limit too: see `adopt_numpy`.

    Returns
    -------
    Memory
        The new default. Arrays that are under it must be gone before it can be replaced.

    Raises
    ------
    Error
        There are arrays under the default memory.
    """
    global _default
    before = _default
    if before is not None and not before.closed:
        buffers = before.counts()["buffers"]
        if buffers:
            raise Error(
                f"{buffers} arrays are under the limit of {size(before.limit)}: set another before the first "
                "array is made, or make a quire.Memory and name it by memory="
            )
        before.close()
    _default = Memory(limit, swap=swap, swap_max=swap_max, delivery=delivery)
    if numpy:
        adopt_numpy(_default)
    return _default


def adopt_numpy(memory: Memory | None = None) -> None:
    """Has numpy make its own arrays under a memory's limit (NEP 49).

    It is for arrays of 1 MiB and more that the calling thread makes from now on, as numpy keeps allocators by
    thread: a pool of threads calls this in each, as by ``ThreadPoolExecutor(initializer=quire.adopt_numpy)``.
    A child by ``fork`` does not have such arrays, and an access there ends it: start processes by
    ``forkserver`` or ``spawn``.

    Parameters
    ----------
    memory : Memory, optional
        By default the default one. It is not closed any more.
    """
    _quire.hand_over(_numpy_api(), default_memory() if memory is None else memory)


def release_numpy() -> None:
    """Has numpy make the arrays of the calling thread by itself again."""
    _quire.hand_over(_numpy_api(), None)


def _numpy_api() -> object:
    from importlib import import_module

    import numpy

    version = tuple(map(int, numpy.__version__.split(".")[:2]))
    if version < (1, 22):
        raise Error(f"numpy {numpy.__version__} takes no allocator; it needs 1.22 or newer")
    core = "numpy.core" if version < (2, 0) else "numpy._core"
    table: object = import_module(f"{core}.multiarray")._ARRAY_API
    return table


def _half_of_all() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = _text("/proc/self/cgroup").rpartition("::")[2]
    for folder in (own, ""):
        limit = _text(f"/sys/fs/cgroup{folder}/memory.max")
        if limit.isdigit():
            total = min(total, int(limit))
    return total // 2


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def flush_at_exit(buffer: _quire.Buffer) -> None:
    """Has a buffer flushed when the process ends, if it is still there."""
    global _is_worker
    _written.add(buffer)
    workers = sys.modules.get("multiprocessing.process")
    if not _is_worker and workers is not None and workers.parent_process() is not None:
        # Such a process ends without what atexit has.
        from multiprocessing.util import Finalize

        _is_worker = True
        Finalize(None, _flush_all, exitpriority=0)


@atexit.register
def _flush_all() -> None:
    for buffer in list(_written):
        if not buffer.closed and buffer.is_there:
            try:
                buffer.flush(0, buffer.nbytes)
            except Exception as error:
                print(f"quire: what was written is not all in its file: {error}", file=sys.stderr)


def _forget_parents() -> None:
    global _default, _is_worker
    _default, _is_worker = None, False
    _written.clear()
    _quire.after_fork_in_child()


os.register_at_fork(after_in_child=_forget_parents)
