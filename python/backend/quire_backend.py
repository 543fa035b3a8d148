"""Builds the wheel: maturin's, with the `quire` command and the preload library added to it."""

import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import (  # noqa: F401
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent.parent
# Laid out as a prefix is: `quire` finds the library beside its own folder. maturin asks for it at each step.
DATA = ROOT / "target/wheel-data"
DATA.mkdir(parents=True, exist_ok=True)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    # As `make` builds it, so that it is not built twice.
    subprocess.run(["cargo", "build", "--release", "--locked", "--workspace"], cwd=ROOT, check=True)
    release = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    shutil.rmtree(DATA)
    for name, folder in (("quire", "scripts"), ("libquire_preload.so", "data/lib/quire")):
        (DATA / folder).mkdir(parents=True)
        shutil.copy2(release / name, DATA / folder / name)
        # What backtraces are made of is most of the wheel.
        subprocess.run(["strip", "--strip-debug", DATA / folder / name], check=True)
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
