"""A C project built from source by make -j2: make, drivers, compilers and assemblers on one budget."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from harness import MIB, Failed, Skipped, case

# The folders of zstd's library, and those that a quick run builds.
FOLDERS = ("common", "compress", "decompress", "deprecated", "dictBuilder", "legacy")
QUICK_FOLDERS = ("common", "decompress")
# A budget in which nothing needs to go: the build's want is what it has at most in here.
ROOMY = 1024 * MIB

MAKEFILE = """
OBJECTS = {objects}
all: $(OBJECTS)
%.o: %.c
\t$(CC) -O3 -g -DZSTD_DISABLE_ASM -DZSTD_LEGACY_SUPPORT=1 -I. -c -o $@ $<
"""


def zstd_source():
    """The newest source of zstd that cargo has unpacked, for this project's own build."""
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    found = sorted(home.glob("registry/src/*/zstd-sys-*/zstd/lib"))
    if not found:
        raise Skipped(f"needs zstd's source, which a build of this project leaves in {home}/registry")
    return found[-1]


class Build:
    """A copy of the source with a Makefile of ours."""

    def __init__(self, context):
        self.tree = context.tmp / "tree"
        shutil.copytree(zstd_source(), self.tree)
        units = [
            unit.relative_to(self.tree).with_suffix(".o")
            for folder in (FOLDERS if context.long else QUICK_FOLDERS)
            for unit in sorted((self.tree / folder).glob("*.c"))
        ]
        self.objects = [self.tree / unit for unit in units]
        (self.tree / "Makefile").write_text(MAKEFILE.format(objects=" ".join(map(str, units))))
        # Everything is made each time.
        self.argv = ["make", "-s", "-B", "-j2", "-C", self.tree]

    def take_objects(self):
        """Digests of the files that were made; removes the files."""
        digests = []
        for made in self.objects:
            digests.append(hashlib.sha256(made.read_bytes()).hexdigest())
            made.unlink()
        return digests


def build_managed(context, build, memory_bytes, bare, expected):
    """A build that ends like the bare one, with the same objects."""
    managed = context.managed(build.argv, memory_bytes, context.swap_directory())
    context.compare(bare, managed)
    digests = build.take_objects()
    wrong = [made.name for made, a, b in zip(build.objects, expected, digests) if a != b]
    if wrong:
        raise Failed(f"other objects than bare: {wrong}")
    return managed


@case("build", needs=("make", "cc"))
def build_in_half(context):
    """zstd, with make -j2: first where all fits, then in half of what that wanted."""
    build = Build(context)
    bare = context.bare(build.argv)
    if bare.status != 0:
        raise Failed(f"make: {bare.stderr[-2000:]}")
    expected = build.take_objects()
    roomy = build_managed(context, build, ROOMY, bare, expected)
    if context.pretend:
        return
    stats = json.loads(context.stats.read_text())
    wanted = stats["wanted_bytes_max"]
    half = build_managed(context, build, max(wanted // 2, 8 * MIB), bare, expected)
    context.note(
        f"{len(expected)} objects by {stats['processes']} processes, {wanted >> 20} MiB in"
        f" {wanted >> 21} MiB, {bare.seconds:.1f} s bare, {roomy.seconds:.1f} s where it fits,"
        f" {half.seconds:.1f} s"
    )
