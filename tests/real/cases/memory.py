"""Programs that want more memory than they may hold: every byte must come back."""

import re
import sys

from harness import MIB, Failed, case

SAME_FILLED = (
    "b=[bytes([i%251])*1048576 for i in range(256)]; print(sum(x[7]+x[-1] for x in b))"
)
INCOMPRESSIBLE = """
import random, zlib
blocks = [random.Random(i).randbytes(1 << 20) for i in range({count})]
print(sum(block[7] + block[-1] for block in blocks))
for step in (1, 7, 3):
    crc = 0
    for i in range({count}):
        crc = zlib.crc32(blocks[i * step % {count}], crc)
    print(step, crc)
"""


@case("same-filled-blocks")
def same_filled_blocks(context):
    """256 MiB of blocks of one byte each, in 64 MiB, by the command a user would type."""
    bare, _ = context.same(["python3", "-c", SAME_FILLED], memory_bytes=64 * MIB)
    if bare.text != "62770\n":
        raise Failed(f"62770 expected, not {bare.text}")


@case("incompressible-blocks")
def incompressible_blocks(context):
    """The same with data that does not compress: it needs the swap file."""
    program = INCOMPRESSIBLE.format(count=1024 if context.long else 256)
    argv = [sys.executable, "-c", program]
    context.same(argv, memory_bytes=64 * MIB, swap=True)


@case("fork-storm")
def fork_storm(context):
    """Eight threads write while children check every byte they inherited and change it."""
    program = context.compile("fork_storm")
    seconds, mebibytes = ("60", "192") if context.long else ("6", "96")
    context.same([program, seconds, mebibytes], memory_bytes=48 * MIB, swap=True)


@case("fork-storm-within-budget")
def fork_storm_within_budget(context):
    """The same where all of it fits: what is shared after the fork is never evicted."""
    program = context.compile("fork_storm")
    seconds = "30" if context.long else "4"
    context.same([program, seconds, "16"], memory_bytes=256 * MIB)


@case("sixteen-threads")
def sixteen_threads(context):
    """1 GiB faulted page by page by sixteen threads in 64 MiB, again and again: no hang."""
    program = context.compile("sixteen_threads")
    bare = context.bare([program, "1024"])
    rounds = 100 if context.long else 2
    for _ in range(rounds):
        managed = context.managed([program, "1024"], 64 * MIB, context.swap_directory())
        context.compare(bare, managed)
    context.note(f"{rounds} rounds, bare {bare.seconds:.1f} s, last {managed.seconds:.1f} s")


@case("layout-storm")
def layout_storm(context):
    """Faults while others change the layout under them, with forks: speculative, then classic."""
    program = context.compile("layout_storm")
    argv = [program, "60" if context.long else "4"]
    # Its neighbours are swapped out all the time.
    context.same(argv, memory_bytes=24 * MIB, swap=True)
    context.same(argv, memory_bytes=24 * MIB, swap=True, options=["--no-speculative-faults"])


def live_read(context, mode):
    """The kernel writes into a buffer while reclaim walks over it."""
    program = context.compile("live_read")
    argv = [program, mode, str(context.tmp / "data"), "24" if context.long else "6", "160"]
    context.same(argv, memory_bytes=64 * MIB, swap=True)


@case("direct-read")
def direct_read(context):
    live_read(context, "pread")


@case("io-uring-read")
def io_uring_read(context):
    live_read(context, "uring")


@case("io-uring-fixed-buffers")
def io_uring_fixed_buffers(context):
    live_read(context, "fixed")


@case("random-walk")
def random_walk(context):
    """Maps, unmaps, moves, protects and discards at random against a plain copy of what must be."""
    program = context.compile("random_walk")
    steps = "60000" if context.long else "12000"
    context.same([program, "1", steps], memory_bytes=24 * MIB, swap=True)
    context.same([program, "2", steps], memory_bytes=24 * MIB, swap=True)


@case("odd-calls")
def odd_calls(context):
    """Calls of mmap's family with arguments good and bad: each ends as it does bare, and leaves the same."""
    program = context.compile("odd_calls")
    for seed in range(1, 41 if context.long else 6):
        by = ["by-number"] if seed % 2 == 0 else []
        context.same([program, str(seed), "4000", *by], memory_bytes=16 * MIB, swap=True)


@case("bare-calls")
def bare_calls(context):
    """What a program drops by an instruction of its own is zeros, wherever its pages were to go afterwards."""
    context.same([context.compile("bare_calls")], memory_bytes=24 * MIB, swap=True)


THRASH = """
import random, time
data = bytearray(random.Random(1).randbytes(96 << 20))
end = time.monotonic() + 35
while time.monotonic() < end:
    for _ in range(100):
        data[random.randrange(len(data))] ^= 1
"""


@case("thrashing")
def thrashing(context):
    """A run that does little but wait for memory is told of once, with what it would be at ease with."""
    if context.pretend:
        return
    argv = [sys.executable, "-c", THRASH]
    result = context.managed(argv, 32 * MIB, context.swap_directory())
    lines = [line for line in result.stderr.splitlines() if "thrashing" in line]
    told = [re.search(r"--memory ([0-9]+)M would", line) for line in lines]
    if len(told) != 1 or not told[0] or not 80 <= float(told[0][1]) <= 160:
        raise Failed(f"one line with a budget of about 100 MiB expected: {result.stderr[-1000:]}")
