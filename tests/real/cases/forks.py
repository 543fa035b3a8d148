"""Trees of processes under one budget: forks at the smallest one, workers, members that are killed."""

import json
import sys

from harness import MIB, Failed, case

# What `quire run` takes at the least.
SMALLEST = 8 * MIB


def run_tree(context, *words, memory_bytes=SMALLEST):
    """fork_tree bare and managed; the kernel's own count of memory must stay within the promise."""
    program = context.compile("fork_tree")
    argv = [program, *(str(word) for word in words)]
    _, managed = context.same(argv, memory_bytes=memory_bytes, swap=True)
    if context.pretend:
        return
    context.note(managed.stderr.partition("\n")[0])
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
    """A master of four times its budget and eight workers, who read all and write a part."""
    run_tree(context, "server", 60 if context.long else 3, 32, 8)


@case("fork-killed")
def fork_killed(context):
    """Every 100 ms a member of sixteen is killed: the others are right, and nothing stays."""
    run_tree(context, "killed", 60 if context.long else 10, 2, 16, memory_bytes=32 * MIB)


@case("fork-packed")
def fork_packed(context):
    """A fork of a program whose packed pages alone are more than half of its budget."""
    program = context.compile("fork_pool")
    argv = [program, "96", "30" if context.long else "3"]
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
