"""fork(): the child is refused with a clear error, the parent goes on unharmed, and the child may
open volumes of its own.

Method: os.fork() and multiprocessing, with I/O in flight at the moment of the fork. Children leave
by os._exit and report through a pipe.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, Content, aligned, quarantine, same, wait_until
from tests.support.faultdev import FaultDevice

ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])


def in_fork(action: Callable[[], object]) -> str:
    """What ``action`` returns in a forked child, as text; fails when it raises, or dies."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "fork in a process with threads"
        child = os.fork()
    if child == 0:
        try:
            text = str(action())
        except BaseException:
            text = "FAILED " + traceback.format_exc()
        try:
            os.write(write_end, text.encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0, "the child died"
    assert not text.startswith("FAILED"), text
    return text


def refused(action: Callable[[], object]) -> None:
    with pytest.raises(kvio.KvioError, match="fork") as caught:
        action()
    assert caught.value.errno == 1
    assert "open its own" in str(caught.value)


@ENGINES
def test_child_is_refused_and_parent_goes_on(
    engine: str, make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    paths = make_files(2, 2 * MIB)
    vol = opened(paths, engine=engine, stripe_unit=64 * KIB)
    content = Content(vol, rng)
    pool = kvio.BufferPool(MIB)
    into = aligned(256 * KIB)
    under_way = [vol.submit_read([i * 64 * KIB], [aligned(64 * KIB)]) for i in range(32)]

    def child() -> str:
        refused(lambda: vol.pread(aligned(4096), 0))
        refused(lambda: vol.pwrite(aligned(4096), 0))
        refused(lambda: vol.read_batch([0], [aligned(4096)]))
        refused(lambda: vol.submit_read([0], [aligned(4096)]))
        refused(vol.flush)
        refused(lambda: vol.discard(0, 4096))
        refused(lambda: vol.register(aligned(4096)))
        vol.close(timeout=1)
        return "refused"

    assert in_fork(child) == "refused"
    assert not vol.closed, "a child's close is not the parent's"
    assert vol.read_batch([0, MIB], [into, aligned(MIB)]).tolist() == [256 * KIB, MIB]
    same(into, content.image[: 256 * KIB], "read after the fork")
    assert [batch.wait(20)[0] for batch in under_way] == [64 * KIB] * 32
    content.write(0, content.page_aligned(MIB, 64 * KIB))
    content.check(0, vol.size)
    pool.close()


@ENGINES
def test_child_opens_its_own_volume(
    engine: str, make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    paths = make_files(2, 2 * MIB)
    vol = opened(paths, engine=engine)
    content = Content(vol, rng)

    def child() -> str:
        with kvio.Volume.open(paths, mode="rw", direct="prefer", engine=engine) as own:
            for _ in range(3):
                got = aligned(own.size)
                assert own.pread(got, 0) == own.size
                same(got, content.image, "the child's blocking read")
                got[:] = 0
                assert own.submit_read([0], [got]).wait(20).tolist() == [own.size]
                same(got, content.image, "the child's submitted read")
            with kvio.BufferPool(MIB) as pool, pool.alloc(MIB) as memory:
                assert own.read_batch([0], [memory]).tolist() == [MIB]
                same(memory, content.image[:MIB], "the child's pool")
            block = aligned(4096)
            block[:] = 77
            assert own.pwrite(block, 4096) == 4096
            own.flush()
        gc.collect()
        return "done"

    for _ in range(3):
        assert in_fork(child) == "done"
        content.image[4096:8192] = 77
    content.check(0, vol.size)


@pytest.mark.root
@ENGINES
def test_fork_while_reads_are_in_flight(
    engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """The data must land in the parent's pages, not in a copy; the child's exit must not wait."""
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    pool = kvio.BufferPool(2 * MIB)
    memory = pool.alloc(MIB)
    stall = disk.stall("read")
    batch = vol.submit_read([MIB], [memory])
    disk.wait_stalled(1)

    def child() -> str:
        refused(lambda: vol.pread(aligned(4096), 0))
        del globals()["_kept"][:]
        gc.collect()
        return "gone"

    globals()["_kept"] = [batch]
    assert in_fork(child) == "gone"
    stall.remove()
    assert batch.wait(20).tolist() == [MIB]
    same(memory, content.image[MIB : 2 * MIB], "read across a fork")
    globals()["_kept"].clear()
    del batch
    memory.free()
    pool.close()
    assert quarantine(vol) == (0, 0)


def test_child_that_drops_a_batch_does_not_swallow_the_parents_wake_up(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """Goal: the eventfd of an awaited batch is shared with children; only the parent may use it.
    Method: the batch is done but its task has not run yet when the child drops it."""
    vol = opened(make_files(1, MIB))

    async def main() -> list[int]:
        batch = vol.submit_read([0, 4096], [aligned(4096), aligned(4096)])
        holder: list[Any] = [batch]

        async def waiting() -> list[int]:
            return (await batch).tolist()

        fd = batch._eventfd()
        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        wait_until(batch.done, "the batch is done")

        def child() -> str:
            nonlocal batch
            holder.clear()
            task.cancel()
            del batch
            gc.collect()
            return "dropped"

        assert fd >= 0
        assert in_fork(child) == "dropped"
        return await asyncio.wait_for(task, 20)

    assert asyncio.run(main()) == [4096, 4096]


def test_pool_memory_is_not_inherited(make_files: Callable[..., list[str]]) -> None:
    """A child must not share pages that the kernel may be writing to: it does not get them."""
    with kvio.BufferPool(2 * MIB) as pool, pool.alloc(4096) as memory:
        address = memory.address
        mapped = mapping_of(address)
        assert mapped
        inherited = in_fork(lambda: mapping_of(address))
        assert inherited == "[]"


def mapping_of(address: int) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if holds(line, address)]


def holds(line: str, address: int) -> bool:
    start, end = (int(x, 16) for x in line.split(maxsplit=1)[0].split("-"))
    return start <= address < end


def worker(paths: list[str]) -> int:
    with kvio.Volume.open(paths, direct="prefer") as own:
        into = aligned(MIB)
        assert own.submit_read([0], [into]).wait(20).tolist() == [MIB]
        return int(into.sum())


def test_multiprocessing(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    paths = make_files(2, MIB)
    vol = opened(paths)
    content = Content(vol, rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            got = pool.map(worker, [paths] * 4)
            pool.close()
            pool.join()
    assert got == [int(content.image[:MIB].sum())] * 4
    content.check(0, vol.size)


def test_statistics_in_a_child_are_refused_or_plain(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened(make_files(1, MIB))
    assert vol.pread(aligned(4096), 0) == 4096

    def child() -> str:
        refusal = "fork"
        try:
            vol.stats()
        except kvio.KvioError as error:
            refusal = str(error)
        assert "fork" in refusal
        assert vol.size == MIB
        assert "Volume" in repr(vol)
        return "ok"

    assert in_fork(child) == "ok"
