#!/usr/bin/env python3
"""Runs a program: its output to a file, its time and the most memory it held to another.

    measure.py OUTPUT MEASURES PROGRAM [ARGUMENT]...

The exit status is the program's (128+N for signal N). SIGINT and SIGTERM are passed on to it.
"""

import json
import os
import signal
import sys
import time


def main():
    output, measures, *argv = sys.argv[1:]
    started = time.monotonic()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    pid = os.posix_spawnp(
        argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, descriptor, 1)]
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - started
    with open(measures, "w", encoding="ascii") as file:
        json.dump({"seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024}, file)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


sys.exit(main())
