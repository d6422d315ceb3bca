# SPDX-License-Identifier: Apache-2.0
"""kvio.uring.Ring: requests on real files, pipes and devices, and what a ring refuses."""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvio import uring
from kvio.uring import CqeFlags, Op, Ring, SetupFlags, SqeFlags

CONTENT = bytes(range(256)) * 64  # 16 KiB in which every offset shows


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring(8) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def finish(ring: Ring, count: int = 1) -> list[uring.Cqe]:
    ring.submit()
    return ring.wait_cqes(count, timeout=10)


def result(ring: Ring) -> int:
    (cqe,) = finish(ring)
    return cqe.res


# --- data ---


def test_read_lands_at_its_offset_and_carries_its_user_data(ring: Ring, file: int) -> None:
    """Goal: bytes, count and user_data of one read. Method: a file whose bytes tell the offset."""
    buffer = bytearray(100)
    marker = object()
    token = ring.prep_read(file, buffer, 1000, user_data=marker)
    (cqe,) = finish(ring)
    assert cqe.error is None
    assert cqe == (marker, 100, 0, token, None)
    assert buffer == CONTENT[1000:1100]


def test_read_through_dev_zero_clears_the_buffer(ring: Ring) -> None:
    buffer = bytearray(b"x" * 4096)
    with open("/dev/zero", "rb") as zero:
        ring.prep_read(zero, buffer, 0)
        assert result(ring) == 4096
    assert buffer == bytes(4096)


def test_direct_read_of_a_page_aligned_buffer(ring: Ring, file: int) -> None:
    buffer = mmap.mmap(-1, 4096)
    fd = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
    ring.prep_read(fd, buffer, 4096)
    assert result(ring) == 4096
    os.close(fd)
    assert buffer[:] == CONTENT[4096:8192]


def test_write_then_fsync_linked_reach_the_file_in_order(ring: Ring, file: int) -> None:
    """Goal: linked requests. Method: a write linked to an fdatasync; both succeed, in order."""
    ring.prep_write(file, b"written", 10, flags=SqeFlags.IO_LINK, user_data="write")
    ring.prep_fsync(file, datasync=True, user_data="sync")
    assert [(c.user_data, c.res) for c in finish(ring, 2)] == [("write", 7), ("sync", 0)]
    assert os.pread(file, 7, 10) == b"written"


def test_vectors_scatter_and_gather(ring: Ring, file: int) -> None:
    ring.prep_writev(file, [b"ab", b"", b"cde"], 0)
    assert result(ring) == 5
    first, second = bytearray(3), bytearray(2)
    ring.prep_readv(file, [first, second], 0)
    assert result(ring) == 5
    assert (bytes(first), bytes(second)) == (b"abc", b"de")


def test_short_read_at_the_end_and_nothing_beyond_it(ring: Ring, file: int) -> None:
    for offset, expected in ((len(CONTENT) - 10, 10), (len(CONTENT), 0), (1 << 40, 0)):
        ring.prep_read(file, bytearray(100), offset)
        assert result(ring) == expected


def test_offset_minus_one_moves_the_file_position(ring: Ring, file: int) -> None:
    os.lseek(file, 5, os.SEEK_SET)
    buffer = bytearray(3)
    ring.prep_read(file, buffer, -1)
    assert result(ring) == 3
    assert buffer == CONTENT[5:8]
    assert os.lseek(file, 0, os.SEEK_CUR) == 8


def test_fallocate_openat_statx_close_work_on_a_path(ring: Ring, tmp_path: Path) -> None:
    """Goal: the file operations. Method: make, grow, stat and close a file through the ring."""
    path = tmp_path / "new"
    ring.prep_openat(path, os.O_RDWR | os.O_CREAT, mode=0o640)
    fd = result(ring)
    assert fd >= 0
    ring.prep_fallocate(fd, 0, 0, 12288)
    assert result(ring) == 0
    raw = bytearray(uring.STATX_SIZE)
    ring.prep_statx(path, raw)
    assert result(ring) == 0
    found = uring.StatxResult.parse(raw)
    assert (found.size_bytes, found.mode & 0o777) == (12288, os.stat(path).st_mode & 0o777)
    assert found.block_size_bytes == os.stat(path).st_blksize
    ring.prep_close(fd)
    assert result(ring) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# --- waiting, ending, signalling ---


def test_timeout_expires_and_can_be_removed(ring: Ring) -> None:
    begin = time.monotonic()
    ring.prep_timeout(0.05)
    assert result(ring) == -errno.ETIME
    assert time.monotonic() - begin >= 0.05
    endless = ring.prep_timeout(3600, user_data="endless")
    ring.prep_timeout_update(endless, 7200, user_data="update")
    ring.prep_timeout_remove(endless, user_data="remove")
    found = {c.user_data: c.res for c in finish(ring, 3)}
    assert found == {"endless": -errno.ECANCELED, "update": 0, "remove": 0}


def test_link_timeout_cancels_a_read_that_waits(ring: Ring) -> None:
    read_end, write_end = os.pipe()
    ring.prep_read(read_end, bytearray(1), -1, flags=SqeFlags.IO_LINK, user_data="read")
    ring.prep_link_timeout(0.02, user_data="limit")
    found = {c.user_data: c.res for c in finish(ring, 2)}
    os.close(read_end)
    os.close(write_end)
    assert found["read"] in (-errno.ECANCELED, -errno.EINTR)
    assert found["limit"] in (-errno.ETIME, 1)


def test_cancel_by_token_and_by_descriptor(ring: Ring) -> None:
    read_end, write_end = os.pipe()
    first = ring.prep_read(read_end, bytearray(1), -1, user_data="first")
    ring.prep_read(read_end, bytearray(1), -1, user_data="second")
    ring.submit()
    ring.prep_cancel(first, user_data="by token")
    found = {c.user_data: c.res for c in finish(ring, 2)}
    assert found == {"first": -errno.ECANCELED, "by token": 0}
    ring.prep_cancel_fd(read_end, user_data="by fd")
    found = {c.user_data: c.res for c in finish(ring, 2)}
    os.close(read_end)
    os.close(write_end)
    assert found == {"second": -errno.ECANCELED, "by fd": 1}


def test_multishot_poll_completes_until_it_is_removed(ring: Ring) -> None:
    """Goal: a request stays known while MORE is set. Method: two events, then a removal."""
    event = os.eventfd(0, os.EFD_NONBLOCK)
    token = ring.prep_poll_add(event, select.POLLIN, multishot=True, user_data="poll")
    ring.submit()
    for _ in range(2):
        os.eventfd_write(event, 1)
        cqe = ring.wait_cqe(timeout=10)
        assert (cqe.user_data, cqe.res) == ("poll", select.POLLIN)
        assert cqe.flags & CqeFlags.MORE
        assert ring.in_flight == 1
        os.eventfd_read(event)
    ring.prep_poll_remove(token, user_data="remove")
    found = {c.user_data: (c.res, bool(c.flags & CqeFlags.MORE)) for c in finish(ring, 2)}
    os.close(event)
    assert found == {"poll": (-errno.ECANCELED, False), "remove": (0, False)}
    assert ring.in_flight == 0


def test_message_to_another_ring_arrives_with_its_number(ring: Ring) -> None:
    with Ring(4) as other:
        ring.prep_msg_ring(other, 17, 4711)
        assert result(ring) == 0
        assert other.wait_cqe(timeout=10) == (4711, 17, 0, 4711, None)


def test_raw_preparation_reaches_operations_without_a_method(ring: Ring, file: int) -> None:
    if not ring.probe().supports(Op.FTRUNCATE):
        pytest.skip("FTRUNCATE needs Linux 6.9")
    ring.prep(Op.FTRUNCATE, fd=file, offset=100)
    assert result(ring) == 0
    assert os.fstat(file).st_size == 100


def test_success_can_be_skipped_where_no_memory_waits_for_it(ring: Ring, file: int) -> None:
    ring.prep_nop(flags=SqeFlags.CQE_SKIP_SUCCESS, user_data=3)
    ring.prep_nop(user_data="last")
    assert [c.user_data for c in finish(ring)] == ["last"]
    ring.prep_fsync(1 << 20, flags=SqeFlags.CQE_SKIP_SUCCESS, user_data=3)
    assert [(c.user_data, c.res) for c in finish(ring)] == [(3, -errno.EBADF)]
    with pytest.raises(ValueError, match="no completion after which memory"):
        ring.prep_read(file, bytearray(8), 0, flags=SqeFlags.CQE_SKIP_SUCCESS)
    assert ring.in_flight == 0


# --- the queues ---


def test_submit_and_wait_takes_one_call_for_a_batch(ring: Ring) -> None:
    for number in range(5):
        ring.prep_nop(user_data=number)
    assert (ring.sq_ready, ring.sq_space_left, ring.in_flight) == (5, 3, 5)
    assert ring.submit_and_wait(5, timeout=10) == 5
    assert ring.cq_ready == 5
    assert [c.user_data for c in ring.peek_cqes(2)] == [0, 1]
    assert [c.user_data for c in ring.peek_cqes()] == [2, 3, 4]
    assert ring.peek_cqe() is None


def test_full_submission_queue_says_submit_first(ring: Ring) -> None:
    for _ in range(8):
        ring.prep_nop()
    buffer = bytearray(8)
    with pytest.raises(BlockingIOError, match=r"call submit\(\) first"):
        ring.prep_read(0, buffer, 0)
    buffer.append(1)  # the refused request holds nothing
    assert ring.in_flight == 8


def test_completions_beyond_the_queue_are_kept_and_all_come() -> None:
    """Goal: overflow loses nothing. Method: 64 NOPs into a completion queue of 4, taken late."""
    with Ring(4, cq_entries=4) as ring:
        for number in range(64):
            ring.prep_nop(user_data=number)
            ring.submit()
        assert ring.cq_overflow
        assert [c.user_data for c in ring.peek_cqes()] == list(range(64))
        assert not ring.cq_overflow


def test_invalid_entry_fails_alone_and_the_rest_follows(ring: Ring) -> None:
    """Goal: without SUBMIT_ALL the kernel stops after a bad entry. Method: one in the middle."""
    ring.prep_nop(user_data="good")
    ring.prep(250, user_data="bad")
    ring.prep_nop(user_data="rest")
    assert ring.submit() == 2
    assert ring.sq_ready == 1
    assert ring.submit() == 1
    found = {c.user_data: c.res for c in ring.wait_cqes(3, timeout=10)}
    assert found == {"good": 0, "bad": -errno.EINVAL, "rest": 0}


def test_discard_takes_back_what_was_not_submitted(ring: Ring) -> None:
    buffer = bytearray(8)
    ring.prep_nop(user_data="submitted")
    ring.submit()
    ring.prep_read(0, buffer, 0, user_data="dropped")
    ring.prep_nop(user_data="dropped too")
    assert ring.discard() == ["dropped", "dropped too"]
    buffer.append(1)
    ring.prep_nop(user_data="after")
    assert [c.user_data for c in finish(ring, 2)] == ["submitted", "after"]


def test_discard_takes_back_what_a_failed_submit_left() -> None:
    """Goal: a poisoned ring is usable again. Method: submit on a ring that is not enabled yet."""
    with Ring(4, flags=SetupFlags.R_DISABLED) as ring:
        ring.prep_nop(user_data="refused")
        with pytest.raises(OSError, match=r"call enable\(\) first") as caught:
            ring.submit()
        assert caught.value.errno == errno.EBADFD
        assert ring.discard() == ["refused"]
        ring.enable()
        ring.prep_nop(user_data="good")
        assert [c.user_data for c in finish(ring)] == ["good"]


def test_wait_gives_up_after_its_timeout_and_keeps_what_is_ready(ring: Ring) -> None:
    ring.prep_nop(user_data="ready")
    ring.submit()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="2 completions were not ready"):
        ring.wait_cqes(2, timeout=0.05)
    assert time.monotonic() - begin >= 0.05
    assert ring.submit_and_wait(2, timeout=0.01) == 0
    assert ring.wait_cqe(timeout=0).user_data == "ready"


def test_wait_lets_other_python_threads_run(ring: Ring) -> None:
    """Goal: the GIL is free in a wait. Method: only another thread can end it."""
    event = os.eventfd(0)
    ring.prep_poll_add(event, select.POLLIN)
    ring.submit()
    threading.Timer(0.05, os.eventfd_write, (event, 1)).start()
    assert ring.wait_cqe(timeout=10).res == select.POLLIN
    os.close(event)


def test_signal_handler_runs_during_a_wait_which_then_goes_on(ring: Ring) -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _frame: seen.append(number))
    try:
        ring.prep_timeout(0.2)
        ring.submit()
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        assert ring.wait_cqe(timeout=10).res == -errno.ETIME
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert len(seen) > 2


@pytest.mark.parametrize(
    "flags",
    [
        SetupFlags.SINGLE_ISSUER | SetupFlags.DEFER_TASKRUN,
        SetupFlags.COOP_TASKRUN | SetupFlags.TASKRUN_FLAG,
        SetupFlags.SQPOLL,
        SetupFlags.SQE128 | SetupFlags.CQE32,
    ],
    ids=str,
)
def test_reads_complete_under_every_mode(flags: SetupFlags, file: int) -> None:
    """Goal: peek sees completions in each mode. Method: 100 reads of known bytes, taken by peek."""
    with Ring(4, flags=flags, sq_thread_idle_ms=100) as ring:
        assert ring.flags & flags == flags
        for number in range(100):
            buffer = bytearray(64)
            ring.prep_read(file, buffer, number * 16, user_data=number)
            ring.submit()
            deadline = time.monotonic() + 10
            while (cqe := ring.peek_cqe()) is None:
                assert time.monotonic() < deadline
            assert (cqe.user_data, cqe.res) == (number, 64)
            assert (cqe.big is not None) == bool(flags & SetupFlags.CQE32)
            assert buffer == CONTENT[number * 16 : number * 16 + 64]


def test_single_issuer_ring_refuses_another_thread_by_name() -> None:
    caught: list[OSError] = []

    def intrude(ring: Ring) -> None:
        try:
            ring.submit()
        except OSError as error:
            caught.append(error)

    with Ring(4, flags=SetupFlags.SINGLE_ISSUER) as ring:
        ring.prep_nop()
        other = threading.Thread(target=intrude, args=(ring,))
        other.start()
        other.join()
        assert caught[0].errno == errno.EEXIST
        assert "belongs to another thread" in str(caught[0])
        assert result(ring) == 0


def test_many_threads_share_one_ring(file: int) -> None:
    """Goal: no lost or crossed request. Method: 4 threads send, one takes; every token once."""
    count = 500
    seen: list[object] = []

    def send(ring: Ring, base: int) -> None:
        for number in range(base, base + count):
            while True:
                try:
                    ring.prep_nop(user_data=number)
                    break
                except BlockingIOError:
                    ring.submit()
        ring.submit()

    with Ring(16, cq_entries=4096) as ring:
        senders = [threading.Thread(target=send, args=(ring, n * count)) for n in range(4)]
        for sender in senders:
            sender.start()
        while len(seen) < 4 * count:
            seen += [c.user_data for c in ring.wait_cqes(1, timeout=10)]
        for sender in senders:
            sender.join()
    assert sorted(seen, key=lambda n: int(str(n))) == list(range(4 * count))
