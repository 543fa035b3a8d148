"""quire stat, vmstat, trace and set, on programs that fault and swap."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from harness import MIB, Failed, case, descendants

MEMORY = 24 * MIB
# Touches three times its budget, twice: what was swapped out comes back.
TOUCH = """
import random, zlib
blocks = [random.Random(i).randbytes(1 << 19) * 2 for i in range(72)]
for _ in range(2):
    total = sum(zlib.crc32(block) for block in blocks)
print(total)
"""
# Touches memory until it is killed, with a second thread.
LOOP = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
while True: data = [bytes([i]) * (1 << 20) for i in range(60)]
"""
# Lays this very file over the middle of memory that is managed, and unmaps it again.
OVERLAY = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
RW, SIZE, PAGE = mmap.PROT_READ | mmap.PROT_WRITE, 1 << 20, 4096
MAP_FIXED = 16
file = os.open(sys.argv[1], os.O_RDONLY)
place = libc.mmap(None, SIZE, RW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
ctypes.memset(place, 7, SIZE)
for _ in range(3):
    at = libc.mmap(place + 8 * PAGE, PAGE, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file, 0)
    assert at == place + 8 * PAGE, ctypes.get_errno()
    assert ctypes.string_at(at, 100) == os.pread(file, 100, 0)
    assert ctypes.string_at(at - PAGE, PAGE) == ctypes.string_at(at + PAGE, PAGE) == bytes([7]) * PAGE
    at = libc.mmap(at, PAGE, RW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1, 0)
    assert ctypes.string_at(at, PAGE) == bytes(PAGE)
assert libc.munmap(place, SIZE) == 0
print("laid over")
"""


def demand(condition, what):
    if not condition:
        raise Failed(str(what))


def quire(context, *words, status=0, **how):
    result = context.bare([context.quire, *words], **how)
    demand(result.status == status, f"quire {words}: {result.status}: {result.stderr[-2000:]}")
    return result


def values_of(text):
    """The values that perf-like lines print, by name."""
    lines = re.findall(r"^ *([\d,]+)      (\S+) +#", text, re.MULTILINE)
    return {name: int(value.replace(",", "")) for value, name in lines}


def stat_words(context, *options):
    swap = context.swap_directory()
    return ["stat", *options, "--memory", MEMORY, "--swap-file", swap, "--stats", context.stats]


@case("counting-stat")
def counting_stat(context):
    """A run's counters in all formats: those that its JSON has, plausible and well-formed."""
    events = "faults,spf,pagefault:*,pswpin,pswpout,pgmajfault"
    program = ["--", sys.executable, "-c", TOUCH]
    result = quire(context, *stat_words(context, "-e", events, "--histogram"), *program)
    expected = context.bare([sys.executable, "-c", TOUCH])
    demand(result.text == expected.text, f"other output: {result.text[:500]}")
    text = result.stderr
    demand("Performance counter stats for '" in text, text)
    elapsed = float(re.search(r"^ +([\d.]+) seconds time elapsed$", text, re.MULTILINE)[1])
    demand(0 < elapsed <= result.seconds, f"{elapsed} of {result.seconds} s")
    values, stats = values_of(text), json.loads(context.stats.read_text())
    demand(values["faults"] == stats["pgfault"] > 1000, f"{values} {stats}")
    demand(values["spf"] == stats["speculative_pgfault"] <= values["faults"], f"{values} {stats}")
    for name in ("pswpin", "pswpout", "pgmajfault"):
        demand(values[name] == stats[name], f"{name}: {values} {stats}")
    # Three times the budget went through it.
    demand(values["pswpout"] * 4096 > MEMORY, values)
    doubts = [value for name, value in values.items() if name.startswith("pagefault:spf_")]
    demand(len(doubts) == 5, values)
    # One thread goes the classic way at once, and nothing is said about it.
    demand(values["spf"] == sum(doubts) == 0, values)
    demand("Service times of" in text, text)
    context.note(f"{values['faults']} faults, {values['spf']} without a lock")

    csv = quire(context, *stat_words(context, "-x,", "-efaults,pswpout", "-r2"), *program)
    rows = [line.split(",") for line in csv.stderr.splitlines() if "100.00" in line]
    demand([row[2] for row in rows] == ["faults", "pswpout"], csv.stderr)
    demand(all(len(row) == 8 and int(row[0]) > 0 and row[3].endswith("%") for row in rows), rows)

    out = context.tmp / "intervals.json"
    options = ("-j", "-e", "faults", "-I", "50", "-o", str(out))
    result = quire(context, *stat_words(context, *options), *program)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    times = [line["interval"] for line in lines]
    demand(times == sorted(times) and times, times)
    total = sum(float(line["counter-value"]) for line in lines)
    faults = json.loads(context.stats.read_text())["pgfault"]
    demand(total == faults, f"{total} in intervals, {faults} in all")


@case("counting-unmanaged")
def counting_unmanaged(context):
    """A file laid over managed memory is the kernel's to serve, and counted as what it is."""
    program = ["--", sys.executable, "-c", OVERLAY, __file__]
    result = quire(context, *stat_words(context, "-e", "layout_unmanaged"), *program)
    demand(result.text == "laid over\n", result.text)
    demand(values_of(result.stderr) == {"layout_unmanaged": 3}, result.stderr)
    demand(json.loads(context.stats.read_text())["layout_unmanaged"] == 3, "another number")


@case("counting-refused")
def counting_refused(context):
    """An event that cannot be counted is one clear message, and the program is not started."""
    proof = context.tmp / "started"
    words = ("stat", "-e", "faults,nosuch", "-m", "64M", "--", "touch", proof)
    text = quire(context, *words, status=125).stderr
    demand("no event 'nosuch'" in text and " speculative_pgfault" in text, text)
    demand(not proof.exists(), "the program was started")
    text = quire(context, "stat", "-p", os.getpid(), status=125).stderr
    demand(text == f"quire: process {os.getpid()} is not run by quire; `quire ps` lists what is", text)
    text = quire(context, "vmstat", "-s", "4194304", status=125).stderr
    demand(text == "quire: there is no process 4194304", text)
    if os.geteuid() == 0:
        # The user nobody may have no right to go there: a build directory may be anywhere.
        copy = shutil.copy(context.quire, context.tmp / "quire")
        asked = subprocess.run(
            [copy, "stat", "-p", str(os.getpid())],
            capture_output=True, text=True, user=65534, group=65534, extra_groups=[], check=False,
        )
        expected = (f"quire: process {os.getpid()} belongs to another user: quire may not look into it; "
                    "try as root\n")
        demand((asked.returncode, asked.stderr) == (125, expected), asked)


def start_loop(context):
    """A run that goes on, and its member's process id."""
    argv = [context.quire, "run", "--quiet", "--memory", MEMORY, "--", sys.executable, "-c", LOOP]
    supervisor = context.spawn([str(word) for word in argv])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid, _, _ in descendants(supervisor.pid):
            asked = context.bare([context.quire, "vmstat", "-s", pid])
            if asked.status == 0 and re.search(r"^pgfault [1-9]", asked.text, re.MULTILINE):
                return supervisor, pid
        time.sleep(0.05)
    raise Failed("the program did not join")


@case("counting-attached")
def counting_attached(context):
    """A run that goes on, looked at from outside: by its member's id, its supervisor's, by none."""
    supervisor, member = start_loop(context)
    try:
        for pid in (member, supervisor.pid):
            text = quire(context, "stat", "-e", "faults,spf", "-p", pid, "sleep", "1").stderr
            demand(f"stats for process id '{pid}' in 'sleep 1':" in text, text)
            values = values_of(text)
            # It has two threads.
            demand(values["faults"] > 0 and values["spf"] * 2 > values["faults"], text)
        lines = quire(context, "vmstat", "-s", member).text.splitlines()
        found = [line for line in lines if "speculative_pgfault" in line]
        demand(len(found) == 1 and re.fullmatch(r"speculative_pgfault \d+", found[0]), lines)
        tree = dict(line.split() for line in quire(context, "vmstat", "-s", supervisor.pid).text.splitlines())
        demand(int(tree["processes"]) == 1 and 0 < int(tree["held_pages"]) * 4096 <= MEMORY, tree)
        result = quire(context, "vmstat", "0.2", "4", "-p", member)
        rows = [line.split() for line in result.text.splitlines()[2:]]
        demand(len(rows) == 4 and all(len(row) == 12 and row[0] == "1" for row in rows), result.text)
        demand(any(int(row[7]) > 0 for row in rows), result.text)
        quire(context, "set", "-p", member, "speculative-faults=off", "folio-order=0")
        time.sleep(0.3)
        text = quire(context, "stat", "-e", "faults,spf", "-p", member, "sleep", "0.5").stderr
        values = values_of(text)
        demand(values["faults"] > 0 and values["spf"] == 0, text)
        quire(context, "set", "-p", member, "speculative-faults=on", "folio-order=auto")
        quire(context, "trace", "-p", member, "sleep", "0.2")
        # A tool that looks at it ends with it.
        looking = context.spawn([context.quire, "stat", "-p", str(member)])
        time.sleep(0.5)
    finally:
        os.kill(member, signal.SIGKILL)
    demand(context.wait(looking, 20).status == 0, "stat -p outlives its process")
    demand(context.wait(supervisor, 20).status == 137, "the run did not end")
