"""Files that other programs made, read through the library's mappings in an eighth of their size."""

import hashlib
import json
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


def one_round(figures, where):
    """The figure of a bench with one round; more than nothing."""
    if len(figures["rounds"]) != 1 or not figures["median"] > 0:
        raise Failed(f"{where}: no figure in {figures}")
    return figures["median"]


def check_fault_around(figures):
    """Every pattern by 1, 2, 4 and 8 threads: mmap, then eight choices, each by both deliveries."""
    cached = [row for row in figures["rows"] if row["ways"][0]["way"] == "mmap"]
    if len(cached) != 3 * 4 or {row["threads"] for row in cached} != {1, 2, 4, 8}:
        raise Failed(f"fault-around: rows are missing in {cached}")
    for row in cached:
        names = [way["way"] for way in row["ways"]]
        choices = ["off", "1", "3", "4", "5", "7", "9", "auto"]
        if names != ["mmap", *choices, *(f"{choice}, inline" for choice in choices)]:
            raise Failed(f"fault-around: {names}")
    for row in figures["rows"]:
        for way in row["ways"]:
            # Where the file cannot be read past the kernel's cache there is nothing.
            if not (way["way"].startswith("direct") and way["seconds"]["rounds"] == []):
                one_round(way["seconds"], (row["pattern"], way["way"]))


def check_objects(figures):
    """Every part has ways of Quire's; beside them ways of mmap's, or it is said why there is none."""
    parts = {part["part"]: part for part in figures["parts"]}
    if list(parts) != ["cached", "in-order", "random", "random-4"]:
        raise Failed(f"objects: {list(parts)}")
    if figures["memory_bytes"] * 4 != figures["bytes"]:
        raise Failed(f"objects: {figures['memory_bytes']} is no quarter of {figures['bytes']}")
    for name, part in parts.items():
        ways = {way["way"]: way for way in part["ways"]}
        by_mmap = [way for way in ways if way.startswith("mmap")]
        by_quire = [way for way in ways if not way.startswith("mmap")]
        if not figures["left_out"]:
            expected = {"cached": (1, 2), "in-order": (4, 2), "random": (1, 3)}.get(name, (1, 2))
            if (len(by_mmap), len(by_quire)) != expected:
                raise Failed(f"objects: {name} has {list(ways)}")
        for label, way in ways.items():
            one_round(way["seconds"], (name, label))
            for ratio in ("over_first_mmap", "over_fastest_mmap"):
                if by_mmap:
                    one_round(way[ratio], (name, label, ratio))
                elif way[ratio] is not None:
                    raise Failed(f"objects: {name}, {label} is compared with nothing")


def check_waiters(figures):
    """The lock alone; then every job by both kinds of unlock, of which one always looks."""
    one_round(figures["free"]["page_ns"], "free")
    if [row["threads"] for row in figures["contended"]] != [2, 4, 8]:
        raise Failed(f"waiters: {figures['contended']}")
    for price in ("free_ns", "look_ns", "wake_ns"):
        one_round(figures["prices"][price], price)
    jobs = [(row["job"], row["phase"]) for row in figures["objects"]]
    phases = ("write and flush", "delete")
    dd = [(f"dd, {kind}", phase) for kind in ("sync", "async") for phase in phases]
    reads = [("read once", "read"), ("read twice", "read")]
    if jobs != dd + reads + [("map and touch", "touch")] * 20:
        raise Failed(f"waiters: {jobs}")
    sizes = [row["bytes"] for row in figures["objects"] if row["phase"] == "touch"]
    if sizes != sorted(set(sizes)):
        raise Failed(f"waiters: sizes do not grow: {sizes}")
    for row in figures["objects"]:
        where = (row["job"], row["phase"], row["bytes"])
        one_round(row["always_looks_over_sign"], where)
        for side in ("sign", "always_looks"):
            one_round(row[side]["seconds"], (where, side))
            if row["phase"] != "delete":
                one_round(row[side]["unlocks"], (where, side))
                one_round(row[side]["unlock_and_wake_percent"], (where, side))
        if row["phase"] != "delete" and row["always_looks"]["looks_per_mille"]["median"] != 1000:
            raise Failed(f"waiters: unlocks that do not look: {row}")


def check_rmap(figures):
    """Locks, walks by 1, 2 and 4 threads, three mixes of jobs by 1, 2, 4 and 8 workers."""
    if [row["threads"] for row in figures["walks"]] != [1, 2, 4] or len(figures["jobs"]) != 3 * 4:
        raise Failed(f"rmap: {figures['walks']}, {figures['jobs']}")
    for row in figures["locks"]:
        one_round(row["pair_ns"], row["lock"])
    for row in figures["walks"]:
        one_round(row["shared_per_second"], row["threads"])
    for row in figures["jobs"]:
        one_round(row["shared_per_minute"], (row["mix"], row["workers"]))


def check_speculative(figures):
    """Every part, each program bare and both ways; a run that is classic has no speculative fault."""
    for what in figures["left_out"]:
        if not what.startswith("kernbench: "):
            raise Failed(f"speculative: {what} is left out")
    cells = [(cell["part"], cell["program"], cell["threads"]) for cell in figures["cells"]]
    programs = ("page_fault1", "page_fault2", "page_fault3", "malloc1")
    scaler = [("scaler", program, threads) for program in programs for threads in (1, 2)]
    contention = [("contention", "contention", threads) for threads in (1, 2)] * 3
    builds = [cell for cell in cells if cell[0] == "kernbench"]
    if cells[0][0] != "ebizzy" or cells[1:] != scaler + contention + builds:
        raise Failed(f"speculative: {cells}")
    if len(builds) != (0 if figures["left_out"] else 2):
        raise Failed(f"speculative: {len(builds)} loads")
    for cell in figures["cells"]:
        where = (cell["part"], cell["program"], cell["threads"])
        if cell["failures"]:
            raise Failed(f"speculative: {where}: {cell['failures']}")
        for name, figure in cell["figures"].items():
            for way in ("bare", "speculative", "classic"):
                if name in ("records_per_second", "pages_per_second", "faults_per_second"):
                    one_round(figure[way], (where, name, way))
                elif len(figure[way]["rounds"]) != 1:
                    raise Failed(f"speculative: {where}: {name}, {way}: {figure[way]}")
        counters = cell["counters"]
        if one_round(counters["classic"]["fault_classic"], where) and (
            counters["classic"]["speculative_pgfault"]["max"] != 0
        ):
            raise Failed(f"speculative: {where}: not classic: {counters}")
        if cell["part"] in ("ebizzy", "contention"):
            one_round(counters["speculative"]["speculative_pgfault"], where)
    ebizzy = figures["cells"][0]
    if [row["base"] for row in ebizzy["published"]] != [742.57, 13105.4]:
        raise Failed(f"speculative: {ebizzy['published']}")
    tables = [len(cell["figures"]) for cell in figures["cells"] if cell["part"] == "kernbench"]
    if tables not in ([], [6, 6]):
        raise Failed(f"speculative: {tables} rows")


@case("objects-bench")
def objects_bench(context):
    """Benches of the engine run to their end, and print JSON with a figure for every row."""
    benches = {
        "fault-around": check_fault_around,
        "objects": check_objects,
        "waiters": check_waiters,
        "rmap": check_rmap,
        "speculative": check_speculative,
    }
    for bench, check in benches.items():
        argv = [context.quire, "bench", bench, "--quick", "--rounds", "1", "--json"]
        result = context.bare(argv)
        if result.status != 0:
            raise Failed(f"{bench}: {result.status}: {result.stderr[-500:]}")
        figures = json.loads(result.text)
        if figures["bench"] != bench or not figures["machine"]:
            raise Failed(f"{bench}: no figures in {result.text[:500]}")
        check(figures)
        for line in result.stderr.splitlines():
            context.note(f"{bench}: {line}")
