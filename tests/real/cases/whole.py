"""The budget is the whole: what is not managed takes its part of it, and managed memory gives way."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from harness import MIB, Failed, Skipped, case

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")

# A heap is filled, then as much memory of another kind by one call, then both are read.
BESIDE = r"""
import ctypes, hashlib, mmap, os, random, sys, time
kind, mib, heap_mib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
noise = random.Random(1).randbytes(1 << 16)
def block(number):
    return (number.to_bytes(8, "little") + noise)[: 1 << 16] * 16
heap = [block(number) for number in range(heap_mib)]
libc = ctypes.CDLL(None, use_errno=True)
size = mib << 20
if kind == "mapping":
    beside = mmap.mmap(-1, size)
elif kind == "sysv":
    libc.shmat.restype = ctypes.c_void_p
    id = libc.shmget(0, ctypes.c_size_t(size), 0o1600)
    address = libc.shmat(id, None, 0)
    libc.shmctl(id, 0, None)
elif kind == "late":
    beside = mmap.mmap(-1, size)
    time.sleep(2.5)
    assert all(had == block(number) for number, had in enumerate(heap))
elif kind == "tmpfs":
    beside = os.memfd_create("beside")
    chunk = b"s" * (1 << 20)
    for _ in range(mib):
        os.write(beside, chunk)
if kind in ("mapping", "late"):
    address = ctypes.addressof(ctypes.c_char.from_buffer(beside))
if kind != "tmpfs":
    libc.memset(ctypes.c_void_p(address), ord("s"), ctypes.c_size_t(size))
digest = hashlib.sha1()
for number, had in enumerate(heap):
    assert had == block(number), number
    digest.update(had)
content = os.pread(beside, size, 0) if kind == "tmpfs" else ctypes.string_at(address, size)
assert content.count(b"s") == size
print(digest.hexdigest())
"""


class Watched:
    """What is in a cgroup and cannot be dropped, looked at again and again."""

    def __init__(self, folder):
        self.folder, self.samples, self.ends = folder, [], threading.Event()
        self.names = ("memory.usage_in_bytes", "total_") if V1 in folder.parents else ("memory.current", "")

    def look(self):
        name, before = self.names
        while True:
            used = int((self.folder / name).read_text())
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            # Files that are deleted between the two are in the one, and not in the other.
            if abs(int((self.folder / name).read_text()) - used) <= MIB:
                return used - int(stat[f"{before}active_file"]) - int(stat[f"{before}inactive_file"])

    def run(self):
        while not self.ends.wait(0.005):
            self.samples.append(self.look())


@contextmanager
def watched_cgroup():
    """A memory cgroup without a limit, and what was seen in it."""
    root = V1 if (V1 / "cgroup.procs").exists() else V2
    folder = root / f"real-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise Skipped(f"no cgroup can be made: {error}") from None
    watched = Watched(folder)
    thread = threading.Thread(target=watched.run)
    try:
        watched.look()
        thread.start()
        yield watched
    except FileNotFoundError:
        raise Skipped("the memory controller is not enabled at the root") from None
    finally:
        watched.ends.set()
        if thread.ident:
            thread.join()
        deadline = time.monotonic() + 5
        while folder.exists():
            try:
                folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def beside(context, argv, whole_mib, options=()):
    """Bare and under Quire, in a cgroup without a limit; the most that was seen in it, in MiB."""
    bare = context.bare(argv)
    if bare.status != 0:
        raise Failed(f"{argv}: bare it ends with {bare.status}: {bare.stderr}")
    with watched_cgroup() as watched:
        inside = ["sh", "-c", f'echo $$ > {watched.folder}/cgroup.procs; exec "$@"', "sh"]
        swap = context.swap_directory()
        run = context.quire_argv(argv, whole_mib * MIB, swap, options, whole=True)
        process = context.spawn([*inside, *run])
        managed = context.wait(process)
        context.nothing_left(process.pid, swap)
    return bare, managed, max(watched.samples) / MIB


@case("whole-shared", needs=("root",))
def shared(context):
    """Shared memory stays, the heap gives way, and both are within the budget whenever one looks."""
    by_kind = [sys.executable, "-c", BESIDE]
    for kind in ("mapping", "sysv"):
        # The supervisor itself is in the cgroup, too.
        bare, managed, most = beside(context, [*by_kind, kind, 300, 300], 400, ["--no-cgroup"])
        if managed.status != 0 or managed.text != bare.text:
            raise Failed(f"{kind}: {managed.status}, {managed.text!r}: {managed.stderr}")
        context.note(f"{kind}: 300 MiB beside 300 MiB of heap, {most:.0f} MiB of 400 at most, {managed.seconds:.1f} s")
        if most > 400:
            raise Failed(f"{kind}: {most:.1f} MiB were in memory, allowed 400")


@case("whole-burst", needs=("root",))
def burst(context):
    """What comes unannounced is caught up with, or the run ends with a line that says what would do."""
    by_kind = [sys.executable, "-c", BESIDE]
    for kind in ("late", "tmpfs"):
        bare, managed, most = beside(context, [*by_kind, kind, 300, 300], 400)
        is_done = managed.status == 0 and managed.text == bare.text
        if not is_done and "the kernel killed" not in managed.stderr:
            raise Failed(f"{kind}: {managed.status}, {managed.text!r}: {managed.stderr}")
        context.note(f"{kind}: {'done' if is_done else 'killed'}, {most:.0f} MiB of 400 at most")


@case("whole-too-much")
def too_much(context):
    """Where unmanaged memory alone is more than the budget, the run says what it was and what would do."""
    argv = [sys.executable, "-c", BESIDE, "mapping", 120, 8]
    process = context.spawn(context.quire_argv(argv, 64 * MIB, None, [], whole=True))
    managed = context.wait(process)
    context.nothing_left(process.pid)
    said = managed.stderr
    if "what quire does not manage takes" not in said and "the kernel killed" not in said:
        raise Failed(f"nothing is said: {managed.status}: {said}")
    if "shared memory" not in said or "give " not in said:
        raise Failed(f"it is not said what it was, or what would do: {said}")


@case("whole-programs", needs=("sort", "root"))
def programs(context):
    """Programs in a part of what they want, all in all: the same output, and hardly ever over the budget."""
    data = context.tmp / "lines"
    context.wait(context.spawn([sys.executable, "-c", f"""
import random
with open({str(data)!r}, "w") as out:
    for _ in range(1_500_000):
        out.write(f"{{random.randrange(1 << 60)}} a line of a file\\n")
"""]))
    sort = ["sort", "--parallel=2", "-S", "200M", "-T", context.tmp, data]
    workers = [sys.executable, "-c", """
import multiprocessing
def work(number):
    held = [bytes([number % 251]) * 997 for _ in range(40_000)]
    return sum(map(len, held))
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(4) as pool:
        print(sum(pool.map(work, range(24))))
"""]
    for argv, whole_mib in ((sort, 96), (workers, 96)):
        bare, managed, most = beside(context, argv, whole_mib)
        if (managed.status, managed.text) != (bare.status, bare.text):
            raise Failed(f"{argv[0]}: {managed.status}: {managed.stderr}")
        context.note(f"{Path(argv[0]).name}: {most:.0f} MiB of {whole_mib} at most")
        # The kernel charges ahead for each CPU, and processes begin between two counts, which are 20 ms apart.
        if most > whole_mib + 6:
            raise Failed(f"{argv[0]}: {most:.1f} MiB were in memory, allowed {whole_mib}")


HOLDS = """
import sys, time
held = [bytes([number % 251]) * 4096 for number in range(30_000)]
print("ready", flush=True)
sys.stdin.readline()
assert all(page == bytes([number % 251]) * 4096 for number, page in enumerate(held))
"""


@case("whole-set")
def set_budget(context):
    """The budget of a run that goes on: lowered, raised, and refused where it cannot be."""
    argv = context.quire_argv([sys.executable, "-c", HOLDS], 256 * MIB, context.swap_directory(), whole=True)
    run = context.spawn_until_ready(argv)

    def ask(size):
        words = [context.quire, "set", "-p", str(run.pid), f"memory={size}"]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    def run_now():
        found = subprocess.run([context.quire, "ps", "--json"], capture_output=True, text=True, check=True)
        return next(row for row in json.loads(found.stdout) if row["pid"] == run.pid)

    for size, words in (("15M", "give 16 MiB at least"), ("600M", "were made for 512 MiB at most")):
        refused = ask(size)
        if refused.returncode == 0 or words not in refused.stderr:
            raise Failed(f"memory={size}: {refused}")
    for mib in (64, 400, 32):
        done = ask(f"{mib}M")
        now = run_now()
        if done.returncode != 0 or now["budget_bytes"] != mib * MIB or now["held_bytes"] > mib * MIB:
            raise Failed(f"memory={mib}M: {done}, {now}")
    context.go_on(run)
    context.nothing_left(run.pid, context.swap_directory())
