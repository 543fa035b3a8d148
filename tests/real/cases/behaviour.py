"""Programs that a memory manager inside a process has to survive: each prints what it prints bare."""

import os
import sys

from harness import HERE, MIB, Failed, case

MEMORY = 32 * MIB
# Says how many handlers the process has, and whether each runs on one CPU only; then its child does.
HANDLERS = """
import glob, os, sys, time
def handlers():
    found = {}
    for task in glob.glob("/proc/self/task/*"):
        if open(task + "/comm").read() == "quire-fault\\n":
            found[task] = len(os.sched_getaffinity(int(os.path.basename(task))))
    return found
def settled():
    # A thread has its name once it runs.
    before, since = None, time.monotonic()
    while time.monotonic() - since < 0.5:
        found = handlers()
        if found != before:
            before, since = found, time.monotonic()
        time.sleep(0.01)
    return before
def say(name):
    found = settled()
    print(name, len(found), set(found.values()) == {1}, flush=True)
say("parent")
child = os.fork()
if child == 0:
    say("child")
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


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


@case("behaviour-handlers")
def handlers(context):
    """As many threads serve a process's faults as was asked for, in a fork's child too; each on one CPU, or on all."""
    for count, is_pinned in ((1, True), (3, True), (12, True), (2, False)):
        options = ["--handlers", str(count), *([] if is_pinned else ["--no-pinned-handlers"])]
        argv = [context.quire, "run", "--memory", "64M", *options, "--", sys.executable, "-c", HANDLERS]
        result = context.bare(argv)
        on_one = is_pinned or len(os.sched_getaffinity(0)) == 1
        expected = f"parent {count} {on_one}\nchild {count} {on_one}\n"
        if (result.status, result.text) != (0, expected):
            raise Failed(f"{options}: {expected!r} expected, not {result.text!r}: {result.stderr[-500:]}")
