"""The traffic of test_stress.py: what one thread, or one event loop, does with a volume.

A volume has a part that is never written, which all may read anywhere, and slots with one owner
each; what a slot holds follows from its offset and a generation. The first failure ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.lib import KIB, MIB, Bytes, aligned, resizable, same, wait_until

SLOT = 20 * KIB  # borders of stripe units lie inside of slots
PAGE = 4 * KIB
UNIT = 64 * KIB
THREADS = 4  # on each volume; one of them is an event loop


def pattern(start: int, length: int, generation: int) -> Bytes:
    """What the bytes [start, start + length) of a volume are in a generation."""
    first, last = start // 8, -(-(start + length) // 8)
    words = np.arange(first, last, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= np.uint64(generation * 0xD1342543DE82EF95 % 2**64)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[start - first * 8 :][:length]


class Run:
    """One run: its end, its pool, its first failure."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed = seed
        self.until = time.monotonic() + seconds
        self.pool = kvio.BufferPool(4 * MIB)
        self.failure = ""
        self.turns: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        return bool(self.failure) or time.monotonic() > self.until

    def count(self, what: str) -> None:
        with self._lock:
            self.turns[what] = self.turns.get(what, 0) + 1

    def fail(self, where: str) -> None:
        with self._lock:
            if not self.failure:
                self.failure = f"{where}\n{traceback.format_exc()}"


class Worker:
    """One thread's traffic on one volume: its own slots, and the part that is only read."""

    def __init__(self, run: Run, vol: kvio.Volume, number: int) -> None:
        self.run = run
        self.vol = vol
        self.number = number
        self.rng = np.random.default_rng([run.seed, number])
        self.fixed = vol.size // 4 // SLOT * SLOT
        mine = range(self.fixed // SLOT + number % THREADS, vol.size // SLOT, THREADS)
        self.slots = {slot * SLOT: 0 for slot in mine}
        self.doing = "setting up"
        for start in self.slots:
            assert vol.pwrite(self.filled(start, 0), start) == SLOT

    def __call__(self) -> None:
        ways = [self.read_fixed, self.read_own, self.write_own, self.many_submitted, self.scattered,
                self.short_deadline_read, self.short_deadline_write, self.registered,
                self.odds_and_ends]  # fmt: skip
        try:
            while not self.run.over:
                way = ways[int(self.rng.integers(len(ways)))]
                way()
                self.run.count(way.__name__)
            self.check_all()
        except BaseException:
            self.run.fail(f"worker {self.number} on {self.vol!r}: {self.doing}")

    # ---- memory -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def memory(self, n: int) -> Iterator[Bytes]:
        """n bytes from the pool, aligned or skewed, with whatever was in there before."""
        kind = int(self.rng.integers(3))
        with contextlib.ExitStack() as stack:
            if kind == 0:
                with contextlib.suppress(MemoryError):
                    buffer = stack.enter_context(self.run.pool.alloc(n))
                    view = buffer.numpy()[:n]
                    yield view
                    del view
                    return
            yield aligned(n, skew=int(self.rng.integers(1, 600)) if kind == 1 else 0)

    def filled(self, start: int, generation: int) -> Bytes:
        data = aligned(SLOT)
        data[:] = pattern(start, SLOT, generation)
        return data

    def pick(self, n: int) -> list[int]:
        return self.rng.choice(list(self.slots), n, replace=False).tolist()

    def deadline(self) -> float | None:
        return 60.0 if self.rng.random() < 0.3 else None

    # ---- traffic ----------------------------------------------------------------------------

    def read_fixed(self) -> None:
        """Any range of the part that nobody writes, by any way."""
        length = int(self.rng.choice([1, 100, PAGE, UNIT, 3 * UNIT + 5, MIB]))
        length = min(length, self.fixed)
        start = int(self.rng.integers(0, self.fixed - length + 1))
        if self.rng.random() < 0.5:
            start -= start % PAGE
        deadline = self.deadline()
        self.doing = f"read of {length} bytes at {start}, deadline {deadline}"
        into = aligned(length, skew=int(self.rng.choice([0, 0, 1, 512])))
        if self.rng.random() < 0.5:
            assert self.vol.pread(into, start, deadline=deadline) == length
        else:
            assert self.vol.submit_read([start], [into], deadline=deadline).wait(60) == [length]
        same(into, pattern(start, length, 0), self.doing)

    def read_own(self) -> None:
        starts = self.pick(int(self.rng.integers(1, 9)))
        deadline = self.deadline()
        self.doing = f"read_batch of slots at {starts}, deadline {deadline}"
        block = aligned(len(starts) * SLOT)
        block[:] = 0xEE
        parts: list[Any] = [block[i * SLOT : (i + 1) * SLOT] for i in range(len(starts))]
        if self.rng.random() < 0.3:
            addresses = np.array([part.ctypes.data for part in parts], np.uint64)
            got = self.vol.read_batch(starts, (addresses, np.full(len(parts), SLOT, np.uint64)))
        else:
            got = self.vol.read_batch(starts, parts, deadline=deadline)
        assert (got == SLOT).all(), got
        for start, part in zip(starts, parts, strict=True):
            same(part, pattern(start, SLOT, self.slots[start]), f"slot at {start}")

    def write_own(self) -> None:
        starts = self.pick(int(self.rng.integers(1, 9)))
        deadline = self.deadline()
        self.doing = f"write of slots at {starts}, deadline {deadline}"
        data = []
        for start in starts:
            self.slots[start] += 1
            data.append(self.filled(start, self.slots[start]))
        if len(starts) == 1:
            assert self.vol.pwrite(data[0], starts[0], deadline=deadline) == SLOT
        elif self.rng.random() < 0.5:
            assert (self.vol.write_batch(starts, data, deadline=deadline) == SLOT).all()
        else:
            batch = self.vol.submit_write(starts, data, deadline=deadline)
            del data  # the engine keeps them
            assert (batch.wait(60) == SLOT).all()

    def many_submitted(self) -> None:
        """Reads and writes of different slots under way together, gathered in another order."""
        starts = self.pick(min(24, len(self.slots)))
        half = len(starts) // 2
        self.doing = f"submitted writes at {starts[:half]}, reads at {starts[half:]}"
        going = []
        for i, start in enumerate(starts):
            if i < half:
                self.slots[start] += 1
                data = self.filled(start, self.slots[start])
                going.append((start, data, self.vol.submit_write([start], [data])))
            else:
                into = aligned(SLOT)
                going.append((start, into, self.vol.submit_read([start], [into])))
        for i in self.rng.permutation(len(going)):
            start, memory, batch = going[i]
            assert batch.wait(60).tolist() == [SLOT]
            same(memory, pattern(start, SLOT, self.slots[start]), f"slot at {start}")

    def scattered(self) -> None:
        (start,) = self.pick(1)
        cuts = np.sort(self.rng.integers(0, SLOT, int(self.rng.integers(0, 80))))
        self.doing = f"slot at {start} in {cuts.size + 1} pieces"
        with self.memory(SLOT) as memory:
            pieces = np.split(memory, cuts)
            assert self.vol.read_batch([start], [pieces]).tolist() == [SLOT]
            same(memory, pattern(start, SLOT, self.slots[start]), self.doing)
            self.slots[start] += 1
            memory[:] = pattern(start, SLOT, self.slots[start])
            assert self.vol.submit_write([start], [tuple(pieces)]).wait(60).tolist() == [SLOT]
            del pieces, memory

    def short_deadline_read(self) -> None:
        """It is served in time, with the right bytes, or it expires; either is right."""
        starts = self.pick(4)
        deadline = float(10 ** self.rng.uniform(-6, -2.5))
        self.doing = f"read of slots at {starts}, deadline {deadline}"
        into = [bytearray(b"\xee" * SLOT) for _ in starts]
        if self.rng.random() < 0.5:
            got = self.vol.read_batch(starts, into, deadline=deadline)
        else:
            got = self.vol.submit_read(starts, into, deadline=deadline).wait(60)
        for start, part, n in zip(starts, into, got.tolist(), strict=True):
            assert n in (SLOT, -errno.ETIME), n
            if n == SLOT:
                same(part, pattern(start, SLOT, self.slots[start]), f"slot at {start}")
            else:
                self.run.count("expired reads")

    def short_deadline_write(self) -> None:
        """One that expires may have happened in part: when its buffer is given back it is over, and
        every block is the old or the new one."""
        (start,) = self.pick(1)
        deadline = float(10 ** self.rng.uniform(-6, -2.5))
        self.doing = f"write of the slot at {start}, deadline {deadline}"
        old, new = (pattern(start, SLOT, self.slots[start] + i).reshape(-1, PAGE) for i in (0, 1))
        source = bytearray(new.tobytes())
        try:
            assert self.vol.pwrite(source, start, deadline=deadline) == SLOT
            self.slots[start] += 1
            return
        except kvio.DeadlineExceeded:
            self.run.count("expired writes")
        wait_until(lambda: self.vol.stats() and resizable(source), "the late write is over")
        into = aligned(SLOT)
        assert self.vol.pread(into, start) == SLOT
        for i, block in enumerate(into.reshape(-1, PAGE)):
            assert np.array_equal(block, old[i]) or np.array_equal(block, new[i]), f"block {i}"
        self.slots[start] += 2
        assert self.vol.pwrite(self.filled(start, self.slots[start]), start) == SLOT

    def registered(self) -> None:
        starts = self.pick(4)
        self.doing = f"registered memory for slots at {starts}"
        memory = aligned(4 * SLOT)
        try:
            self.vol.register(memory)
        except kvio.KvioError as error:
            if error.errno != errno.ENOSPC:  # the table of registrations may be full
                raise
            return
        try:
            assert (self.vol.read_batch(starts, memory) == SLOT).all()
        finally:
            self.vol.unregister(memory)
        for i, start in enumerate(starts):
            part = memory[i * SLOT : (i + 1) * SLOT]
            same(part, pattern(start, SLOT, self.slots[start]), f"slot at {start}")

    def odds_and_ends(self) -> None:
        """What is refused, what is empty, what lies at the end; flush; a second volume."""
        vol, kind = self.vol, int(self.rng.integers(5))
        self.doing = f"odds and ends {kind}"
        if kind == 0:
            vol.flush(deadline=60)
        elif kind == 1:
            with pytest.raises(ValueError):
                vol.pwrite(bytearray(100), 3)
            assert vol.write_batch([vol.size], [aligned(PAGE)]).tolist() == [-errno.ENOSPC]
        elif kind == 2:
            assert vol.read_batch([vol.size, 2**62], [bytearray(10)] * 2).tolist() == [0, 0]
            assert vol.submit_read([], []).wait(60).tolist() == []
        elif kind == 3:
            self.run.count("second volumes")
            paths = [member.path for member in vol.members]
            with kvio.Volume.open(paths, stripe_unit=UNIT, direct="prefer") as other:
                into = aligned(UNIT)
                assert other.pread(into, 0) == UNIT
                same(into, pattern(0, UNIT, 0), "a second volume")
        else:
            vol.submit_read(self.pick(8), aligned(8 * SLOT))  # dropped
            stats = vol.stats()
            assert stats.stale_completions == stats.poisoned_rings == 0

    def check_all(self) -> None:
        for start, generation in self.slots.items():
            self.doing = f"the last look at the slot at {start}"
            into = aligned(SLOT)
            assert self.vol.pread(into, start) == SLOT
            same(into, pattern(start, SLOT, generation), self.doing)


class AsyncWorker(Worker):
    """The same slots and checks, eight tasks in an event loop of the thread's own."""

    def __call__(self) -> None:
        try:
            asyncio.run(self.everything())
            self.check_all()
        except BaseException:
            self.run.fail(f"event loop {self.number} on {self.vol!r}: {self.doing}")

    async def everything(self) -> None:
        own = list(self.slots)
        async with asyncio.TaskGroup() as group:
            for i in range(8):
                group.create_task(self.task(own[i::8]))

    async def task(self, starts: list[int]) -> None:
        while not self.run.over:
            start = int(self.rng.choice(starts))
            self.doing = f"await of the slot at {start}"
            self.slots[start] += 1
            data = self.filled(start, self.slots[start])
            assert (await self.vol.submit_write([start], [data])).tolist() == [SLOT]
            into = aligned(SLOT)
            batch = self.vol.submit_read([start], [into], deadline=self.deadline())
            if self.rng.random() < 0.2:
                waiting = asyncio.ensure_future(_result(batch))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            assert (await batch).tolist() == [SLOT]
            same(into, pattern(start, SLOT, self.slots[start]), self.doing)
            self.run.count("awaits")


async def _result(batch: kvio.Batch) -> Any:
    return await batch
