#!/usr/bin/env bash
# A program that wants several hundred MiB, in a quarter of them: CPython with a database in memory.
# It runs twice, bare and under Quire, and the two must print the same.
#
#     demo/run.sh [QUIRE]        (default: target/release/quire)
#
# Exit status 1 where the answers differ, the budget was exceeded or one of the runs failed. The
# input is kept in demo-data (or QUIRE_DEMO_DATA); the swap file is there while the demo runs.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")
quire=${1:-${QUIRE_BIN:-${CARGO_TARGET_DIR:-$repository/target}/release/quire}}
data=${QUIRE_DEMO_DATA:-$repository/demo-data}

if [ ! -x "$quire" ]; then
	echo "demo: no quire at $quire: build it first (make)" >&2
	exit 1
fi
# python3 may be a script that chooses one: the demo needs the program itself.
python=$(python3 -c 'import sqlite3, sys; print(sys.executable)')

mkdir -p "$data"
out=$(mktemp -d "$data/run.XXXXXX")
child=
finish() {
	if [ -n "$child" ]; then
		kill -TERM "$child" 2>/dev/null && wait "$child" || true
	fi
	rm -rf "$out"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# In the background, so that a signal to this script is not kept waiting by the program.
run() {
	local status=0
	"$@" &
	child=$!
	wait "$child" || status=$?
	child=
	return "$status"
}

# Output, phases and measures go to files by the run's name: library NAME [COMMAND BEFORE PYTHON]...
library() {
	local name=$1 status=0
	shift
	run "$python" "$here/measure.py" "$out/$name" "$out/$name.json" \
		"$@" "$python" "$here/library.py" "$input" "$out/$name-phases.json" || status=$?
	if [ "$status" -ne 0 ]; then
		echo "demo: the $name run ended with status $status" >&2
		exit 1
	fi
}

# The input follows from the generator alone: another generator, another directory.
input=$data/library-$(cksum <"$here/generate.py" | cut -d' ' -f1)
if [ ! -d "$input" ]; then
	echo "Making the library and its log (once; kept in $data)"
	run "$python" "$here/generate.py" "$out/library"
	rm -rf "$data"/library-*
	# Under this name it is whole.
	mv "$out/library" "$input"
fi

echo "CPython loads a library's log of $(($(du -sm "$input" | cut -f1))) MiB into a SQLite database in memory, indexes it"
echo "and asks questions: joins, sorts, groups, windows, text search, an update, lookups."
echo
echo "1. bare"
library bare
wanted=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["peak_bytes"])' "$out/bare.json")
# In whole MiB.
budget=$(((wanted / 4) >> 20 << 20))

echo "2. quire run --memory $((budget >> 20))M (a quarter of the $((wanted >> 20)) MiB that it held)"
library quire "$quire" run --memory "$budget" --swap-file "$out" --stats "$out/stats.json" --

echo
"$python" "$here/report.py" "$out" "$budget"
