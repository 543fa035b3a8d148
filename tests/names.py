#!/usr/bin/env python3
"""Finds what the documents name that is not there: files, functions, tests, real cases, options, links.

    tests/names.py

Looked at are words between backticks outside of code blocks: those with a slash or a file's ending are the end of a
tracked path; those with underscores, colons or hyphens are words of the sources, and where they are as long as
tests' names are, names of functions. The first column of a table is the kernel's and is left out.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/designs.md", "docs/tour.md", "docs/manual.md"),
    *("docs/cookbook.md", "docs/containers.md", "docs/pressure.md", "docs/benchmarks.md", "docs/stress-ng.md"),
)
ENDINGS = r"\.(rs|py|c|h|sh|md|toml)"
FILE = re.compile(rf"[\w./-]+{ENDINGS}|[a-z0-9-]+(/[a-z0-9.-]+)+/?")
WORD = re.compile(r"--[a-z][a-z0-9-]*|[a-z][a-z0-9]*([-_][a-z0-9]+)+(\(\))?|(\w+::)+\w+(\(\))?")
# A test's name is a sentence.
TEST_PARTS = 5


def read_tree():
    """The tracked paths, and the text of those that are sources."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    paths = [path for path in listed.stdout.split("\0") if path]
    sources = [path for path in paths if not path.endswith((".md", ".svg")) and path != "tests/names.py"]
    return paths, "\n".join((ROOT / path).read_text(errors="replace") for path in sources)


def names_in(text):
    """Each line's number and the names that are looked for in it."""
    in_block = False
    for number, line in enumerate(text.split("\n"), 1):
        in_block ^= line.lstrip().startswith("```")
        if not in_block:
            # Behind the first column.
            looked_at = line.split("|", 2)[-1] if line.startswith("|") else line
            yield from ((number, name) for name in re.findall(r"`([^`]+)`", looked_at))


def is_there(name, paths, words, functions):
    if FILE.fullmatch(name):
        end = name.rstrip("/")
        return any(f"/{end}/" in f"/{path}/" for path in paths)
    if not WORD.fullmatch(name):
        return True
    if name.startswith("--"):
        return name in words or name[2:].replace("-", "_") in words
    if name.count("_") >= TEST_PARTS:
        return name in functions
    return all(part in words for part in name.removesuffix("()").split("::"))


def main():
    paths, source = read_tree()
    words = set(re.findall(r"[\w-]+", source)) | set(re.findall(r"\w+", source))
    functions = set(re.findall(r"\b(?:fn|def) (\w+)", source))
    missing = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        for number, name in names_in(text):
            if not is_there(name, paths, words, functions):
                missing.append(f"{document}:{number}: there is no `{name}`")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (ROOT / document).parent.joinpath(target).exists():
                missing.append(f"{document}: a link leads to {target}, which is not there")
    print("\n".join(missing) if missing else "All names in the documents exist.")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
