import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import quire


@pytest.fixture
def memory():
    """Little memory, and a swap file."""
    made = quire.Memory("8M")
    yield made
    made = None


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.fixture
def numbers(tmp_path, rng):
    """A file of random numbers, twice as large as the memory, and what is in it."""
    values = rng.random((2048, 1024))
    path = tmp_path / "numbers.bin"
    values.tofile(path)
    return path, values


@pytest.fixture
def quire_command():
    """Runs the `quire` command that the wheel brought."""
    command = Path(sysconfig.get_path("scripts")) / "quire"

    def run(*args):
        return subprocess.run([command, *args], check=True, capture_output=True, text=True, timeout=120).stdout

    return run
