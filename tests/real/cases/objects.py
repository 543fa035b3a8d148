"""Files that other programs made, read through the library's mappings in an eighth of their size."""

import hashlib
import re
import sqlite3

from harness import MIB, Failed, case


def write_database(path, mebibytes):
    """A database of SQLite's: an index, and rows that pack to about half."""
    with sqlite3.connect(path) as database:
        database.execute("create table t (id integer primary key, name text, data blob)")
        rows = mebibytes * 256
        database.executemany(
            "insert into t values (?, ?, ?)",
            (
                (i, f"name {i * 7919 % rows}", hashlib.shake_128(b"%d" % i).digest(1800) * 2)
                for i in range(rows)
            ),
        )
        database.execute("create index by_name on t (name)")
    return path.stat().st_size


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def quire(context, *words):
    """A command of quire's, which must not fail."""
    result = context.bare([context.quire, *words])
    if result.status != 0:
        raise Failed(f"quire {words}: {result.status}: {result.stderr[-1000:]}")
    return result


@case("objects-database")
def objects_database(context):
    """SQLite's own file, plain and packed, by `quire cat` and `quire sum`: the same bytes."""
    path = context.tmp / "t.db"
    size = write_database(path, 256 if context.long else 24)
    memory = max(size // 8, 2 * MIB)
    expected = digest(path)
    packed = context.tmp / "t.db.zst"
    quire(context, "pack", path, "-o", packed)
    sums = set()
    for file in (path, packed):
        for options in ((), ("--direct", "on"), ("--fault-around", "off")):
            if options == ("--direct", "on") and file is packed:
                continue
            common = ["--memory", memory, *options]
            if digest(quire(context, "cat", *common, file).stdout) != expected:
                raise Failed(f"other bytes: {file} {options}")
            line = quire(context, "sum", *common, "--stats", file)
            sums.add(line.text.split()[0])
            held = re.search(r"held ([\d.]+) (K|M)iB", line.stderr)
            held_bytes = float(held[1]) * (MIB if held[2] == "M" else 1024)
            # Printed with one digit behind the point.
            if held_bytes > memory + MIB // 10:
                raise Failed(f"held more than {memory} bytes: {line.stderr}")
    if len(sums) != 1:
        raise Failed(f"sums differ: {sums}")
    context.note(f"{size / MIB:.0f} MiB in {memory / MIB:.1f} MiB")
