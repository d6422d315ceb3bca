"""Closing with I/O under way: it drains; when the device does not answer in time it says so and
keeps what the kernel may still write to. Dropped batches, dropped volumes, dropped buffers.

Method: throttled and stalling devices. What leaks on purpose runs in a child.
"""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvio
from kvio.testing import LoopDevices, throttle
from tests.engine.conftest import Opener
from tests.engine.lib import (
    KIB,
    MIB,
    Content,
    aligned,
    in_thread,
    native_threads,
    resizable,
    run_child,
    same,
    stall_ends,
    wait_until,
)
from tests.support.faultdev import FaultDevice

pytestmark = pytest.mark.root
LOOP_CLR_FD = 0x4C01
ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])


@ENGINES
def test_close_waits_for_what_is_under_way(
    engine: str, make_loops: Callable[..., list[str]], rng: np.random.Generator
) -> None:
    """Goal: close() drains reads that are sent and reads that wait in line. Method: 8 MiB at
    16 MiB/s with depth 2."""
    paths = make_loops(2, 8 * MIB)
    vol = kvio.Volume.open(paths, mode="rw", engine=engine, queue_depth=2, stripe_unit=256 * KIB)
    content = Content(vol, rng)
    with throttle(paths, read_bps=8 * MIB):
        # nested: the threads that the volume starts now are the ones that are throttled
        with kvio.Volume.open(paths, engine=engine, queue_depth=2, stripe_unit=256 * KIB) as slow:
            before = slow.stats()
            into = [aligned(256 * KIB) for _ in range(32)]
            batches = [slow.submit_read([i * 256 * KIB], [b]) for i, b in enumerate(into)]
            assert not batches[-1].done()
            slow.close()
            assert all(batch.done() for batch in batches)
            for i, (batch, part) in enumerate(zip(batches, into, strict=True)):
                assert batch.results().tolist() == [256 * KIB]
                place = slice(i * 256 * KIB, (i + 1) * 256 * KIB)
                same(part, content.image[place], f"read {i}")
            assert slow.stats().delta(before).read.ops == 32
    vol.close()


@ENGINES
def test_close_waits_for_a_thread_inside_a_blocking_call(engine: str, disk: FaultDevice) -> None:
    vol = kvio.Volume.open([disk.device], mode="rw", engine=engine)
    stall = disk.stall("read")
    into = [aligned(64 * KIB), aligned(64 * KIB)]
    got: list[Any] = []
    with in_thread(lambda: got.append(vol.read_batch([0, MIB], into))):
        disk.wait_stalled(2 if engine == "io_uring" else 1)
        with in_thread(vol.close) as closing:
            wait_until(lambda: refuses(vol), "close has begun")
            assert vol.closed
            assert closing.is_alive(), "it waits for the thread inside"
            stall.remove()
    assert got[0].tolist() == [64 * KIB] * 2


def refuses(vol: kvio.Volume) -> bool:
    try:
        vol.pread(bytearray(), 0)
    except kvio.KvioError as error:
        return "closed" in str(error)
    return False


@pytest.mark.parametrize("way", ["submit", "blocking"])
@ENGINES
def test_close_that_times_out_says_so_and_keeps_the_buffers(
    engine: str, way: str, disk: FaultDevice
) -> None:
    """In a child, for what it keeps is kept for ever."""
    stall = disk.stall("read", offset=4 * MIB, length=4 * MIB)
    code = """
path, engine, way = sys.argv[1:]
vol = kvio.Volume.open([path], mode="rw", engine=engine)
first, second = bytearray(65536), bytearray(65536)
places, buffers = [4 << 20, 5 << 20], [first, second]
if way == "submit":
    batch = vol.submit_read(places, buffers)
else:
    threading.Thread(target=vol.read_batch, args=(places, buffers), daemon=True).start()
    wait_until(lambda: not resizable(first), "the call has begun")
    time.sleep(0.1)
start = time.monotonic()
try:
    vol.close(timeout=0.3)
    print("closed")
except kvio.DeadlineExceeded as error:
    print(error.op, error.error_class, "in flight" in str(error), "kept" in str(error))
assert 0.3 <= time.monotonic() - start < 5
print(resizable(first), resizable(second), vol.closed)
if way == "submit":
    assert batch.done()
    print(sorted(set(batch.results().tolist())), batch.errors()[0].error_class)
    del batch
vol.close()
try:
    vol.pread(bytearray(512), 0)
except kvio.KvioError as error:
    print(error.error_class)
del vol
gc.collect()
print(resizable(first), resizable(second), flush=True)
os._exit(0)
"""
    with stall_ends(stall):
        out = run_child(code, disk.device, engine, way, timeout=60).splitlines()
    assert out[0] == "close deadline True True"
    assert out[1] == "False False True"
    if way == "submit":
        assert out[2] == "[-108] shutdown"
    assert out[-2:] == ["shutdown", "False False"]


@ENGINES
def test_batch_dropped_while_it_is_under_way(
    engine: str, disk: FaultDevice, opened: Opener, rng: np.random.Generator
) -> None:
    """Nobody waits, nobody holds the buffers: the engine keeps them until the kernel is done."""
    vol = opened([disk.device], engine=engine)
    content = Content(vol, rng)
    before = vol.stats()
    stall = disk.stall("read")

    class Watched(bytearray):
        pass

    buffer = Watched(64 * KIB)
    alive = weakref.ref(buffer)
    vol.submit_read([MIB], [buffer])
    disk.wait_stalled(1)
    assert not resizable(buffer)
    del buffer
    gc.collect()
    assert alive() is not None, "freed while the kernel may write there"
    filler = [bytearray(b"\xee" * 64 * KIB) for _ in range(64)]
    stall.remove()
    wait_until(lambda: vol.stats().delta(before).read.ops == 1, "the read lands")
    wait_until(lambda: vol.stats() and alive() is None, "the buffer is let go of")
    assert all(part == b"\xee" * 64 * KIB for part in filler), "memory of others was overwritten"
    content.check(0, vol.size)


@ENGINES
def test_volume_dropped_without_close(engine: str, make_files: Callable[..., list[str]]) -> None:
    paths = make_files(2, MIB)
    threads = native_threads()
    buffer = bytearray(MIB)
    vol = kvio.Volume.open(paths, engine=engine, direct="prefer")
    batch = vol.submit_read([0], [buffer])
    del vol
    gc.collect()
    assert batch.wait(20).tolist() == [MIB], "a batch keeps its volume"
    del batch
    gc.collect()
    assert native_threads() == threads
    assert resizable(buffer)


def test_batch_outlives_the_close(make_files: Callable[..., list[str]]) -> None:
    paths = make_files(1, MIB)
    with kvio.Volume.open(paths, mode="rw", direct="prefer") as vol:
        good = vol.submit_read([0], [aligned(MIB)])
        bad = vol.submit_write([vol.size], [aligned(4096)])
    assert good.wait(0).tolist() == [MIB]
    assert bad.wait(0).tolist() == [-28]
    assert bad.errors()[0].error_class == "space"
    assert good.errors() == []
    with pytest.raises(kvio.KvioError):
        vol.submit_read([0], [aligned(4096)])


@ENGINES
def test_bytearray_cannot_be_resized_while_it_is_filled(
    engine: str, disk: FaultDevice, opened: Opener
) -> None:
    vol = opened([disk.device], engine=engine)
    stall = disk.stall("read")
    whole, nested = bytearray(8192), [bytearray(4096), bytearray(4096)]
    batch = vol.submit_read([0, MIB], [whole, nested])
    disk.wait_stalled(1)
    for buffer in (whole, *nested):
        with pytest.raises(BufferError):
            buffer.extend(b"more")
        with pytest.raises(BufferError):
            del buffer[:]
    stall.remove()
    assert batch.wait(20).tolist() == [8192, 8192]
    for buffer in (whole, *nested):
        buffer.extend(b"more")
    read_only = b"x" * 4096
    assert vol.pwrite(read_only, 0) == 4096


def test_closing_twice_and_from_many_threads(make_files: Callable[..., list[str]]) -> None:
    vol = kvio.Volume.open(make_files(1, MIB), direct="prefer")
    batches = [vol.submit_read([0], [aligned(MIB)]) for _ in range(16)]
    with in_thread(vol.close), in_thread(vol.close), in_thread(vol.close):
        vol.close()
    assert vol.closed
    wait_until(lambda: all(batch.done() for batch in batches), "all batches end")
    assert {int(batch.results()[0]) for batch in batches} == {MIB}


def test_device_can_be_opened_again_at_once(make_loops: Callable[..., list[str]]) -> None:
    """Goal: the claim on a block device ends with close(), not some time later. Method: rings of
    several threads and a worker, twenty times."""
    (path,) = make_loops(1, 8 * MIB)
    for _ in range(20):
        with kvio.Volume.open([path], mode="rw") as vol:
            vol.submit_write([0, MIB], [aligned(4096), aligned(4096)]).wait(20)
            with in_thread(lambda: vol.read_batch([0, MIB], [aligned(4096)] * 2)):
                vol.read_batch([0, MIB], [aligned(4096), aligned(4096)])


def test_close_from_another_thread_harms_no_other_volume(
    make_files: Callable[..., list[str]],
) -> None:
    """Goal: what close() does to the rings of other threads must not touch the closing thread's own
    rings of other volumes. Method: every thread's first ring has the same number in the kernel."""
    first, second = make_files(2, 4 * MIB)
    done = threading.Event()
    ready = threading.Event()
    held: list[kvio.Volume] = []

    def other_thread() -> None:
        held.append(kvio.Volume.open([first], direct="prefer"))
        assert held[0].read_batch([0, MIB], [aligned(MIB), aligned(MIB)]).tolist() == [MIB, MIB]
        ready.set()
        assert done.wait(60)

    mine = kvio.Volume.open([second], mode="rw", direct="prefer")
    with mine, in_thread(other_thread):
        assert mine.read_batch([0, MIB], [aligned(MIB), aligned(MIB)]).tolist() == [MIB, MIB]
        assert ready.wait(60)
        held[0].close()
        try:
            for _ in range(3):
                got = mine.read_batch([0, MIB], [aligned(MIB), aligned(MIB)])
                assert got.tolist() == [MIB, MIB]
            assert mine.stats().poisoned_rings == 0
        finally:
            done.set()


def test_close_from_another_thread_lets_go_of_the_device(require_root: None) -> None:
    """Goal: after close() nothing holds a member any more, also when threads that used the volume
    live on. Method: the loop device must detach while such a thread lives."""
    done, ready = threading.Event(), threading.Event()
    with LoopDevices(1, 8 * MIB) as loops:
        vol = kvio.Volume.open(loops.paths, mode="rw")

        def user() -> None:
            vol.read_batch([0, MIB], [aligned(MIB), aligned(MIB)])
            ready.set()
            assert done.wait(60)

        with in_thread(user):
            assert ready.wait(60)
            try:
                with in_thread(vol.close):  # neither main's ring nor the user's is its own
                    pass
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    loops.devices[0].close()  # warns when the device stays attached
            finally:
                done.set()


@ENGINES
@pytest.mark.parametrize("use", ["open", "batch", "submit", "thread"])
def test_nothing_holds_a_member_when_close_has_returned(
    use: str, engine: str, require_root: None
) -> None:
    """Goal: who closes a volume may detach, stop or repartition its devices at once. Method: a loop
    device whose last opener goes detaches in that moment."""
    with LoopDevices(1, 8 * MIB) as loops:
        vol = kvio.Volume.open(loops.paths, mode="rw", engine=engine)
        places, buffers = [0, MIB], [aligned(4096), aligned(4096)]
        if use == "batch":
            vol.read_batch(places, buffers)
        elif use == "submit":
            vol.submit_read(places, buffers).wait(20)
        elif use == "thread":
            with in_thread(lambda: vol.read_batch(places, buffers)):
                pass
        vol.close()
        (loop,) = loops.devices
        fcntl.ioctl(loop._fd, LOOP_CLR_FD)
        os.close(loop._fd)
        loop._fd = -1
        assert not loop.attached, "the kernel still has it open"
