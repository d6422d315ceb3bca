"""Plain direct I/O through the system calls, for tests that must not trust kvio; and waiting."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def opened(path: str, flags: int = os.O_RDWR | os.O_DIRECT) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def read(fd: int, offset: int, length: int) -> bytes:
    buffer = mmap.mmap(-1, length)
    return buffer[: os.preadv(fd, [buffer], offset)]


def write(fd: int, offset: int, data: bytes) -> int:
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    return os.pwritev(fd, [buffer], offset)


def eventually(condition: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    """Polls for something that another process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.01)
