"""Real programs at a quarter of what they want: CPython, GNU sort, g++, Redis."""

import random
import sys
import time

from cases import resp
from harness import HERE, MIB, Failed, case


# A line is about 250 bytes.
LINE_WORDS = 30


def write_text(path, mebibytes, seed=1):
    """Lines as long as a log's, numbered out of order; the same for a seed everywhere."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(3, 11))) for _ in range(4000)]
    written, goal, chunk = 0, mebibytes * MIB, 0
    with open(path, "w", encoding="ascii") as file:
        while written < goal:
            numbers = rng.sample(range(1 << 40), 4096)
            picks = rng.choices(words, k=4096 * LINE_WORDS)
            written += file.write(
                "".join(
                    f"{' '.join(picks[i * LINE_WORDS : (i + 1) * LINE_WORDS])} {number:x} {chunk}\n"
                    for i, number in enumerate(numbers)
                )
            )
            chunk += 1


@case("sort", needs=("sort",))
def sort(context):
    """GNU sort with all of the text in its buffer."""
    text = context.tmp / "text"
    write_text(text, 400 if context.long else 24)
    argv = ["sort", "-S", "4G", "--parallel=2", text]
    context.same(argv, swap=True, env={"LC_ALL": "C"})


def write_templates(path, classes):
    """C++ that makes the compiler keep a great many types and functions."""
    with open(path, "w", encoding="ascii") as file:
        file.write("#include <map>\n#include <string>\n#include <vector>\n")
        file.write("#include <algorithm>\n#include <functional>\n#include <memory>\n")
        for i in range(classes):
            file.write(
                f"struct K{i} {{ int a; double b; bool operator<(const K{i} &o) const"
                f" {{ return a + {i} < o.a || (a == o.a && b < o.b); }} }};\n"
                f"template <int N> struct C{i} {{ std::map<K{i}, std::vector<std::string>> m;"
                f" C{i}<N - 1> next; int sum(const K{i} &k) {{ m[k].push_back(\"x{i}\");"
                f" return N + int(m.size()) + next.sum(k); }} }};\n"
                f"template <> struct C{i}<0> {{ int sum(const K{i} &k) {{ return k.a; }} }};\n"
                f"int f{i}(int n) {{ std::vector<K{i}> v(n); std::sort(v.begin(), v.end());"
                f" C{i}<3> c; std::function<int(int)> g = [&](int x) {{ return x + c.sum(v[0]); }};"
                f" return g(n); }}\n"
            )


@case("compile", needs=("g++",))
def compile_templates(context):
    """g++ over heavy templates: its driver, the compiler proper and the assembler in a row."""
    source = context.tmp / "templates.cc"
    write_templates(source, 110 if context.long else 20)
    made = context.tmp / "made.o"
    argv = ["g++", "-O1", "-g", "-c", source, "-o", made]
    bare = context.bare(argv)
    expected = made.read_bytes()
    made.unlink()
    memory = max(bare.peak_bytes // 4, 16 * MIB)
    managed = context.managed(argv, memory, context.swap_directory())
    context.compare(bare, managed)
    if made.read_bytes() != expected:
        raise Failed("the object file differs")
    context.note(
        f"{bare.peak_bytes >> 20} MiB in {memory >> 20} MiB,"
        f" {bare.seconds:.1f} s bare, {managed.seconds:.1f} s"
    )


@case("json")
def json_documents(context):
    """CPython: a large tree of dicts and lists, written out, parsed, sorted."""
    size = "6" if context.long else "2"
    context.same([sys.executable, HERE / "cases" / "json_documents.py", size], swap=True)


def serve_and_check(context, argv, socket, count):
    """Fills a Redis, loads it, lets it dump itself by a fork, and checks every key."""
    server = context.spawn(argv)
    client = resp.connect(socket, patience_seconds=30)
    started = time.monotonic()
    resp.fill(client, count)
    load = ["redis-benchmark", "-s", socket, "-t", "get,set,lpush,incr,zadd"]
    load += ["-n", "100000" if context.long else "20000", "-r", "100000", "-d", "64", "-q"]
    loader = context.spawn([*load, "-P", "8", "-c", "20"])
    client.call("BGSAVE")
    loaded = context.wait(loader)
    if loaded.status != 0:
        raise Failed(f"redis-benchmark: {loaded.text[-500:]}{loaded.stderr[-500:]}")
    wrong = resp.check(client, count)
    resp.wait_for_dump(client, patience_seconds=context.watchdog_seconds)
    seconds = time.monotonic() - started
    peak = int(client.info("used_memory_peak"))
    client.send("SHUTDOWN", "NOSAVE")
    result = context.wait(server)
    if wrong:
        raise Failed(f"{len(wrong)} wrong keys, the first {wrong[:3]}")
    if result.status != 0:
        raise Failed(f"redis-server ended with {result.status}: {result.text[-2000:]}")
    return server.pid, peak, seconds


@case("redis", needs=("redis-server", "redis-benchmark"))
def redis(context):
    """Redis under load with a quarter of its data set, dumping itself meanwhile."""
    count = (400 if context.long else 120) * MIB // resp.VALUE_BYTES
    socket = str(context.tmp / "socket")
    argv = ["redis-server", "--port", "0", "--unixsocket", socket, "--save", ""]
    argv += ["--dir", str(context.tmp), "--rdbcompression", "no"]
    _, peak, bare_seconds = serve_and_check(context, argv, socket, count)
    expected = resp.dump_size(context.tmp)
    swap = context.swap_directory()
    managed = context.quire_argv(argv, peak // 4, swap)
    pid, _, seconds = serve_and_check(context, managed, socket, count)
    context.nothing_left(pid, swap)
    if abs(resp.dump_size(context.tmp) - expected) > expected // 4:
        raise Failed("the dump is far smaller or larger than bare's")
    context.note(
        f"{peak >> 20} MiB in {peak >> 22} MiB, {bare_seconds:.1f} s bare, {seconds:.1f} s"
    )
