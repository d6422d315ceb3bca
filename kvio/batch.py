"""Operations under way: wait for them, poll them, await them."""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvio import _core

__all__ = ["Batch"]


class Batch(_core.Batch):
    """Operations under way, from :meth:`Volume.submit_read` or :meth:`Volume.submit_write`.

    ``done()``, ``wait(timeout)`` or ``await batch``; then ``results()`` and ``errors()``. The
    buffers stay exported until the engine has let go of them, also when the batch is dropped.
    """

    def __await__(self) -> Generator[Any, None, npt.NDArray[np.int64]]:
        if not self.done():
            yield from _wait(self)
        return self.results()


class _LoopReader:
    """What wakes one event loop: a descriptor for all batches that its tasks wait for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._notifier = _core.Notifier()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._tags = itertools.count()
        loop.add_reader(self._notifier.fileno(), self._wake)

    def expect(self, batch: Batch, future: asyncio.Future[None]) -> int | None:
        """The tag under which the future waits; None when the batch reports elsewhere already."""
        tag = next(self._tags)
        self._waiting[tag] = future
        if batch._notify(self._notifier, tag):
            return tag
        del self._waiting[tag]
        return None

    def forget(self, tag: int) -> None:
        self._waiting.pop(tag, None)

    def _wake(self) -> None:
        for tag in self._notifier.take():
            future = self._waiting.pop(tag, None)
            if future is not None and not future.done():
                future.set_result(None)


# An entry goes with its loop: the reader refers to the loop's futures only while they wait.
_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopReader] = (
    weakref.WeakKeyDictionary()
)


def _wait(batch: Batch) -> Generator[Any, None, None]:
    loop = asyncio.get_running_loop()
    reader = _readers.get(loop)
    if reader is None:
        reader = _readers[loop] = _LoopReader(loop)
    future = loop.create_future()
    tag = reader.expect(batch, future)
    if tag is None:
        yield from _wait_by_eventfd(batch, loop, future)
        return
    try:
        yield from future
    finally:
        reader.forget(tag)


def _wait_by_eventfd(
    batch: Batch, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]
) -> Generator[Any, None, None]:
    """For the second task that awaits a batch, which may run in another loop than the first.

    The batch's own eventfd stays readable once it is done, since nobody reads from it. A loop
    knows one reader for a descriptor, so every task has a duplicate.
    """
    fd = os.dup(batch._eventfd())
    loop.add_reader(fd, _set_ready, future)
    try:
        yield from future
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _set_ready(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
