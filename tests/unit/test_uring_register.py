# SPDX-License-Identifier: Apache-2.0
"""kvio.uring.Ring: registered buffers, files and descriptors; and what is refused."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import select
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvio.uring import AT_FDCWD, Op, RegisterOp, Ring, SetupFlags, SqeFlags, address_of
from kvio.uring._liburing import ffi

CONTENT = bytes(range(256)) * 64


class Watched(bytearray):
    """A bytearray that a weak reference can point to."""


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


def result(ring: Ring) -> int:
    ring.submit()
    return ring.wait_cqe(timeout=10).res


# --- registration ---


def test_fixed_buffers_carry_data_both_ways(ring: Ring, file: int) -> None:
    """Goal: READ_FIXED and WRITE_FIXED by index and slice. Method: copy within a file."""
    memory = [mmap.mmap(-1, 8192), mmap.mmap(-1, 4096)]
    ring.register_buffers(memory)
    assert ring.registered_buffers == 2
    ring.prep_read_fixed(file, memoryview(memory[0])[4096:], 256, buf_index=0)
    assert result(ring) == 4096
    assert memory[0][4096:] == CONTENT[256:4352]
    ring.prep_write_fixed(file, memoryview(memory[0])[4096:4106], 0, buf_index=0)
    assert result(ring) == 10
    assert os.pread(file, 10, 0) == CONTENT[256:266]
    if ring.probe().supports(Op.READV_FIXED):
        ring.prep_readv_fixed(file, [memoryview(memory[1])[8:16]], 512, buf_index=1)
        assert result(ring) == 8
        assert memory[1][8:16] == CONTENT[512:520]


def test_fixed_read_outside_of_its_buffer_is_a_fault(ring: Ring, file: int) -> None:
    registered, other = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
    ring.register_buffers([registered])
    ring.prep_read_fixed(file, other, 0, buf_index=0)
    assert result(ring) == -errno.EFAULT
    ring.prep_read_fixed(file, registered, 0, buf_index=1)
    assert result(ring) == -errno.EFAULT


def test_registered_buffer_is_held_until_unregistered(ring: Ring) -> None:
    buffer = Watched(4096)
    alive = weakref.ref(buffer)
    ring.register_buffers([buffer])
    with pytest.raises(OSError, match=r"unregister_buffers\(\) first") as caught:
        ring.register_buffers([bytearray(8)])
    assert caught.value.errno == errno.EBUSY
    del buffer
    gc.collect()
    assert alive() is not None
    ring.unregister_buffers()
    assert alive() is None
    with pytest.raises(OSError, match="unregistering buffers") as caught:
        ring.unregister_buffers()
    assert caught.value.errno == errno.ENXIO


def test_sparse_table_is_filled_emptied_and_bounded(ring: Ring, file: int) -> None:
    ring.register_buffers_sparse(4)
    memory, replaced = mmap.mmap(-1, 4096), Watched(4096)
    alive = weakref.ref(replaced)
    ring.update_buffers(2, [memory, replaced])
    ring.prep_read_fixed(file, memory, 0, buf_index=2)
    assert result(ring) == 4096
    del replaced
    ring.update_buffers(3, [None])
    assert alive() is None
    with pytest.raises(OSError, match="slots 3 to 4"):
        ring.update_buffers(3, [memory, memory])
    ring.prep_read_fixed(file, memory, 0, buf_index=3)
    assert result(ring) == -errno.EFAULT


def test_cloned_buffers_work_after_the_first_ring_is_gone(file: int) -> None:
    """Goal: a clone holds the memory, too. Method: close the first ring, drop the buffer."""
    memory = Watched(4096)
    alive = weakref.ref(memory)
    second = Ring(4)
    with Ring(4) as first:
        first.register_buffers([memory])
        second.clone_buffers(first)
    second.prep_read_fixed(file, memory, 0, buf_index=0)
    assert result(second) == 4096
    assert bytes(memory) == CONTENT[:4096]
    del memory
    gc.collect()
    assert alive() is not None
    second.close()
    assert alive() is None


def test_registered_files_are_addressed_by_slot(ring: Ring, file: int) -> None:
    ring.register_files_sparse(3)
    assert ring.update_files(1, [file]) == 1
    buffer = bytearray(16)
    ring.prep_read(1, buffer, 16, flags=SqeFlags.FIXED_FILE)
    assert result(ring) == 16
    assert buffer == CONTENT[16:32]
    ring.prep_close(file_index=1)
    assert result(ring) == 0
    ring.prep_read(1, buffer, 0, flags=SqeFlags.FIXED_FILE)
    assert result(ring) == -errno.EBADF
    ring.unregister_files()
    ring.register_files([file])
    ring.prep_read(0, buffer, 0, flags=SqeFlags.FIXED_FILE)
    assert result(ring) == 16


def test_eventfd_tells_of_completions_that_peek_then_gets(file: int) -> None:
    """Goal: eventfd under DEFER_TASKRUN. Method: it fires while the queue is empty."""
    event = os.eventfd(0, os.EFD_NONBLOCK)
    with Ring(4, flags=SetupFlags.SINGLE_ISSUER | SetupFlags.DEFER_TASKRUN) as ring:
        ring.register_eventfd(event)
        read_end, write_end = os.pipe()
        ring.prep_read(read_end, bytearray(4), -1)
        ring.submit()
        os.write(write_end, b"abcd")
        assert select.select([event], [], [], 10)[0] == [event]
        assert ring.cq_ready == 0
        cqe = ring.peek_cqe()
        assert cqe is not None
        assert cqe.res == 4
        ring.unregister_eventfd()
    for fd in (event, read_end, write_end):
        os.close(fd)


def test_registered_ring_fd_ties_the_ring_to_its_thread(ring: Ring) -> None:
    ring.register_ring_fd()
    ring.prep_nop()
    assert result(ring) == 0
    caught: list[OSError] = []

    def intrude() -> None:
        try:
            ring.submit()
        except OSError as error:
            caught.append(error)

    other = threading.Thread(target=intrude)
    other.start()
    other.join()
    assert "ties this Ring to the thread" in str(caught[0])
    ring.unregister_ring_fd()
    ring.prep_nop()
    assert result(ring) == 0


def test_raw_register_reaches_what_has_no_method(ring: Ring) -> None:
    """Goal: `register`. Method: a probe for one operation, read from the bytes it left."""
    answer = bytearray(16 + 8)
    ring.register(RegisterOp.REGISTER_PROBE, answer, 1)
    assert answer[0] >= Op.READ
    assert answer[1] == 1
    with pytest.raises(OSError, match="io_uring_register") as caught:
        ring.register(9999)
    assert caught.value.errno == errno.EINVAL


def test_registering_beyond_memlock_names_the_limit_and_the_need() -> None:
    """Goal: the message. Method: an ordinary user with 64 KiB of RLIMIT_MEMLOCK, in a child."""
    if os.getuid() != 0:
        pytest.skip("needs root to become an ordinary user with a limit of its own")
    code = (
        "import mmap, os, resource\n"
        "from kvio.uring import Ring\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "ring = Ring(4)\n"
        "ring.register_buffers([mmap.mmap(-1, 32768)]); ring.unregister_buffers()\n"
        "try: ring.register_buffers([mmap.mmap(-1, 1 << 20)])\n"
        "except OSError as error: print(error.errno, error)\n"
        "ring.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{errno.ENOMEM} ")
    assert "1048576 bytes are to be locked and RLIMIT_MEMLOCK" in done.stdout
    assert "is 65536 bytes" in done.stdout


def test_driver_command_reaches_the_driver(ring: Ring, file: int) -> None:
    """Goal: URING_CMD arrives. Method: a file system that has none says so; sizes are checked."""
    ring.prep_uring_cmd(file, 0x1234, b"\0" * 16, buffers=[bytearray(8)])
    assert result(ring) in (-errno.EOPNOTSUPP, -errno.ENOTTY, -errno.EINVAL)
    with pytest.raises(ValueError, match="see SQE128"):
        ring.prep_uring_cmd(file, 0, b"\0" * 17)
    memory = bytearray(8)
    assert address_of(memoryview(memory)[3:]) == address_of(memory) + 3


def test_wide_entry_holds_its_command_and_nothing_older(file: int) -> None:
    """Goal: the layout of struct io_uring_sqe. Method: read the entry's bytes in the ring."""
    command = bytes(range(1, 81))
    with Ring(1, flags=SetupFlags.SQE128) as ring:
        entry = ffi.buffer(ffi.cast("char *", ring._ring.sq.sqes), 128)
        token = ring.prep_uring_cmd(file, 0x1234, command, buf_index=7)
        opcode, fd, cmd_op, flags = struct.unpack_from("<B3xiI16xI", entry, 0)
        assert (opcode, fd, cmd_op, flags) == (Op.URING_CMD, file, 0x1234, 1)
        assert struct.unpack_from("<QH", entry, 32) == (token, 7)
        assert entry[48:128] == command
        ring.discard()
        ring.prep_uring_cmd(file, 0, b"\xff" * 4)
        assert entry[48:128] == b"\xff" * 4 + bytes(76)
        ring.discard()
        ring.prep_nop()
        assert entry[64:128] == bytes(64)
        assert result(ring) == 0


# --- bad arguments ---


def test_bad_setup_is_refused_by_us_or_by_the_kernel() -> None:
    for entries in (0, -1, 1 << 32, 1.5):
        with pytest.raises(ValueError, match="entries must be"):
            Ring(entries)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NO_SQARRAY"):
        Ring(4, flags=SetupFlags.NO_SQARRAY)
    for flags in (SetupFlags.DEFER_TASKRUN, 1 << 30):
        with pytest.raises(OSError, match=r"capabilities\(\) says which flags") as caught:
            Ring(4, flags=flags)
        assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="io_uring_setup") as caught:
        Ring(1 << 20)
    assert caught.value.errno == errno.EINVAL


def test_bad_requests_complete_with_the_kernel_errno(ring: Ring, file: int) -> None:
    ring.prep_read(1 << 20, bytearray(8), 0)
    assert result(ring) == -errno.EBADF
    fd = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
    ring.prep_read(fd, memoryview(mmap.mmap(-1, 4096))[:512], 1)
    cqe = (ring.submit(), ring.wait_cqe(timeout=10))[1]
    os.close(fd)
    assert cqe.res == -errno.EINVAL
    assert isinstance(cqe.error, OSError)
    assert cqe.error.errno == errno.EINVAL
    ring.prep_openat("/nonexistent/file", os.O_RDONLY, dir_fd=AT_FDCWD)
    assert result(ring) == -errno.ENOENT


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_bad_timeout_is_refused(ring: Ring, timeout: float) -> None:
    for wait in (ring.wait_cqe, ring.submit_and_wait):
        with pytest.raises(ValueError, match="timeout must be"):
            wait(timeout=timeout)
    with pytest.raises(ValueError, match="number of seconds"):
        ring.prep_timeout(timeout)
    with pytest.raises(ValueError, match="cq_entries 16"):
        ring.wait_cqes(17)
