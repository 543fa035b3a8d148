"""CPython's own tests of processes, bare and managed: the same tests pass."""

import subprocess
import sys

from harness import HERE, MIB, Failed, Skipped, case

# CPython alone wants about 20 MiB, and at a fork the child's share is charged beside that.
SMALL = 32 * MIB
# Interpreters that start interpreters and wait for them want 37 MiB; none gives what it does not use.
FOUR_INTERPRETERS = 48 * MIB
# What a quick run takes: each way in which a process is made, shared memory, pools and managers.
QUICK_FORK = (
    "WithProcessesTestProcess",
    "WithProcessesTestQueue",
    "WithProcessesTestPoolWorker",
    "WithProcessesTestHeap",
    "WithProcessesTestArray",
    "WithManagerTestContainers",
    "TestCloseFds",
    "TestForkAwareThreadLock",
)
QUICK_SUBPROCESS = (
    "POSIXProcessTestCase.test_preexec",
    "POSIXProcessTestCase.test_close_fds",
    "POSIXProcessTestCase.test_vfork",
    "POSIXProcessTestCase.test_exception",
    "POSIXProcessTestCase.test_kill",
    "ProcessTestCase.test_communicate",
    "RunFuncTestCase",
)


def need_tests(module):
    found = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise Skipped(
            f"{sys.executable} has no {module}: install CPython's own tests"
            " (Debian: libpython3-testsuite), or take an interpreter that has them"
        )


def same_tests(context, which, patterns, memory_bytes, options=()):
    """The same words for every test; what is left out of the comparison is not among them."""
    argv = [sys.executable, HERE / "cases" / "cpython_tests.py", which]
    for pattern in () if context.long else patterns:
        argv += ["-k", pattern]
    bare = context.bare(argv)
    managed = context.managed(argv, memory_bytes, context.swap_directory(), options)
    if managed.status != 0 or bare.status != 0:
        raise Failed(f"ended with {managed.status}, bare with {bare.status}: {managed.stderr[-3000:]}")
    before, after = set(bare.text.splitlines()), set(managed.text.splitlines())
    passed = sum(line.startswith("passed: ") for line in before)
    if passed == 0:
        raise Failed(f"no test passed bare: {bare.stderr[-2000:]}")
    if before != after:
        only = "\n".join(sorted(before ^ after))
        raise Failed(f"other outcomes:\n{only}\nmanaged: {managed.stderr[-6000:]}")
    others = len(before) - passed
    context.note(
        f"{passed} tests pass, {others} do not or are skipped, in {memory_bytes >> 20} MiB,"
        f" {bare.seconds:.1f} s bare, {managed.seconds:.1f} s"
    )


@case("cpython-fork")
def cpython_fork(context):
    """test_multiprocessing_fork."""
    need_tests("test._test_multiprocessing")
    # A hundred processes at a time: their engines pass the allowance that all share.
    same_tests(context, "fork", QUICK_FORK, SMALL, ["--no-cgroup"])


@case("cpython-subprocess")
def cpython_subprocess(context):
    """test_subprocess."""
    need_tests("test.test_subprocess")
    same_tests(context, "subprocess", QUICK_SUBPROCESS, FOUR_INTERPRETERS)
