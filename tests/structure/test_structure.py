"""Layers, sizes, exports, stubs and public names; for each check a mutant that it must catch."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvio
from tests.structure import rules

ROOT = Path(__file__).resolve().parents[2]
CORE = importlib.util.find_spec("kvio._core")
URING = importlib.util.find_spec("kvio.uring._liburing")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources that a test may break."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "_liburing.c")
    for name in ("csrc", "kvio"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    return tmp_path


def edit(path: Path, *, append: str = "", prepend: str = "") -> None:
    path.write_text(prepend + path.read_text() + append)


def stubtest(folder: Path) -> list[str]:
    """The command that compares kvio/_core.pyi with the compiled module."""
    allowed = folder / "allowed"
    # the buffer protocol has a Python name from 3.12 on; type checkers know it by that name earlier
    allowed.write_text("kvio._core.Slice.__buffer__\n")
    words = ["--ignore-missing-stub", "--ignore-unused-allowlist", "--allowlist", str(allowed)]
    return [sys.executable, "-m", "mypy.stubtest", "kvio._core", *words]


# ---- the tree as it is ------------------------------------------------------------------------


def test_c_layers() -> None:
    assert rules.c_layers(ROOT / "csrc") == []


def test_c_has_no_other_mutable_globals() -> None:
    assert rules.c_globals(ROOT / "csrc") == []


def test_python_layers() -> None:
    assert rules.python_layers(ROOT / "kvio") == []


def test_sizes() -> None:
    assert rules.sizes(ROOT) == []


def test_exceptions_are_needed() -> None:
    """Goal: the lists of exceptions hold nothing that is gone."""
    for name, (_, reason) in rules.LARGER.items():
        assert (ROOT / name).exists(), name
        assert reason
    for (name, variable), reason in rules.GLOBALS.items():
        assert variable in (ROOT / "csrc" / name).read_text(), variable
        assert reason
    units = {rules.PART_OF.get(p.stem, p.stem) for p in (ROOT / "csrc").glob("*.[ch]")}
    assert units == set(rules.UNITS) | {"kvio"}


@pytest.mark.parametrize("spec", [CORE, URING], ids=["_core", "_liburing"])
def test_modules_export_their_init_function_only(spec: object) -> None:
    assert rules.exports(Path(spec.origin)) == []  # type: ignore[attr-defined]


def test_stubs_match_the_compiled_module(tmp_path: Path) -> None:
    """Goal: what a type checker believes of kvio._core is true."""
    done = subprocess.run(
        stubtest(tmp_path),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names() -> None:
    """Goal: the names that other programs rely on exist, and each says what it is."""
    promised = {
        "Volume", "Batch", "BufferPool", "Buffer", "Member", "VolumeStats", "OpStats",
        "MemberStats", "Histogram", "KvioError", "CorruptPage", "DeviceBusy", "NotFormatted",
        "GeometryMismatch", "Fenced", "DeadlineExceeded", "Unsupported",
    }  # fmt: skip
    assert promised <= set(kvio.__all__)
    for name in kvio.__all__:
        value = getattr(kvio, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"kvio.{name} has no docstring"
    for method in ("create", "open", "close", "pread", "pwrite", "read_batch", "write_batch",
                   "submit_read", "submit_write", "flush", "discard", "stats", "register",
                   "unregister"):  # fmt: skip
        assert inspect.getdoc(getattr(kvio.Volume, method)), f"Volume.{method} has no docstring"


# ---- mutants: a check that cannot fail checks nothing ------------------------------------------

MUTANTS: dict[str, tuple[Callable[[Path], None], Callable[[Path], list[str]], str]] = {
    "a lower layer includes a higher one": (
        lambda t: edit(t / "csrc/layout.c", prepend='#include "lane.h"\n'),
        lambda t: rules.c_layers(t / "csrc"),
        "layout.c includes lane.h",
    ),
    "neighbours include each other": (
        lambda t: edit(t / "csrc/caller.h", prepend='#include "worker.h"\n'),
        lambda t: rules.c_layers(t / "csrc"),
        "caller.h includes worker.h",
    ),
    "liburing outside of ring.c": (
        lambda t: edit(t / "csrc/lane.c", prepend="#include <liburing.h>\n"),
        lambda t: rules.c_layers(t / "csrc"),
        "lane.c includes liburing",
    ),
    "a unit without a layer": (
        lambda t: (t / "csrc/extra.c").write_text("int extra;\n") and None,
        lambda t: rules.c_layers(t / "csrc"),
        "extra.c: in no layer",
    ),
    "a mutable global": (
        lambda t: edit(t / "csrc/batch.c", append="\nstatic uint64_t calls_so_far;\n"),
        lambda t: rules.c_globals(t / "csrc"),
        "calls_so_far",
    ),
    "a mutable global with a value": (
        lambda t: edit(t / "csrc/ring.c", append="\nstatic int depth = 4;\n"),
        lambda t: rules.c_globals(t / "csrc"),
        "depth",
    ),
    "the library imports the command line": (
        lambda t: edit(t / "kvio/core.py", append="\nfrom kvio.cli import units\n"),
        lambda t: rules.python_layers(t / "kvio"),
        "core.py imports cli.",
    ),
    "the command line reaches inside": (
        lambda t: edit(t / "kvio/cli/info.py", append="\nfrom kvio import _core\n"),
        lambda t: rules.python_layers(t / "kvio"),
        "cli/info.py imports _core",
    ),
    "the liburing binding uses the engine": (
        lambda t: edit(t / "kvio/uring/_types.py", append="\nimport kvio.core\n"),
        lambda t: rules.python_layers(t / "kvio"),
        "uring/_types.py imports core",
    ),
    "a long C file": (
        lambda t: edit(t / "csrc/hist.c", append="\n" * rules.C_LINES),
        rules.sizes,
        "csrc/hist.c",
    ),
    "a long Python file": (
        lambda t: edit(t / "kvio/errors.py", append="\n" * rules.PYTHON_LINES),
        rules.sizes,
        "kvio/errors.py",
    ),
    "a long C function": (
        lambda t: edit(
            t / "csrc/hist.c", append="\nvoid endless(void)\n{\n" + "  ;\n" * 70 + "}\n"
        ),
        rules.sizes,
        "endless() has 72 lines",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tree: Path) -> None:
    breaks, check, expected = MUTANTS[name]
    assert check(tree) == []
    breaks(tree)
    assert any(expected in line for line in check(tree)), check(tree)


def test_mutant_of_the_exports_is_caught(tmp_path: Path) -> None:
    """A module that also gives away a function of its own."""
    source, library = tmp_path / "leaky.c", tmp_path / "leaky.so"
    source.write_text(
        "int PyInit_leaky(void) { return 0; }\nint io_uring_queue_init(void) { return 0; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert rules.exports(library) == ["leaky.so exports io_uring_queue_init"]


def test_mutant_of_the_stubs_is_caught(tree: Path) -> None:
    """A stub that promises what the compiled module has not."""
    for module in (CORE, URING):
        origin = Path(module.origin)  # type: ignore[union-attr, arg-type]
        shutil.copy(origin, tree / origin.relative_to(ROOT))
    edit(tree / "kvio/_core.pyi", append="\ndef promised(x: int) -> int: ...\n")
    done = subprocess.run(
        stubtest(tree),
        capture_output=True,
        text=True,
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tree), "MYPYPATH": str(tree)},
        check=False,
    )
    assert done.returncode != 0
    assert "promised" in done.stdout + done.stderr
