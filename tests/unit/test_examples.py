"""The examples run as they are, as anybody, leave nothing behind, and notice wrong bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.user import run_as_user

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
MEMLOCK = 8 << 20  # what an ordinary user usually may lock

# Reads come from 4096 bytes further on than asked: what a layout bug would do.
MUTANT = """
import runpy, sys
import numpy as np
from kvio.core import Volume

def shifted(method):
    def call(self, first, second, **rest):
        if method.__name__ == "pread":
            return method(self, first, second + 4096, **rest)
        return method(self, np.asarray(first, np.int64) + 4096, second, **rest)
    return call

for name in ("pread", "read_batch", "submit_read"):
    setattr(Volume, name, shifted(getattr(Volume, name)))
runpy.run_path(sys.argv[1], run_name="__main__")
"""

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in ``folder``, which is the place for temporary files too."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_kind_of_use_has_an_example() -> None:
    """The list is complete: a glob that finds nothing must not pass."""
    assert {path.stem for path in EXAMPLES} == {
        "asyncio_read",
        "blocking",
        "registered_memory",
        "scatter",
        "threads",
    }


@each_example
def test_example_runs(example: Path, tmp_path: Path) -> None:
    """With warnings as errors; it says what it did, and its temporary files are gone."""
    done = run([str(example)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@each_example
def test_example_notices_wrong_bytes(example: Path, tmp_path: Path) -> None:
    """Under a volume that reads from the wrong place it fails."""
    done = run(["-c", MUTANT, str(example)], tmp_path)
    assert done.returncode != 0, done.stdout
    assert "Error" in done.stderr


@pytest.mark.root
@each_example
def test_example_runs_as_ordinary_user(example: Path) -> None:
    """With the usual limit of locked memory: what is refused is done without."""
    done = run_as_user(example.read_text(), memlock_bytes=MEMLOCK, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
