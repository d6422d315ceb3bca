"""Memory for I/O: pools in huge pages, and the list of who must register them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvio import _core
from kvio._checks import choice, count
from kvio.errors import make_error

__all__ = ["Buffer", "BufferPool", "join"]

_HUGEPAGES = {"auto": 0, "require": 1, "off": 2}


class Registrar(Protocol):
    """What a pool needs of a volume."""

    @property
    def closed(self) -> bool: ...
    def unregister(self, buffer: Any) -> None: ...
    def _register_quietly(self, pool: BufferPool) -> None: ...
    def _reclaim(self) -> None: ...


# Every open volume knows every live pool, so that pool memory is registered in all rings.
_lock = threading.Lock()
_volumes: weakref.WeakSet[Registrar] = weakref.WeakSet()
_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def join(volume: Registrar) -> None:
    """A volume was opened: it registers all pools, and those to come."""
    with _lock:
        _volumes.add(volume)
        pools = list(_pools)
    for pool in pools:
        volume._register_quietly(pool)


def _open_volumes() -> list[Registrar]:
    return [volume for volume in _volumes if not volume.closed]


class Buffer(_core.Slice):
    """A part of a :class:`BufferPool`: buffer protocol, ``numpy()``, context manager.

    It goes back to the pool by ``free()``, at the end of a ``with`` block, or when collected. When
    the block ends by an exception while views of it exist or I/O on it is in flight, the exception
    goes on and the memory goes back with the last of them.
    """

    _pool: BufferPool

    def numpy(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """A view of the memory as a one-dimensional array of ``dtype``."""
        return np.frombuffer(memoryview(self), dtype=np.dtype(dtype))

    def free(self) -> None:
        """Give the memory back.

        Raises
        ------
        BufferError
            Views of it exist, or I/O on it is in flight.
        """
        if self._retire():
            self._pool._give_back(self.start, self.nbytes)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self.free()
        except BufferError:
            if exc is None:
                raise  # a view that outlives the block: the caller's mistake to know of

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None and self._retire():
            pool._give_back(self.start, self.nbytes)


class BufferPool(_core.Memory):
    """Aligned memory for I/O in huge pages where they can be had, registered in every ring.

    Parameters
    ----------
    nbytes : int
        Bytes to map, rounded up to the page size that is granted.
    hugepages : {"auto", "require", "off"}
        hugetlb pages, then transparent huge pages, then 4 KiB pages; only hugetlb; only 4 KiB.

    Raises
    ------
    KvioError
        The memory cannot be had (``hugepages="require"`` without free hugetlb pages).
    """

    ALIGNMENT = 4096
    _SLICE = 1 << 30  # the kernel registers at most 1 GiB at once: no buffer straddles a border

    def __init__(
        self, nbytes: int, *, hugepages: Literal["auto", "require", "off"] = "auto"
    ) -> None:
        size = count("nbytes", nbytes, most=2**46)
        code = self._map(size, choice("hugepages", hugepages, _HUGEPAGES))
        if code:
            hint = "; reserve huge pages: sysctl vm.nr_hugepages" if hugepages == "require" else ""
            raise make_error(code, f"{size} bytes of memory for I/O: {os.strerror(code)}{hint}")
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, super().nbytes)]
        self._closed = False
        with _lock:
            _pools.add(self)
            volumes = _open_volumes()
        for volume in volumes:
            volume._register_quietly(self)

    def alloc(self, nbytes: int) -> Buffer:
        """Take ``nbytes`` (rounded up to 4096) from the pool, aligned to 4096.

        Raises
        ------
        MemoryError
            No free range is large enough.
        """
        asked = count("nbytes", nbytes, most=2**46)
        size = -(-asked // self.ALIGNMENT) * self.ALIGNMENT
        if self._closed:
            raise ValueError("this pool is closed")
        with self._lock:
            start = self._take(size)
        if start is None:
            # buffers of batches that nobody waited for come back when a volume is asked
            with _lock:
                volumes = _open_volumes()
            for volume in volumes:
                volume._reclaim()
            with self._lock:
                start = self._take(size)
        if start is None:
            largest = max((n for _, n in self._free), default=0)
            raise MemoryError(
                f"pool of {self.nbytes} bytes: no room for {size}, the largest free "
                f"range has {largest}"
            )
        buffer = Buffer.__new__(Buffer)
        buffer._attach(self, start, size)
        buffer._pool = self
        return buffer

    def _take(self, size: int) -> int | None:
        for i, (start, length) in enumerate(self._free):
            begin = start
            if size <= self._SLICE and begin // self._SLICE != (begin + size - 1) // self._SLICE:
                begin = (begin // self._SLICE + 1) * self._SLICE
            if begin + size > start + length:
                continue
            rest = [(start, begin - start), (begin + size, start + length - begin - size)]
            self._free[i : i + 1] = [part for part in rest if part[1]]
            return begin
        return None

    def _give_back(self, start: int, size: int) -> None:
        with self._lock:
            self._free.append((start, size))
            self._free.sort()
            merged = [self._free[0]]
            for begin, length in self._free[1:]:
                last, last_length = merged[-1]
                if last + last_length == begin:
                    merged[-1] = (last, last_length + length)
                else:
                    merged.append((begin, length))
            self._free = merged

    def close(self) -> None:
        """Unregister from all volumes. The memory goes when the last buffer is gone."""
        self._closed = True
        with _lock:
            _pools.discard(self)
            volumes = _open_volumes()
        for volume in volumes:
            with contextlib.suppress(ValueError):  # the table had no room for it
                volume.unregister(self)

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock") and not self._closed:
            self.close()
