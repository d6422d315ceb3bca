"""The jobs that the benches give to kvio: each does a fixed number of operations and returns a
Sample. Buffers and offsets are made before the clock starts.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

import kvio
from bench.harness import Meter, Sample

Offsets = npt.NDArray[np.int64]

_TABLE = 509  # sets of random offsets that a run goes through in turn: a prime, so no rhythm
_runs = itertools.count(1)


def fresh_rows(table: list[Offsets]) -> Iterator[Offsets]:
    """The table's rows without end, from another one for each run: a disk's cache knows what the
    last run has read, and fio reads elsewhere each time too.
    """
    start = next(_runs) * 59 % _TABLE
    return itertools.islice(itertools.cycle(table), start, None)


def offset_table(
    size_bytes: int, block: int, count: int, *, members: int = 1, unit: int = 1 << 20
) -> list[Offsets]:
    """Sets of ``count`` random block offsets. With members, each set visits them in turn, stripe
    unit by stripe unit, as fio does with ``filename=a:b:c`` and ``file_service_type=roundrobin``.
    """
    rng = np.random.default_rng(1)
    if members == 1:
        return [rng.integers(0, size_bytes // block, count) * block for _ in range(_TABLE)]
    rows = size_bytes // unit // members
    turn = np.arange(count) % members
    blocks = unit // block
    return [
        (rng.integers(0, rows, count) * members + turn) * unit
        + rng.integers(0, blocks, count) * block
        for _ in range(_TABLE)
    ]


@contextmanager
def page_memory(nbytes: int, *, hugepages: Any = "auto") -> Iterator[kvio.Buffer]:
    """Touched memory for I/O, from a pool of its own."""
    with kvio.BufferPool(nbytes, hugepages=hugepages) as pool:
        buffer = pool.alloc(nbytes)
        np.frombuffer(buffer, np.uint8)[::4096] = 1
        try:
            yield buffer
        finally:
            buffer.free()


def blocking(
    call: Callable[..., Any], memory: Any, table: list[Offsets], block: int, ops: int
) -> Sample:
    """``read_batch`` or ``write_batch`` again and again, into the same memory."""
    count = len(table[0])
    calls = max(ops // count, 1)
    rows = fresh_rows(table)
    meter = Meter()
    for _ in range(calls):
        moved = call(next(rows), memory)
    sample = meter.stop(nbytes=calls * count * block, ops=calls * count)
    check_moved(moved, block)
    return sample


def rolling(
    call: Callable[..., Any],
    memory: Any,
    table: list[Offsets],
    block: int,
    ops: int,
    *,
    in_flight: int,
) -> Sample:
    """``submit_read`` or ``submit_write`` with so many batches in flight."""
    count = len(table[0])
    whole = memoryview(memory).cast("B")
    parts = [whole[i * count * block : (i + 1) * count * block] for i in range(in_flight)]
    calls = max(ops // count, 1)
    queue: deque[kvio.Batch] = deque()
    rows = fresh_rows(table)
    meter = Meter()
    for i in range(calls):
        if len(queue) == in_flight:
            moved = queue.popleft().wait()
        queue.append(call(next(rows), parts[i % in_flight]))
    while queue:
        moved = queue.popleft().wait()
    sample = meter.stop(nbytes=calls * count * block, ops=calls * count)
    check_moved(moved, block)
    del parts
    whole.release()
    return sample


def awaited(
    vol: kvio.Volume,
    memory: Any,
    table: list[Offsets],
    block: int,
    ops: int,
    *,
    in_flight: int,
) -> Sample:
    """asyncio: so many tasks, each awaiting one batch after the other."""
    count = len(table[0])
    parts = np.frombuffer(memory, np.uint8).reshape(in_flight, count * block)
    calls = max(ops // count // in_flight, 1)

    async def reader(number: int) -> None:
        rows = fresh_rows(table)
        for _ in range(calls):
            moved = await vol.submit_read(next(rows), parts[number])
        check_moved(moved, block)

    async def main() -> Sample:
        meter = Meter()
        await asyncio.gather(*(reader(number) for number in range(in_flight)))
        total = calls * in_flight * count
        return meter.stop(nbytes=total * block, ops=total)

    return asyncio.run(main())


def in_threads(
    call: Callable[[Any, int], Any],
    memory: Any,
    size_bytes: int,
    block: int,
    ops: int,
    threads: int,
) -> Sample:
    """So many Python threads, each reading one block after the other with ``call(buffer, offset)``:
    ``vol.pread``, or a preadv on a descriptor.
    """
    parts = np.frombuffer(memory, np.uint8).reshape(threads, block)
    share = max(ops // threads, 1)
    failures: list[BaseException] = []
    start = threading.Barrier(threads + 1)

    def reader(number: int) -> None:
        places = np.random.default_rng(next(_runs)).integers(0, size_bytes // block, share) * block
        offsets, buffer = places.tolist(), parts[number]
        start.wait()
        try:
            for offset in offsets:
                if call(buffer, offset) != block:
                    raise RuntimeError(f"a short read at {offset}")
        except BaseException as error:
            failures.append(error)

    crew = [threading.Thread(target=reader, args=(number,)) for number in range(threads)]
    for thread in crew:
        thread.start()
    meter = Meter()  # before they start: it takes its time
    start.wait()
    for thread in crew:
        thread.join()
    if failures:
        raise failures[0]
    return meter.stop(nbytes=share * threads * block, ops=share * threads)


def batches_in_threads(
    call: Callable[..., Any], memory: Any, table: list[Offsets], block: int, ops: int, threads: int
) -> Sample:
    """So many Python threads, each with blocking batches one after the other."""
    count = len(table[0])
    parts = np.frombuffer(memory, np.uint8).reshape(threads, count * block)
    share = max(ops // count // threads, 1)
    failures: list[BaseException] = []
    start = threading.Barrier(threads + 1)

    def reader(number: int) -> None:
        rows, buffer = fresh_rows(table), parts[number]
        start.wait()
        try:
            for _ in range(share):
                moved = call(next(rows), buffer)
            check_moved(moved, block)
        except BaseException as error:
            failures.append(error)

    crew = [threading.Thread(target=reader, args=(number,)) for number in range(threads)]
    for thread in crew:
        thread.start()
    meter = Meter()
    start.wait()
    for thread in crew:
        thread.join()
    if failures:
        raise failures[0]
    total = share * threads * count
    return meter.stop(nbytes=total * block, ops=total)


def pooled(
    call: Callable[[Any, int], Any], memory: Any, table: list[Offsets], block: int, ops: int
) -> Sample:
    """Batches over a pool of as many Python threads as a batch has blocks, what a Python program
    does without kvio: ``call(buffer, offset)`` is a preadv.
    """
    count = len(table[0])
    parts = list(np.frombuffer(memory, np.uint8)[: count * block].reshape(count, block))
    rows = fresh_rows([offsets.tolist() for offsets in table])
    calls = max(ops // count, 1)
    with ThreadPoolExecutor(count) as pool:
        moved = list(pool.map(call, parts, next(rows)))
        meter = Meter()
        for _ in range(calls):
            moved = list(pool.map(call, parts, next(rows)))
        sample = meter.stop(nbytes=calls * count * block, ops=calls * count)
    check_moved(np.array(moved), block)
    return sample


def one_by_one(
    call: Callable[[Any, int], Any], memory: Any, size_bytes: int, block: int, ops: int
) -> Sample:
    """One thread, one block after the other."""
    buffer = np.frombuffer(memory, np.uint8)[:block]
    rng = np.random.default_rng(next(_runs))
    offsets = (rng.integers(0, size_bytes // block, ops) * block).tolist()
    meter = Meter()
    for offset in offsets:
        moved = call(buffer, offset)
    sample = meter.stop(nbytes=ops * block, ops=ops)
    if moved != block:
        raise RuntimeError(f"{moved} of {block} bytes were read")
    return sample


@contextmanager
def preadv_call(path: str) -> Iterator[Callable[[Any, int], int]]:
    """``call(buffer, offset)`` over os.preadv with O_DIRECT."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield lambda buffer, offset: os.preadv(fd, [buffer], offset)
    finally:
        os.close(fd)


def check_moved(moved: npt.NDArray[np.int64], block: int) -> None:
    if not (moved == block).all():
        raise RuntimeError(f"a batch did not move all of its bytes: {moved.tolist()}")
