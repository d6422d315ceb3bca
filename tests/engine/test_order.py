"""Who goes first, and how many at once: reads overtake queued writes, writes are not starved,
limits of depth and bytes hold.

Method: throttled loop devices, on which a flood takes seconds; stalling devices, on which what is
in flight can be counted. No test measures time: it looks at what is still queued when something is
done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvio
from kvio.testing import throttle
from tests.engine import matrix
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, Content, aligned, in_thread, same, wait_until
from tests.support.faultdev import FaultDevice

ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])
CHUNK = 128 * KIB


def undone(batches: list[kvio.Batch]) -> int:
    return sum(not batch.done() for batch in batches)


@pytest.mark.root
@ENGINES
@pytest.mark.parametrize("way", ["submit", "blocking in main", "blocking in a thread"])
def test_reads_overtake_a_flood_of_writes(
    way: str,
    engine: str,
    make_loops: Callable[..., list[str]],
    opened: Opener,
    rng: np.random.Generator,
) -> None:
    """Goal: a load does not wait for the stores before it. 16 MiB of writes at 8 MiB/s; five reads,
    one after the other, each waits for a place among the writes in flight at most."""
    paths = make_loops(2, 8 * MIB)
    options: dict[str, Any] = {"engine": engine, "stripe_unit": CHUNK}
    image = Content(opened(paths, **options), rng)
    image.vol.close()
    with throttle(paths, write_bps=4 * MIB):
        vol = opened(paths, queue_depth=8, io_threads=8, **options)
        data = image.page_aligned(0, vol.size)
        places = np.arange(0, vol.size, CHUNK)
        shares = [places[i::8].tolist() for i in range(8)]
        flood = [vol.submit_write(share, [data[p : p + CHUNK] for p in share]) for share in shares]
        wait_until(lambda: vol.stats().write.ops or vol.stats().members[0].write.ops,
                   "the flood is under way")  # fmt: skip
        into = aligned(CHUNK)

        def reads() -> None:
            for place in rng.integers(0, vol.size // CHUNK, 5) * CHUNK:
                if way == "submit":
                    assert vol.submit_read([place], [into]).wait(60).tolist() == [CHUNK]
                else:
                    assert vol.pread(into, int(place)) == CHUNK
                same(into, image.image[place : place + CHUNK], f"read at {place}")

        if way == "blocking in a thread":
            with in_thread(reads):
                pass
        else:
            reads()
        members = vol.stats().members
        written = sum(member.write.ops for member in members)
        assert undone(flood) >= 2, "the writes were over before the reads"
        assert written < places.size * 3 // 4, f"{written} of {places.size} writes went before"
        for batch in flood:
            assert (batch.wait(60) == CHUNK).all()
    image.vol = vol
    image.check(0, vol.size)


@pytest.mark.root
@ENGINES
def test_writes_are_not_starved_by_reads(
    engine: str, make_loops: Callable[..., list[str]], opened: Opener
) -> None:
    """Goal: a store among loads that never end is served. The reads go on until it is."""
    paths = make_loops(2, 8 * MIB)
    stop = threading.Event()
    with throttle(paths, read_bps=16 * MIB):
        vol = opened(paths, engine=engine, queue_depth=4, io_threads=4, stripe_unit=CHUNK)

        def flood() -> None:
            into = [aligned(CHUNK) for _ in range(64)]
            places = np.arange(64) * CHUNK
            going = [vol.submit_read(places, into) for _ in range(2)]
            while not stop.is_set():  # there is always a batch queued behind the one under way
                going.append(vol.submit_read(places, into))
                assert (going.pop(0).wait(60) == CHUNK).all()
            for batch in going:
                batch.wait(60)

        with in_thread(flood):
            try:
                wait_until(lambda: vol.stats().read.ops >= 4, "the reads are under way")
                for i in range(5):
                    data = aligned(CHUNK)
                    data[:] = i
                    before = vol.stats().read.ops
                    batch = vol.submit_write([i * CHUNK, MIB + i * CHUNK], [data, data])
                    assert batch.wait(20).tolist() == [CHUNK, CHUNK]
                    assert vol.stats().read.ops - before < 3 * 64, "it waited for the queue's end"
            finally:
                stop.set()


@pytest.mark.root
@ENGINES
def test_flush_and_discard_do_not_wait_for_a_queue_of_reads(
    engine: str, make_loops: Callable[..., list[str]], opened: Opener
) -> None:
    paths = make_loops(2, 8 * MIB)
    with throttle(paths, read_bps=4 * MIB):
        vol = opened(paths, engine=engine, queue_depth=4, io_threads=4, stripe_unit=CHUNK)
        into = [aligned(CHUNK) for _ in range(96)]
        flood = [vol.submit_read([i * CHUNK], [part]) for i, part in enumerate(into)]
        vol.flush()
        vol.discard(0, CHUNK)
        assert undone(flood) >= 16, "the reads were over first"
        for batch in flood:
            assert batch.wait(60).tolist() == [CHUNK]


# ---- limits -----------------------------------------------------------------------------------

LIMITS: list[tuple[dict[str, Any], int]] = [
    ({"queue_depth": 1}, 1),
    ({"queue_depth": 5}, 5),
    ({"queue_depth": 64, "max_inflight": 3}, 3),
    ({"max_inflight_bytes": 32 * KIB}, 4),
    ({"max_inflight_bytes": 8 * KIB}, 1),
    ({"max_inflight_bytes": 1000}, 1),
]


def wait_for_stalled(disk: FaultDevice, vol: kvio.Volume | None, n: int, most: int) -> None:
    """Until n requests are at the device; fails when there are ever more than ``most``."""

    def settled() -> bool:
        here = len(disk.stalled())
        in_flight = vol.stats().members[0].in_flight if vol else n
        assert max(here, in_flight) <= most
        return here == in_flight == n

    wait_until(settled, f"{n} requests in flight")


@pytest.mark.root
@pytest.mark.parametrize(("options", "most"), LIMITS, ids=[str(o) for o, _ in LIMITS])
def test_no_more_in_flight_than_allowed(
    options: dict[str, Any], most: int, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """Goal: exactly as many as allowed are at the device, again after each that it answers; also an
    operation larger than the limit goes, alone."""
    vol = opened([disk.device], engine="io_uring", **options)
    content = Content(vol, rng)
    stall = disk.stall("read")
    into = [aligned(8 * KIB) for _ in range(12)]
    places = np.arange(12) * MIB
    batches = [vol.submit_read([place], [part]) for place, part in zip(places, into, strict=True)]
    for answered in range(12):
        wait_for_stalled(disk, vol, min(most, 12 - answered), most)
        stall.release(1)
    for place, part, batch in zip(places, into, batches, strict=True):
        assert batch.wait(20).tolist() == [8 * KIB]
        same(part, content.image[place : place + 8 * KIB], f"read at {place}")


@pytest.mark.root
def test_limit_over_all_members(require_root: None) -> None:
    with FaultDevice(2 * MIB) as one, FaultDevice(2 * MIB) as other:
        with kvio.Volume.open([one.device, other.device], stripe_unit=64 * KIB, engine="io_uring",
                              queue_depth=3, max_inflight=4) as vol:  # fmt: skip
            stalls = [one.stall("read"), other.stall("read")]
            batch = vol.submit_read(np.arange(16) * 64 * KIB, [aligned(4096) for _ in range(16)])
            try:
                wait_until(lambda: len(one.stalled()) + len(other.stalled()) == 4, "four in flight")
                assert sum(member.in_flight for member in vol.stats().members) == 4
                assert max(len(one.stalled()), len(other.stalled())) <= 3
                stalls[0].remove()  # its share goes to the other, up to the depth of a member
                wait_until(lambda: len(other.stalled()) == 3, "three at the one that still stalls")
                assert not batch.done()
            finally:
                one.clear()
                other.clear()
            assert (batch.wait(20) == 4096).all()


@pytest.mark.root
def test_no_more_threads_than_allowed(disk: FaultDevice, opened: Opener) -> None:
    vol = opened([disk.device], engine="threads", io_threads=3)
    stall = disk.stall("read")
    batches = [vol.submit_read([i * MIB], [aligned(4096)]) for i in range(12)]
    for answered in range(12):
        wait_for_stalled(disk, None, min(3, 12 - answered), 3)
        stall.release(1)
    assert all(batch.wait(20).tolist() == [4096] for batch in batches)
    assert vol.stats().io_threads == 3


@pytest.mark.root
def test_much_in_flight_that_is_not_answered_holds_up_nobody(
    disk: FaultDevice, make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """Goal: a worker waits for a group of completions when much is in flight, but never for a group
    that does not come. Method: 40 reads of a member that hangs, then reads of another one, by the
    same worker, each awaited before the next; the first ones are still under way at the end."""
    vol = opened([disk.device, *make_files(1, 16 * MIB)], engine="io_uring", workers=1)
    into = aligned(4096)
    assert vol.submit_read([MIB], [into]).wait(20).tolist() == [4096]  # the worker knows a pace
    stall = disk.stall("read")
    stuck = [vol.submit_read([i * 2 * CHUNK], [aligned(4096)]) for i in (0, 1, 2, 3)]
    stuck += [vol.submit_read([2 * MIB + i * 4096], [aligned(4096)]) for i in range(36)]
    wait_until(lambda: vol.stats().members[0].in_flight == 40, "all of them are in flight")
    for place in range(20):
        batch = vol.submit_read([MIB + place * 4096], [into])
        assert batch.wait(20).tolist() == [4096]
    assert undone(stuck) == 40
    stall.remove()
    assert all(batch.wait(20).tolist() == [4096] for batch in stuck)


OPTIONS: list[dict[str, Any]] = [
    {"queue_depth": 1, "max_inflight": 1},
    {"queue_depth": 4096},
    {"submit_batch": 1},
    {"submit_batch": 4096, "queue_depth": 2},
    {"max_inflight_bytes": 4096},
    {"workers": 3},
    {"engine": "threads", "io_threads": 1},
    {"engine": "threads", "io_threads": 64, "workers": 2},
]


@pytest.mark.parametrize("limits", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "name", ["batches_round_trip", "submitted_batches_round_trip", "many_threads"]
)
def test_limits_change_no_result(
    name: str,
    limits: dict[str, Any],
    make_files: Callable[..., list[str]],
    rng: np.random.Generator,
) -> None:
    members = make_files(3, 2 * MIB)

    def open_volume(**options: Any) -> kvio.Volume:
        options = {
            "mode": "rw",
            "direct": "prefer",
            "stripe_unit": matrix.UNIT,
            **limits,
            **options,
        }
        return kvio.Volume.open(members, **options)

    matrix.CHECKS[name](open_volume, rng)
