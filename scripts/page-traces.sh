#!/bin/sh
# Records the pages that six programs ask for, small enough for valgrind, and plays the policies on them.
# Usage: scripts/page-traces.sh DIR [QUIRE]. It takes an hour or two.
set -eu
cd "$(dirname "$0")/.."
traces=${1:?the directory for the traces}
quire=${2:-target/release/quire}
python=$(python3 -c 'import sys; print(sys.executable)')
programs=crates/quire-bench/src
mkdir -p "$traces"

record() {
    name=$1
    shift
    [ -s "$traces/$name.pages" ] && return
    echo "recording $name" >&2
    LC_ALL=C "$quire" bench policies --record "$traces/new" -- "$@"
    mv "$traces/new" "$traces/$name.pages"
}

"$python" - "$traces" <<'PYTHON'
import pathlib
import random
import sys

traces = pathlib.Path(sys.argv[1])
rng = random.Random(5)
words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(4000)]
lines = (" ".join(rng.choices(words, k=30)) + f" {rng.getrandbits(64):016x}\n" for _ in range(30_000))
(traces / "text").write_text("".join(lines))
(traces / "maps.cc").write_text("#include <map>\nint at(std::map<int, int> &m) { return m[3]; }\n")
(traces / "rows.sql").write_text(
    "create table t(id integer primary key, word text, n integer); create index w on t(word);\n"
    "begin;\n"
    + "".join(
        f"insert into t values({i}, '{rng.choice(words)}{rng.randrange(1000)}', {rng.randrange(1000)});\n"
        for i in range(20_000)
    )
    + "commit;\n"
    + "".join(f"select count(*), sum(n) from t where word like '{rng.choice(words)}%';\n" for _ in range(8))
    + "".join(f"update t set n = n + 1 where id = {rng.randrange(20_000)};\n" for _ in range(1000))
)
PYTHON

record sort sort -S 1G --parallel=1 -o "$traces/sorted" "$traces/text"
g++ -E -o "$traces/maps.ii" "$traces/maps.cc"
record cc1plus "$(g++ -print-prog-name=cc1plus)" -quiet -o "$traces/maps.s" -fpreprocessed "$traces/maps.ii"
record sqlite sqlite3 -init "$traces/rows.sql" :memory: .exit
record collector "$python" "$programs/pressure/collector.py" 20000 1
record dicts "$python" "$programs/programs/dicts.py" 4000
record zstd zstd -qf -3 --single-thread -o "$traces/text.zst" "$traces/text"
exec "$quire" bench policies "$traces"/*.pages
