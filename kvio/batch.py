"""Operations under way: wait for them, poll them, await them."""

from __future__ import annotations

import asyncio
import os
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

    _awaited = False

    def __await__(self) -> Generator[Any, None, npt.NDArray[np.int64]]:
        if not self.done():
            yield from self._readable().__await__()
        return self.results()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        # An event loop knows one reader for a descriptor: a second task gets a duplicate. Nobody
        # reads from it, so all of them see it readable.
        fd = os.dup(self._eventfd()) if self._awaited else self._eventfd()
        first = not self._awaited
        self._awaited = True
        loop.add_reader(fd, _set_ready, ready)
        try:
            await ready
        finally:
            loop.remove_reader(fd)
            if first:
                self._awaited = False
            else:
                os.close(fd)


def _set_ready(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
