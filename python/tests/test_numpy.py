"""numpy's own tests: of memory maps, with `quire.memmap` imported for numpy's; of arrays, with numpy's own arrays under a
limit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(np.__file__).parent / ("_core" if np.__version__ >= "2" else "core") / "tests"


#: Left out: a vector of 16 GiB, which takes minutes in 64 MiB; and what takes long and has small arrays.
WHICH = "not huge_vectordot" if "QUIRE_LONG" in os.environ else "TestCreation or TestMethods or TestIO or TestResize"


def run_pytest(*args, folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *map(str, args)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)


def test_numpys_tests_of_memory_maps_pass(tmp_path):
    source = (TESTS / "test_memmap.py").read_text()
    ours = re.sub(r"^    memmap,\n", "", source, count=1, flags=re.MULTILINE)
    assert ours != source
    (tmp_path / "test_memmap.py").write_text("from quire import memmap\n" + ours)
    ended = run_pytest("test_memmap.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) >= 20


@pytest.mark.skipif(np.__version__ < "2", reason="its tests need pytest of then")
def test_numpys_tests_of_arrays_pass_as_bare_with_its_arrays_under_a_limit(tmp_path):
    (tmp_path / "under_a_limit.py").write_text('import quire\n\nquire.set_limit("64M", numpy=True)\n')
    outcomes = []
    for more in ([], ["-p", "under_a_limit"]):
        ended = run_pytest("-rfE", "-k", WHICH, *more, TESTS / "test_multiarray.py", folder=tmp_path)
        failed = sorted(re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE))
        counted = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error)", ended.stdout)}
        outcomes.append((failed, counted))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1]["passed"] > 300
