"""BufferPool: memory is given out once, comes back whole, and never while somebody can still reach
it.

Method: a model of the free ranges beside random alloc and free; views, collected buffers and
stalled I/O as the last users of a buffer.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import GIB, KIB, MIB, Content, quarantine, same, wait_until
from tests.support.faultdev import FaultDevice

PAGE = 64 * KIB
HUGE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def place(pool: kvio.BufferPool, buffer: kvio.Buffer) -> tuple[int, int]:
    """Where it lies in the pool, from its address as the kernel would get it."""
    start = buffer.address - pool.address
    return start, start + buffer.nbytes


def check_whole(pool: kvio.BufferPool) -> None:
    """All of it is free, and in one piece."""
    pool.alloc(pool.nbytes).free()


# ---- giving out and taking back ---------------------------------------------------------------


def test_sizes_and_addresses_are_rounded_up_to_4096() -> None:
    with kvio.BufferPool(MIB, hugepages="off") as pool:
        assert pool.nbytes == MIB
        for asked, given in [(1, 4096), (4096, 4096), (4097, 8192), (100_000, 102_400)]:
            buffer = pool.alloc(asked)
            assert buffer.nbytes == len(memoryview(buffer)) == given
            assert buffer.address % 4096 == 0
            assert not buffer.numpy().any(), "new memory is zero"
            buffer.free()
        check_whole(pool)
    with kvio.BufferPool(5000, hugepages="off") as pool:
        assert pool.nbytes == 8192


def test_random_alloc_and_free_against_a_model(rng: np.random.Generator) -> None:
    """No two buffers overlap, what is written stays, MemoryError only when no gap is large enough,
    and at the end all has grown together again."""
    with kvio.BufferPool(4 * MIB, hugepages="off") as pool:
        alive: list[tuple[kvio.Buffer, int]] = []
        refused = 0
        for turn in range(4000):
            if alive and rng.random() < 0.45:
                buffer, mark = alive.pop(int(rng.integers(len(alive))))
                content = buffer.numpy()
                assert (content == mark).all(), f"turn {turn}: somebody wrote into it"
                del content
                buffer.free()
                continue
            asked = int(rng.integers(1, 300_000))
            taken = sorted(place(pool, buffer) for buffer, _ in alive)
            ends = [0, *(end for _, end in taken)]
            starts = [*(start for start, _ in taken), pool.nbytes]
            largest = max(start - end for start, end in zip(starts, ends, strict=True))
            if -(-asked // 4096) * 4096 > largest:
                refused += 1
                with pytest.raises(MemoryError, match=str(largest)):
                    pool.alloc(asked)
                continue
            buffer = pool.alloc(asked)
            start, end = place(pool, buffer)
            assert start >= 0
            assert end <= pool.nbytes
            assert all(end <= s or e <= start for s, e in taken), f"turn {turn}: given out twice"
            mark = turn % 255 + 1
            buffer.numpy()[:] = mark
            alive.append((buffer, mark))
        assert refused > 10, "the pool was never full"
        for buffer, _ in alive:
            buffer.free()
        check_whole(pool)


def test_many_threads_take_and_give(seed: int) -> None:
    with kvio.BufferPool(2 * MIB, hugepages="off") as pool:

        def work(number: int) -> int:
            own = np.random.default_rng([seed, number])
            full = 0
            for turn in range(400):
                try:
                    with pool.alloc(int(own.integers(1, 400_000))) as buffer:
                        view = buffer.numpy()
                        view[:] = number + 1
                        assert (view == number + 1).all(), f"thread {number}, turn {turn}"
                        del view
                except MemoryError:
                    full += 1
            return full

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        check_whole(pool)


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (-1, ValueError), (2**60, ValueError), (1.5, TypeError), ("1", TypeError),
     (None, TypeError)],
)  # fmt: skip
def test_sizes_that_are_none(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        kvio.BufferPool(size)
    with kvio.BufferPool(MIB) as pool:
        with pytest.raises(error):
            pool.alloc(size)
        check_whole(pool)


def test_hugepages_are_what_was_asked_for() -> None:
    with kvio.BufferPool(4 * MIB, hugepages="off") as pool:
        assert pool.hugepages == "none"
    with kvio.BufferPool(3 * MIB) as pool:
        assert pool.hugepages in ("hugetlb", "thp", "none")
        if pool.hugepages != "none":
            assert pool.nbytes == 4 * MIB
            assert pool.address % (2 * MIB) == 0
    free = int(HUGE.read_text()) if HUGE.exists() else 0
    if free >= 1:
        with kvio.BufferPool(2 * MIB, hugepages="require") as pool:
            assert pool.hugepages == "hugetlb"
    with pytest.raises(kvio.KvioError, match=r"vm\.nr_hugepages"):
        kvio.BufferPool((free + 1) * 2 * MIB, hugepages="require")
    with pytest.raises(ValueError, match="hugepages"):
        kvio.BufferPool(MIB, hugepages="2M")  # type: ignore[arg-type]


def test_no_buffer_lies_across_a_border_of_registration() -> None:
    """The kernel registers 1 GiB at most: a buffer across two registrations would never be fixed.
    The memory is only reserved, not touched."""
    with kvio.BufferPool(GIB + 2 * MIB, hugepages="off") as pool:
        first = pool.alloc(GIB - 4096)
        second = pool.alloc(8192)
        assert place(pool, second)[0] == GIB
        third = pool.alloc(4096)
        assert place(pool, third) == (GIB - 4096, GIB), "what lies before the border is not lost"
        for buffer in (first, second, third):
            buffer.free()
        check_whole(pool)


# ---- who may still reach it -------------------------------------------------------------------


def test_views_keep_a_buffer(rng: np.random.Generator) -> None:
    with kvio.BufferPool(MIB, hugepages="off") as pool:
        buffer = pool.alloc(MIB)
        view, array = memoryview(buffer), buffer.numpy(np.uint64)
        part = array[10:20]
        with pytest.raises(BufferError, match="views"):
            buffer.free()
        view.release()
        with pytest.raises(BufferError):
            buffer.free()
        del array
        with pytest.raises(BufferError):
            buffer.free()
        part[:] = 7
        with pytest.raises(MemoryError):
            pool.alloc(4096)
        del part
        buffer.free()
        buffer.free()  # again is nothing
        check_whole(pool)
        for use in (memoryview, kvio.Buffer.numpy):
            with pytest.raises((ValueError, BufferError)):
                use(buffer)


def test_freed_buffer_takes_no_io(make_files: Callable[..., list[str]], opened: Opener) -> None:
    vol = opened(make_files(1))
    with kvio.BufferPool(MIB) as pool:
        buffer = pool.alloc(PAGE)
        buffer.free()
        for call in (
            lambda: vol.pread(buffer, 0),
            lambda: vol.read_batch([0], [buffer]),
            lambda: vol.submit_write([0], [buffer]),
            lambda: vol.register(buffer),
        ):
            with pytest.raises((ValueError, BufferError)):
                call()


def test_collected_buffer_goes_back_after_its_last_view() -> None:
    with kvio.BufferPool(MIB, hugepages="off") as pool:
        pool.alloc(MIB)
        gc.collect()
        view = pool.alloc(MIB).numpy()
        gc.collect()
        with pytest.raises(MemoryError):
            pool.alloc(4096)
        view[:] = 9
        del view
        gc.collect()
        check_whole(pool)


def keep_a_view_and_fail(buffer: kvio.Buffer, views: list[Any]) -> None:
    views.append(buffer.numpy())
    raise RuntimeError("mine")


def test_block_lets_its_own_exception_through() -> None:
    """Goal: `with pool.alloc(n)` never hides what went wrong in it, also while views are alive."""
    views: list[Any] = []
    with kvio.BufferPool(MIB, hugepages="off") as pool:
        with pytest.raises(RuntimeError, match="mine"), pool.alloc(MIB) as buffer:
            keep_a_view_and_fail(buffer, views)
        with pytest.raises(MemoryError):
            pool.alloc(4096)
        views[0][:] = 1
        views.clear()
        del buffer
        gc.collect()
        check_whole(pool)
        with pytest.raises(RuntimeError, match="other"), pool.alloc(MIB):
            raise RuntimeError("other")
        check_whole(pool)


@pytest.mark.root
def test_block_that_misses_a_deadline_says_so(disk: FaultDevice, opened: Opener) -> None:
    """The I/O is in flight when the block ends: the memory goes back when the member has answered,
    not before."""
    vol = opened([disk.device])
    with kvio.BufferPool(PAGE, hugepages="off") as pool:
        stall = disk.stall("read")
        with pytest.raises(kvio.DeadlineExceeded), pool.alloc(PAGE) as buffer:
            vol.pread(buffer, 0, deadline=0.2)
        with pytest.raises(MemoryError):
            pool.alloc(4096)
        del buffer
        gc.collect()
        with pytest.raises(MemoryError):
            pool.alloc(4096)
        stall.remove()
        wait_until(lambda: quarantine(vol) == (0, 0), "the quarantine ends")
        wait_until(lambda: gc.collect() >= 0 and _has_room(pool), "the memory comes back")


def _has_room(pool: kvio.BufferPool) -> bool:
    with contextlib.suppress(MemoryError):
        check_whole(pool)
        return True
    return False


@pytest.mark.root
def test_buffer_with_io_in_flight_is_not_given_back(
    disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened([disk.device])
    content = Content(vol, rng)
    with kvio.BufferPool(2 * PAGE, hugepages="off") as pool:
        buffer = pool.alloc(PAGE)
        stall = disk.stall("read")
        batch = vol.submit_read([MIB], [buffer])
        disk.wait_stalled(1)
        with pytest.raises(BufferError, match="in flight"):
            buffer.free()
        dropped = pool.alloc(PAGE)
        other = vol.submit_read([2 * MIB], [dropped])
        del dropped
        gc.collect()
        with pytest.raises(MemoryError):
            pool.alloc(4096)
        stall.remove()
        assert batch.wait(20).tolist() == other.wait(20).tolist() == [PAGE]
        same(buffer, content.image[MIB : MIB + PAGE], "the read")
        buffer.free()
        del batch, other
        wait_until(lambda: _has_room(pool), "all is back")
