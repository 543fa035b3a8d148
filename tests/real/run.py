#!/usr/bin/env python3
"""Real programs under `quire run`, each held against its bare run.

    tests/real/run.py [--quick | --long] [-k NAME]... [--quire PATH] [--list]

The closing line is `N passed, N failed, N skipped`; the exit status is 1 where a case failed.
With CI=true a case counts as failed where a right or a program that it needs is missing.
"""

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import harness
from harness import CASES, Context, Failed, Skipped

import cases.behaviour  # noqa: F401  (registers its cases)
import cases.bench  # noqa: F401
import cases.builds  # noqa: F401
import cases.containers  # noqa: F401
import cases.cookbook  # noqa: F401
import cases.counting  # noqa: F401
import cases.cpython  # noqa: F401
import cases.endings  # noqa: F401
import cases.everyday  # noqa: F401
import cases.far  # noqa: F401
import cases.forks  # noqa: F401
import cases.memory  # noqa: F401
import cases.objects  # noqa: F401
import cases.profile  # noqa: F401
import cases.programs  # noqa: F401
import cases.redis  # noqa: F401
import cases.soak  # noqa: F401
import cases.stress  # noqa: F401
import cases.tree  # noqa: F401
import cases.trees  # noqa: F401
import cases.urls  # noqa: F401
import cases.whole  # noqa: F401


def built_quire():
    target = Path(os.environ.get("CARGO_TARGET_DIR", harness.REPOSITORY / "target"))
    return os.environ.get("QUIRE_BIN") or str(target / "release" / "quire")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes (the default)")
    parser.add_argument("--long", action="store_true", help="full sizes and many repetitions")
    parser.add_argument("-k", action="append", default=[], metavar="NAME", help="cases to run")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    parser.add_argument("--quire", default=built_quire(), help="the binary (default: %(default)s)")
    parser.add_argument("--timeout", type=float, help="seconds that a program may take")
    parser.add_argument(
        "--bare", action="store_true", help="both runs bare: checks the cases themselves"
    )
    return parser.parse_args()


def run_case(chosen, options):
    """One case in a directory of its own: (outcome, text)."""
    context = Context(
        quire=os.path.abspath(options.quire),
        long=options.long,
        tmp=harness.temporary_directory(),
        # Far more than any program takes: on a busy machine these are several times slower.
        watchdog_seconds=options.timeout or 900,
        pretend=options.bare,
    )
    try:
        harness.need(*chosen.needs)
        chosen(context)
        return "ok", ", ".join(context.notes)
    except Skipped as skipped:
        return ("not ok" if os.environ.get("CI") == "true" else "skip"), str(skipped)
    except Failed as failed:
        return "not ok", str(failed)
    except Exception:
        return "not ok", traceback.format_exc()
    finally:
        harness.kill_descendants(os.getpid())
        shutil.rmtree(context.tmp, ignore_errors=True)


def main():
    options = arguments()
    chosen = [
        case
        for case in CASES
        if (options.long or not case.long_only or case.name in options.k)
        and (not options.k or any(part in case.name for part in options.k))
    ]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if not options.bare and not os.access(options.quire, os.X_OK):
        print(f"no quire at {options.quire}: build it (make), or name it with --quire")
        return 2
    harness.become_reaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    counts = {"ok": 0, "not ok": 0, "skip": 0}
    for case in chosen:
        started = time.monotonic()
        outcome, text = run_case(case, options)
        counts[outcome] += 1
        first, _, rest = text.partition("\n")
        print(f"{outcome} {case.name} [{time.monotonic() - started:.1f} s] {first}", flush=True)
        for line in rest.splitlines():
            print(f"    {line}", flush=True)
    print(f"{counts['ok']} passed, {counts['not ok']} failed, {counts['skip']} skipped")
    return 1 if counts["not ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
