"""The job loop: keeps batches in flight on a volume and accounts for each of them.

Invariants
  F1  A batch's buffers are not touched between its submission and its completion.
  F2  When run() returns with drain, nothing that this flow submitted is in flight.
  F3  Every result of every batch is counted once: full, short, or failed.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvio.cli.plan import READ, WRITE, Chunk, Plan, Written
from kvio.cli.results import Direction
from kvio.cli.session import Buffers
from kvio.cli.verify import BadBlock, Contents

_MAX_MESSAGES = 10
_MAX_NAP_S = 0.05


@dataclass(slots=True)
class Slot:
    """One batch in flight."""

    index: int
    batch: Any
    chunk: Chunk


@dataclass(slots=True)
class Check:
    """How blocks are filled and checked.

    ``reads``: blocks that are read are checked. ``own``: this run wrote them. ``fatal``: the first
    bad one ends the job.
    """

    contents: Contents
    reads: bool
    own: bool
    fatal: bool


class Flow:
    """Runs plans over one volume, one after the other."""

    def __init__(
        self,
        volume: Any,
        buffers: Buffers,
        blocks: tuple[int, int],
        *,
        slots: int,
        largest_batch: int,
        keep_going: tuple[bool, bool],
        tick: Callable[[float], bool],
        tick_s: float,
    ) -> None:
        self._volume, self._buffers = volume, buffers
        self._free = deque(range(slots))
        self._pending: deque[Slot] = deque()
        self._keep_going, self._tick, self._tick_s = keep_going, tick, tick_s
        self._largest_batch = largest_batch
        self.use_blocks(blocks)
        self._next_tick_s = time.monotonic() + tick_s
        self._last_done_s = 0.0
        self.reset()

    def use_blocks(self, blocks: tuple[int, int]) -> None:
        """Set the bytes of one read and of one write; nothing may be in flight."""
        self._blocks = blocks
        self._lengths = tuple(np.full(self._largest_batch, block, np.uint64) for block in blocks)

    def reset(self) -> None:
        """Forget what was counted; batches in flight go on."""
        self.counted = (Direction(), Direction())
        self.error = 0
        self.stopped = False
        self.messages: list[str] = []
        self.verified = 0
        self.bad: list[BadBlock] = []
        self.bad_count = 0

    def run(
        self,
        plan: Plan,
        *,
        until_s: float | None = None,
        check: Check | None = None,
        written: Written | None = None,
        drain: bool = True,
    ) -> None:
        """Issue everything that the plan has, or until a time of CLOCK_MONOTONIC."""
        while not self.stopped:
            now = time.monotonic()
            if now >= self._next_tick_s:
                self._do_tick(now)
            if until_s is not None and now >= until_s:
                break
            if not self._free:
                self._finish(plan, check, written)
                continue
            chunk = plan.next(now)
            if chunk is None or not self._wait_until(chunk.due_s, until_s):
                break
            self._submit(chunk, check)
        while drain and self._pending:
            self._finish(plan, check, written)

    def _submit(self, chunk: Chunk, check: Check | None) -> None:
        index, count = self._free.popleft(), chunk.offsets.size
        if check is not None and chunk.direction == WRITE:
            block = self._blocks[WRITE]
            for i, offset in enumerate(chunk.offsets.tolist()):
                check.contents.fill(self._buffers.piece(index, i, block), offset)
        memory = (
            self._buffers.addresses(index, chunk.direction, count),
            self._lengths[chunk.direction][:count],
        )
        submit = self._volume.submit_read if chunk.direction == READ else self._volume.submit_write
        if not self._pending:
            self._last_done_s = time.monotonic()
        self._pending.append(Slot(index, submit(chunk.offsets, memory), chunk))

    def _finish(self, plan: Plan, check: Check | None, written: Written | None) -> None:
        slot = self._pending.popleft()
        results = self._wait(slot.batch)
        now = time.monotonic()
        plan.took(results.size, now - self._last_done_s)
        self._last_done_s = now
        block = self._blocks[slot.chunk.direction]
        direction = self.counted[slot.chunk.direction]
        direction.ios += results.size
        full = results == block
        if full.all():
            direction.bytes += results.size * block
        else:
            self._count_odd(slot, results, direction)
        if check is not None and check.reads and slot.chunk.direction == READ:
            self._check(slot, results, check)
        if written is not None and slot.chunk.direction == WRITE:
            written.add(slot.chunk.offsets[full])
        self._free.append(slot.index)

    def _wait(self, batch: Any) -> Any:
        while True:
            left = self._next_tick_s - time.monotonic()
            if left > 0:
                try:
                    return batch.wait(timeout=left)
                except TimeoutError:
                    pass
            self._do_tick(time.monotonic())

    def _do_tick(self, now: float) -> None:
        self._next_tick_s = now + self._tick_s
        if self._tick(now):
            self.stopped = True

    def _wait_until(self, due_s: float, until_s: float | None) -> bool:
        """Sleep until a chunk may go; False when the run ends before."""
        while not self.stopped:
            now = time.monotonic()
            if now >= self._next_tick_s:
                self._do_tick(now)
            if until_s is not None and now >= until_s:
                return False
            if now >= due_s:
                return True
            time.sleep(min(due_s - now, _MAX_NAP_S))
        return False

    def _count_odd(self, slot: Slot, results: Any, direction: Direction) -> None:
        block = self._blocks[slot.chunk.direction]
        failed = results < 0
        short = ~failed & (results < block)
        direction.bytes += int(results[~failed].sum())
        direction.errors += int(failed.sum())
        direction.short += int(short.sum())
        if short.any():
            where = int(slot.chunk.offsets[short][0])
            self._say(f"{int(short.sum())} short I/O(s), the first at volume offset {where}")
        if not failed.any():
            return
        for error in slot.batch.errors()[:_MAX_MESSAGES]:
            self._say(str(error))
        if not self._keep_going[slot.chunk.direction]:
            self.error = self.error or int(-results[failed][0])
            self.stopped = True

    def _check(self, slot: Slot, results: Any, check: Check) -> None:
        """Check the blocks of a batch; one that did not come whole is bad, or an error already."""
        block = self._blocks[READ]
        for i, offset in enumerate(slot.chunk.offsets.tolist()):
            if results[i] < 0:
                continue  # counted as an error
            self.verified += 1
            bad: BadBlock | None
            if results[i] != block:
                bad = BadBlock(offset, f"only {results[i]} of its {block} bytes could be read")
            else:
                piece = self._buffers.piece(slot.index, i, block)
                bad = check.contents.check(piece, offset, own=check.own)
            if bad is None:
                continue
            self.bad_count += 1
            if len(self.bad) < _MAX_MESSAGES:
                self.bad.append(bad)
            if check.fatal:
                self.stopped = True
                break
        if self.bad_count and not self.error:
            self.error = errno.EILSEQ

    def _say(self, text: str) -> None:
        if len(self.messages) < _MAX_MESSAGES and text not in self.messages:
            self.messages.append(text)
