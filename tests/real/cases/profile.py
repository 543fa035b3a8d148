"""`quire profile`: what it says of a program, against runs of it with the memory that it speaks of."""

import json
import random
import sys
import xml.etree.ElementTree as xml
from statistics import median

from harness import MIB, Failed, case

# Builds a dictionary, walks it in orders of its own, and frees a part of it.
PYTHON = """
import random
random.seed(3)
rows = {i: {"name": "n%d" % i, "values": [i, 2 * i]} for i in range(ROWS)}
total = 0
for turn in range(3):
    for key in sorted(rows, key=lambda key: rows[key]["values"][1] % 1009):
        total += len(rows[key]["name"])
words = sorted("%x" % (i * 2654435761 % 2**32) for i in range(ROWS + ROWS // 2))
print(total, words[:3], len(set(words)))
"""

CLASS = """struct T{0} {{ std::map<std::string, std::vector<int>> m; std::unordered_map<int, std::string> u;
int f(int x) {{ std::vector<std::string> v; for (int j = 0; j < x; j++) v.push_back(std::to_string(j * {0}));
m["{0}"].push_back(x); u[x] = v[0]; std::function<int(int)> g = [&](int y) {{ return y + {0}; }};
return g(v.size()) + m.size(); }} }};
"""


def python(rows):
    return [sys.executable, "-c", PYTHON.replace("ROWS", str(rows))]


def source(context, classes):
    """A C++ file that takes a compiler's time."""
    path = context.tmp / "large.cc"
    heads = ["map", "string", "vector", "functional", "unordered_map", "iostream"]
    uses = "".join(f"{{ T{n} t; s += t.f({n} + 1); }}" for n in range(classes))
    text = "".join(f"#include <{head}>\n" for head in heads) + "".join(CLASS.format(n) for n in range(classes))
    path.write_text(text + f"int main() {{ int s = 0; {uses} std::cout << s; }}\n")
    return path


def lines(context, count):
    path = context.tmp / "lines.txt"
    numbers = random.Random(1)
    with open(path, "w", encoding="ascii") as out:
        for _ in range(count):
            out.write(f"{numbers.randrange(10**9)} {numbers.getrandbits(120):x}\n")
    return path


def profiled(context, argv, options=(), status=0):
    """Runs `quire profile`; returns what it writes as JSON, and the run."""
    file = context.tmp / "profile.json"
    argv = [context.quire, "profile", "--json", file, *options, "--", *argv]
    run = context.bare(argv)
    if run.status != status:
        raise Failed(f"{run.status} and not {status}: {run.stderr}")
    return json.loads(file.read_text()), run


def expected(curve, memory_bytes, what):
    """What a curve says of a budget between two of its points."""
    for low, high in zip(curve, curve[1:]):
        if low["memory_bytes"] <= memory_bytes <= high["memory_bytes"]:
            part = (memory_bytes - low["memory_bytes"]) / (high["memory_bytes"] - low["memory_bytes"])
            return low[what] + (high[what] - low[what]) * part
    raise Failed(f"the curve has nothing at {memory_bytes}: {curve}")


def memory_for(curve, count, what):
    """With how much memory, of the budgets that a curve has, it expects so many."""
    for low, high in zip(curve, curve[1:]):
        if low[what] > count >= high[what]:
            part = (low[what] - count) / (low[what] - high[what])
            return low["memory_bytes"] + (high["memory_bytes"] - low["memory_bytes"]) * part
    return curve[0]["memory_bytes"] if count >= curve[0][what] else curve[-1]["memory_bytes"]


def is_close(value, other):
    """Whether it is within a quarter of the other."""
    return abs(value - other) <= other / 4


def spread(values, form):
    return f"{median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


@case("profile")
def profile(context):
    """The need is what a run wants, the curve falls, the picture is one, and the program is unharmed."""
    argv = python(150_000)
    bare = context.bare(argv)
    svg = context.tmp / "profile.svg"
    said, run = profiled(context, argv, ["--svg", svg])
    if run.text != bare.text:
        raise Failed(f"other output: {run.text}")
    managed = context.managed(argv, 1024 * MIB, whole=True)
    stats = json.loads(context.stats.read_text())
    wanted = stats["wanted_bytes_max"] + stats["unmanaged_memory_bytes_max"]
    if managed.text != bare.text or not 0.9 * wanted < said["need_bytes"] < 1.15 * wanted:
        raise Failed(f"it needs {said['need_bytes']}, and a run wants {wanted}")
    curve = said["curve"]
    if len(curve) < 8 or curve[0]["memory_bytes"] > 0.3 * said["need_bytes"] or curve[-1]["slowdown"] != 1:
        raise Failed(f"no curve: {curve}")
    seconds = [point["seconds"] for point in curve]
    if seconds != sorted(seconds, reverse=True) or seconds[0] < 1.2 * seconds[-1]:
        raise Failed(f"less memory is not slower: {seconds}")
    if "needs" not in run.stderr or "MiB" not in run.stderr:
        raise Failed(f"no words: {run.stderr}")
    drawn = xml.parse(svg).getroot()
    if len([line for line in drawn.iter() if line.tag.endswith("polyline")]) < 3:
        raise Failed("the picture has no curve")
    context.note(f"needs {said['need_bytes'] // MIB} MiB; bare {bare.seconds:.1f} s, profiled {said['wall_seconds']:.1f} s")


@case("profile-odd")
def profile_odd(context):
    """Programs that fail, are killed, fork, leave something behind, are small or are not there."""
    _, run = profiled(context, ["sh", "-c", "echo out; exit 3"], status=3)
    if run.text != "out\n":
        raise Failed(f"other output: {run.text!r}")
    profiled(context, ["sh", "-c", "kill -9 $$"], status=137)
    missing = context.bare([context.quire, "profile", "--", "/no/such/program"])
    if missing.status != 127 or "/no/such/program" not in missing.stderr:
        raise Failed(f"{missing.status}: {missing.stderr}")
    refused = context.bare([context.quire, "profile", "--json", "/no/such/folder/x", "--", "true"])
    if refused.status != 125 or "/no/such/folder/x" not in refused.stderr:
        raise Failed(f"{refused.status}: {refused.stderr}")
    small, run = profiled(context, ["true"])
    if small["need_bytes"] > 16 * MIB or "needs" not in run.stderr:
        raise Failed(f"{small['need_bytes']}: {run.stderr}")
    # Two at a time, each in a process of its own.
    one = " ".join(f"'{word}'" for word in python(60_000))
    both, run = profiled(context, ["sh", "-c", f"{one} > a & {one} > b & wait; cat a b"])
    alone, _ = profiled(context, python(60_000))
    if run.text.count("\n") != 2 or both["need_bytes"] < 1.5 * alone["need_bytes"]:
        raise Failed(f"{both['need_bytes']} for two, {alone['need_bytes']} for one: {run.text}")


@case("profile-checked", long_only=True, needs=("g++", "sort"))
def profile_checked(context):
    """What is expected at four budgets beside what comes, for three programs: a table, which is not judged by
    time."""
    programs = {
        "sort": ["sort", "-S", "800M", "--parallel=1", lines(context, 6_000_000), "-o", context.tmp / "sorted"],
        "CPython": python(1_600_000),
        "g++": ["g++", "-O1", "-c", source(context, 260), "-o", context.tmp / "large.o"],
    }
    rows = [
        "medians of three profiles and of three runs around the budget, their ratio, and with how much more or less"
        " memory what came is expected: seconds; faults on swap; pages that came back"
    ]
    # Of each kind: whether what is expected is close to what came, and each run to the mean of the two others.
    told_close, run_close = {}, {}
    for name, argv in programs.items():
        bare = median(context.bare(argv).seconds for _ in range(3))
        profiles = [profiled(context, argv)[0] for _ in range(3)]
        need = median(said["need_bytes"] for said in profiles)
        walls = [said["wall_seconds"] / bare for said in profiles]
        rows.append(f"{name}: {bare:.1f} s bare, needs {need // MIB} MiB; profiled {spread(walls, '.2f')} times as long")
        faults = []
        for part in (0.92, 0.85, 0.77, 0.7):
            memory = int(need * part)
            runs = []
            # A budget that is a hundredth larger may bring twice as many faults, or half as many.
            for near in (0.985, 1, 1.015):
                context.managed(argv, int(memory * near), whole=True)
                runs.append(json.loads(context.stats.read_text()))
            cells = []
            for what, counted in (
                ("seconds", "wall_seconds"),
                ("faults_from_pool", "workingset_refault_anon"),
                ("pages_swapped_in", "pswpin"),
            ):
                told = [expected(said["curve"], memory, what) for said in profiles]
                came = [run[counted] for run in runs]
                ratio = median(told) / max(median(came), 1)
                told_close.setdefault(what, []).append(is_close(median(told), median(came)))
                run_close.setdefault(what, []).extend(is_close(one, (sum(came) - one) / 2) for one in came)
                apart = median(memory_for(said["curve"], median(came), what) for said in profiles) / memory - 1
                cells.append(f"{spread(told, '.4g')}, {spread(came, '.4g')}, {ratio:.2f}, as with {apart:+.1%}")
                if what == "faults_from_pool":
                    faults.append(median(told))
            rows.append(f"{name}, {memory // MIB} MiB ({part:.2f}): {'; '.join(cells)}")
        # Where a curve is flat, medians of three profiles may fall a little.
        falls = any(less < more * 2 / 3 for more, less in zip(faults, faults[1:]))
        if falls or faults[0] >= faults[-1]:
            raise Failed("\n".join(rows))
    for what, close in told_close.items():
        others = run_close[what]
        rows.append(
            f"{what}: expected within a quarter of what came at {sum(close)} of {len(close)}; a run within a quarter of"
            f" the two others in {sum(others)} of {len(others)}"
        )
    context.note("\n    " + "\n    ".join(rows))
