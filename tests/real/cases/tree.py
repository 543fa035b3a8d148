"""Members of a tree: which gives memory to which, which is passed over, and which is ended."""

import json
import os
from pathlib import Path

import harness
from harness import MIB, Failed, case


def counters(context):
    return json.loads(context.stats.read_text())


def same(context, words, memory_bytes, swap=True):
    """tree_market bare and managed."""
    program = context.compile("tree_market")
    argv = [program, *(str(word) for word in words)]
    _, managed = context.same(argv, memory_bytes=memory_bytes, swap=swap)
    if "the kernel killed" in managed.stderr:
        raise Failed(managed.stderr[-2000:])
    return managed


@case("tree-idle")
def tree_idle(context):
    """A member that sleeps gives its memory to a busy one, however small that one is."""
    idle, busy, rounds = 40, 20, 60
    same(context, ["idle", idle, busy, rounds], 36 * MIB)
    if context.pretend:
        return
    stats = counters(context)
    came = stats["pswpin"] + stats["pgactivate_limbo"]
    # All of the sleeper's once, at its end, and all of the other's now and then. Where each kept its
    # half every round would bring in what does not fit, and mostly all.
    if came > (idle + rounds * busy / 4) * MIB / 4096:
        raise Failed(f"{came} pages came back in")
    context.note(f"{came} pages came back in")


@case("tree-stopped")
def tree_stopped(context):
    """A member that is stopped with most of the budget: the other gets on with what is left."""
    same(context, ["stopped", 40, 20], 32 * MIB)


@case("tree-frozen", needs=("root",))
def tree_frozen(context):
    """The same where it is frozen, with all its threads at once."""
    freezer = Path("/sys/fs/cgroup/freezer")
    if not (freezer / "cgroup.procs").exists():
        # That of version 2 would take the process out of the run's memory cgroup.
        context.note("no freezer of version 1 here: not tested")
        return
    cgroup = freezer / f"real-{os.getpid()}"
    cgroup.mkdir()
    try:
        same(context, ["frozen", 40, 20, cgroup], 32 * MIB)
    finally:
        (cgroup / "freezer.state").write_text("THAWED")
        harness.kill_descendants(os.getpid())
        cgroup.rmdir()


@case("tree-all-stopped")
def tree_all_stopped(context):
    """All that hold memory are stopped, and nothing can be freed: only the member that asks is ended."""
    program = context.compile("tree_market")
    argv = [program, "all", "13", "24"]
    managed = context.managed(argv, 32 * MIB)
    if context.pretend:
        return
    if managed.text != "busy 137\nstopped 0\nstopped 0\n":
        raise Failed(f"printed {managed.text!r}\n{managed.stderr[-2000:]}")
    if managed.stderr.count("ran out of memory") != 1 or "are stopped, traced or frozen" not in managed.stderr:
        raise Failed(managed.stderr[-2000:])
    context.note(managed.stderr.partition("\n")[0])


@case("tree-sixteen")
def tree_sixteen(context):
    """Sixteen that work, with a quarter of what they want."""
    same(context, ["many", 16, 8, 40 if context.long else 6], 32 * MIB)


@case("tree-giver-killed")
def tree_giver_killed(context):
    """A member is killed while it gives, again and again: the other is right, and nothing stays."""
    same(context, ["killed", 24, 12, 100 if context.long else 20], 24 * MIB)
