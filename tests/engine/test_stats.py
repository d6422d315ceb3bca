"""stats(): operations, commands and bytes add up, whatever way they went; nothing is counted twice,
nothing is forgotten, also what failed, expired, or never reached a member.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, Content, aligned, in_thread, quarantine, wait_until
from tests.support.faultdev import FaultDevice

UNIT = 64 * KIB
ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])


def check_sums(stats: kvio.VolumeStats) -> None:
    """What must hold for any volume without failures."""
    for verb in ("read", "write"):
        io = getattr(stats, verb)
        members = [getattr(member, verb) for member in stats.members]
        assert sum(member.bytes for member in members) == io.bytes
        for part in (io, *members):
            assert part.latency.count == part.ops
            assert int(part.latency.counts.sum()) == part.ops
            assert part.errors == 0
    commands = sum(member.read.ops + member.write.ops for member in stats.members)
    assert stats.fixed_ops + stats.unfixed_ops + stats.direct_ops == commands
    assert sum(member.in_flight for member in stats.members) == 0
    assert (stats.quarantined_buffers, stats.quarantined_bytes) == (0, 0)


@ENGINES
def test_fresh_volume_has_counted_nothing(
    engine: str, make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """The probing reads of the open are the engine's own."""
    stats = opened(make_files(3, 2 * MIB), engine=engine).stats()
    check_sums(stats)
    assert (stats.read.ops, stats.read.bytes, stats.write.ops, stats.write.bytes) == (0, 0, 0, 0)
    for member in stats.members:
        assert (member.read.ops, member.read.bytes, member.write.ops) == (0, 0, 0)
        assert (member.flushes, member.discards, member.retries, member.in_flight) == (0, 0, 0, 0)
        assert not member.suspect
    for name in ("retries", "short_reads", "bounced", "fixed_ops", "unfixed_ops", "direct_ops",
                 "stale_completions", "poisoned_rings", "deadline_exceeded"):  # fmt: skip
        assert getattr(stats, name) == 0, name
    assert stats.read.latency.percentiles([0, 50, 100]) == [0, 0, 0]


CALLS: dict[str, Callable[[kvio.Volume, str, list[int], np.ndarray], Any]] = {
    "one by one": lambda v, verb, at, b: [
        getattr(v, f"p{verb}")(part, place)
        for part, place in zip(np.split(b, len(at)), at, strict=True)
    ],
    "batch": lambda v, verb, at, b: getattr(v, f"{verb}_batch")(at, b),
    "batch with deadline": lambda v, verb, at, b: getattr(v, f"{verb}_batch")(at, b, deadline=60),
    "submit": lambda v, verb, at, b: getattr(v, f"submit_{verb}")(at, b).wait(20),
    "scattered": lambda v, verb, at, b: getattr(v, f"{verb}_batch")(
        at, [np.split(part, 4) for part in np.split(b, len(at))]
    ),
}


@ENGINES
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("caller", ["main", "thread"])
@pytest.mark.parametrize("call", CALLS)
def test_every_way_counts_alike(
    call: str,
    caller: str,
    verb: str,
    engine: str,
    make_files: Callable[..., list[str]],
    opened: Opener,
) -> None:
    """Eight operations of four units each over two members: 8 operations, 32 commands."""
    vol = opened(make_files(2, 2 * MIB), engine=engine, stripe_unit=UNIT)
    buffer = aligned(8 * 4 * UNIT)
    places = [i * 4 * UNIT for i in range(8)]

    def go() -> None:
        CALLS[call](vol, verb, places, buffer)

    if caller == "main":
        go()
    else:
        with in_thread(go):
            pass
    stats = vol.stats()
    check_sums(stats)
    io, other = (stats.read, stats.write)[:: 1 if verb == "read" else -1]
    assert (io.ops, io.bytes, other.ops, other.bytes) == (8, buffer.size, 0, 0)
    assert [getattr(m, verb).bytes for m in stats.members] == [buffer.size // 2] * 2
    assert [getattr(m, verb).ops for m in stats.members] == [16, 16]
    if engine == "threads":
        assert stats.direct_ops == 32
    assert (stats.bounced, stats.retries, stats.short_reads, stats.deadline_exceeded) == (0,) * 4


def test_bounced_operations_count_what_was_asked_for(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened(make_files(2, 2 * MIB), stripe_unit=UNIT)
    assert vol.pread(bytearray(1000), 10) == 1000
    assert vol.read_batch([1, UNIT - 1], [bytearray(10), bytearray(2)]).tolist() == [10, 2]
    stats = vol.stats()
    assert (stats.read.ops, stats.read.bytes, stats.bounced) == (3, 1012, 3)
    assert sum(member.read.ops for member in stats.members) == 4
    assert sum(member.read.bytes for member in stats.members) >= 1012


def test_operations_at_and_beyond_the_end_are_counted(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """A read there is an operation of 0 bytes; a write there is one that failed."""
    vol = opened(make_files(2, MIB), stripe_unit=UNIT)
    assert vol.read_batch([vol.size], [bytearray(512)]).tolist() == [0]
    assert vol.read_batch([vol.size, 2**62], [bytearray(512), bytearray(8)]).tolist() == [0, 0]
    assert vol.submit_read([vol.size], [bytearray(512)]).wait(20).tolist() == [0]
    assert vol.pread(bytearray(512), vol.size) == 0
    assert vol.read_batch([vol.size - 4096, vol.size], aligned(16 * KIB)).tolist() == [4096, 0]
    stats = vol.stats()
    assert (stats.read.ops, stats.read.bytes, stats.read.errors) == (7, 4096, 0)
    refused = vol.write_batch([vol.size, 0], [aligned(4096), aligned(4096)])
    assert refused.tolist() == [-errno.ENOSPC, 4096]
    assert vol.submit_write([vol.size], [aligned(4096)]).wait(20).tolist() == [-errno.ENOSPC]
    stats = vol.stats()
    assert (stats.write.ops, stats.write.bytes, stats.write.errors) == (3, 4096, 2)
    assert sum(member.write.ops for member in stats.members) == 1


def test_what_is_refused_at_the_door_is_no_operation(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened(make_files(1), unaligned="refuse")
    for bad in (
        lambda: vol.pread(bytearray(10), 1),
        lambda: vol.read_batch([0, -1], [bytearray(4096)] * 2),
        lambda: vol.write_batch([0, 1], [aligned(4096), aligned(4096)]),
        lambda: vol.submit_write([0], [None]),
    ):
        with pytest.raises((ValueError, TypeError)):
            bad()
    stats = vol.stats()
    check_sums(stats)
    assert (stats.read.ops, stats.write.ops) == (0, 0)


@pytest.mark.root
@ENGINES
def test_expired_operations_are_counted(engine: str, disk: FaultDevice, opened: Opener) -> None:
    vol = opened([disk.device], engine=engine)
    stall = disk.stall("read")
    got = vol.submit_read(np.arange(64) * 4096, aligned(64 * 4096), deadline=0.2).wait(20)
    assert set(got.tolist()) == {-errno.ETIME}
    stats = vol.stats()
    assert (stats.read.ops, stats.read.bytes, stats.read.errors) == (64, 0, 64)
    assert stats.deadline_exceeded == 1
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the late answers")
    late = vol.stats()
    assert (late.read.ops, late.read.bytes, late.read.errors) == (64, 0, 64)
    assert late.deadline_exceeded == 1
    assert vol.read_batch([0], [aligned(4096)]).tolist() == [4096]
    assert vol.stats().read.ops == 65


@pytest.mark.root
@ENGINES
def test_in_flight_is_what_the_members_have_not_answered(
    engine: str, disk: FaultDevice, make_loops: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened([make_loops(1, 16 * MIB)[0], disk.device], engine=engine, stripe_unit=UNIT)
    stall = disk.stall("read")
    batch = vol.submit_read([UNIT, 3 * UNIT, 5 * UNIT], [aligned(4096) for _ in range(3)])
    disk.wait_stalled(3)
    assert [member.in_flight for member in vol.stats().members] == [0, 3]
    stall.release(1)
    wait_until(lambda: vol.stats().members[1].in_flight == 2, "one was answered")
    stall.remove()
    assert batch.wait(20).tolist() == [4096] * 3
    assert [member.in_flight for member in vol.stats().members] == [0, 0]


@ENGINES
def test_sums_hold_over_many_threads_that_come_and_go(
    engine: str, make_files: Callable[..., list[str]], opened: Opener, seed: int
) -> None:
    """Goal: what a thread has counted stays when it ends; a reader of the statistics sees numbers
    that only grow."""
    vol = opened(make_files(3, 2 * MIB), engine=engine, stripe_unit=UNIT)
    done = [0, 0]
    lock = threading.Lock()
    stop = threading.Event()

    def traffic(number: int) -> None:
        own = np.random.default_rng([seed, number])
        for turn in range(30):
            n = int(own.integers(1, 6))
            places = own.integers(0, vol.size // UNIT, n) * UNIT
            buffer = aligned(n * UNIT)
            assert (vol.read_batch(places, buffer) == UNIT).all()
            if turn % 3 == 0:
                assert (vol.submit_write(places, buffer).wait(20) == UNIT).all()
            with lock:
                done[0] += n
                done[1] += n * (turn % 3 == 0)

    def watch() -> None:
        old = vol.stats()
        while not stop.is_set():
            new = vol.stats()
            for verb in ("read", "write"):
                added = getattr(new.delta(old), verb)
                assert min(added.ops, added.bytes, added.errors, added.latency.count) >= 0
            old = new

    with in_thread(watch):
        try:
            for _ in range(3):
                with ThreadPoolExecutor(8) as threads:
                    list(threads.map(traffic, range(8)))
        finally:
            stop.set()
    stats = vol.stats()
    check_sums(stats)
    assert (stats.read.ops, stats.write.ops) == tuple(done)
    assert (stats.read.bytes, stats.write.bytes) == (done[0] * UNIT, done[1] * UNIT)


def test_statistics_are_values(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened(make_files(2, 2 * MIB))
    Content(vol, rng)
    stats = vol.stats()
    for value, name in ((stats, "retries"), (stats.read, "ops"), (stats.members[0], "path"),
                        (stats.read.latency, "count")):  # fmt: skip
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1)
    vol.pread(aligned(MIB), 0)
    assert stats.read.ops == 0, "an old value does not move"
    plain = json.loads(json.dumps(vol.stats().to_dict()))
    assert plain["read"]["ops"] == 1
    assert [member["path"] for member in plain["members"]] == [m.path for m in vol.members]
    nothing = vol.stats().delta(vol.stats())
    assert (nothing.read.ops, nothing.read.latency.count, nothing.write.bytes) == (0, 0, 0)
    vol.close()
    check_sums(vol.stats())
    assert vol.stats().read.ops == 1, "also after the close"
