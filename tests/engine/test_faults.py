"""A member that fails: one bad operation fails alone, the error says what, where and of which
class, a failed flush stays failed.

Method: a FUSE file under a loop device that fails on request, beside healthy loop devices.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, Content, aligned, quarantine, same
from tests.support.faultdev import FaultDevice

pytestmark = pytest.mark.root
PAGE = 16 * KIB


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("way", ["blocking", "submit", "deadline"])
def test_one_bad_page_of_64_fails_alone(
    way: str, verb: str, engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    bad, places = 37, rng.permutation(vol.size // PAGE)[:64] * PAGE
    fault = disk.fail(verb, offset=int(places[bad]), length=PAGE)
    block = aligned(64 * PAGE)
    before = vol.stats()
    failed: list[kvio.KvioError] = []
    if way == "submit":
        batch = getattr(vol, f"submit_{verb}")(places, block)
        got, failed = batch.wait(30), batch.errors()
    else:
        deadline = 30 if way == "deadline" else None
        got = getattr(vol, f"{verb}_batch")(places, block, errors=failed, deadline=deadline)
    assert fault.hits >= 1
    assert got[bad] == -errno.EIO
    assert (np.delete(got, bad) == PAGE).all()
    (error,) = failed
    assert type(error) is kvio.KvioError
    assert (error.errno, error.error_class, error.op) == (errno.EIO, "unknown", verb)
    assert (error.index, error.member, error.filename) == (bad, 0, disk.device)
    assert error.offset <= places[bad] < error.offset + error.length
    for word in (verb, str(error.offset), str(error.length), disk.device, "unknown"):
        assert word in str(error)
    added = vol.stats().delta(before)
    io = getattr(added, verb)
    assert (io.ops, io.bytes, io.errors) == (64, 63 * PAGE, 1)
    assert getattr(added.members[0], verb).errors == 1
    if verb == "read":
        for i in set(range(64)) - {bad}:
            place = places[i]
            same(block[i * PAGE : (i + 1) * PAGE], content.image[place : place + PAGE], f"page {i}")
        return
    disk.clear()
    for i in set(range(64)) - {bad}:
        content.image[places[i] : places[i] + PAGE] = 0
    around = np.ones(vol.size, bool)
    around[places[bad] : places[bad] + PAGE] = False
    into = aligned(vol.size)
    assert vol.pread(into, 0) == vol.size
    same(into[around], content.image[around], "everything beside the failed page")


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_large_operation_fails_when_any_part_of_it_does(
    which: str, disk: FaultDevice, make_loops: Callable[..., list[str]], opened: Opener
) -> None:
    healthy = make_loops(2, 16 * MIB)
    vol = opened([healthy[0], disk.device, healthy[1]], stripe_unit=64 * KIB)
    at = {"first": 0, "middle": 512 * KIB, "last": 15 * MIB}[which]
    disk.fail("read", offset=at, length=4096)
    with pytest.raises(kvio.KvioError) as caught:
        vol.pread(aligned(vol.size), 0)
    assert (caught.value.errno, caught.value.member) == (errno.EIO, 1)
    assert caught.value.offset <= at < caught.value.offset + caught.value.length
    other = aligned(64 * KIB)  # the neighbours' units are served
    assert vol.read_batch([0, 128 * KIB], [other, aligned(64 * KIB)]).tolist() == [64 * KIB] * 2


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (errno.EIO, "unknown"),
        (errno.ENODATA, "media"),
        (errno.ETIMEDOUT, "timeout"),
        (errno.ENOSPC, "space"),
        (errno.ENOLINK, "transport"),
        (errno.EREMOTEIO, "target"),
        (errno.EILSEQ, "protection"),
        (errno.EBADE, "reservation"),
    ],
)
def test_class_of_an_error_is_what_the_block_layer_means_by_its_errno(
    code: int, name: str, disk: FaultDevice, opened: Opener
) -> None:
    """Through the file the errno arrives as it is; a loop device may have turned it into EIO."""
    vol = opened([disk.device])
    with kvio.Volume.open([disk.path], direct=True) as through_file:
        disk.fail("read", code=code)
        with pytest.raises(kvio.KvioError) as caught:
            through_file.pread(aligned(4096), 0)
        assert (caught.value.errno, caught.value.error_class) == (code, name)
        assert isinstance(caught.value, kvio.Fenced) == (code == errno.EBADE)
    with pytest.raises(kvio.KvioError) as caught:
        vol.pread(aligned(4096), 0)
    assert caught.value.error_class in {name, "unknown"}
    assert name in str(caught.value) or "unknown" in str(caught.value)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.ENOMEM])
def test_passing_trouble_is_retried_and_counted(
    code: int, require_root: None, rng: np.random.Generator
) -> None:
    with FaultDevice(2 * MIB, loop=False) as disk:
        with kvio.Volume.open([disk.path], mode="rw", direct=True) as vol:
            content = Content(vol, rng)
            into = aligned(MIB)
            fault = disk.fail("read", code=code, times=5)
            assert vol.read_batch([0, MIB], [into, aligned(MIB)]).tolist() == [MIB, MIB]
            same(into, content.image[:MIB], "the first page")
            assert fault.hits == 5
            assert vol.stats().retries >= 1
            assert vol.stats().read.errors == 0
            disk.clear()
            disk.fail("read", code=code)  # for ever: there is a bound
            assert vol.read_batch([0], [into]).tolist() == [-code]
            disk.clear()
            content.check(0, vol.size)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_failed_flush_stays_failed(engine: str, disk: FaultDevice, opened: Opener) -> None:
    """The kernel reports a lost write once: a second flush that succeeds would be a lie."""
    vol = opened([disk.device], engine=engine)
    vol.flush()
    assert vol.pwrite(aligned(PAGE), 0) == PAGE
    fault = disk.fail("flush", times=1)
    with pytest.raises(kvio.KvioError) as caught:
        vol.flush()
    assert fault.hits == 1
    assert (caught.value.op, caught.value.member) == ("flush", 0)
    assert caught.value.filename == disk.device
    for attempt in range(3):
        assert vol.pwrite(aligned(PAGE), 0) == PAGE
        with pytest.raises(kvio.KvioError) as again:
            vol.flush()
        assert again.value.errno == caught.value.errno, f"attempt {attempt}"
    assert vol.pread(aligned(PAGE), 0) == PAGE, "reads go on"
    vol.close()
    opened([disk.device]).flush()  # a new open starts anew


def test_flush_names_the_member_that_failed(
    disk: FaultDevice, make_loops: Callable[..., list[str]], opened: Opener
) -> None:
    healthy = make_loops(2, 16 * MIB)
    vol = opened([healthy[0], disk.device, healthy[1]])
    disk.fail("flush")
    with pytest.raises(kvio.KvioError) as caught:
        vol.flush()
    assert (caught.value.member, caught.value.filename) == (1, disk.device)
    assert [member.flushes for member in vol.stats().members] == [1, 1, 1], "all were asked"


def test_flush_asks_all_members_at_the_same_time(require_root: None) -> None:
    with FaultDevice(MIB) as one, FaultDevice(MIB) as other:
        with kvio.Volume.open([one.device, other.device], mode="rw") as vol:
            stalls = [one.stall("flush"), other.stall("flush")]
            with pytest.raises(kvio.DeadlineExceeded):
                vol.flush(deadline=0.3)
            one.wait_stalled(1)
            other.wait_stalled(1)  # the second did not wait for the first
            for stall in stalls:
                stall.remove()


def test_flush_comes_after_the_writes_before_it(disk: FaultDevice, opened: Opener) -> None:
    vol = opened([disk.device])
    disk.record()
    assert vol.write_batch([0, MIB], [aligned(PAGE), aligned(PAGE)]).tolist() == [PAGE, PAGE]
    vol.flush()
    assert vol.pwrite(aligned(PAGE), 2 * MIB) == PAGE
    log = [op for op, *_ in disk.log()]
    assert log.index("flush") == 2
    assert log[3] == "write"


def test_write_that_failed_is_not_in_the_way_of_later_ones(
    disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened([disk.device], queue_depth=4)
    content = Content(vol, rng)
    disk.fail("write", times=40)
    data = [content.page_aligned(i * PAGE, PAGE) for i in range(64)]
    got = vol.write_batch(np.arange(64) * PAGE, data)
    assert set(got.tolist()) == {PAGE, -errno.EIO}
    assert vol.write_batch(np.arange(64) * PAGE, data).tolist() == [PAGE] * 64
    content.check(0, vol.size)
    assert quarantine(vol) == (0, 0)


def test_discard_makes_room_and_refuses_what_it_cannot(
    disk: FaultDevice, make_loops: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened(make_loops(2, 4 * MIB), stripe_unit=MIB)
    data = aligned(vol.size)
    data[:] = 1
    assert vol.pwrite(data, 0) == vol.size
    vol.discard(512 * KIB, 4 * MIB)
    into = aligned(vol.size)
    assert vol.pread(into, 0) == vol.size
    assert (into[: 512 * KIB] == 1).all()
    assert (into[4 * MIB + 512 * KIB :] == 1).all()
    assert not into[512 * KIB : 4 * MIB + 512 * KIB].any(), "a loop device over memory gives zeros"
    vol.discard(0, 0)
    with pytest.raises(ValueError, match="discard"):
        vol.discard(1, 4096)
    with pytest.raises(ValueError, match="discard"):
        vol.discard(0, 100)
    for offset, length in ((vol.size, 4096), (vol.size - 4096, 8192), (2**62, 4096)):
        with pytest.raises(kvio.KvioError) as caught:
            vol.discard(offset, length)
        assert (caught.value.errno, caught.value.op) == (errno.ENOSPC, "discard")
    assert (into[4 * MIB + 512 * KIB :] == 1).all()
