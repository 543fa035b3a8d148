"""What stress-ng does to memory, all of its kinds, each checked by itself (`--verify`)."""

import os
import subprocess

from harness import MIB, Failed, case

CLASSES = ("vm", "memory")
# These end otherwise than bare, or may: docs/manual.md's limits.
DIFFERENT = {
    "dev-shm": "files in memory cannot be swapped, and are more than the budget by themselves",
    "mmaphuge": "shared mappings of a gigabyte cannot be swapped, and chance says how many there are at once",
    "pageswap": "anonymous memory that is shared cannot be swapped either",
    "userfaultfd": "wants a userfaultfd on memory that has Quire's",
}
# These are not for a machine that others use.
NEVER = {
    "resources": "takes the disk's last block, which is not its own alone",
    "swap": "changes what the machine swaps to",
    "watchdog": "would have the machine restarted",
}


def kinds():
    """The names of what there is in the classes, but for those that never run."""
    found = set()
    for one in CLASSES:
        listed = subprocess.run(["stress-ng", "--class", f"{one}?"], capture_output=True, text=True, check=False)
        found.update(listed.stdout.partition(":")[2].split())
    if not found:
        raise Failed("stress-ng lists nothing")
    return sorted(found - NEVER.keys())


@case("stress-ng", needs=("stress-ng", "setpriv"))
def stress_ng(context):
    """Each ends as it does bare, which is looked at where that is no success.

    `QUIRE_STRESS_NG_TABLE=FILE` has all of them run both ways, and writes how each ended.
    """
    seconds, instances = (10, 2) if context.long else (1, 1)
    table = os.environ.get("QUIRE_STRESS_NG_TABLE")
    wrong, failed_bare, lines = [], [], []
    chosen = [kind for kind in kinds() if table or kind not in DIFFERENT]
    for kind in chosen:
        # Some would take pages from the machine for good.
        argv = ["setpriv", "--bounding-set", "-sys_admin", "stress-ng", f"--{kind}", instances]
        argv += ["--verify", "--timeout", seconds, "--oomable", "--temp-path", context.tmp]
        managed = context.managed(argv, 64 * MIB, context.swap_directory(), whole=True)
        if managed.status == 0 and not table:
            continue
        bare = context.bare(argv)
        if bare.status != 0:
            failed_bare.append(kind)
        if bare.status != managed.status and kind not in DIFFERENT:
            wrong.append(f"{kind}: {managed.status}, bare {bare.status}: {managed.text}{managed.stderr}")
        why = DIFFERENT.get(kind, "") if bare.status != managed.status else ""
        lines.append(f"| {kind} | {bare.status} | {managed.status} | {why} |")
    if table:
        write_table(table, lines, f"{instances} of each for {seconds} s, in 64 MiB with a swap file")
    if wrong:
        raise Failed("\n".join(wrong))
    context.note(f"{len(chosen)} kinds; not done bare either: {', '.join(failed_bare) or 'none'}")


def write_table(file, lines, how):
    version = subprocess.run(["stress-ng", "--version"], capture_output=True, text=True, check=False).stdout
    with open(file, "w", encoding="utf-8") as out:
        out.write("# stress-ng, bare and under Quire\n\nHow each kind ends, bare and under `quire run`.")
        out.write(" Written by the real case `stress-ng`, where QUIRE_STRESS_NG_TABLE names this file.\n\n")
        out.write(f"{version.split(' (')[0]}, classes {' and '.join(CLASSES)}, `--verify`: {how}.\n\n")
        out.write("| kind | status bare | under Quire | why it differs |\n|---|---|---|---|\n")
        out.write("\n".join(lines) + "\n\n")
        out.write("\n".join(f"Never run: {kind}, which {why}." for kind, why in NEVER.items()) + "\n")
