"""Trees of processes under one budget: forks at the smallest one, workers, members that are killed."""

import json
import os
import re
import subprocess
import sys
import time

from cases.programs import write_text
from harness import MIB, Failed, case, descendants, diagnose

# The smallest budget that `quire run` takes.
SMALLEST = 8 * MIB


def last_word(managed):
    """What the program says of itself at its end: a number and what it counts."""
    lines = managed.stderr.splitlines()
    return next((line for line in lines if re.fullmatch(r"\d+ (trees|workers|kills)", line)), "")


def run_tree(context, *words, memory_bytes=SMALLEST):
    """fork_tree bare and managed; the kernel's own count of memory must stay within the promise."""
    program = context.compile("fork_tree")
    argv = [program, *(str(word) for word in words)]
    _, managed = context.same(argv, memory_bytes=memory_bytes, swap=True)
    if context.pretend:
        return
    refused = managed.stderr.count("fork was refused")
    context.note(f"{last_word(managed)}, {refused} forks refused")
    if "the kernel killed" in managed.stderr:
        raise Failed(managed.stderr[-2000:])
    stats = json.loads(context.stats.read_text())
    peak, limit = stats["cgroup_bytes_max"] or 0, stats["cgroup_limit_bytes"] or 0
    if peak > limit:
        raise Failed(f"the cgroup held {peak}, allowed {limit}")


@case("fork-tree")
def fork_tree(context):
    """Eight threads write while children check, change and fork again, at the smallest budget."""
    run_tree(context, "tree", 300 if context.long else 10, 16)


@case("fork-depth")
def fork_depth(context):
    """Four generations, each beside the one it came from."""
    run_tree(context, "tree", 60 if context.long else 3, 8, 4)


@case("fork-workers")
def fork_workers(context):
    """A master of four times its budget and eight workers, which read all and write a part."""
    run_tree(context, "server", 60 if context.long else 3, 32, 8)


def accounts(context, supervisor):
    """What `quire vmstat -s` says of a run: the tree's words and counters by name."""
    argv = [context.quire, "vmstat", "-s", str(supervisor)]
    shown = subprocess.run(argv, capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise Failed(f"vmstat: {shown.stderr}")
    return {name: int(value) for name, value in map(str.split, shown.stdout.splitlines())}


def accounts_of(context, process, members, patience_seconds=20):
    """The accounts of a tree once it has so many members; those that were killed are being buried."""
    deadline = time.monotonic() + patience_seconds
    while True:
        now = accounts(context, process.pid)
        if now["processes"] == members:
            return now
        if time.monotonic() > deadline:
            raise Failed(f"{now['processes']} members, expected {members}")
        time.sleep(0.02)


def wait_for_word(context, process, word):
    """Waits until the program has written `word` to stderr."""
    deadline = time.monotonic() + context.watchdog_seconds
    while word not in process.err_path.read_text(errors="replace").split():
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            raise Failed(f"ended early: {process.err_path.read_text(errors='replace')[-2000:]}")
        if time.monotonic() > deadline:
            diagnosis = diagnose(os.getpid())
            raise Failed(f"no end of the storm\n{diagnosis}")
        time.sleep(0.05)


def check_accounts(context, process, pipe):
    """Killed members leave nothing on the accounts: first beside the one that is left, then without any."""
    wait_for_word(context, process, "settled")
    one = accounts_of(context, process, members=1)
    held = one["held_pages"], one["wanted_pages"]
    program = descendants(process.pid)[0][0]
    member = accounts(context, program)
    if held != (member["held_pages"], member["wanted_pages"]):
        raise Failed(f"the tree's account {held} is not that of its last member: {member}")
    os.write(pipe, b"\n")
    none = accounts_of(context, process, members=0)
    words = "held_pages", "wanted_pages", "managed_pages", "pool_pages", "swap_file_pages"
    left = {word: none[word] for word in words if none[word] != 0}
    if left:
        raise Failed(f"on the accounts when no member was left: {left}")


def run_killed(context, members, memory_bytes, options=()):
    """Members are killed at random; the accounts are looked at while the run still stands."""
    program = context.compile("fork_tree")
    argv = [program, "killed", "60" if context.long else "5", "2", str(members)]
    bare = context.bare(argv)
    fifo, swap = context.tmp / "input", context.swap_directory()
    os.mkfifo(fifo)
    # Both ends, so that neither opening waits for the other.
    pipe = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
    command = context.quire_argv(argv, memory_bytes, swap, ["--allow-unmanaged", *options])
    process = context.spawn(command, stdin=fifo)
    try:
        if not context.pretend:
            check_accounts(context, process, pipe)
    finally:
        os.close(pipe)
    managed = context.wait(process)
    context.nothing_left(process.pid, swap)
    context.compare(bare, managed)
    if not context.pretend:
        context.within_budget(managed)
        if "the kernel killed" in managed.stderr:
            raise Failed(managed.stderr[-2000:])
    context.note(f"{members} members in {memory_bytes >> 20} MiB")
    context.note(last_word(managed))


@case("fork-killed")
def fork_killed(context):
    """Every 100 ms a member of eight is killed: the others are right, and nothing stays."""
    run_killed(context, 8, 16 * MIB)


@case("fork-killed-sixteen")
def fork_killed_sixteen(context):
    """The same with sixteen, half of which have children of their own."""
    run_killed(context, 16, 32 * MIB)


@case("fork-packed")
def fork_packed(context):
    """A fork of a program whose packed pages alone are more than half of its budget."""
    program = context.compile("fork_pool")
    argv = [program, "96", "30" if context.long else "8"]
    _, managed = context.same(argv, memory_bytes=44 * MIB, swap=False)
    if context.pretend:
        return
    stats = json.loads(context.stats.read_text())
    context.note(f"pool {stats['pool_bytes_max'] / MIB:.1f} MiB at most")
    if stats["pool_bytes_max"] * 2 < 44 * MIB:
        raise Failed("the pool was too small for the case to mean anything")


PIPELINE = """
set -e
for round in 1 2 3; do
  seq 1 60000 | sed s/7/x/ | awk '{ a[$0]++ } END { for (k in a) print k }' | sort -r | md5sum
  (seq 1 2000; (seq 5 900 | tac) ) | while read line; do echo "$line"; done | sort -n | cksum
done
echo $(echo a $(echo b $(echo c)))
"""


@case("fork-pipeline", needs=("sh", "sed", "awk", "sort"))
def fork_pipeline(context):
    """Pipelines of a shell, its subshells and substitutions."""
    context.same(["sh", "-c", PIPELINE], memory_bytes=24 * MIB, swap=True)


SERVER = """
import os, zlib
blocks = [os.urandom(16) * 4096 * 16 for i in range(64)]
expected = [zlib.crc32(block) for block in blocks]
for generation in range(3):
    children = []
    for worker in range(4):
        pid = os.fork()
        if pid == 0:
            fine = [zlib.crc32(block) for block in blocks] == expected
            blocks[worker::4] = [bytes([worker]) * (1 << 20) for _ in blocks[worker::4]]
            os._exit(not (fine and all(b == bytes([worker]) * (1 << 20) for b in blocks[worker::4])))
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert [zlib.crc32(block) for block in blocks] == expected
print("right")
"""


@case("fork-interpreter")
def fork_interpreter(context):
    """CPython, which frees and allocates as it looks at what it inherited."""
    context.same([sys.executable, "-c", SERVER], memory_bytes=24 * MIB, swap=True)


COUNTING = """
LC_ALL=C sort -S 256M --parallel=2 "$0" | uniq -c | awk '{ n[$2] += $1; m++ } END {
  for (word in n) print n[word], word; print m }' | sort -n | cksum
awk '{ for (i = 1; i <= NF; i++) n[$i]++ } END { for (word in n) print n[word], word }' "$0" |
  sort -k 2 | cksum
"""


@case("fork-pipeline-large", needs=("sh", "awk", "sort", "uniq"))
def fork_pipeline_large(context):
    """Words counted by programs that all want much at once, in a quarter of what the largest has."""
    text = context.tmp / "text"
    write_text(text, 160 if context.long else 24)
    context.same(["sh", "-c", COUNTING, text], swap=True)


PREFORK = """
import os, socket, sys, zlib

MIB = 1 << 20
size, workers, rounds = int(sys.argv[1]), 4, int(sys.argv[2])
table = [os.urandom(64) * (MIB // 64) for _ in range(size)]
expected = [zlib.crc32(part) for part in table]
listener = socket.socket(socket.AF_UNIX)
listener.bind("server")
listener.listen(64)


def serve():
    own = {}
    while True:
        client, _ = listener.accept()
        with client, client.makefile("rb") as lines:
            for line in lines:
                word, number = line.split()
                number = int(number)
                if word == b"quit":
                    os._exit(0)
                if word == b"put":
                    # A worker's changes are its own.
                    own[number] = table[number] = bytes([number]) * MIB
                    client.sendall(b"%d\\n" % os.getpid())
                else:
                    is_right = number not in own or table[number] == bytes([number]) * MIB
                    client.sendall(b"%d %d\\n" % (zlib.crc32(table[number]), is_right))


def ask(text):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("server")
        client.sendall(text)
        with client.makefile("rb") as lines:
            return lines.readline()


pids = []
for _ in range(workers):
    pid = os.fork()
    if pid == 0:
        serve()
    pids.append(pid)
wrong = 0
for turn in range(rounds):
    for number in range(size):
        crc, is_right = ask(b"get %d\\n" % number).split()
        changed = zlib.crc32(bytes([number]) * MIB)
        wrong += int(crc) not in (expected[number], changed) or int(is_right) != 1
        if number % 8 == turn % 8:
            ask(b"put %d\\n" % number)
    wrong += [zlib.crc32(part) for part in table] != expected
for pid in pids:
    ask(b"quit 0\\n")
for pid in pids:
    wrong += os.waitpid(pid, 0)[1] != 0
os.unlink("server")
print("wrong" if wrong else "right")
"""


@case("fork-server")
def fork_server(context):
    """A server that forks its workers first, which serve a table that they share, and change it."""
    size, rounds = ("96", "8") if context.long else ("48", "2")
    context.same([sys.executable, "-c", PREFORK, size, rounds], swap=True)
