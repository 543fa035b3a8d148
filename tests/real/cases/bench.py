"""Benches: each suite runs to its end, and its JSON has a figure for every cell that it is to have."""

import json
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

from harness import Failed, Skipped, case, read_or


def table(figures, suite):
    """The cells by sheet, row and column; each has figures of one round, the first of which is something."""
    cells = {}
    for cell in figures["cells"]:
        where = (cell["sheet"], cell["row"], cell["column"])
        if "failure" in cell or not cell["figures"]:
            raise Failed(f"{suite}: {where}: {cell}")
        values = [figure["median"] for figure in cell["figures"].values()]
        rounds = {len(figure["rounds"]) for figure in cell["figures"].values()}
        if rounds != {1} or not values[0] > 0 or min(values) < 0:
            raise Failed(f"{suite}: {where}: no figure in {cell}")
        cells[where] = dict(zip(cell["figures"], values))
    return cells


def grid(cells, sheet):
    """The rows and columns of a sheet, which has all of them."""
    found = [where[1:] for where in cells if where[0] == sheet]
    rows, columns = dict.fromkeys(row for row, _ in found), dict.fromkeys(column for _, column in found)
    if len(found) != len(rows) * len(columns) or not found:
        raise Failed(f"{sheet}: cells are missing in {found}")
    return list(rows), list(columns)


def threads(*numbers, noun="thread"):
    return [f"{number} {noun}{'' if number == 1 else 's'}" for number in numbers]


def expect(what, found, expected):
    if found != expected:
        raise Failed(f"{what}: {found}, expected {expected}")


def check_fault_around(cells, _):
    columns = ["mmap", "off", "1", "3", "4", "5", "7", "9", "auto"]
    for pattern in ("in order", "at random", "one page per 2 MiB"):
        for by in ("by handlers", "inline"):
            sheet = f"{pattern}, everything cached, {by}"
            expect(sheet, grid(cells, sheet), (threads(1, 2, 4, 8), columns))
    sheet = "in order, everything cached, inline"
    off, order_4 = (cells[sheet, "1 thread", around]["faults"] for around in ("off", "4"))
    expect("faults of order 4", order_4, off / 16)


def check_objects(cells, figures):
    sheets = {
        "in order, from the kernel's cache": (1, 2),
        "in order, from the disk": (4, 2),
        "pages at random, from the disk, 1 thread": (1, 3),
        "pages at random, from the disk, 4 threads": (1, 2),
    }
    for sheet, expected in sheets.items():
        _, columns = grid(cells, sheet)
        by_mmap = sum(column.startswith("mmap") for column in columns)
        if not figures["left_out"]:
            expect(sheet, (by_mmap, len(columns) - by_mmap), expected)


def check_waiters(cells, _):
    ways = ["std::sync::Mutex", "page lock", "page lock, always looks"]
    expect("free", grid(cells, "locked and unlocked by a thread alone"), (["free"], ways))
    contended = "locked and unlocked by several threads"
    expect("contended", grid(cells, contended), (threads(2, 4, 8), ways))
    files, sides = "files written, deleted and read", ["with the sign", "always looks"]
    jobs = ["dd, sync", "dd, async", "read once", "read twice"]
    expect(files, grid(cells, files), (jobs, sides))
    touched = "objects of growing sizes, mapped and touched"
    sizes, columns = grid(cells, touched)
    expect(touched, columns, sides)
    numbers = [int(size.split()[0]) for size in sizes]
    if len(numbers) != 20 or numbers != sorted(set(numbers)):
        raise Failed(f"waiters: {sizes}")
    for size in sizes:
        expect("looks of 1000", cells[touched, size, "always looks"]["looks"], 1000)


def check_rmap(cells, _):
    ways = ["shared", "exclusive"]
    expect("walks", grid(cells, "walks a second"), (threads(1, 2, 4), ways))
    for mix in ("short mappings", "disk", "walks"):
        rows = threads(1, 2, 4, 8, noun="worker")
        expect(mix, grid(cells, f"jobs a minute, {mix}"), (rows, ways))


def check_speculative(cells, figures):
    """A run that is classic has no speculative fault."""
    for what in figures["left_out"]:
        if not what.startswith("kernbench: "):
            raise Failed(f"speculative: {what} is left out")
    sheets = list(dict.fromkeys(sheet for sheet, _, _ in cells))
    kinds = [re.match(r"\w+", sheet)[0] for sheet in sheets]
    builds = [] if figures["left_out"] else ["kernbench"]
    expect("speculative", kinds, ["ebizzy"] + ["page"] * 4 + ["faults"] * 3 + builds)
    for (sheet, row, column), counted in cells.items():
        if column == "classic" and (counted["spf"] != 0 or not counted["classic"] > 0):
            raise Failed(f"speculative: {sheet}, {row}: not classic: {counted}")
        if column == "speculative" and sheet.startswith(("ebizzy", "faults")):
            if not counted["spf"] > 0:
                raise Failed(f"speculative: {sheet}, {row}: not speculative: {counted}")
        if sheet.startswith("kernbench"):
            expect(sheet, list(counted)[:2], ["Elapsed Time", "User Time"])


def check_swap(cells, _):
    sheets = dict.fromkeys(sheet for sheet, _, _ in cells)
    expect("settings", len(sheets), 4)
    for sheet in sheets:
        batched = cells[sheet, "", "quire, 64 KiB folios, batched"]["pages a call"]
        single = cells[sheet, "", "quire, 64 KiB folios, page by page"]["pages a call"]
        if not batched > 8 * single:
            raise Failed(f"swap: {sheet}: {batched} pages a call, {single} page by page")


def check_fault(cells, _):
    expect("fault", grid(cells, "a fault"), (threads(1, 2), ["bare", "loop", "quire"]))


def check_fork(cells, _):
    sheet = "milliseconds to start a program and see it end"
    expect("fork", grid(cells, sheet), (["1 MiB", "64 MiB", "200 MiB"], ["bare", "quire"]))


def check_url(cells, _):
    rows = ["1 Gbit/s, 1 ms", "1 Gbit/s, 10 ms", "1 Gbit/s, 50 ms", "2.5 Gbit/s, 10 ms", "5 Gbit/s, 10 ms", "loopback"]
    expect("url", grid(cells, "in order"), (rows, ["client alone", "quire"]))


WAYS = ["numpy.memmap", "quire", "plain memory"]
ARRAYS = {"half": WAYS, "once": WAYS, "four times": WAYS[:2]}
CHECKS = {
    "fault-around": check_fault_around,
    "swap": check_swap,
    "waiters": check_waiters,
    "rmap": check_rmap,
    "speculative": check_speculative,
    "fault": check_fault,
    "objects": check_objects,
    "fork": check_fork,
    "url": check_url,
}


@case("bench-far", needs=("redis-server",))
def bench_far(context):
    """Pages on a server, with and without a proxy that delays: the farther it is, the longer a page takes."""
    argv = [context.quire, "bench", "far", "--quick", "--rounds", "1", "--round-trips", "0,5", "--json"]
    result = context.bare(argv)
    if result.status != 0:
        raise Failed(f"{result.status}: {result.stderr[-1000:]}")
    report = json.loads(result.text)
    cells = table(report, "far")
    rows = ["at random", "at random, 4 threads", "in order"]
    expect("far", grid(cells, "microseconds a page"), (rows, ["swap file", "0 ms", "5 ms"]))
    far, near = (cells["microseconds a page", "at random", column]["us"] for column in ("5 ms", "0 ms"))
    if not far > max(near, 1500):
        raise Failed(f"{far} us for a page that is 5 ms away, {near} for one that is near")


@case("bench-quick")
def bench_quick(context):
    """All suites but the longest as one report; compared with itself nothing has moved."""
    html, printed = context.tmp / "report.html", context.tmp / "report.json"
    argv = [context.quire, "bench", "all", "--quick", "--rounds", "1", "--json"]
    result = context.bare([*argv, "--only", ",".join(CHECKS), "--html", html])
    if result.status != 0:
        raise Failed(f"{result.status}: {result.stderr[-1000:]}")
    printed.write_text(result.text)
    reports = json.loads(result.text)
    expect("suites", [report["bench"] for report in reports], list(CHECKS))
    for report in reports:
        expect(report["bench"], report["ending"], "complete")
        CHECKS[report["bench"]](table(report, report["bench"]), report)
    page = html.read_text()
    for suite in CHECKS:
        if f'<section id="{suite}">' not in page:
            raise Failed(f"{suite} is not in the page")
    if page.count("<svg") < 10 or "<script" in page:
        raise Failed(f"the page has {page.count('<svg')} plots")
    argv = [context.quire, "bench", "fork", "--quick", "--rounds", "1"]
    compared = context.bare([*argv, "--baseline", printed])
    if compared.status != 0 or "### against the baseline" not in compared.text:
        raise Failed(f"beside the baseline: {compared.status}: {compared.stderr[-500:]}")
    broken = context.bare([*argv, "--baseline", html])
    if broken.status != 1 or "cannot compare with" not in broken.stderr or "## fork" not in broken.text:
        raise Failed(f"a broken baseline: {broken.status}: {broken.stderr[-500:]}")
    closed = subprocess.run(
        f"{shlex.quote(context.quire)} bench fault --quick --rounds 1 2> /dev/null | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    if closed.stdout.strip() not in ("0", "130", "141"):
        raise Failed(f"into a closed pipe: {closed.stdout}")


@case("bench-arrays", needs=("root",))
def bench_arrays(context):
    """numpy on arrays of files: each way has its figures; the program fails where more than the limit was held."""
    python = Path(context.quire).resolve().parents[1] / "python/bin/python"
    if not python.exists():
        raise Skipped(f"needs {python}, which `make python` makes")
    argv = [context.quire, "bench", "arrays", "--quick", "--rounds", "1", "--json", "--python", python]
    result = context.bare(argv)
    if result.status != 0:
        raise Failed(f"{result.status}: {result.stderr[-1000:]}")
    expected = {
        (f"an array of {factor} the limit, seconds", row, way)
        for factor, ways in ARRAYS.items()
        for row in ("sum", "a matrix by a vector", "sort", "items at random", "rows at random")
        for way in (*ways, "quire, prefetched")
        if way in ways or row == "rows at random"
    }
    expect("cells", set(table(json.loads(result.text), "arrays")), expected)


def swaps_of_the_kernel():
    """What a bench may have set up, and has to undo."""
    zswap = sorted(Path("/sys/module/zswap/parameters").glob("*"))
    return (
        read_or("/proc/swaps"),
        sorted(path.name for path in Path("/sys/block").glob("zram*")),
        [read_or(path) for path in zswap],
    )


@case("bench-pressure")
def bench_pressure(context):
    """Programs under pressure: a run that was interrupted goes on, and nothing is left behind."""
    before, directory = swaps_of_the_kernel(), context.swap_directory()
    results = context.tmp / "results"
    argv = [context.quire, "bench", "pressure", "--quick", "--json", "--directory", directory]
    argv += ["--resume", results]
    process = context.spawn(argv)
    deadline = time.monotonic() + context.watchdog_seconds
    while len(read_or(results, "").splitlines()) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    result = context.wait(process)
    if result.status != 130 or json.loads(result.text)["ending"] != "interrupted":
        raise Failed(f"interrupted: {result.status}, {result.text[-500:]}{result.stderr[-500:]}")
    context.nothing_left(process.pid, directory)
    taken = results.read_text()
    process = context.spawn(argv)
    result = context.wait(process)
    context.nothing_left(process.pid, directory)
    if swaps_of_the_kernel() != before:
        raise Failed(f"the kernel's swaps are not as they were: {before}, {swaps_of_the_kernel()}")
    figures = json.loads(result.text)
    if result.status != 0 or figures["ending"] != "complete":
        raise Failed(f"{result.status}: {result.stderr[-500:]}")
    if not results.read_text().startswith(taken):
        raise Failed("results of the interrupted run were run again")
    ends = {cell["row"]: cell["ends"] for cell in figures["cells"] if cell["column"] == "quire"}
    if len(ends) < 3 or any(ends[row] != ["done"] for row in ends):
        raise Failed(f"under Quire: {ends}")
    unknown = context.bare([*argv, "--only", "nothing-such"])
    if unknown.status != 125 or "there are sort-100M" not in unknown.stderr:
        raise Failed(f"an unknown row: {unknown.status}, {unknown.stderr[-500:]}")
