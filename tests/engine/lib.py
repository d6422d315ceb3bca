"""What the engine's tests share: memory, contents that can be checked, waiting, children."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvio

REPOSITORY = Path(__file__).resolve().parents[2]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PATIENCE = 20.0  # seconds until a condition that must come true counts as failed
NOBODY = 65534

Bytes = npt.NDArray[np.uint8]


def aligned(nbytes: int, *, skew: int = 0) -> Bytes:
    """Zeroed memory whose first byte lies ``skew`` bytes beyond a page border."""
    memory = mmap.mmap(-1, max(nbytes + skew, 1))
    return np.frombuffer(memory, np.uint8, nbytes, skew)


def wait_until(true: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
    """Returns as soon as ``true()`` is; fails the test, naming ``what``, when it does not come."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.002)


class Content:
    """A volume filled with random bytes, and what it must hold.

    ``image`` is the truth; :meth:`write` changes both, :meth:`check` compares a range.
    """

    def __init__(self, vol: kvio.Volume, rng: np.random.Generator) -> None:
        self.vol = vol
        self.image: Bytes = np.frombuffer(rng.bytes(vol.size), np.uint8).copy()
        assert vol.pwrite(self.page_aligned(0, vol.size), 0) == vol.size

    def page_aligned(self, offset: int, length: int) -> Bytes:
        """A copy of a part of the image in memory that needs no bounce buffer."""
        part = aligned(length)
        part[:] = self.image[offset : offset + length]
        return part

    def write(self, offset: int, data: Bytes) -> None:
        self.image[offset : offset + data.size] = data
        assert self.vol.pwrite(data, offset) == data.size

    def check(self, offset: int, length: int) -> None:
        got = aligned(length)
        assert self.vol.pread(got, offset) == length
        same(got, self.image[offset : offset + length], f"bytes {offset} to {offset + length}")


def same(got: Any, expected: Any, where: str) -> None:
    """Fails with the place of the first difference, not with megabytes of output."""
    left, right = np.frombuffer(got, np.uint8), np.frombuffer(expected, np.uint8)
    assert left.size == right.size, f"{where}: {left.size} bytes, not {right.size}"
    wrong = np.flatnonzero(left != right)
    assert wrong.size == 0, f"{where}: {wrong.size} wrong bytes, the first at {wrong[0]}"


def descriptors() -> dict[str, str]:
    """Open file descriptors of this process and what they are."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[link.name] = os.readlink(link)
    return found


def native_threads() -> int:
    """Threads of this process, without the kernel's own io-wq helpers: those stay with a thread
    that once used a ring until it ends."""
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            count += not name.read_text().startswith("iou-")
    return count


def resident_bytes() -> int:
    """Memory of this process that is its own (no page cache of files)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/self/status")


def quarantine(vol: kvio.Volume) -> tuple[int, int]:
    """(buffers, bytes) in quarantine now."""
    stats = vol.stats()
    return stats.quarantined_buffers, stats.quarantined_bytes


def resizable(buffer: bytearray) -> bool:
    """Whether nobody holds an export of it. Leaves its length as it was."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True


@contextlib.contextmanager
def in_thread(action: Callable[[], object]) -> Iterator[threading.Thread]:
    """Runs ``action`` beside the block, joins it at the end; its exception fails the test."""
    failed: list[BaseException] = []

    def body() -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(3 * PATIENCE)
    assert not thread.is_alive(), "the thread beside the test did not end"
    if failed:
        raise failed[0]


@contextlib.contextmanager
def stall_ends(stall: Any, seconds: float = 5.0) -> Iterator[None]:
    """Removes the stall at the end of the block, or after ``seconds``: a child whose thread sits in
    stalled I/O cannot end, and the block waits for the child."""
    finished = threading.Event()

    def remove() -> None:
        finished.wait(seconds)
        stall.remove()

    with in_thread(remove):
        try:
            yield
        finally:
            finished.set()


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users may enter (pytest's tmp_path is its owner's alone)."""
    with tempfile.TemporaryDirectory(prefix="kvio-engine-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


_CHILD_PRELUDE = """
import sys, os, errno, json, resource, threading, time, signal, faulthandler, gc
import numpy as np
import kvio, kvio.core, kvio.stats
from tests.engine.lib import *
faulthandler.enable()
"""


def run_child(
    code: str,
    *args: object,
    timeout: float = 60.0,
    environ: Mapping[str, str] | None = None,
    expect: int | None = 0,
) -> str:
    """Runs Python code in an interpreter of its own: what may crash, leak or change its process.

    ``args`` are its ``sys.argv[1:]``. Returns standard output; fails the test, with standard
    error, when the exit status is not ``expect`` (None: any).
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD_PRELUDE + code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environ or {})},
        stdin=subprocess.DEVNULL,
    )
    if expect is not None:
        assert done.returncode == expect, (
            f"the child ended with {done.returncode}, not {expect}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def become_nobody(memlock_bytes: int | None = None) -> None:
    """For children: drop root for good, with a limit for locked memory."""
    import resource

    if memlock_bytes is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
