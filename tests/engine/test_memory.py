"""Registered memory: I/O goes to the pages that are there now, never to those that were there when
something was registered; what cannot be registered is refused or served unregistered.

Method: one address whose pages are replaced (mmap with MAP_FIXED), used through the rings of
several threads and of a worker. Limits of an ordinary user are in test_refused.py, pools in
test_pools.py.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import (
    KIB,
    MIB,
    Bytes,
    Content,
    aligned,
    in_thread,
    resizable,
    same,
    wait_until,
)
from tests.support.faultdev import FaultDevice

PAGE = 64 * KIB
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000


class Ground:
    """Memory at one address whose pages can be exchanged for new ones."""

    def __init__(self, nbytes: int) -> None:
        self.bytes: Bytes = aligned(nbytes)
        self._mmap = ctypes.CDLL(None, use_errno=True).mmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def exchange(self) -> None:
        """New pages, zeroed; whoever still has the old ones reads and writes beside them."""
        address, n = self.bytes.ctypes.data, self.bytes.size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        got = self._mmap(address, n, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert got == address, ctypes.get_errno()


@pytest.fixture
def vol(make_files: Callable[..., list[str]], opened: Opener) -> kvio.Volume:
    """On io_uring: only rings know registered memory."""
    return opened(make_files(2, 2 * MIB), stripe_unit=PAGE, engine="io_uring")


@pytest.fixture
def threads() -> Iterator[list[ThreadPoolExecutor]]:
    """Four threads, each keeping its ring, that do one thing at a time."""
    pools = [ThreadPoolExecutor(1) for _ in range(4)]
    yield pools
    for pool in pools:
        pool.shutdown()


def check_every_ring(
    vol: kvio.Volume, content: Content, memory: Bytes, threads: list[ThreadPoolExecutor], turn: int
) -> None:
    """Reads and writes through ``memory`` on the rings of main, of the threads and of a worker.
    Two operations each: a single small one takes no ring."""

    def submitted(verb: str, places: list[int]) -> list[int]:
        batch = getattr(vol, f"submit_{verb}")(places, memory[:PAGE])
        return batch.wait(20).tolist()

    def blocking(verb: str, places: list[int]) -> list[int]:
        return getattr(vol, f"{verb}_batch")(places, memory[:PAGE]).tolist()

    def in_pool(thread: ThreadPoolExecutor) -> Callable[[str, list[int]], list[int]]:
        return lambda verb, places: thread.submit(blocking, verb, places).result(20)

    ways = [submitted, blocking, *map(in_pool, threads)]
    half = PAGE // 2
    for number, way in enumerate(ways):
        first = (turn * len(ways) + number) % (vol.size // PAGE // 2) * PAGE
        places = [first, vol.size // 2 + first]
        memory[:PAGE] = 0xEE
        assert way("read", places) == [half, half]
        for part, place in zip((memory[:half], memory[half:PAGE]), places, strict=True):
            same(part, content.image[place : place + half], f"turn {turn}, way {number}")
        memory[:PAGE] = (turn * 31 + number) % 251
        assert way("write", places) == [half, half]
        for place in places:
            content.image[place : place + half] = memory[:half]
            content.check(place, half)


@pytest.mark.parametrize("register_again", [True, False], ids=["registered again", "not again"])
def test_new_pages_at_an_address_that_was_registered(
    register_again: bool,
    vol: kvio.Volume,
    rng: np.random.Generator,
    threads: list[ThreadPoolExecutor],
) -> None:
    """Goal: after unregister the old pages are forgotten by every ring, also by those of threads
    that were idle meanwhile. A stale ring would read into (and write from) pages nobody sees."""
    content = Content(vol, rng)
    ground = Ground(MIB)
    assert vol.register(ground.bytes)
    check_every_ring(vol, content, ground.bytes, threads, 0)
    assert vol.stats().fixed_ops >= 12, "every ring used the registration"
    for turn in range(1, 6):
        vol.unregister(ground.bytes)
        ground.exchange()
        before = vol.stats()
        if register_again:
            assert vol.register(ground.bytes)
        check_every_ring(vol, content, ground.bytes, threads, turn)
        fixed = vol.stats().delta(before).fixed_ops
        assert fixed >= 12 if register_again else fixed == 0
        if not register_again:
            assert vol.register(ground.bytes)
            check_every_ring(vol, content, ground.bytes, threads, turn)
    content.check(0, vol.size)


def test_another_range_over_an_address_that_was_registered(
    vol: kvio.Volume, rng: np.random.Generator, threads: list[ThreadPoolExecutor]
) -> None:
    """The same start with another length, and a start inside the old range."""
    content = Content(vol, rng)
    ground = Ground(MIB)
    for turn, (start, stop) in enumerate(
        [(0, MIB), (0, 128 * KIB), (0, MIB), (PAGE, 2 * PAGE), (32 * KIB, 512 * KIB)]
    ):
        part = ground.bytes[start:stop]
        assert vol.register(part)
        check_every_ring(vol, content, ground.bytes, threads, 2 * turn)
        check_every_ring(vol, content, part, threads, 2 * turn + 1)
        vol.unregister(part)
        ground.exchange()
    content.check(0, vol.size)


def test_only_what_lies_wholly_inside_is_fixed(vol: kvio.Volume, rng: np.random.Generator) -> None:
    content = Content(vol, rng)
    memory = aligned(4 * PAGE)
    assert vol.register(memory[PAGE : 3 * PAGE])
    for at, fixed in [(0, 0), (PAGE // 2, 0), (PAGE, 1), (2 * PAGE, 1), (2 * PAGE + 4096, 0)]:
        before = vol.stats()
        assert vol.read_batch([PAGE], [memory[at : at + PAGE]]).tolist() == [PAGE]
        added = vol.stats().delta(before)
        assert (added.fixed_ops, added.unfixed_ops) == (fixed, 1 - fixed), at
        same(memory[at : at + PAGE], content.image[PAGE : 2 * PAGE], f"at {at}")
    before = vol.stats()  # two registered ranges that touch are two ranges
    vol.register(memory[3 * PAGE :])
    piece = memory[2 * PAGE + PAGE // 2 : 3 * PAGE + PAGE // 2]
    assert vol.read_batch([PAGE], [piece]).tolist() == [PAGE]
    assert vol.stats().delta(before).fixed_ops == 0
    same(piece, content.image[PAGE : 2 * PAGE], "across two ranges")


def test_overlapping_registration_is_refused(vol: kvio.Volume, rng: np.random.Generator) -> None:
    content = Content(vol, rng)
    memory = aligned(4 * MIB)
    assert vol.register(memory[MIB : 2 * MIB])
    regions = vol.capabilities["regions"]
    for start, stop in [(MIB, 2 * MIB), (0, 4 * MIB), (2 * MIB - 1, 3 * MIB), (0, MIB + 1),
                        (MIB + 4096, MIB + 8192)]:  # fmt: skip
        with pytest.raises(kvio.KvioError, match="overlaps") as caught:
            vol.register(memory[start:stop])
        assert caught.value.errno == errno.EEXIST
        assert caught.value.op not in ("read", "write"), "it was neither"
    assert vol.capabilities["regions"] == regions
    assert vol.register(memory[:MIB]), "touching is not overlapping"
    assert vol.register(memory[2 * MIB :])
    part = memory[MIB : MIB + PAGE]
    assert vol.read_batch([0], [part]).tolist() == [PAGE]
    same(part, content.image[:PAGE], "the range that was there first")
    for start, stop in [(0, MIB), (MIB, 2 * MIB), (2 * MIB, 4 * MIB)]:
        vol.unregister(memory[start:stop])
    assert vol.capabilities["regions"] == 0
    assert vol.register(memory)


def test_refused_registration_keeps_nothing(vol: kvio.Volume) -> None:
    first = bytearray(PAGE)
    vol.register(first)
    with pytest.raises(kvio.KvioError):
        vol.register(first)
    assert not resizable(first)
    vol.unregister(first)
    assert resizable(first), "an export was left by the call that was refused"


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (b"read-only", (BufferError, ValueError)),
        (np.zeros((8, 8))[:, ::2], (BufferError, ValueError)),
        (bytearray(), ValueError),
        (None, TypeError),
        (4096, TypeError),
        ([bytearray(8)], TypeError),
    ],
    ids=["read-only", "gaps", "empty", "None", "int", "list"],
)
def test_what_is_no_memory_is_not_registered(
    buffer: Any, error: type[Exception], vol: kvio.Volume
) -> None:
    for call in (vol.register, vol.unregister):
        with pytest.raises(error):
            call(buffer)
    assert vol.capabilities["regions"] == 0


def test_unregister_of_what_is_not_registered(vol: kvio.Volume) -> None:
    memory = aligned(MIB)
    with pytest.raises(ValueError, match="not registered"):
        vol.unregister(memory)
    vol.register(memory)
    with pytest.raises(ValueError, match="not registered"):
        vol.unregister(memory[4096:])
    vol.unregister(memory)
    with pytest.raises(ValueError, match="not registered"):
        vol.unregister(memory)


def test_more_ranges_than_there_is_room_for(vol: kvio.Volume, rng: np.random.Generator) -> None:
    """64 slices of at most 1 GiB: the 65th range is refused, and works unregistered."""
    content = Content(vol, rng)
    pages = [aligned(PAGE) for _ in range(66)]
    for page in pages[:64]:
        assert vol.register(page)
    for page in pages[64:]:
        with pytest.raises(kvio.KvioError, match="unregister another") as caught:
            vol.register(page)
        assert caught.value.errno == errno.ENOSPC
    places = rng.integers(0, vol.size // PAGE, 66) * PAGE
    before = vol.stats()
    assert (vol.read_batch(places, pages) == PAGE).all()
    for place, page in zip(places, pages, strict=True):
        same(page, content.image[place : place + PAGE], f"page at {place}")
    added = vol.stats().delta(before)
    assert (added.fixed_ops, added.unfixed_ops) == (64, 2)
    vol.unregister(pages[31])
    assert vol.register(pages[64])
    before = vol.stats()
    assert (vol.read_batch(places, pages) == PAGE).all()
    assert vol.stats().delta(before).fixed_ops == 64
    for place, page in zip(places, pages, strict=True):
        same(page, content.image[place : place + PAGE], f"page at {place}, second time")


def test_range_that_needs_more_slices_than_there_are(vol: kvio.Volume) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, 65 << 30, flags=flags), np.uint8)
    with pytest.raises(ValueError, match="64 GiB"):
        vol.register(memory)
    small = aligned(PAGE)
    vol.register(small)
    with pytest.raises(kvio.KvioError) as caught:  # refused before the kernel pins any of it
        vol.register(memory[: 64 << 30])
    assert caught.value.errno == errno.ENOSPC
    assert vol.capabilities["regions"] == 1


def test_registered_buffer_stays_exported(make_files: Callable[..., list[str]]) -> None:
    """Until unregister, or until the volume is gone: the rings point at its pages."""
    buffer, other = bytearray(MIB), bytearray(MIB)
    vol = kvio.Volume.open(make_files(1), direct="prefer")
    vol.register(buffer)
    vol.register(other)
    assert not resizable(buffer)
    vol.unregister(buffer)
    assert resizable(buffer)
    assert not resizable(other)
    vol.close()
    late = bytearray(4096)
    with pytest.raises(kvio.KvioError, match="closed"):
        vol.register(late)
    assert resizable(late)
    del vol
    gc.collect()
    assert resizable(other)


def test_engine_without_rings_takes_registrations_too(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened(make_files(1), engine="threads")
    memory = aligned(MIB)
    vol.register(memory)
    assert vol.read_batch([0, PAGE], memory[: 2 * PAGE]).tolist() == [PAGE, PAGE]
    assert vol.stats().fixed_ops == 0
    vol.unregister(memory)


def test_registering_while_others_do_io(vol: kvio.Volume, rng: np.random.Generator) -> None:
    """Goal: registrations that come and go change no result of I/O under way on that memory."""
    content = Content(vol, rng)
    memory = aligned(32 * PAGE)
    stop = threading.Event()
    turns = [0, 0]

    def traffic(number: int) -> Callable[[], None]:
        own = np.random.default_rng(rng.integers(2**32))
        mine = memory[number * 16 * PAGE : (number + 1) * 16 * PAGE]

        def run() -> None:
            while not stop.is_set():
                places = own.integers(0, vol.size // PAGE, 16) * PAGE
                mine[:] = 0
                got = (
                    vol.submit_read(places, mine).wait(20)
                    if number
                    else vol.read_batch(places, mine)
                )
                assert (got == PAGE).all()
                for i, place in enumerate(places):
                    part = mine[i * PAGE : (i + 1) * PAGE]
                    same(part, content.image[place : place + PAGE], f"turn {turns[number]}")
                turns[number] += 1

        return run

    try:
        with in_thread(traffic(0)), in_thread(traffic(1)):
            try:
                for turn in range(300):
                    part = memory[: (turn % 32 + 1) * PAGE]
                    assert vol.register(part)
                    vol.unregister(part)
                wait_until(lambda: min(turns) >= 5, "both got something done")
            finally:
                stop.set()
    finally:
        stop.set()
    assert vol.capabilities["regions"] == 0
    content.check(0, vol.size)


@pytest.mark.root
def test_unregister_while_a_read_is_in_flight(
    disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """The kernel keeps the pages of a command that it has begun; the next command uses new ones."""
    vol = opened([disk.device], engine="io_uring")
    content = Content(vol, rng)
    ground = Ground(MIB)
    vol.register(ground.bytes)
    stall = disk.stall("read", times=1)
    batch = vol.submit_read([0], [ground.bytes[:PAGE]])
    disk.wait_stalled(1)
    vol.unregister(ground.bytes)
    assert vol.register(ground.bytes)
    other = ground.bytes[PAGE : 2 * PAGE]
    assert vol.submit_read([MIB], [other]).wait(20).tolist() == [PAGE]
    same(other, content.image[MIB : MIB + PAGE], "beside the one in flight")
    stall.remove()
    assert batch.wait(20).tolist() == [PAGE]
    same(ground.bytes[:PAGE], content.image[:PAGE], "the one in flight")
