"""Pools and volumes: every open volume registers every live pool, whichever came first, and forgets
it when it goes; I/O never reaches memory of a pool that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, Content, in_thread, same

PAGE = 64 * KIB


def fixed(vol: kvio.Volume, buffer: kvio.Buffer) -> bool:
    """Whether the engine takes it for registered memory."""
    before = vol.stats()
    half = buffer.nbytes // 2
    with memoryview(buffer) as view:
        parts = [view[:half], view[half:]]
        assert vol.read_batch([0, MIB], parts).tolist() == [half, half]
        for part in parts:
            part.release()
    return vol.stats().delta(before).fixed_ops == 2


def test_every_volume_knows_every_pool(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    first, second = make_files(2)
    before = kvio.BufferPool(MIB)
    old = opened([first], engine="io_uring")
    with kvio.BufferPool(MIB) as pool, before.alloc(PAGE) as one, pool.alloc(PAGE) as other:
        young = opened([second], engine="io_uring")
        for vol in (old, young):
            assert vol.capabilities["regions"] == 2
            assert fixed(vol, one)
            assert fixed(vol, other)
        young.close()
    assert old.capabilities["regions"] == 1
    before.close()
    assert old.capabilities["regions"] == 0
    before.close()
    dropped = kvio.BufferPool(MIB)
    assert old.capabilities["regions"] == 1
    del dropped
    gc.collect()
    assert old.capabilities["regions"] == 0


def test_closed_pool_keeps_what_is_in_use(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened(make_files(1), engine="io_uring")
    content = Content(vol, rng)
    pool = kvio.BufferPool(MIB)
    gone = weakref.ref(pool)
    buffer, view = pool.alloc(PAGE), pool.alloc(PAGE).numpy()
    view[:] = 5
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.alloc(4096)
    assert not fixed(vol, buffer), "unregistered, yet served"
    del pool
    gc.collect()
    assert vol.pread(buffer, MIB) == PAGE
    same(buffer, content.image[MIB : MIB + PAGE], "memory of a closed pool")
    assert (view == 5).all()
    buffer.free()
    del buffer, view
    gc.collect()
    assert gone() is None


def test_pool_at_the_address_of_an_old_one(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    """Goal: a ring that saw the old pool reads into the new one. Method: pools one after the other
    (the kernel likes to give the same address again), used by main, a worker and a thread that is
    idle in between."""
    vol = opened(make_files(2, 2 * MIB), engine="io_uring", stripe_unit=PAGE)
    content = Content(vol, rng)
    addresses = []
    with ThreadPoolExecutor(1) as thread:
        for turn in range(40):
            with kvio.BufferPool(2 * MIB, hugepages="off") as pool, pool.alloc(2 * PAGE) as buffer:
                addresses.append(pool.address)
                places = (rng.integers(0, vol.size // PAGE, 2) * PAGE).tolist()
                for number, read in enumerate((
                    lambda b, p: vol.read_batch(p, b),
                    lambda b, p: vol.submit_read(p, b).wait(20),
                    lambda b, p: thread.submit(vol.read_batch, p, b).result(20),
                )):  # fmt: skip
                    if number == 2 and turn % 3:
                        continue
                    buffer.numpy()[:] = 0xEE
                    assert read(buffer, places).tolist() == [PAGE, PAGE]
                    expected = np.concatenate([content.image[p : p + PAGE] for p in places])
                    same(buffer, expected, f"turn {turn}, way {number}")
            del pool, buffer
    print(f"{len(set(addresses))} addresses for {len(addresses)} pools")
    assert vol.capabilities["regions"] == 0


def test_more_pools_than_there_is_room_for(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    """64 can be registered; the others are served all the same."""
    vol = opened(make_files(1), engine="io_uring")
    content = Content(vol, rng)
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(kvio.BufferPool(PAGE, hugepages="off")) for _ in range(70)]
        assert vol.capabilities["regions"] == 64
        before = vol.stats()
        buffers = [stack.enter_context(pool.alloc(PAGE)) for pool in pools]
        places = rng.integers(0, vol.size // PAGE, 70) * PAGE
        assert (vol.read_batch(places, buffers) == PAGE).all()
        for at, buffer in zip(places, buffers, strict=True):
            same(buffer, content.image[at : at + PAGE], f"page at {at}")
        added = vol.stats().delta(before)
        assert (added.fixed_ops, added.unfixed_ops) == (64, 6)
    assert vol.capabilities["regions"] == 0


def test_pools_that_come_and_go_while_others_do_io(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened(make_files(2, 2 * MIB), stripe_unit=PAGE)
    content = Content(vol, rng)
    stop = threading.Event()

    def traffic() -> None:
        own = np.random.default_rng(int(content.image[0]))
        with kvio.BufferPool(2 * MIB) as pool, pool.alloc(16 * PAGE) as buffer:
            while not stop.is_set():
                places = own.integers(0, vol.size // PAGE, 16) * PAGE
                assert (vol.read_batch(places, buffer) == PAGE).all()
                expected = np.concatenate([content.image[p : p + PAGE] for p in places])
                same(buffer, expected, "traffic")

    async def awaited(buffer: kvio.Buffer) -> list[int]:
        return (await vol.submit_read([0], [buffer])).tolist()

    with in_thread(traffic):
        try:
            for _ in range(100):
                with kvio.BufferPool(MIB) as pool, pool.alloc(PAGE) as buffer:
                    assert asyncio.run(awaited(buffer)) == [PAGE]
                    same(buffer, content.image[:PAGE], "beside the traffic")
        finally:
            stop.set()
    assert vol.capabilities["regions"] == 0
