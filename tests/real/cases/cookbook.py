"""docs/cookbook.md: each recipe as it stands, with files like those it names."""

import gzip
import json
import os
import random
import re
import shutil
from pathlib import Path

from harness import REPOSITORY, Failed, case

# What each prints at last, as a pattern.
PRINTS = {
    "A job of continuous integration": r"tested\n\"wanted_bytes_max\": \d+\n$",
    "make -j": r"",
    "pytest": r"3 passed",
    "Jupyter": r"",
    "Redis": r"OK\nvalue:77\n$",
    "PostgreSQL": r"125000250000\n$",
    "A pipeline": r"^ *3000 GET /0\n",
    "A shell's loop": r"^a 100000\nb 100000\n$",
}
HELD = "held = [bytes([number % 251]) * 4096 for number in range({pages})]\n"


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def prepare(title, folder):
    """The files that a recipe names."""
    if title == "A job of continuous integration":
        write(folder, {"Makefile": "test:\n\t@python3 job.py\n", "job.py": HELD.format(pages=40_000) + "print('tested')"})
    elif title == "make -j":
        unit = "#include <map>\n#include <regex>\n#include <string>\nstd::map<std::string, std::regex> m{number};\n"
        rules = "all: a0.o a1.o a2.o a3.o\n%.o: %.cc\n\tg++ -O1 -c -o $@ $<\n"
        write(folder, {"Makefile": rules, **{f"a{n}.cc": unit.format(number=n) for n in range(4)}})
    elif title == "pytest":
        test = HELD.format(pages=20_000) + "def test_{n}():\n    assert len(held) == 20_000\n"
        write(folder, {f"test_{n}.py": test.replace("{n}", str(n)) for n in range(3)})
    elif title == "Jupyter":
        source = HELD.format(pages=60_000) + "open('done', 'w').write(str(len(held)))\n"
        cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
        spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        write(folder, {"analysis.ipynb": json.dumps({"cells": [cell], "metadata": spec, "nbformat": 4, "nbformat_minor": 4})})
    elif title == "A pipeline":
        lines = [f"GET /{n // 3000 if n < 3000 else n}\n" for n in range(900_000)]
        random.Random(1).shuffle(lines)
        (folder / "log.gz").write_bytes(gzip.compress("".join(lines).encode(), 1))
    elif title == "A shell's loop":
        program = "import json, sys\nrows = json.load(open(sys.argv[1]))\nprint(rows[0]['name'], len(rows))\n"
        rows = {f"data/{name}.json": json.dumps([{"name": name}] * 100_000) for name in "ab"}
        write(folder, {"summarize.py": program, **rows})


def check(title, folder):
    if title == "make -j" and len(list(folder.glob("*.o"))) != 4:
        raise Failed(f"{title}: not all was made")
    if title == "Jupyter" and (folder / "done").read_text() != "60000":
        raise Failed(f"{title}: the notebook was not run")


@case("cookbook", needs=("root", "redis-server", "jupyter", "pytest", "make", "g++", "psql"))
def cookbook(context):
    """Every recipe of the document, and none but those."""
    text = (REPOSITORY / "docs/cookbook.md").read_text()
    recipes = dict(re.findall(r"^## (.+?)\n.*?^```sh\n(.*?)^```", text, re.M | re.S))
    if recipes.keys() != PRINTS.keys():
        raise Failed(f"recipes {recipes.keys() ^ PRINTS.keys()}")
    programs = context.tmp / "bin"
    programs.mkdir()
    (programs / "quire").symlink_to(Path(context.quire).resolve())
    # Others' Jupyter and pytest may have been installed for another Python.
    path = f"{programs}:/usr/local/bin:/usr/bin:/bin"
    seconds = {}
    for title, recipe in recipes.items():
        # The server of the database has another user.
        folder = Path(os.path.realpath(context.tmp)) / re.sub(r"\W+", "-", title)
        folder.mkdir(mode=0o755)
        for above in (context.tmp, folder):
            above.chmod(0o755)
        prepare(title, folder)
        environment = {**os.environ, "PATH": path, "HOME": str(folder), "JUPYTER_PLATFORM_DIRS": "1"}
        process = context.spawn(["bash", "-euc", recipe], cwd=folder, env=environment)
        ran = context.wait(process)
        context.nothing_left(process.pid)
        if ran.status != 0 or not re.search(PRINTS[title], ran.text):
            logs = "".join(f"{log.name}: {log.read_text()[-500:]}\n" for log in folder.glob("*.log"))
            raise Failed(f"{title}: {ran.status}: {ran.text}{ran.stderr}{logs}")
        check(title, folder)
        seconds[title] = ran.seconds
        shutil.rmtree(folder)
    context.note(", ".join(f"{title} {took:.1f} s" for title, took in seconds.items()))
