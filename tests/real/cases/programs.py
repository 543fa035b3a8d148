"""Real programs at a quarter of what they want: CPython, GNU sort, g++."""

import random
import sys

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
