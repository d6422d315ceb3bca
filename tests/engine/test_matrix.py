"""Every engine does the same: io_uring, preadv threads, and what is left where io_uring is refused.

Method: the checks of matrix.py over real members, once for each engine; for a refused io_uring in a
child under a seccomp filter that answers EPERM (Docker) or ENOSYS (Podman).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine import matrix
from tests.engine.lib import MIB, in_thread
from tests.support.seccomp import run_refused

SIZE = 4 * MIB


MEMBERS = {"loops": "make_loops", "files": "make_files"}
ROOT = pytest.mark.root


@pytest.fixture
def members(kind: str, request: pytest.FixtureRequest) -> list[str]:
    return request.getfixturevalue(MEMBERS[kind])(3, SIZE)


@pytest.mark.parametrize(
    ("kind", "caller"),
    [pytest.param("loops", "main", marks=ROOT), ("files", "main"), ("files", "thread")],
)
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("name", matrix.CHECKS)
def test_engine(
    name: str, engine: str, kind: str, caller: str, members: list[str], rng: np.random.Generator
) -> None:
    """The main thread can be interrupted, so its calls take another way than other threads'."""

    def open_volume(**options: Any) -> kvio.Volume:
        options = {"mode": "rw", "direct": "prefer", "stripe_unit": matrix.UNIT, **options}
        vol = kvio.Volume.open(members, engine=engine, **options)
        assert vol.engine == engine
        return vol

    if caller == "main":
        matrix.CHECKS[name](open_volume, rng)
    else:
        with in_thread(lambda: matrix.CHECKS[name](open_volume, rng)):
            pass


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_process_without_io_uring(
    code: int, make_files: Callable[..., list[str]], seed: int
) -> None:
    """All checks in one child; engine="auto" falls back by itself and says why."""
    members = make_files(3, SIZE)
    argv = [str(seed), *members]
    done = run_refused(
        "import sys; sys.path.insert(0, '')\nfrom tests.engine import matrix\n"
        f"matrix.main(*{argv!r})",
        code,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("engine") == "threads"
    assert errno.errorcode[code] in report.pop("refused")
    words = {errno.EPERM: "Operation not permitted", errno.ENOSYS: "Function not implemented"}
    assert all(words[code] in reason for reason in report.pop("reasons"))
    assert report.keys() == matrix.CHECKS.keys()
    failed = {name: text for name, text in report.items() if text}
    assert not failed, "\n".join(failed.values())


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_asking_for_a_refused_io_uring_is_a_clear_error(
    code: int, make_files: Callable[..., list[str]]
) -> None:
    member = make_files(1)[0]
    done = run_refused(
        "import sys; sys.path.insert(0, '')\nimport kvio\n"
        "try:\n"
        f"    kvio.Volume.open([{member!r}], engine='io_uring', direct='prefer')\n"
        "except kvio.KvioError as error:\n"
        "    print(type(error).__name__, error.errno, error.op, error.filename, error, sep='|')\n",
        code,
    )
    assert done.returncode == 0, done.stderr
    kind, number, op, filename, text = done.stdout.strip().split("|")
    # a kernel that forbids io_uring and one that has none are the same to the caller
    assert kind == "Unsupported"
    assert (int(number), op, filename) == (errno.EOPNOTSUPP, "open", member)
    assert os.strerror(code) in text
    for word in (member, "io_uring is refused", "engine='auto'", "kvio doctor"):
        assert word in text
