#!/usr/bin/env python3
"""Sets the demo's two runs side by side.

    report.py DIRECTORY BUDGET_BYTES

Exit status 1 where the answers differ or more was held than the budget.
"""

import json
import sys
from difflib import unified_diff
from pathlib import Path

MIB = 1 << 20


def main():
    out, budget = Path(sys.argv[1]), int(sys.argv[2])

    def load(name):
        return json.loads((out / name).read_text(encoding="ascii"))

    bare, quire, stats = load("bare.json"), load("quire.json"), load("stats.json")
    print(f"{'':44}{'bare':>9}{'Quire':>10}{'from disk':>13}")
    for before, after in zip(load("bare-phases.json"), load("quire-phases.json"), strict=True):
        print(f"  {after['name']:42}{before['seconds']:>7.1f} s{after['seconds']:>8.1f} s"
              f"{after['read_bytes'] / MIB:>9.0f} MiB")
    print(f"  {'':42}{'-' * 9:>9}{'-' * 9:>10}")
    print(f"  {'all':42}{bare['seconds']:>7.1f} s{quire['seconds']:>8.1f} s"
          f"   ({quire['seconds'] / bare['seconds']:.1f} times as long)")
    held, seen = stats["held_bytes_max"], stats.get("cgroup_bytes_max")
    print(f"  {'memory at most':42}{bare['peak_bytes'] / MIB:>5.0f} MiB{held / MIB:>6.0f} MiB"
          f"   of a budget of {budget / MIB:.0f} MiB")
    if seen:
        print(f"  {'':42}{'':9}{seen / MIB:>6.0f} MiB   as its cgroup counts: with code, stacks,"
              " page tables")
    swapped = stats["pswpout"] * 4096
    print(f"  {'swapped out altogether':42}{'':9}{swapped / MIB:>6.0f} MiB   "
          f"{stats['swap_file_bytes_max'] / MIB:.0f} MiB of swap file at most")
    print()

    answers = (out / "bare").read_bytes()
    ours = (out / "quire").read_bytes()
    if answers != ours:
        lines = [text.decode(errors="replace").splitlines() for text in (answers, ours)]
        print(*unified_diff(*lines, "bare", "quire", lineterm=""), sep="\n")
        sys.exit("demo: the two runs printed different answers")
    if held > budget:
        sys.exit(f"demo: {held} bytes were held, and the budget is {budget}")
    print(f"The answers are the same, byte for byte: {len(answers.splitlines())} lines, the digests"
          " of all rows among them.")


main()
