"""What stress-ng does to memory, all of its kinds, each checked by itself (`--verify`)."""

import subprocess

from harness import MIB, Failed, case

CLASSES = ("vm", "memory")
LEFT_OUT = {
    "dev-shm": "files in memory are not managed, and are more than the cgroup allows beside the budget",
    "pageswap": "so is anonymous memory that is shared",
    "resources": "takes the disk's last block, which is not its own alone",
    "shm": "as dev-shm",
    "shm-sysv": "as dev-shm",
    "swap": "changes what the machine swaps to",
    "tmpfs": "as dev-shm",
    "userfaultfd": "wants a userfaultfd on memory that has Quire's",
    "watchdog": "would have the machine restarted",
}


def kinds():
    """The names of what there is in the classes."""
    found = set()
    for one in CLASSES:
        listed = subprocess.run(["stress-ng", "--class", f"{one}?"], capture_output=True, text=True, check=False)
        found.update(listed.stdout.partition(":")[2].split())
    if not found:
        raise Failed("stress-ng lists nothing")
    return sorted(found - LEFT_OUT.keys())


@case("stress-ng", needs=("stress-ng", "setpriv"))
def stress_ng(context):
    """Each ends as it does bare, which is looked at where that is no success."""
    seconds, instances = (10, 2) if context.long else (1, 1)
    wrong, failed_bare = [], []
    chosen = kinds()
    for kind in chosen:
        # Some would take pages from the machine for good.
        argv = ["setpriv", "--bounding-set", "-sys_admin", "stress-ng", f"--{kind}", instances]
        argv += ["--verify", "--timeout", seconds, "--oomable", "--temp-path", context.tmp]
        managed = context.managed(argv, 64 * MIB, context.swap_directory())
        if managed.status == 0:
            continue
        bare = context.bare(argv)
        failed_bare.append(kind)
        if bare.status != managed.status:
            wrong.append(f"{kind}: {managed.status}, bare {bare.status}: {managed.text}{managed.stderr}")
    if wrong:
        raise Failed("\n".join(wrong))
    context.note(f"{len(chosen)} kinds; not done bare either: {', '.join(failed_bare) or 'none'}")
