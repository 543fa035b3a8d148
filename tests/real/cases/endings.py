"""How runs end: killed, out of swap, with the program's own status. Nothing may stay behind."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from harness import MIB, Failed, Skipped, case, descendants, read_or

# A child that its parent leaves behind ends by itself; the run ends with the parent.
CHURN = """
import os, random
parent = os.getpid()
child = os.fork() == 0
data = [b"child" * 100] if child else []
while not child or os.getppid() == parent:
    data.append(random.randbytes(1 << 18) + bytes(1 << 18))
    if len(data) > 200:
        data[random.randrange(len(data))] = b""
        data.pop(random.randrange(len(data)))
"""
FILL = """
import random, zlib
blocks = [random.Random(i).randbytes(1 << 20) for i in range({count})]
print(zlib.crc32(b"".join(zlib.crc32(block).to_bytes(4) for block in blocks)))
"""


def kill_one(context, victim):
    """One run, one kill at a random moment, and a look around."""
    swap = context.swap_directory()
    argv = context.quire_argv([sys.executable, "-c", CHURN], 48 * MIB, swap)
    process = context.spawn(argv)
    time.sleep(random.random() * 1.5)
    if victim == "quire":
        orphans = [p for p, _, state in descendants(process.pid) if state != "Z"]
        os.kill(process.pid, signal.SIGKILL)
        # The program lives on without its supervisor: end it as a user would.
        time.sleep(0.3)
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    else:
        below = [p for p, _, state in descendants(process.pid) if state != "Z"]
        for pid in below if victim == "all" else random.sample(below, min(1, len(below))):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        # Where the victim was a child the program goes on: end it as a user would.
        time.sleep(0.3)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
    if context.pretend:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)
    context.nothing_left(process.pid, swap, cgroups=False)
    # A killed supervisor cannot remove its cgroup: the next run does.
    context.managed(["true"], 48 * MIB)
    context.nothing_left(process.pid, swap)


@case("killed")
def killed(context):
    """kill -9 of the supervisor, of one process, of all, at random moments."""
    rounds = 30 if context.long else 3
    for victim in ("quire", "one", "all") * rounds:
        try:
            kill_one(context, victim)
        except subprocess.TimeoutExpired:
            raise Failed(f"the run goes on after kill -9 of {victim}") from None
        except Failed as failed:
            raise Failed(f"after kill -9 of {victim}: {failed}") from None
    context.note(f"{rounds} rounds of 3")


@contextmanager
def small_disk(directory, mebibytes):
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}M", "none", directory]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Skipped(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=False)


@case("disk-full", needs=("root",))
def disk_full(context):
    """The swap file's disk fills: that program ends with 137 and a message, others go on."""
    hungry = [sys.executable, "-c", FILL.format(count=256)]
    modest = [sys.executable, "-c", FILL.format(count=96)]
    expected = context.bare(modest)
    other = context.tmp / "other"
    other.mkdir()
    with small_disk(context.tmp / "small", 24) as disk:
        neighbour = context.spawn(context.quire_argv(modest, 48 * MIB, other))
        victim = context.spawn(context.quire_argv(hungry, 48 * MIB, disk))
        ended, went_on = context.wait(victim), context.wait(neighbour)
        context.compare(expected, went_on)
        if context.pretend:
            return
        context.nothing_left(victim.pid, disk)
        context.nothing_left(neighbour.pid, other)
    if ended.status != 137 or "memory" not in ended.stderr or ended.text:
        raise Failed(f"137 and a message expected: {ended.status}, {ended.stderr[-500:]}")


@case("out-of-memory")
def out_of_memory(context):
    """Without a swap file, data that does not compress ends with 137 and a message."""
    straddle = context.compile("straddle")
    if context.pretend:
        return
    fill = [sys.executable, "-c", FILL.format(count=192)]
    for argv, budget_bytes in ((fill, 64 * MIB), ([straddle], 16 * MIB)):
        ended = context.managed(argv, budget_bytes)
        if ended.status != 137 or "memory" not in ended.stderr or ended.text:
            raise Failed(f"137 and a message expected: {ended.status}, {ended.stderr[-500:]}")


# Says when more than its budget is filled, and reads it back once it may.
LATER = """
import os, random, sys, time
blocks = [random.Random(i).randbytes(1 << 20) for i in range(96)]
print("filled", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
print(sum(sum(block[::4096]) for block in blocks))
"""


def overwrite_swap_file(pid, directory):
    """Other bytes in all of the swap file that a run has made in `directory`."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd).startswith(f"{directory}/"):
            break
    else:
        raise Failed(f"the run has no file in {directory}")
    with open(fd, "r+b", buffering=0) as file:
        end = 0
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            os.pwrite(file.fileno(), b"\xff" * (end - start), start)
        os.fsync(file.fileno())
    return end


@case("swap-file-lies", needs=("root",))
def swap_file_lies(context):
    """A swap file that gives other bytes back: SIGBUS, and a message with its folder and the place."""
    go, swap = context.tmp / "go", context.swap_directory()
    argv = [sys.executable, "-c", LATER, go]
    process = context.spawn(context.quire_argv(argv, 48 * MIB, swap))
    if context.pretend:
        go.touch()
        context.wait(process)
        return
    deadline = time.monotonic() + 60
    while "filled" not in read_or(context.tmp / f"out.{context.runs}", ""):
        if time.monotonic() > deadline or process.poll() is not None:
            raise Failed("the program did not fill its memory")
        time.sleep(0.05)
    if not overwrite_swap_file(process.pid, swap):
        raise Failed("nothing was in the swap file")
    go.touch()
    ended = context.wait(process)
    said = f"lost a page: the swap file in {swap} could not be read, or gave other bytes back, at byte"
    if ended.status != 128 + signal.SIGBUS or said not in ended.stderr:
        raise Failed(f"SIGBUS and a message expected: {ended.status}, {ended.stderr[-500:]}")
    context.nothing_left(process.pid, swap)


@case("statuses")
def statuses(context):
    """The program's status is the run's; Quire's own are 126 and 127."""
    for script, expected in (
        ("exit 0", 0),
        ("exit 3", 3),
        ("kill -TERM $$", 143),
        ("kill -SEGV $$", 139),
        ("kill -KILL $$", 137),
    ):
        result = context.managed(["sh", "-c", script], 64 * MIB)
        if result.status != expected:
            raise Failed(f"{script}: {result.status}, expected {expected}: {result.stderr}")
    if context.pretend:
        return
    plain = context.tmp / "plain"
    plain.write_text("not a program")
    for path, expected in ((plain, 126), (context.tmp / "absent", 127)):
        result = context.managed([path], 64 * MIB)
        if result.status != expected:
            raise Failed(f"{path.name}: {result.status}, expected {expected}")


@case("pipes")
def pipes(context):
    """stdin, stdout and a closed pipe behave as ever."""
    given = context.tmp / "given"
    given.write_bytes(random.Random(3).randbytes(4 * MIB))
    context.same(["sh", "-c", "tac | rev | sort | cksum"], memory_bytes=32 * MIB, stdin=given)
    context.same(["sh", "-c", "yes quire | head -3; echo $?"], memory_bytes=32 * MIB)
