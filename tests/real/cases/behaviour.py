"""Programs that do what a manager inside a process has to survive: each prints what it prints bare."""

import sys

from harness import HERE, MIB, case

MEMORY = 32 * MIB


def behave(context, name, *arguments, memory_bytes=MEMORY):
    program = context.compile("behaviour", HERE / "c" / "behaviour_limits.c")
    context.same([program, name, *arguments], memory_bytes=memory_bytes, swap=True)


def register(name, needs=(), memory_bytes=MEMORY):
    @case(f"behaviour-{name}", needs=needs)
    def run(context):
        behave(context, name, memory_bytes=memory_bytes)

    return run


for plain in (
    "close-range",
    "main-exits",
    "signals",
    "signal-storm",
    "seccomp",
    "seccomp-all-threads",
    "address-limit",
    "address-limit-refuses",
    "data-limit",
    "file-limit",
    "vfork",
    "spawn",
    "system",
    "popen",
    "exec-chain",
    "thread-churn",
    "free-elsewhere",
    "at-exit",
    "daemon",
):
    register(plain)
# Nine processes at a time, each of which needs a few MiB of its own.
register("fork-in-thread", memory_bytes=64 * MIB)
# All of it stays in memory, in three processes.
register("fork-of-clean", memory_bytes=192 * MIB)
register("clean-changes", memory_bytes=192 * MIB)
register("setuid", needs=("root",))
register("process-limit", needs=("root",))
register("lock-all", needs=("root",))


@case("behaviour-limits-from-outside")
def limits_from_outside(context):
    """Limits that hold before the first instruction."""
    program = context.compile("behaviour", HERE / "c" / "behaviour_limits.c")
    for limit in ("ulimit -v 2000000", "ulimit -d 1000000", "ulimit -n 16", "ulimit -l 64"):
        argv = ["sh", "-c", f'{limit}; exec "$0" data', program]
        context.same(argv, memory_bytes=MEMORY, swap=True)


@case("behaviour-interpreter")
def interpreter(context):
    """CPython with threads, subprocesses and multiprocessing."""
    argv = [sys.executable, HERE / "cases" / "interpreter.py"]
    context.same(argv, memory_bytes=64 * MIB, swap=True)
