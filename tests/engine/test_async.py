"""await batch: many at once, several tasks for one batch, cancelled tasks, loops that end, loops in
several threads. The I/O itself never depends on whether somebody waits for it.

Method: a FUSE file under a loop device that stalls, where something has to be under way.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import (
    KIB,
    MIB,
    PATIENCE,
    Content,
    aligned,
    descriptors,
    in_thread,
    quarantine,
    resizable,
    same,
    wait_until,
)
from tests.support.faultdev import FaultDevice

PAGE = 16 * KIB
ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])


async def result(batch: kvio.Batch) -> list[int]:
    return (await batch).tolist()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run with an end: a wake-up that is lost must fail the test, not hang it."""

    async def limited() -> Any:
        return await asyncio.wait_for(main, PATIENCE)

    return asyncio.run(limited())


@ENGINES
@pytest.mark.parametrize("n", [1, 64, 1000])
def test_many_batches_at_once(
    n: int,
    engine: str,
    make_files: Callable[..., list[str]],
    opened: Opener,
    rng: np.random.Generator,
) -> None:
    vol = opened(make_files(3, 2 * MIB), engine=engine, stripe_unit=64 * KIB)
    content = Content(vol, rng)
    places = (rng.integers(0, vol.size // PAGE, n) * PAGE).tolist()

    async def one(place: int) -> None:
        into = aligned(PAGE)
        assert await result(vol.submit_read([place], [into])) == [PAGE]
        same(into, content.image[place : place + PAGE], f"read at {place}")

    async def everything() -> None:
        async with asyncio.TaskGroup() as group:
            for place in places:
                group.create_task(one(place))

    run(everything())
    run(everything())  # a second loop, after the first is gone


def test_one_descriptor_a_batch_at_most(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """Awaiting a thousand batches leaves no descriptor, also of those that were done already."""
    vol = opened(make_files(1))

    async def everything() -> int:
        await vol.submit_read([0], [aligned(PAGE)])
        before = len(descriptors())
        for _ in range(50):
            batches = [vol.submit_read([0], [aligned(PAGE)]) for _ in range(20)]
            for batch in batches:
                assert await result(batch) == [PAGE]
                assert await result(batch) == [PAGE], "again"
        del batches, batch
        gc.collect()
        return len(descriptors()) - before

    # the engine keeps up to 64 idle ones for the next batches
    assert run(everything()) <= 64


@pytest.mark.root
@ENGINES
def test_several_tasks_await_one_batch(
    engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    stall = disk.stall("read")
    into = aligned(PAGE)

    async def everything() -> None:
        batch = vol.submit_read([MIB], [into])
        tasks = [asyncio.create_task(result(batch)) for _ in range(3)]
        await asyncio.to_thread(disk.wait_stalled, 1)
        late = asyncio.create_task(result(batch))
        assert not any(task.done() for task in (*tasks, late))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(tasks[0]), 0.05)
        await asyncio.to_thread(stall.remove)
        assert await asyncio.gather(*tasks, late) == [[PAGE]] * 4
        assert await result(batch) == [PAGE]

    run(everything())
    same(into, content.image[MIB : MIB + PAGE], "what all of them read")


@pytest.mark.root
@ENGINES
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_of_several_waiting_tasks_is_cancelled(
    victim: int, engine: str, disk: FaultDevice, opened: Opener
) -> None:
    """The others, and whoever comes later, still get the result."""
    vol = opened([disk.device], engine=engine)
    stall = disk.stall("read")

    async def everything() -> None:
        batch = vol.submit_read([0], [aligned(PAGE)])
        tasks = [asyncio.create_task(result(batch)) for _ in range(3)]
        await asyncio.to_thread(disk.wait_stalled, 1)
        tasks[victim].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[victim]
        tasks[victim] = asyncio.create_task(result(batch))
        await asyncio.sleep(0)
        await asyncio.to_thread(stall.remove)
        assert await asyncio.gather(*tasks) == [[PAGE]] * 3

    run(everything())


@pytest.mark.root
@ENGINES
def test_cancelled_task_leaves_the_batch_going(
    engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """Cancelling is no more than not waiting: the read lands, the buffer is kept until then."""
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    stall = disk.stall("read")
    buffer, dropped = bytearray(PAGE), bytearray(PAGE)

    async def everything() -> kvio.Batch:
        batch = vol.submit_read([MIB], [buffer])
        task = asyncio.create_task(result(batch))
        # nobody but the task itself holds this one
        alone = asyncio.create_task(result(vol.submit_read([2 * MIB], [dropped])))
        await asyncio.to_thread(disk.wait_stalled, 2)
        for waiting in (task, alone):
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        return batch

    batch = run(everything())
    gc.collect()
    assert not batch.done()
    assert not resizable(buffer)
    assert not resizable(dropped)
    stall.remove()
    assert batch.wait(PATIENCE).tolist() == [PAGE]
    same(buffer, content.image[MIB : MIB + PAGE], "the read that went on")
    wait_until(lambda: vol.stats() and resizable(dropped), "the dropped one lands too")
    same(dropped, content.image[2 * MIB : 2 * MIB + PAGE], "the read that nobody awaits")
    assert resizable(buffer)
    assert quarantine(vol) == (0, 0)


@pytest.mark.root
@ENGINES
def test_timeout_around_an_await(engine: str, disk: FaultDevice, opened: Opener) -> None:
    vol = opened([disk.device], engine=engine)
    stall = disk.stall("read")

    async def everything() -> None:
        batch = vol.submit_read([0], [aligned(PAGE)])
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await batch
        assert not batch.done()
        await asyncio.to_thread(stall.remove)
        assert await result(batch) == [PAGE]

    run(everything())


@pytest.mark.root
@ENGINES
def test_await_with_a_deadline(
    engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """The deadline ends the await; the loop goes on beside it, and reads elsewhere are served."""
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    stall = disk.stall("read", length=MIB)

    async def healthy(count: list[int], until: asyncio.Event) -> None:
        into = aligned(PAGE)
        while not until.is_set():
            assert await result(vol.submit_read([2 * MIB], [into], deadline=30)) == [PAGE]
            same(into, content.image[2 * MIB : 2 * MIB + PAGE], "beside the stall")
            count[0] += 1

    async def everything() -> None:
        count, until = [0], asyncio.Event()
        beside = asyncio.create_task(healthy(count, until))
        stuck = [vol.submit_read([i * PAGE], [aligned(PAGE)], deadline=0.3) for i in range(4)]
        assert await asyncio.gather(*map(result, stuck)) == [[-errno.ETIME]] * 4
        until.set()
        await beside
        assert count[0] >= 3
        for batch in stuck:
            (error,) = batch.errors()
            assert isinstance(error, kvio.DeadlineExceeded)

    run(everything())
    assert vol.stats().deadline_exceeded == 4
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the late answers")


@pytest.mark.root
@ENGINES
def test_loop_that_ends_while_a_batch_is_under_way(
    engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """Goal: the engine does not touch the closed loop, nothing is left open, another loop can take
    over. Method: asyncio.run that returns, one that raises, and a loop closed by hand."""
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    stall = disk.stall("read")
    into = [aligned(PAGE) for _ in range(3)]
    batches: list[kvio.Batch] = []

    async def leave_behind(i: int, fail: bool) -> None:
        batches.append(vol.submit_read([i * MIB], [into[i]]))
        task = asyncio.create_task(result(batches[i]))
        await asyncio.to_thread(disk.wait_stalled, i + 1)
        assert not task.done()
        if fail:
            raise RuntimeError("mine")

    asyncio.run(leave_behind(0, False))
    with pytest.raises(RuntimeError, match="mine"):
        asyncio.run(leave_behind(1, True))
    loop = asyncio.new_event_loop()
    gone = weakref.ref(loop)
    waiting = loop.create_task(_start(vol, into[2], batches))
    loop.run_until_complete(asyncio.sleep(0.01))
    waiting.cancel()
    loop.run_until_complete(asyncio.wait([waiting]))
    loop.close()
    del loop, waiting
    disk.wait_stalled(3)
    stall.remove()
    assert run(_gather(batches)) == [[PAGE]] * 3
    for i, part in enumerate(into):
        same(part, content.image[i * MIB : i * MIB + PAGE], f"read {i}")
    batches.clear()
    gc.collect()
    assert gone() is None, "something keeps the closed loop"


async def _start(vol: kvio.Volume, into: Any, batches: list[kvio.Batch]) -> None:
    batches.append(vol.submit_read([2 * MIB], [into]))
    await batches[-1]


async def _gather(batches: list[kvio.Batch]) -> list[list[int]]:
    return await asyncio.gather(*map(result, batches))


def test_loop_closed_with_its_task_still_waiting(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """A loop thrown away in the middle (pytest plugins, notebooks) leaves no descriptor behind."""
    vol = opened(make_files(1))
    before = len(descriptors())
    for _ in range(20):
        loop = asyncio.new_event_loop()
        batches = [vol.submit_read([0], [aligned(MIB)]) for _ in range(8)]
        tasks = [loop.create_task(result(batch)) for batch in batches]
        loop.run_until_complete(asyncio.sleep(0))
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
        assert [batch.wait(PATIENCE).tolist() for batch in batches] == [[MIB]] * 8
    del loop, tasks, task, batches
    gc.collect()
    assert len(descriptors()) - before <= 64, "the engine keeps up to 64 idle event descriptors"


@ENGINES
def test_loops_in_several_threads(
    engine: str, make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened(make_files(2, 2 * MIB), engine=engine, stripe_unit=64 * KIB)
    content = Content(vol, rng)
    places = (rng.permutation(vol.size // PAGE)[:200] * PAGE).tolist()

    def in_own_loop() -> None:
        async def one(place: int) -> None:
            into = aligned(PAGE)
            assert await result(vol.submit_read([place], [into])) == [PAGE]
            same(into, content.image[place : place + PAGE], f"read at {place}")

        async def everything() -> None:
            await asyncio.gather(*map(one, places))

        for _ in range(3):
            run(everything())

    with in_thread(in_own_loop), in_thread(in_own_loop), in_thread(in_own_loop):
        in_own_loop()


@pytest.mark.root
@ENGINES
def test_one_batch_awaited_by_two_loops_and_waited_for_by_a_thread(
    engine: str, disk: FaultDevice, opened: Opener
) -> None:
    vol = opened([disk.device], engine=engine)
    stall = disk.stall("read")
    batch = vol.submit_read([0], [aligned(PAGE)])
    disk.wait_stalled(1)
    got: list[Any] = []
    started = threading.Barrier(4)

    def by_loop() -> None:
        async def wait() -> list[int]:
            task = asyncio.create_task(result(batch))
            await asyncio.sleep(0)  # the task waits now
            await asyncio.to_thread(started.wait, PATIENCE)
            return await task

        got.append(run(wait()))

    def by_wait() -> None:
        started.wait(PATIENCE)
        got.append(batch.wait(PATIENCE).tolist())

    with in_thread(by_loop), in_thread(by_loop), in_thread(by_wait):
        started.wait(PATIENCE)
        assert not batch.done()
        stall.remove()
    assert got == [[PAGE]] * 3


def test_close_while_a_task_awaits(make_files: Callable[..., list[str]], opened: Opener) -> None:
    """close() drains, so the tasks get their results; a later submit is refused inside the loop."""
    vol = opened(make_files(2, 8 * MIB), queue_depth=1)

    async def everything() -> None:
        tasks = [asyncio.create_task(result(vol.submit_read([0], [aligned(MIB)])))
                 for _ in range(32)]  # fmt: skip
        await asyncio.sleep(0)
        await asyncio.to_thread(vol.close)
        assert await asyncio.gather(*tasks) == [[MIB]] * 32
        with pytest.raises(kvio.KvioError, match="closed"):
            vol.submit_read([0], [aligned(MIB)])

    run(everything())
