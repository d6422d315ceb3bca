"""Signals: Ctrl-C leaves a blocked call on a device that does not answer; a storm of signals
changes no result; the engine's own threads take none.

Method: setitimer at 1 kHz while batches run; SIGINT to this process while a FUSE device stalls.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
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
    run_child,
    same,
    stall_ends,
    wait_until,
)
from tests.support.faultdev import FaultDevice

PROMPT = 3.0  # seconds; a wait looks at signals about every 100 ms
ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])


@pytest.fixture
def storm() -> Iterator[list[int]]:
    """SIGALRM a thousand times a second, handled in Python; gives the count as a list of one."""
    count = [0]

    def handler(*_: object) -> None:
        count[0] += 1

    # pytest-timeout has its own SIGALRM handler and timer: both come back afterwards
    old = signal.signal(signal.SIGALRM, handler)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield count
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, old)


@ENGINES
def test_storm_of_signals_changes_nothing(
    engine: str,
    make_files: Callable[..., list[str]],
    opened: Opener,
    rng: np.random.Generator,
    storm: list[int],
) -> None:
    vol = opened(make_files(3, 2 * MIB), engine=engine, stripe_unit=64 * KIB)
    content = Content(vol, rng)
    until = time.monotonic() + 2
    turns = 0
    into = aligned(64 * 16 * KIB)
    while time.monotonic() < until:
        places = rng.permutation(vol.size // (16 * KIB))[:64] * 16 * KIB
        got = vol.read_batch(places, into) if turns % 2 else vol.submit_read(places, into).wait()
        assert (got == 16 * KIB).all()
        for i, place in enumerate(places):
            part = into[i * 16 * KIB : (i + 1) * 16 * KIB]
            same(part, content.image[place : place + 16 * KIB], f"turn {turns}, page {i}")
        content.write(int(places[0]), content.page_aligned(int(places[1]), 16 * KIB))
        assert vol.pread(into[:MIB], 0, deadline=30) == MIB
        turns += 1
    assert storm[0] > 200, "there was no storm"
    assert turns > 5
    content.check(0, vol.size)
    assert vol.stats().read.errors == 0
    assert quarantine(vol) == (0, 0)


CALLS: dict[str, Callable[[kvio.Volume, list[bytearray]], object]] = {
    "pread": lambda vol, b: vol.pread(b[0], 0),
    "large pread": lambda vol, b: vol.pread(b[4], 0),
    "read_batch": lambda vol, b: vol.read_batch([0, MIB, 2 * MIB], b[:3]),
    "pread with deadline": lambda vol, b: vol.pread(b[0], 0, deadline=60),
    "pwrite": lambda vol, b: vol.pwrite(b[0], 0),
    "wait": lambda vol, b: vol.submit_read([0, MIB], b[:2]).wait(),
    "wait with timeout": lambda vol, b: vol.submit_read([0, MIB], b[:2]).wait(60),
    "flush": lambda vol, b: vol.flush(),
}


@pytest.mark.root
@ENGINES
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_leaves_a_call_on_a_stalled_device(
    name: str, engine: str, disk: FaultDevice
) -> None:
    """Afterwards the device answers: the volume goes on, buffers come back, close() is clean."""
    vol = kvio.Volume.open([disk.device], mode="rw", engine=engine)
    op = {"flush": "flush", "pwrite": "write"}.get(name, "read")
    stall = disk.stall(op)
    buffers = [bytearray(64 * KIB) for _ in range(4)] + [bytearray(4 * MIB)]

    def interrupt() -> None:
        disk.wait_stalled(1)
        os.kill(os.getpid(), signal.SIGINT)

    with in_thread(interrupt):
        with pytest.raises(KeyboardInterrupt):
            CALLS[name](vol, buffers)
        returned = time.monotonic()
    assert time.monotonic() - returned < PROMPT
    assert disk.stalled(), "it was the signal that ended the call, not the device"
    held = [b for b in buffers if not resizable(b)]
    if op != "flush":
        assert held, "the kernel may still touch them"
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the late I/O lands")
    wait_until(lambda: vol.stats() and all(resizable(b) for b in buffers), "the buffers come back")
    assert vol.pread(aligned(4096), 0) == 4096
    vol.flush()
    vol.close(timeout=10)


@pytest.mark.root
def test_interrupted_thread_and_closing_thread_need_not_be_the_same(disk: FaultDevice) -> None:
    """Main is interrupted, the device answers, another thread closes while main waits for it."""
    vol = kvio.Volume.open([disk.device], mode="rw")
    stall = disk.stall("read")
    buffers = [bytearray(64 * KIB) for _ in range(3)]

    def interrupt() -> None:
        disk.wait_stalled(1)
        os.kill(os.getpid(), signal.SIGINT)

    with in_thread(interrupt):
        with pytest.raises(KeyboardInterrupt):
            vol.read_batch([0, MIB, 2 * MIB], buffers)
    stall.remove()
    with in_thread(lambda: vol.close(timeout=10)):
        pass
    assert all(resizable(b) for b in buffers)


@pytest.mark.root
def test_handler_that_does_not_raise_does_not_end_the_call(disk: FaultDevice) -> None:
    with kvio.Volume.open([disk.device]) as vol:
        stall = disk.stall("read")
        seen: list[int] = []
        old = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
        try:

            def signals() -> None:
                disk.wait_stalled(1)
                for expected in range(1, 4):
                    os.kill(os.getpid(), signal.SIGUSR1)
                    wait_until(lambda n=expected: len(seen) >= n, "handlers run in a blocked call")
                stall.remove()

            with in_thread(signals):
                assert vol.read_batch([0, MIB], [aligned(4096)] * 2).tolist() == [4096] * 2
        finally:
            signal.signal(signal.SIGUSR1, old)
        assert len(seen) == 3


@pytest.mark.root
def test_handler_may_use_the_volume(disk: FaultDevice) -> None:
    """A handler runs inside the blocked call of the same thread; its own I/O must not be confused
    with the call's."""
    with kvio.Volume.open([disk.device], mode="rw") as vol:
        data = aligned(64 * KIB)
        data[:] = 5
        assert vol.pwrite(data, 8 * MIB) == 64 * KIB
        stall = disk.stall("read", offset=0, length=MIB)
        got: list[Any] = []

        def handler(*_: object) -> None:
            into = [aligned(4096), aligned(4096)]
            got.append(vol.read_batch([8 * MIB, 8 * MIB + 4096], into).tolist())
            got.append(bool((into[0] == 5).all() and (into[1] == 5).all()))
            stall.remove()

        old = signal.signal(signal.SIGUSR1, handler)
        try:

            def send() -> None:
                disk.wait_stalled(1)
                os.kill(os.getpid(), signal.SIGUSR1)

            with in_thread(send):
                assert vol.read_batch([0, 4096], [aligned(4096)] * 2).tolist() == [4096] * 2
        finally:
            signal.signal(signal.SIGUSR1, old)
        assert got == [[4096, 4096], True]


@ENGINES
def test_threads_of_the_engine_block_all_signals(
    engine: str, make_files: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened(make_files(4, MIB), engine=engine, workers=2)
    before = set(os.listdir("/proc/self/task"))
    batch = vol.submit_read(np.arange(16) * 256 * KIB, aligned(4 * MIB))
    assert (batch.wait(20) == 256 * KIB).all()
    started = set(os.listdir("/proc/self/task")) - before
    checked = 0
    for task in started:
        status = Path("/proc/self/task", task, "status").read_text()
        if "iou-" in status.splitlines()[0]:
            continue  # the kernel's own
        mask = int(next(x.split()[1] for x in status.splitlines() if x.startswith("SigBlk")), 16)
        wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD]
        assert all(mask >> (number - 1) & 1 for number in wanted)
        checked += 1
    assert checked >= 2
    assert threading.active_count() >= 1


@pytest.mark.root
@ENGINES
@pytest.mark.parametrize("timeout", ["None", "60"])
def test_ctrl_c_ends_close(timeout: str, engine: str, disk: FaultDevice) -> None:
    """Goal: close() on a member that does not answer can be left: the volume is closed then, and
    what the kernel may still write to is kept. In a child, for it is kept for ever."""
    stall = disk.stall("read", offset=4 * MIB, length=4 * MIB)  # open() reads both ends
    code = """
import signal
path, engine, timeout = sys.argv[1:]
vol = kvio.Volume.open([path], mode="rw", engine=engine)
buffer = bytearray(65536)
batch = vol.submit_read([4 << 20], [buffer])
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    vol.close(timeout=eval(timeout))
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 5)
print(vol.closed, batch.done(), resizable(buffer))
try:
    vol.pread(bytearray(4096), 0)
except kvio.KvioError as error:
    print(error.error_class, flush=True)
os._exit(0)
"""
    with stall_ends(stall):
        out = run_child(code, disk.device, engine, timeout, timeout=60).splitlines()
    assert out == ["interrupted True", "True True False", "shutdown"]
