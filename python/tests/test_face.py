"""What people see: the bar, IPython's extension, types, the command that comes with the package."""

import io
import subprocess
import sys

import pytest
import quire


def test_progress_says_what_is_held(memory):
    said = io.StringIO()
    array = quire.zeros(100_000, memory=memory)
    with quire.progress(memory, said):
        array[:] = 1
    assert "of 8 MiB held" in said.getvalue() and said.getvalue().count("\n") == 1


def test_ipython_shows_a_bar_after_a_cell_that_used_the_memory():
    testing = pytest.importorskip("IPython.testing.globalipapp")
    del testing
    program = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in ("%load_ext quire", "1 + 1", "import quire; quire.set_limit('8M'); a = quire.zeros(9)", "a[:] = 1", "2 + 2"):
    print("cell", cell)
    shell.run_cell(cell)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    after = [part for part in ended.stdout.split("cell ") if "held" in part]
    assert len(after) == 1 and after[0].startswith("a[:] = 1"), ended


def test_types_are_whole():
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "-p", "quire"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout


def test_the_command_comes_with_the_package(quire_command):
    assert quire.__version__ in quire_command("--version")
    said = quire_command("run", "--memory", "64M", "--", sys.executable, "-c", "print(sum(bytes(10_000_000)))")
    assert said == "0\n"


def test_everything_public_is_documented():
    for name in quire.__all__:
        if name not in ("__version__", "Stats"):
            assert getattr(quire, name).__doc__, name
