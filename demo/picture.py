#!/usr/bin/env python3
"""Draws README's picture from two real runs: a job in a memory cgroup, bare and under Quire.

    sudo python3 demo/picture.py target/release/quire docs/picture.svg

The job fills 420 MiB that compress, as data of programs do, and reads them again; the cgroup allows 256 MiB, and no
swap of the kernel's. What is in memory is looked at every 20 ms: what cannot be dropped, by the kernel's count.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

MIB = 1 << 20
LIMIT, BUDGET, ROWS = 256, 240, 420
JOB = f"""
import random
noise = random.Random(1).randbytes(1 << 20)
held = [bytearray(noise[:300_000] + bytes([number % 251]) * ((1 << 20) - 300_000)) for number in range({ROWS})]
for turn in range(3):
    for number, row in enumerate(held):
        assert row[:300_000] == noise[:300_000] and row[-1] == number % 251
"""
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
IS_V1 = (V1 / "cgroup.procs").exists()
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 320, 56, 28, 40


def undroppable(folder):
    used = int((folder / ("memory.usage_in_bytes" if IS_V1 else "memory.current")).read_text())
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    total = "total_" if IS_V1 else ""
    return used - int(stat[f"{total}active_file"]) - int(stat[f"{total}inactive_file"])


def watched(argv, wanted):
    """Runs a program in a cgroup with the limit: seconds, MiB and data at each look, and how it ended."""
    folder = (V1 if IS_V1 else V2) / f"picture-{os.getpid()}"
    folder.mkdir()
    try:
        limits = ("limit_in_bytes", "memsw.limit_in_bytes") if IS_V1 else ("max", "swap.max")
        for name, value in zip(limits, (LIMIT * MIB, LIMIT * MIB if IS_V1 else 0)):
            (folder / f"memory.{name}").write_text(str(value))
        enter = f'echo $$ > {folder}/cgroup.procs; exec "$@"'
        process = subprocess.Popen(["sh", "-c", enter, "sh", *argv], stderr=subprocess.DEVNULL)
        start, looks = time.monotonic(), []
        while process.poll() is None:
            looks.append((time.monotonic() - start, undroppable(folder) / MIB, wanted(process.pid)))
            time.sleep(0.02)
        return looks, process.returncode
    finally:
        time.sleep(0.2)
        folder.rmdir()


def wanted_of(quire):
    def look(pid):
        listed = subprocess.run([quire, "ps", "--json"], capture_output=True, text=True, check=False).stdout
        rows = [row for row in json.loads(listed or "[]") if row["pid"] == pid]
        return rows[0]["wanted_bytes"] / MIB if rows else 0
    return look


def draw(bare, quire):
    seconds = max(looks[-1][0] for looks in (bare, quire)) * 1.02
    most = max(max(look[1:]) for look in (*bare, *quire)) * 1.08

    def x(value):
        return LEFT + value / seconds * (WIDTH - LEFT - 16)

    def y(value):
        return HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM)

    def line(looks, column, colour, style=""):
        points = " ".join(f"{x(look[0]):.1f},{y(look[column]):.1f}" for look in looks)
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5" {style}/>'

    def text(at_x, at_y, words, colour="#444", anchor="start"):
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'

    died, ended = max(bare, key=lambda look: look[1]), quire[-1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for mib in range(0, int(most), 100):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y(mib):.1f}" y2="{y(mib):.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, y(mib) + 4, mib, anchor="end"))
    step = next(step for step in (0.5, 1, 2, 5, 10, 20) if seconds / step < 9)
    for tick in range(int(seconds / step) + 1):
        parts.append(text(x(tick * step), HEIGHT - BOTTOM + 18, f"{tick * step:g} s", anchor="middle"))
    parts += [
        text(LEFT - 40, 16, "MiB in memory"),
        f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y(LIMIT):.1f}" y2="{y(LIMIT):.1f}" stroke="#999" stroke-dasharray="6 4"/>',
        text(WIDTH - 18, y(LIMIT) - 6, f"the limit, {LIMIT} MiB", "#666", "end"),
        line(quire, 2, "#9bbfe3", 'stroke-dasharray="3 3"'),
        line(quire, 1, "#1f6fb4"),
        line([look for look in bare if look[0] <= died[0]], 1, "#c0392b"),
        text(x(died[0]) + 6, y(died[1]) + 40, "bare: killed", "#c0392b"),
        f'<text x="{x(died[0]):.1f}" y="{y(died[1]) + 6:.1f}" fill="#c0392b" font-size="20" text-anchor="middle">✕</text>',
        text(x(ended[0]) - 50, y(BUDGET) + 34, f"quire run --memory {BUDGET}M: done", "#1f6fb4", "end"),
        text(x(ended[0]) - 50, y(ROWS) + 44, "the data that it has, much of it compressed", "#6f9fcf", "end"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main():
    quire, picture = sys.argv[1:]
    job = [sys.executable, "-c", JOB]
    bare, bare_ended = watched(job, lambda _: 0)
    managed, ended = watched([quire, "run", "-q", "--memory", f"{BUDGET}M", "--", *job], wanted_of(quire))
    if bare_ended != -9 or ended != 0:
        sys.exit(f"bare it ended with {bare_ended}, under Quire with {ended}: there is nothing to draw")
    Path(picture).write_text(draw(bare, managed))


if __name__ == "__main__":
    main()
