"""A tree of processes as its user meets it: bombs, execs in a loop, floors beyond the budget, a killed
supervisor, runs inside runs, a bound for each process, and what `quire ps` says meanwhile."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from harness import MIB, Failed, Skipped, case, descendants

# Writes and checks its own memory beside a bomb, until that has ended.
BYSTANDER = """
import os, sys, zlib
blocks = [os.urandom(16) * 4096 for _ in range(64)]
sums = [zlib.crc32(block) for block in blocks]
while not os.path.exists(sys.argv[1]):
    assert [zlib.crc32(block) for block in blocks] == sums
    blocks = [bytes(block) + b"" for block in blocks]
print("bystander right")
"""
# Wants COUNT MiB, in CHILDREN processes beside the first, and reads it all twice.
FILL = """
import os, random, sys, zlib
count, children = int(sys.argv[1]), int(sys.argv[2])
def fill(seed):
    blocks = [random.Random(seed * 1000 + i).randbytes(1 << 19) * 2 for i in range(count)]
    return [zlib.crc32(block) for block in blocks] == [zlib.crc32(block) for block in blocks]
pids = []
for seed in range(children):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if fill(seed + 1) else 1)
    pids.append(pid)
fine = fill(0)
print(fine and all(os.waitpid(pid, 0)[1] == 0 for pid in pids))
"""
SURVIVOR = """
import errno, os, random, sys, time, zlib
blocks = [random.Random(i).randbytes(1 << 19) * 2 for i in range(60)]
sums = [zlib.crc32(block) for block in blocks]
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
assert [zlib.crc32(block) for block in blocks] == sums
for _ in range(3):
    try:
        pid = os.fork()
    except OSError as error:
        assert error.errno in (errno.EPERM, errno.EAGAIN), error
    else:
        if pid == 0:
            print("a child that is not managed", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
pid = os.posix_spawn("/bin/echo", ["echo", "spawned"], os.environ)
assert os.waitpid(pid, 0)[1] == 0
blocks = [block[::-1] for block in blocks]
assert [zlib.crc32(block[::-1]) for block in blocks] == sums
print("right", flush=True)
"""


def demand(condition, what):
    if not condition:
        raise Failed(str(what))


def stats_of(context):
    return json.loads(context.stats.read_text())


def ps(context, pid):
    """What `quire ps` says of the run of `pid`, or None where there is none."""
    words = [context.quire, "ps", "--json", "-p", str(pid)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)[0] if done.returncode == 0 else None


def eventually(what, look, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise Failed(f"{what} did not happen")
        time.sleep(0.02)


@contextmanager
def pids_limit(count):
    """A cgroup in which there are at most `count` threads."""
    for mount in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        folder = Path(mount) / f"bomb-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            try:
                (folder / "pids.max").write_text(str(count))
            except OSError:
                continue
            yield folder
            return
        finally:
            eventually("the end of the cgroup", lambda folder=folder: is_removed(folder), 10)
    raise Skipped("no pids controller")


def is_removed(folder):
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def bomb(context, *options, levels=7, before=""):
    """A bomb beside a bystander; returns how many forks there were, and how many were refused."""
    program, over = context.compile("fork_bomb"), context.tmp / "over"
    over.unlink(missing_ok=True)
    bystander = shlex.join([sys.executable, "-c", BYSTANDER, str(over)])
    script = (
        f"{bystander} & b=$!; {program} {levels}; s=$?; : > {over}; wait $b && exit $s; exit 9"
    )
    swap = context.swap_directory()
    argv = context.quire_argv(["sh", "-c", script], 48 * MIB, swap, options)
    if before:
        argv = ["sh", "-c", before + ' && exec "$@"', "sh", *(str(word) for word in argv)]
    process = context.spawn(argv)
    result = context.wait(process)
    context.nothing_left(process.pid, swap)
    demand(result.status == 0, f"{result.status}: {result.text[-500:]} {result.stderr[-2000:]}")
    demand(sorted(result.text.split("\n")[:2]) == ["bystander right", "right"], result.text)
    made, refused = map(int, re.search(r"(\d+) forks, (\d+) refused", result.stderr).groups())
    context.note(f"{made} forks, {refused} refused")
    return refused, result.stderr


@case("trees-bomb-members")
def bomb_members(context):
    """A fork bomb against --members-max: forks say EAGAIN, and all that are there are right."""
    refused, told = bomb(context, "--members-max", "12")
    if context.pretend:
        return
    demand(refused > 0, "nothing was refused")
    demand(told.count("the run has 12 processes, as many as --members-max allows: no other") == 1, told)
    demand(stats_of(context)["processes_refused"] >= refused, stats_of(context))


@case("trees-bomb-pids", needs=("root",))
def bomb_pids(context):
    """A fork bomb against the kernel's limit on processes."""
    with pids_limit(120) as folder:
        refused, _ = bomb(context, before=f"echo 0 > {folder}/cgroup.procs")
        demand(context.pretend or refused > 0, "nothing was refused")


@case("trees-exec-loop")
def exec_loop(context):
    """A program that executes itself a thousand times: one member, and the account is its own."""
    if context.pretend:
        return
    script = context.tmp / "itself.sh"
    script.write_text('test "$1" -gt 0 && exec sh "$0" $(($1 - 1)); exec sleep 1000\n')
    process = context.spawn(context.quire_argv(["sh", str(script), "1000"], 32 * MIB))

    def settled():
        run = ps(context, process.pid)
        members = run["members"] if run else []
        if [member["name"] for member in members] != ["sleep"]:
            return None
        return run if run["held_bytes"] == members[0]["held_bytes"] else None

    try:
        run = eventually("the last of a thousand programs, alone on the account", settled)
        descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
        demand(descriptors < 30, f"{descriptors} descriptors")
        demand(run["wanted_bytes"] == run["members"][0]["wanted_bytes"], run)
    finally:
        for pid, _, _ in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
    context.wait(process)
    context.nothing_left(process.pid)
    stats = stats_of(context)
    demand(stats["processes"] >= 1001, stats["processes"])
    ends = [member["end"] for member in stats["members"]]
    demand(ends[-1] in ("killed", "unknown") and set(ends[:-1]) == {"executed"}, ends)
    demand(len(ends) == 256 and stats["members_forgotten"] == stats["processes"] - 256, stats)


@case("trees-floors")
def floors(context):
    """More processes than the budget has room for: each is right, or ends with 137 and a message."""
    if context.pretend:
        return
    program, joined = context.compile("small_member"), context.tmp / "joined"
    joined.write_text("")
    count = 64
    script = (
        f"for i in $(seq {count}); do {program} {joined} & p=\"$p $!\"; done;"
        " for i in $p; do wait $i; echo $?; done"
    )
    swap = context.swap_directory()
    # Without a cgroup: sixty engines are more than what it allows beside the budget.
    argv = context.quire_argv(["sh", "-c", script], 8 * MIB, swap, ("--no-cgroup",))
    process = context.spawn(argv)

    def settled():
        """All are there with their data, or have ended."""
        there = joined.stat().st_size
        run = ps(context, process.pid)
        return not run or there == count or process.out_path.stat().st_size > 0

    eventually("the crowd", settled, 120)
    (context.tmp / "joined.late").write_text("")
    result = context.wait(process)
    context.nothing_left(process.pid, swap)
    demand(result.status in (0, 137), f"{result.status}: {result.stderr[-2000:]}")
    statuses = [int(line) for line in result.text.split()]
    demand(set(statuses) <= {0, 137}, f"{statuses} {result.stderr[-2000:]}")
    killed = statuses.count(137) + (result.status == 137)
    demand(killed == 0 or "ran out of memory" in result.stderr, result.stderr[-2000:])
    context.within_budget(result)
    context.note(f"{statuses.count(0)} right, {killed} ended with a message")


@case("trees-supervisor-killed")
def supervisor_killed(context):
    """kill -9 of the supervisor: members go on with what they have, forks say why they cannot be."""
    if context.pretend:
        return
    go, swap = context.tmp / "go", context.swap_directory()
    argv = [sys.executable, "-c", SURVIVOR, str(go)]
    process = context.spawn(context.quire_argv(argv, 24 * MIB, swap))
    eventually("the data", lambda: process.out_path.read_text() == "ready\n")
    members = [pid for pid, _, _ in descendants(process.pid)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    go.write_text("")
    eventually("the end", lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in members))
    text, told = process.out_path.read_text(), process.err_path.read_text()
    demand(text == "ready\nspawned\nright\n", f"{text}\n{told}")
    demand(told.count("cannot fork: the supervisor of its run has ended") == 1, told)
    demand("runs unmanaged: the supervisor of its run has ended" in told, told)
    context.nothing_left(process.pid, swap, cgroups=False)
    # Its cgroup goes with the next run.
    context.managed(["true"], 24 * MIB)
    context.nothing_left(process.pid, swap)


@case("trees-inside")
def inside(context):
    """A run inside a run: within its own budget, which is a part of the outer one's."""
    program = [sys.executable, "-c", FILL, "60", "1"]
    if context.pretend:
        return
    swap = context.swap_directory()
    inner_stats = context.tmp / "inner.json"
    inner = [context.quire, "run", "--memory", "32M", "--swap-file", str(swap)]
    inner += ["--stats", str(inner_stats), "--", *program]
    result = context.managed(inner, 80 * MIB)
    demand((result.status, result.text) == (0, "True\n"), f"{result.status} {result.stderr}")
    stats, within = stats_of(context), json.loads(inner_stats.read_text())
    demand(stats["held_bytes_max"] >= 32 * MIB, stats["held_bytes_max"])
    demand(within["held_bytes_max"] <= 32 * MIB and within["pswpout"] > 0, within)
    demand(stats["unmanaged_processes"] == 0, stats["unmanaged"])
    inner[inner.index("32M")] = "79M"
    refused = context.managed(inner, 80 * MIB)
    demand((refused.status, refused.text) == (125, ""), refused.stderr)
    demand("lower --memory, or raise that of the outer run" in refused.stderr, refused.stderr)


@case("trees-per-process")
def per_process(context):
    """--memory-per-process: no process holds more, whatever the budget has left; the sums are right."""
    program, most = [sys.executable, "-c", FILL, "40", "2"], 16 * MIB
    options = ("--memory-per-process", str(most))
    context.same(program, memory_bytes=256 * MIB, swap=True, options=options)
    if context.pretend:
        return
    stats = stats_of(context)
    held = [member["held_bytes_max"] for member in stats["members"]]
    demand(len(held) == 3 and max(held) <= most, held)
    demand(min(held) > most // 2 and stats["pswpout"] * 4096 > 60 * MIB, stats)
    for name in ("pgfault", "pgmajfault", "pswpin", "pswpout"):
        of_members = sum(member[name] for member in stats["members"])
        demand(of_members == stats[name], f"{name}: {of_members} of members, {stats[name]} in all")
    ends = {(member["end"], member["end_number"]) for member in stats["members"]}
    demand(ends <= {("exited", 0), ("unknown", None)}, ends)


@case("trees-ps")
def trees_ps(context):
    """What `quire ps` shows of a run that swaps is what its counters say in the end."""
    if context.pretend:
        return
    swap = context.swap_directory()
    process = context.spawn(
        context.quire_argv([sys.executable, "-c", FILL, "60", "2"], 48 * MIB, swap)
    )

    def looked():
        run = ps(context, process.pid)
        return run if run and len(run["members"]) == 3 and run["pswpout"] > 1000 else None

    run = eventually("a run that swaps", looked)
    demand(run["held_bytes"] <= run["budget_bytes"] == 48 * MIB, run)
    demand(len({member["name"] for member in run["members"]}) == 1, run["members"])
    demand(run["unmanaged"] == [], run["unmanaged"])
    demand(sum(member["wanted_bytes"] for member in run["members"]) > 0, run)
    result = context.wait(process)
    context.nothing_left(process.pid, swap)
    demand((result.status, result.text) == (0, "True\n"), result.stderr)
    stats = stats_of(context)
    demand(stats["pgfault"] >= run["pgfault"] and stats["pswpout"] >= run["pswpout"], (stats, run))
