"""Which blocks go into the next batch. Plans hold no volume and read no clock of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvio.cli.common import UsageError
from kvio.cli.offsets import OffsetStream

Offsets = npt.NDArray[np.int64]

READ, WRITE = 0, 1

# What a batch of an unpaced job should last: long enough that Python's share of the work vanishes,
# short enough that the end of a timed run is sharp.
_BATCH_S = 0.025


@dataclass(frozen=True, slots=True)
class Chunk:
    """One batch to come: its direction, its offsets, and the earliest time to submit it."""

    direction: int
    offsets: Offsets
    due_s: float = 0.0


class Budget:
    """How much is left to do: bytes, I/Os, both, or no end (None)."""

    def __init__(self, nbytes: int | None, ios: int | None) -> None:
        self.nbytes, self.ios = nbytes, ios

    def grant(self, wanted: int, block: int) -> int:
        """How many of ``wanted`` blocks may still be issued; takes them from the budget."""
        granted = wanted
        if self.nbytes is not None:
            granted = min(granted, self.nbytes // block)
        if self.ios is not None:
            granted = min(granted, self.ios)
        if self.nbytes is not None:
            self.nbytes -= granted * block
        if self.ios is not None:
            self.ios -= granted
        return granted


class Plan(Protocol):
    """A source of chunks."""

    budget: Budget

    def next(self, now_s: float) -> Chunk | None:
        """The next chunk, or None when everything was issued."""

    def took(self, ios: int, seconds: float) -> None:
        """Learn how long the I/Os of a chunk took from one completion of a batch to the next."""


class OneWay:
    """One direction as fast as it goes, in batches whose size follows the speed."""

    def __init__(
        self,
        stream: OffsetStream,
        direction: int,
        block: int,
        budget: Budget,
        limits: tuple[int, int],
    ) -> None:
        self._stream, self._direction, self._block = stream, direction, block
        self.budget = budget
        self._smallest, self._largest = limits
        self._size = self._smallest

    def next(self, now_s: float) -> Chunk | None:
        del now_s
        count = self.budget.grant(self._size, self._block)
        return Chunk(self._direction, self._stream.take(count)) if count else None

    def took(self, ios: int, seconds: float) -> None:
        if seconds <= 0:
            return
        wanted = int(ios / seconds * _BATCH_S)
        # At most double: one lucky interval must not make a batch of seconds.
        self._size = max(self._smallest, min(self._largest, wanted, 2 * self._size))


class Paced:
    """A mix of reads and writes, each with a limit of I/Os a second or none.

    ``share_read`` (0 to 1) is kept by count: after every chunk the reads issued are within one
    chunk of that share. With limits on both directions the limits decide instead.
    """

    def __init__(
        self,
        streams: tuple[OffsetStream, OffsetStream],
        blocks: tuple[int, int],
        budget: Budget,
        *,
        batch: int,
        share_read: float,
        iops: tuple[float, float],
    ) -> None:
        self._streams, self._blocks, self.budget = streams, blocks, budget
        self._batch, self._share_read, self._iops = batch, share_read, iops
        self._issued = [0, 0]
        self._start_s: float | None = None

    def _due(self, direction: int) -> float:
        assert self._start_s is not None
        limit = self._iops[direction]
        return self._start_s + self._issued[direction] / limit if limit else 0.0

    def _choose(self) -> int:
        if self._share_read >= 1:
            return READ
        if self._share_read <= 0:
            return WRITE
        if all(self._iops):
            return READ if self._due(READ) <= self._due(WRITE) else WRITE
        total = sum(self._issued)
        return READ if self._issued[READ] <= total * self._share_read else WRITE

    def next(self, now_s: float) -> Chunk | None:
        if self._start_s is None:
            self._start_s = now_s
        direction = self._choose()
        block = self._blocks[direction]
        count = self.budget.grant(self._batch, block)
        if not count:
            return None
        due_s = self._due(direction)
        self._issued[direction] += count
        return Chunk(direction, self._streams[direction].take(count), due_s)

    def took(self, ios: int, seconds: float) -> None:
        del ios, seconds


class Written:
    """Which blocks a job has written, one bit each, to be read back ``batch`` at a time."""

    def __init__(self, start: int, length: int, block: int, *, batch: int) -> None:
        self.start, self.block, self.batch = start, block, batch
        self._bits = np.zeros((length // block + 7) // 8, np.uint8)

    @classmethod
    def over(cls, regions: Sequence[tuple[int, int]], block: int, *, batch: int) -> Written:
        """For (start, length) regions whose blocks lie on one grid."""
        start = min(region[0] for region in regions)
        if any((region[0] - start) % block for region in regions):
            raise UsageError(f"verify needs an offset_increment that is a multiple of bs={block}")
        return cls(start, max(sum(region) for region in regions) - start, block, batch=batch)

    def add(self, offsets: Offsets) -> None:
        """Note blocks by their byte offsets."""
        index = (offsets - self.start) // self.block
        np.bitwise_or.at(self._bits, index >> 3, (1 << (index & 7)).astype(np.uint8))

    def chunks(self) -> Iterator[Offsets]:
        """All noted blocks in ascending order, ``batch`` byte offsets at a time."""
        batch = self.batch
        step = 1 << 16
        left = np.empty(0, np.int64)
        for first in range(0, self._bits.size, step):
            bits = np.unpackbits(self._bits[first : first + step], bitorder="little")
            found = (np.flatnonzero(bits) + first * 8) * self.block + self.start
            left = np.concatenate([left, found.astype(np.int64)])
            while left.size >= batch:
                yield left[:batch]
                left = left[batch:]
        if left.size:
            yield left


class ReadBack:
    """Reads what was written, for the check after a write phase."""

    def __init__(self, written: Written) -> None:
        self._chunks = written.chunks()
        self.budget = Budget(None, None)

    def next(self, now_s: float) -> Chunk | None:
        del now_s
        found = next(self._chunks, None)
        return None if found is None else Chunk(READ, found)

    def took(self, ios: int, seconds: float) -> None:
        del ios, seconds
