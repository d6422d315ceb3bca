"""The fault device (tests.support.faultdev): faults really arrive, and nothing of it outlives its
process, also when that is killed in the middle of a stall."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.faultdev import FaultDevice
from tests.support.rawio import eventually, opened, read, write

MIB = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]

root = pytest.mark.root


def test_fault_eio_arrives_where_it_was_put(fault_device: FaultDevice) -> None:
    fault = fault_device.fail("read", offset=MIB, length=4096)
    with opened(fault_device.device) as fd:
        with pytest.raises(OSError, match="Input/output") as caught:
            read(fd, MIB, 4096)
        assert caught.value.errno == errno.EIO
        assert len(read(fd, MIB + 4096, 4096)) == 4096
        assert fault.hits >= 1
        fault.remove()
        assert len(read(fd, MIB, 4096)) == 4096


def test_fault_other_errnos_and_counts_arrive(fault_file: FaultDevice) -> None:
    fault_file.fail("write", code=errno.ENOSPC, times=1)
    with opened(fault_file.path) as fd:
        with pytest.raises(OSError, match="No space"):
            write(fd, 0, bytes(4096))
        assert write(fd, 0, bytes(4096)) == 4096


def test_fault_flush_fails(fault_device: FaultDevice) -> None:
    with opened(fault_device.device) as fd:
        write(fd, 0, bytes(4096))
        os.fsync(fd)
        fault_device.fail("flush", times=1)
        with pytest.raises(OSError, match="Input/output"):
            os.fsync(fd)


def test_fault_stall_lasts_until_released_and_stalls_nothing_else(
    fault_device: FaultDevice,
) -> None:
    stall = fault_device.stall("read", offset=0, length=4096)
    with opened(fault_device.device) as fd, ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(read, fd, 0, 4096)
        fault_device.wait_stalled(1)
        assert fault_device.stalled() == [["read", 0, 4096]]
        assert len(read(fd, 8192, 4096)) == 4096, "another offset goes through meanwhile"
        assert not stuck.done()
        assert stall.release() == 1
        assert len(stuck.result(20)) == 4096


def test_fault_stalled_writes_go_on_in_the_order_of_release(fault_device: FaultDevice) -> None:
    stall = fault_device.stall("write")
    with opened(fault_device.device) as fd, ThreadPoolExecutor(2) as pool:
        first = pool.submit(write, fd, 0, b"1" * 4096)
        fault_device.wait_stalled(1)
        second = pool.submit(write, fd, 65536, b"2" * 4096)
        fault_device.wait_stalled(2)
        stall.release(1)
        assert first.result(20) == 4096
        assert not second.done()
        stall.remove()
        assert second.result(20) == 4096


def test_fault_wait_stalled_times_out(fault_device: FaultDevice) -> None:
    with pytest.raises(TimeoutError, match="0 requests stalled"):
        fault_device.wait_stalled(1, timeout=0.05)


def test_fault_short_read_shows_through_the_file(fault_file: FaultDevice) -> None:
    fault_file.short("read", 1000, offset=0, length=4096, times=1)
    with opened(fault_file.path) as fd:
        assert len(read(fd, 0, 4096)) == 1000
        assert len(read(fd, 0, 4096)) == 4096


def test_fault_log_keeps_order_and_builds_crash_images(
    fault_device: FaultDevice, tmp_path: Path
) -> None:
    fault_device.record()
    with opened(fault_device.device) as fd:
        write(fd, 0, b"a" * 4096)
        os.fsync(fd)
        write(fd, 4096, b"b" * 4096)
        write(fd, 0, b"c" * 4096)
    log = fault_device.log()
    writes = [["write", 0, 4096], ["flush", 0, 0], ["write", 4096, 4096], ["write", 0, 4096]]
    assert log[:4] == writes
    fault_device.crash_image(tmp_path / "image", upto=4, without=[2])
    image = (tmp_path / "image").read_bytes()
    assert image[:4096] == b"c" * 4096
    assert image[4096:8192] == bytes(4096)
    fault_device.crash_image(tmp_path / "image", upto=1)
    assert (tmp_path / "image").read_bytes()[:4096] == b"a" * 4096


@root
def test_fault_device_goes_away_with_a_stall_pending() -> None:
    """Goal: a test that fails in a stall does not hang. Method: leave the block with one."""
    with FaultDevice(4 * MIB) as disk:
        folder = os.path.dirname(disk.path)
        disk.stall("read")
        fd = os.open(disk.device, os.O_RDONLY | os.O_DIRECT)
        stuck = threading.Thread(target=read, args=(fd, 0, 4096))
        stuck.start()
        disk.wait_stalled(1)
        # close() lets the read go on; then nobody holds the device any more
        threading.Thread(target=lambda: (stuck.join(20), os.close(fd))).start()
    stuck.join(20)
    assert not stuck.is_alive()
    assert not os.path.exists(folder)


@root
def test_fault_stall_ends_by_itself() -> None:
    """Goal: a test that forgets a stall does not hang. Method: 0.2 s instead of two minutes."""
    with FaultDevice(4 * MIB, loop=False, max_stall_seconds=0.2) as disk:
        fault = disk.stall("read")
        with opened(disk.path) as fd:
            start = time.monotonic()
            assert len(read(fd, 0, 4096)) == 4096
            assert time.monotonic() - start >= 0.19
        assert fault.hits == 1
        assert disk.stalled() == []


VICTIM = """
    import os, mmap, sys, threading, time
    from tests.support.faultdev import FaultDevice
    disk = FaultDevice(4 << 20)
    disk.stall("read")
    fd = os.open(disk.device, os.O_RDONLY | os.O_DIRECT)

    def read():
        os.preadv(fd, [mmap.mmap(-1, 4096)], 0)

    def report(child=0):
        print(os.path.dirname(disk.path), disk.device, disk._server.pid, child, flush=True)

    def report_stalled():
        disk.wait_stalled(1)
        report()

    match sys.argv[1]:
        case "main thread":
            threading.Thread(target=report_stalled).start()
            read()
        case "another thread":
            threading.Thread(target=read).start()
            report_stalled()
        case "forked child":
            if child := os.fork():
                report(child)
    time.sleep(60)
"""


@root
@pytest.mark.parametrize("where", ["main thread", "another thread", "forked child"])
def test_fault_device_is_gone_after_kill(where: str) -> None:
    """Goal: a killed test run leaves no mount, though a process with a thread in a stalled read
    cannot end, and a forked child keeps the control socket open. Method: kill one of each kind."""
    victim = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(VICTIM), where],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    with victim:
        assert victim.stdout is not None
        folder, device, server, child = victim.stdout.readline().split()
        victim.send_signal(signal.SIGKILL)
        victim.wait(20)
    eventually(lambda: not os.path.exists(folder), "mount point removed")
    if int(child):  # it holds the loop device, whose file then gives errors
        os.kill(int(child), signal.SIGKILL)
    eventually(lambda: not Path("/proc", server).exists(), "server ended")
    backing = Path("/sys/block", os.path.basename(device), "loop/backing_file")
    eventually(lambda: not backing.exists(), "loop device detached")
