#!/usr/bin/env bash
# A program that wants some 360 MiB, in a quarter of it: CPython with a database in memory. It runs
# twice, bare and under Quire, and the two must print the same.
#
#     demo/run.sh [QUIRE]        (default: target/release/quire)
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")
quire=${1:-${QUIRE_BIN:-${CARGO_TARGET_DIR:-$repository/target}/release/quire}}
data=${QUIRE_DEMO_DATA:-$repository/demo-data}
python=$(python3 -c 'import sys; print(sys.executable)')

if [ ! -x "$quire" ]; then
	echo "demo: no quire at $quire: build it first (make)" >&2
	exit 1
fi

out=$(mktemp -d "${TMPDIR:-/var/tmp}/quire-demo.XXXXXX")
trap 'rm -rf "$out"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The input follows from the generator alone: another generator, another directory.
input=$data/library-$(cksum <"$here/generate.py" | cut -d' ' -f1)
if [ ! -f "$input/whole" ]; then
	echo "Making the library of books (once; kept in $data)"
	mkdir -p "$data"
	rm -rf "$data"/library-*
	"$python" "$here/generate.py" "$input"
	touch "$input/whole"
fi

value() { "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$@"; }
mebibytes() { echo "$(($1 >> 20)) MiB"; }

echo "1. bare: $(basename "$python") demo/library.py"
"$python" "$here/measure.py" "$out/bare" "$out/bare.json" "$python" "$here/library.py" "$input"
wanted=$(value "$out/bare.json" peak_bytes)
budget=$((wanted / 4))
echo "   it held $(mebibytes "$wanted")"

echo "2. quire run --memory $((budget >> 20))M: the same program, the same input"
status=0
"$python" "$here/measure.py" "$out/quire" "$out/quire.json" \
	"$quire" run --memory "$budget" --swap-file "$out" --stats "$out/stats.json" -- \
	"$python" "$here/library.py" "$input" || status=$?
if [ "$status" -ne 0 ]; then
	echo "demo: under quire it ended with $status" >&2
	exit 1
fi

echo
sed 's/^/   | /' "$out/quire"
echo
if ! cmp "$out/bare" "$out/quire"; then
	echo "demo: the two runs printed different answers" >&2
	diff "$out/bare" "$out/quire" >&2 || true
	exit 1
fi

"$python" - "$out" "$budget" <<'END'
import json
import sys

out, budget = sys.argv[1], int(sys.argv[2])
bare, quire = (json.load(open(f"{out}/{name}.json")) for name in ("bare", "quire"))
stats = json.load(open(f"{out}/stats.json"))
held = stats["held_bytes_max"]
peak = stats.get("cgroup_bytes_max")
print(f"{'':14}{'time':>9}{'memory held at most':>22}")
print(f"{'bare':14}{bare['seconds']:>7.1f} s{bare['peak_bytes'] / 2**20:>18.0f} MiB")
print(f"{'under Quire':14}{quire['seconds']:>7.1f} s{held / 2**20:>18.0f} MiB"
      f" of a budget of {budget / 2**20:.0f} MiB")
if peak:
    print(f"{'':14}{'':>9}{peak / 2**20:>18.0f} MiB by the cgroup's count, code and stacks included")
if held > budget:
    sys.exit("demo: more was held than the budget")
END
echo "The answers are the same, byte for byte."
