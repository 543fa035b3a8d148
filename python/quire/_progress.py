"""A bar of what is held, for IPython's cells and for scripts."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import IO, Any, Self

from ._memory import Memory, default_memory, size

_WIDTH = 30
_SECONDS = 0.5


def _bar(before: dict[str, Any], now: dict[str, Any]) -> str:
    filled = round(_WIDTH * now["held"] / now["limit"])
    faults = now["pgfault"] - before["pgfault"]
    swapped = now["packed"] + now["swap_file"]
    return (
        f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {size(now['held'])} of {size(now['limit'])} held, "
        f"{size(swapped)} swapped, {faults} faults"
    )


class progress:
    """Shows what a memory holds while a block runs, on one line that changes.

    Parameters
    ----------
    memory : Memory, optional
        By default the default one.
    file : text file, optional
        By default standard error.

    Examples
    --------
    >>> with quire.progress():
    ...     a.sort()
    [##############################] 512 MiB of 512 MiB held, 1.5 GiB swapped, 393216 faults
    """

    def __init__(self, memory: Memory | None = None, file: IO[str] | None = None) -> None:
        self._memory = default_memory() if memory is None else memory
        self._file = sys.stderr if file is None else file
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Self:
        self._before: dict[str, Any] = self._memory.counts()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        print(f"\r{_bar(self._before, self._memory.counts())}", file=self._file)

    def _show(self) -> None:
        # A file that is no terminal gets the last line only.
        while not self._end.wait(_SECONDS) and self._file.isatty():
            print(f"\r{_bar(self._before, self._memory.counts())}", end="", file=self._file, flush=True)


class _Cells:
    """Shows the default memory's bar after each of IPython's cells that used it."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None

    def begin(self, *_: object) -> None:
        from . import _memory

        memory = _memory._default
        self._before = None if memory is None or memory.closed else memory.counts()

    def end(self, *_: object) -> None:
        from . import _memory

        memory = _memory._default
        if memory is None or memory.closed:
            return
        now: dict[str, Any] = memory.counts()
        before = self._before if self._before is not None else {"pgfault": 0}
        if now["pgfault"] != before["pgfault"]:
            print(_bar(before, now))


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext quire`` does: a bar after each cell that used the default memory."""
    cells = _Cells()
    shell.events.register("pre_run_cell", cells.begin)
    shell.events.register("post_run_cell", cells.end)
