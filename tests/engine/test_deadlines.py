"""Deadlines on a member that does not answer: the caller gets its answer at once, the buffer stays
in quarantine until the member's own comes, and that late answer changes nothing any more.

Method: a FUSE file under a loop device whose read handler stalls until it is told to go on.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import (
    KIB,
    MIB,
    Content,
    aligned,
    in_thread,
    quarantine,
    resizable,
    same,
    wait_until,
)
from tests.support.faultdev import FaultDevice

pytestmark = pytest.mark.root
SOON = 0.2  # the deadlines of these tests, in seconds
AT_ONCE = 5.0  # far below what a test would take if the deadline were not kept

ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])


def by_pread(vol: kvio.Volume, buffer: Any, offset: int) -> kvio.KvioError:
    with pytest.raises(kvio.DeadlineExceeded) as caught:
        vol.pread(buffer, offset, deadline=SOON)
    return caught.value


def by_batch(vol: kvio.Volume, buffer: Any, offset: int) -> kvio.KvioError:
    failed: list[kvio.KvioError] = []
    got = vol.read_batch([offset], [buffer], deadline=SOON, errors=failed)
    assert got.tolist() == [-errno.ETIME]
    return failed[0]


def by_submit(vol: kvio.Volume, buffer: Any, offset: int) -> kvio.KvioError:
    batch = vol.submit_read([offset], [buffer], deadline=SOON)
    assert batch.wait(AT_ONCE).tolist() == [-errno.ETIME]
    assert batch.done()
    return batch.errors()[0]


def by_await(vol: kvio.Volume, buffer: Any, offset: int) -> kvio.KvioError:
    async def read() -> kvio.Batch:
        batch = vol.submit_read([offset], [buffer], deadline=SOON)
        assert (await asyncio.wait_for(_result(batch), AT_ONCE)).tolist() == [-errno.ETIME]
        return batch

    return asyncio.run(read()).errors()[0]


async def _result(batch: kvio.Batch) -> Any:
    return await batch


WAYS = [by_pread, by_batch, by_submit, by_await]


@ENGINES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("caller", ["main", "thread"])
def test_stalled_read_ends_at_its_deadline(
    caller: str,
    way: Callable[[kvio.Volume, Any, int], kvio.KvioError],
    engine: str,
    disk: FaultDevice,
    opened: Opener,
) -> None:
    vol = opened([disk.device], engine=engine)
    stall = disk.stall("read")
    buffer = bytearray(64 * KIB)

    def read() -> None:
        start = time.monotonic()
        error = way(vol, buffer, MIB)
        assert SOON <= time.monotonic() - start < AT_ONCE
        assert isinstance(error, kvio.DeadlineExceeded)
        assert isinstance(error, TimeoutError)
        assert (error.errno, error.error_class, error.op) == (errno.ETIME, "deadline", "read")
        assert (error.member, error.filename) == (0, disk.device)
        assert error.offset == MIB
        assert "quarantine" in str(error)

    if caller == "main":
        read()
    else:
        with in_thread(read):
            pass
    disk.wait_stalled(1)
    buffers, nbytes = quarantine(vol)
    assert buffers >= 1
    assert nbytes >= 64 * KIB
    assert vol.stats().deadline_exceeded == 1
    assert not resizable(buffer), "the kernel may still write there"
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the quarantine ends with the answer")
    # buffers are let go of by the next call to the volume, whatever it is
    wait_until(lambda: vol.stats() and resizable(buffer), "the buffer is given back")
    assert vol.pread(buffer, MIB, deadline=30) == 64 * KIB


@ENGINES
def test_late_data_does_not_change_what_was_reported(
    engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    stall = disk.stall("read", offset=MIB, length=4096)
    into = aligned(3 * 4096)
    batch = vol.submit_read([0, MIB, 2 * MIB], into, deadline=SOON)
    reported = batch.wait(AT_ONCE).tolist()
    assert reported == [4096, -errno.ETIME, 4096]
    same(into[:4096], content.image[:4096], "the operation that was served in time")
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the late read lands")
    assert batch.results().tolist() == reported
    assert [error.index for error in batch.errors()] == [1]
    assert vol.stats().stale_completions == 0, "it is told apart by its batch, not by its number"
    assert vol.stats().deadline_exceeded == 1


@ENGINES
@pytest.mark.parametrize("late", [False, True], ids=["served in time", "served late"])
def test_bounced_reads_of_a_batch_that_expires(
    late: bool, engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """Goal: an unaligned read of a batch that expires is a failure, or its bytes are really there.
    Nothing is copied into a caller's buffer after the report."""
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    stall = disk.stall("read", offset=MIB, length=4096)
    buffers = [bytearray(b"\xee" * 1000) for _ in range(2)]
    got = vol.submit_read([10 + late * MIB, MIB + 10], buffers, deadline=SOON).wait(AT_ONCE)
    assert got[1] == -errno.ETIME
    assert got[0] == -errno.ETIME if late else got[0] in (1000, -errno.ETIME)
    seen = [bytes(buffer) for buffer in buffers]
    if got[0] == 1000:
        same(seen[0], content.image[10:1010], "an operation reported as read")
    assert seen[1] == b"\xee" * 1000
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the late read lands")
    assert [bytes(buffer) for buffer in buffers] == seen, "changed after the report"


def test_write_in_quarantine_keeps_its_source(
    disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened([disk.device])
    content = Content(vol, rng)
    stall = disk.stall("write")
    source = bytearray(rng.bytes(64 * KIB))
    with pytest.raises(kvio.DeadlineExceeded) as caught:
        vol.pwrite(source, 0, deadline=SOON)
    assert caught.value.op == "write"
    assert not resizable(source)
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the late write lands")
    assert resizable(source)
    content.image[: 64 * KIB] = np.frombuffer(source, np.uint8)
    content.check(0, vol.size)


@ENGINES
def test_stalled_member_does_not_hold_up_the_others(
    engine: str, disk: FaultDevice, make_loops: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened([make_loops(1, 16 * MIB)[0], disk.device], engine=engine, stripe_unit=64 * KIB)
    stall = disk.stall("read")
    bad = [vol.submit_read([64 * KIB], [aligned(4096)]) for _ in range(200)]
    disk.wait_stalled(8)  # and more will follow, up to whatever cap the engine has
    for _ in range(20):
        batch = vol.submit_read([0, 128 * KIB], [aligned(64 * KIB), aligned(64 * KIB)])
        assert batch.wait(AT_ONCE).tolist() == [64 * KIB] * 2
        assert vol.pread(aligned(4096), 0) == 4096
    assert not any(batch.done() for batch in bad)
    stall.remove()
    for batch in bad:
        assert batch.wait(AT_ONCE).tolist() == [4096]


@ENGINES
def test_batch_waits_in_line_no_longer_than_its_deadline(
    engine: str, disk: FaultDevice, opened: Opener
) -> None:
    """Also what was never sent (queue depth 1 behind a stall) ends at its deadline, and is not sent
    afterwards."""
    vol = opened([disk.device], engine=engine, queue_depth=1, max_inflight=1, io_threads=1)
    stall = disk.stall("read")
    first = vol.submit_read([0], [aligned(4096)])
    disk.wait_stalled(1)
    behind = [vol.submit_read([MIB + i * 4096], [aligned(4096)], deadline=SOON) for i in range(8)]
    start = time.monotonic()
    for batch in behind:
        assert batch.wait(AT_ONCE).tolist() == [-errno.ETIME]
    assert time.monotonic() - start < AT_ONCE
    assert stall.hits == 1
    stall.remove()
    assert first.wait(AT_ONCE).tolist() == [4096]
    wait_until(lambda: quarantine(vol) == (0, 0), "what was in line is dropped")
    before = vol.stats()
    assert vol.pread(aligned(4096), 0) == 4096
    assert vol.stats().delta(before).members[0].read.ops == 1


def test_default_deadline_of_the_volume_and_its_override(disk: FaultDevice, opened: Opener) -> None:
    vol = opened([disk.device], deadline=SOON)
    stall = disk.stall("read", times=3)
    with pytest.raises(kvio.DeadlineExceeded):
        vol.pread(aligned(4096), 0)
    assert vol.submit_read([0], [aligned(4096)]).wait(AT_ONCE).tolist() == [-errno.ETIME]
    patient = vol.submit_read([0], [aligned(4096)], deadline=60)
    with pytest.raises(TimeoutError, match="goes on"):
        patient.wait(3 * SOON)
    assert not patient.done()
    with pytest.raises(ValueError, match="not done"):
        patient.results()
    with pytest.raises(ValueError, match="not done"):
        patient.errors()
    stall.release()
    assert patient.wait(AT_ONCE).tolist() == [4096]
    disk.clear()
    disk.stall("flush")
    with pytest.raises(kvio.DeadlineExceeded) as caught:
        vol.flush()
    assert caught.value.op == "flush"
    disk.clear()


def test_member_that_misses_deadlines_is_suspect_until_it_answers(
    disk: FaultDevice, make_loops: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened([disk.device, make_loops(1, 16 * MIB)[0]], stripe_unit=64 * KIB)
    assert not any(member.suspect for member in vol.stats().members)
    stall = disk.stall("read")
    for _ in range(3):
        with pytest.raises(kvio.DeadlineExceeded):
            vol.pread(aligned(4096), 0, deadline=0.05)
    assert [member.suspect for member in vol.stats().members] == [True, False]
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the late reads land")
    assert vol.pread(aligned(4096), 0) == 4096
    assert not any(member.suspect for member in vol.stats().members)


def test_timeout_of_wait_leaves_the_batch_going(disk: FaultDevice, opened: Opener) -> None:
    vol = opened([disk.device])
    stall = disk.stall("read")
    into = aligned(4096)
    batch = vol.submit_read([0], [into])
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError):
            batch.wait(timeout)
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            batch.wait(bad)
    assert quarantine(vol) == (0, 0), "nobody has given up"
    stall.remove()
    assert batch.wait().tolist() == [4096]
    assert batch.wait(0).tolist() == [4096]


def test_many_deadlines_of_different_length_are_each_kept(
    disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """Given in random order: the short ones must not wait for the long ones."""
    vol = opened([disk.device])
    stall = disk.stall("read")
    start = time.monotonic()
    lengths = rng.permutation([0.1, 0.2, 0.3, 0.4, 0.5, 60, 60, 60])
    batches = [vol.submit_read([i * 4096], [aligned(4096)], deadline=float(n))
               for i, n in enumerate(lengths)]  # fmt: skip
    for n, batch in sorted(zip(lengths, batches, strict=True), key=lambda pair: pair[0]):
        if n == 60:
            assert not batch.done()
            continue
        assert batch.wait(AT_ONCE).tolist() == [-errno.ETIME]
        assert n <= time.monotonic() - start < n + AT_ONCE
    stall.remove()
    patient = [b for n, b in zip(lengths, batches, strict=True) if n == 60]
    assert [b.wait(AT_ONCE)[0] for b in patient] == [4096] * 3


@ENGINES
def test_each_operation_of_an_expired_batch_says_so(
    engine: str, make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """Goal: an operation that its thread finds cancelled failed by the deadline, not by ECANCELED.
    Method: batches of 2000 small reads whose deadline passes in the middle, many times."""
    vol = opened(make_files(2, 4 * MIB), mode="r", direct=False, engine=engine)
    offsets = np.arange(2000) % (vol.size // 4096) * 4096
    memory = np.zeros(len(offsets) * 4096, np.uint8)
    seen: set[int] = set()
    for _ in range(200):
        seen |= set(vol.read_batch(offsets, memory, deadline=0.0003).tolist())
    assert -errno.ETIME in seen
    assert seen <= {4096, -errno.ETIME}
