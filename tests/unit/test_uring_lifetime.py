# SPDX-License-Identifier: Apache-2.0
"""kvio.uring.Ring: who keeps memory alive, closing, and processes that fork."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from kvio.testing import LoopDevices, throttle
from kvio.uring import CqeFlags, Ring
from kvio.uring import _ring as internals

PIPE_TEXT = b"what the kernel wrote"


class Watched(bytearray):
    """A bytearray that a weak reference can point to."""


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring(8) as made:
        yield made


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def result(ring: Ring) -> int:
    ring.submit()
    return ring.wait_cqe(timeout=10).res


def in_child(action: Callable[[], object]) -> str:
    """What `action` raises in a fork of this process, as text; "" when it raises nothing."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as reader:
        text = reader.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child crashed"
    return text


# --- memory of requests ---


def test_buffer_with_io_in_flight_survives_its_last_reference(
    ring: Ring, pipe: tuple[int, int]
) -> None:
    """Goal: R1. Method: drop a bytearray that a pipe read will fill; it is there at the end only.

    The memory would otherwise be free when the kernel writes into it.
    """
    buffer = Watched(64)
    alive = weakref.ref(buffer)
    ring.prep_read(pipe[0], memoryview(buffer)[8:], -1)
    ring.submit()
    del buffer
    gc.collect()
    churn = [bytearray(64) for _ in range(1000)]
    assert alive() is not None
    os.write(pipe[1], PIPE_TEXT)
    assert ring.wait_cqe(timeout=10).res == len(PIPE_TEXT)
    gc.collect()
    assert alive() is None
    assert not any(map(any, churn))


def test_buffer_cannot_be_resized_until_its_completion_is_taken(
    ring: Ring, pipe: tuple[int, int]
) -> None:
    buffers = [bytearray(32), bytearray(32)]
    ring.prep_readv(pipe[0], buffers, -1)
    ring.submit()
    for buffer in buffers:
        with pytest.raises(BufferError):
            buffer.extend(b"more")
    os.write(pipe[1], PIPE_TEXT * 2)
    ring.submit_and_wait(1, timeout=10)
    with pytest.raises(BufferError):
        buffers[0].extend(b"completed, but not taken")
    assert ring.wait_cqe().res == 2 * len(PIPE_TEXT)
    buffers[0].extend(b"more")
    assert bytes(buffers[0][:32] + buffers[1])[: 2 * len(PIPE_TEXT)] == PIPE_TEXT * 2


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (b"read-only", BufferError),
        (memoryview(bytearray(64))[::2], BufferError),
        ("text", TypeError),
        (12, TypeError),
        (None, TypeError),
    ],
    ids=["read-only", "non-contiguous", "str", "int", "None"],
)
def test_unusable_buffer_is_refused_and_leaves_no_entry(
    ring: Ring, buffer: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        ring.prep_read(0, buffer, 0)
    with pytest.raises(error):
        ring.prep_readv(0, [bytearray(8), buffer], 0)
    assert (ring.sq_ready, ring.in_flight) == (0, 0)


def test_statx_buffer_that_is_too_small_is_refused(ring: Ring) -> None:
    with pytest.raises(ValueError, match="256 bytes"):
        ring.prep_statx("/", bytearray(255))


# --- closing ---


def test_closed_ring_refuses_everything_and_closing_again_is_nothing() -> None:
    ring = Ring(4)
    fd = ring.fileno()
    ring.close()
    ring.close()
    assert ring.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    calls: list[Callable[[], object]] = [
        ring.prep_nop, ring.submit, ring.submit_and_wait, ring.peek_cqe, ring.wait_cqe,
        ring.probe, ring.discard, ring.fileno, ring.register_ring_fd, ring.unregister_buffers,
        lambda: ring.features, lambda: ring.cq_ready, ring.__enter__,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(OSError, match="this Ring is closed") as caught:
            call()
        assert caught.value.errno == errno.EBADF


def test_close_cancels_what_would_never_end_and_frees_it(pipe: tuple[int, int]) -> None:
    buffer, unsent = Watched(16), Watched(16)
    alive = [weakref.ref(buffer), weakref.ref(unsent)]
    ring = Ring(8)
    ring.prep_read(pipe[0], buffer, -1)
    ring.prep_timeout(3600)
    ring.prep_poll_add(pipe[0], select.POLLIN)
    ring.submit()
    ring.prep_read(pipe[0], unsent, -1)
    del buffer, unsent
    begin = time.monotonic()
    ring.close(timeout=10)
    assert time.monotonic() - begin < 5
    assert [ref() for ref in alive] == [None, None]
    os.write(pipe[1], PIPE_TEXT)
    assert os.read(pipe[0], 64) == PIPE_TEXT  # no request was left to take it


def test_close_waits_for_slow_io_and_keeps_memory_that_does_not_come_back() -> None:
    """Goal: no buffer is freed under the kernel. Method: a device of 256 KiB/s, real direct reads.

    Block I/O cannot be cancelled. Closing with patience gets the data; closing without says so
    and leaves the buffer alive, into which the kernel writes later.
    """
    if os.getuid() != 0:
        pytest.skip("needs root for a loop device and its throttle")
    size = 128 << 10
    with LoopDevices(1, 1 << 20) as loops, throttle(loops.paths, read_bps=2 * size):
        with open(loops.backing[0], "r+b") as memory:
            memory.write(b"\xab" * (1 << 20))
        fd = os.open(loops.paths[0], os.O_RDONLY | os.O_DIRECT)
        patient, hasty = mmap.mmap(-1, size), mmap.mmap(-1, size)
        ring = Ring(4)
        ring.prep_read(fd, patient, 0)
        ring.submit()
        ring.close(timeout=30)
        assert patient[:] == b"\xab" * size
        alive = weakref.ref(hasty)
        ring = Ring(4)
        ring.prep_read(fd, hasty, size)
        ring.submit()
        left_before = len(internals._abandoned)
        with pytest.raises(TimeoutError, match="1 requests still in the kernel"):
            ring.close(timeout=0.05)
        assert ring.closed
        del hasty
        gc.collect()
        late = alive()
        assert late is not None
        assert len(internals._abandoned) == left_before + 1
        deadline = time.monotonic() + 30
        while late[:] != b"\xab" * size:
            assert time.monotonic() < deadline, "the read never landed"
            time.sleep(0.01)
        os.close(fd)


def test_forgotten_ring_warns_and_is_closed(pipe: tuple[int, int]) -> None:
    ring = Ring(4)
    fd = ring.fileno()
    ring.prep_read(pipe[0], bytearray(8), -1)
    ring.submit()
    with pytest.warns(ResourceWarning, match=r"unclosed <kvio\.uring\.Ring fd"):
        del ring
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_ring_is_not_closed_under_a_waiting_thread(ring: Ring, pipe: tuple[int, int]) -> None:
    ring.prep_poll_add(pipe[0], select.POLLIN)
    ring.submit()
    started = threading.Event()
    got: list[int] = []

    def wait() -> None:
        started.set()
        got.append(ring.wait_cqe().res)

    waiter = threading.Thread(target=wait)
    waiter.start()
    started.wait()
    deadline = time.monotonic() + 10
    while ring._cq_lock.acquire(blocking=False):  # until the waiter has it
        ring._cq_lock.release()
        assert time.monotonic() < deadline
    with pytest.raises(OSError, match="another thread is waiting") as caught:
        ring.close()
    assert caught.value.errno == errno.EBUSY
    os.write(pipe[1], b"x")
    waiter.join()
    assert got == [select.POLLIN]


def test_opening_and_closing_leaks_no_descriptor_and_no_memory() -> None:
    def cycle(count: int) -> None:
        for _ in range(count):
            with Ring(8) as ring:
                ring.register_buffers([bytearray(4096)])
                ring.prep_nop()
                result(ring)
                if os.geteuid() != 0:  # the kernel gives RLIMIT_MEMLOCK back some time after close
                    ring.unregister_buffers()

    cycle(100)
    before = len(os.listdir("/proc/self/fd"))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cycle(1000)
    assert len(os.listdir("/proc/self/fd")) == before
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # which keeps freed memory aside
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 4096


# --- fork ---


def test_fork_is_refused_by_name_and_the_parent_goes_on(ring: Ring, pipe: tuple[int, int]) -> None:
    """Goal: R4. Method: children try to use, to close and to drop the ring of their parent."""
    buffer = bytearray(64)
    ring.prep_read(pipe[0], buffer, -1, user_data="parent's")
    ring.submit()
    text = in_child(ring.submit)
    assert text.startswith("OSError: [Errno 9] this Ring was opened by process")
    assert "open a new Ring after the fork" in text
    assert in_child(ring.close) == ""
    assert in_child(ring.__del__) == ""
    assert in_child(lambda: Ring(4).close()) == ""
    os.write(pipe[1], PIPE_TEXT)
    cqe = ring.wait_cqe(timeout=10)
    assert (cqe.user_data, cqe.res, cqe.flags & CqeFlags.MORE) == ("parent's", len(PIPE_TEXT), 0)
    assert buffer.startswith(PIPE_TEXT)
