"""The support that other tests stand on does what it says: devices have their sizes, caps really
cap, and nothing stays behind, also when the process is killed. Faults: test_support_faults.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bench.fio import run_fio
from kvio.testing import LoopDevice, LoopDevices, throttle
from tests.support import images
from tests.support.rawio import eventually, opened, read, write
from tests.support.user import ordinary_user, run_as_user

MIB = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]

root = pytest.mark.root


# --- loop devices ---


@root
@pytest.mark.parametrize("sector", [512, 4096])
def test_loop_devices_have_size_sector_and_direct_io(sector: int) -> None:
    with LoopDevices(3, 8 * MIB, sector=sector) as loops:
        assert len(set(loops.paths)) == 3
        for path in loops.paths:
            queue = Path("/sys/block", os.path.basename(path), "queue/logical_block_size")
            assert int(queue.read_text()) == sector
            with opened(path) as fd:
                assert os.lseek(fd, 0, os.SEEK_END) == 8 * MIB
                assert write(fd, MIB, b"k" * 4096) == 4096
                assert read(fd, MIB, 4096) == b"k" * 4096
        assert loops.direct


@root
def test_loop_devices_backing_shows_the_same_bytes() -> None:
    with LoopDevices(1, 4 * MIB) as loops:
        with open(loops.backing[0], "r+b") as behind:
            behind.write(b"behind its back")
        with opened(loops.paths[0]) as fd:
            assert read(fd, 0, 512).startswith(b"behind its back")


@root
def test_loop_devices_are_gone_after_an_exception() -> None:
    devices = []

    def interrupted() -> None:
        with LoopDevices(2, 4 * MIB) as loops:
            devices.extend(loops.devices)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(devices) == 2
    assert not any(device.attached for device in devices)


@root
def test_loop_device_is_gone_after_kill() -> None:
    """Goal: SIGKILL leaves no device. Method: a child makes one, says its name and is killed."""
    code = """
        import sys, time
        from kvio.testing import LoopDevices
        loops = LoopDevices(1, 1 << 20)
        print(loops.paths[0], flush=True)
        time.sleep(60)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    with child:
        assert child.stdout is not None
        backing = Path("/sys/block", os.path.basename(child.stdout.readline().strip()), "loop")
        assert (backing / "backing_file").exists()
        child.send_signal(signal.SIGKILL)
    eventually(lambda: not (backing / "backing_file").exists(), "loop device detached")


@root
def test_loop_device_held_open_by_others_is_named() -> None:
    loop = LoopDevices(1, MIB)
    device = loop.devices[0]
    with opened(device.path, os.O_RDONLY), pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvio.testing._DETACH_SECONDS", 0.05)
        with pytest.warns(ResourceWarning, match=f"pid {os.getpid()}"):
            loop.close()
    eventually(lambda: not device.attached, "detached once it is closed")


@root
def test_read_only_loop_device_refuses_writing(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(MIB))
    with LoopDevice(image, read_only=True) as loop:
        # Linux lets a read-only disk be opened for writing (its holder may make it writable
        # again); it is the write that fails
        with opened(loop.path) as fd:
            with pytest.raises(PermissionError):
                write(fd, 0, b"w" * 512)
            assert read(fd, 0, 512) == bytes(512)
    assert image.read_bytes() == bytes(MIB)


@pytest.mark.parametrize(("n", "size", "sector"), [(0, MIB, 512), (1, 1000, 512), (1, 512, 4096)])
def test_loop_devices_refuse_bad_sizes(n: int, size: int, sector: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        LoopDevices(n, size, sector=sector)


def test_loop_device_refuses_odd_sector(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sector is 513"):
        LoopDevice(tmp_path / "x", sector=513)


# --- throttle ---


@root
def test_throttle_holds_fio_to_its_cap() -> None:
    """Goal: 250 MiB/s is what a capped device gives. Method: fio, 256 KiB at depth 8, 2 s."""
    with LoopDevices(1, 64 * MIB) as loops, throttle(loops.paths, read_bps=250 * MIB):
        result = run_fio(loops.paths, rw="randread", bs="256k", iodepth=8, runtime=2, size=64 * MIB)
    assert result.read.bandwidth / MIB == pytest.approx(250, rel=0.12)


@root
def test_throttle_caps_writes_and_lifts_at_the_end() -> None:
    def seconds(path: str) -> float:
        with opened(path) as fd:
            start = time.monotonic()
            for index in range(64):
                write(fd, index * 128 * 1024, b"w" * 128 * 1024)
            return time.monotonic() - start

    group = Path("/proc/self/cgroup").read_text()
    with LoopDevices(1, 16 * MIB) as loops:
        with throttle(loops.paths, write_bps=16 * MIB):
            capped = seconds(loops.paths[0])
        free = seconds(loops.paths[0])
    assert capped > 0.3, "8 MiB at 16 MiB/s take about half a second"
    assert free < capped / 2
    assert Path("/proc/self/cgroup").read_text() == group


@root
def test_throttle_nests_for_other_devices() -> None:
    """Goal: an inner block keeps the outer cap. Method: iops caps of two devices, timed reads."""

    def seconds(path: str) -> float:
        with opened(path) as fd:
            start = time.monotonic()
            for _ in range(20):
                read(fd, 0, 4096)
            return time.monotonic() - start

    with LoopDevices(2, MIB) as loops:
        outer, inner = loops.paths
        with throttle([outer], read_iops=40):
            with throttle([inner], read_iops=40):
                assert seconds(outer) > 0.2
                assert seconds(inner) > 0.2
            assert seconds(outer) > 0.2
            assert seconds(inner) < 0.2


def test_throttle_refuses_nonsense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one limit"), throttle(["/dev/null"]):
        pass
    with pytest.raises(ValueError, match="positive"), throttle(["/dev/null"], read_bps=0):
        pass
    plain = tmp_path / "plain"
    plain.touch()
    with pytest.raises(OSError, match="block device"), throttle([str(plain)], read_bps=1):
        pass


def fake_cgroup(tmp_path: Path, controllers: str) -> Path:
    (tmp_path / "cgroup.controllers").write_text(controllers)
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    return tmp_path


@root
def test_throttle_speaks_cgroup_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: a folder stands for the mount; what is written there is what v2 documents."""
    top = fake_cgroup(tmp_path, "cpu io memory")
    monkeypatch.setattr("kvio.testing._leave", lambda group, home: None)
    with LoopDevices(1, MIB) as loops:
        number = os.stat(loops.paths[0]).st_rdev
        with throttle(loops.paths, read_bps=1000, write_iops=7, root=str(top)):
            group = top / f"kvio-throttle-{os.getpid()}"
            limit = f"{os.major(number)}:{os.minor(number)} rbps=1000 wiops=7"
            assert (group / "io.max").read_text() == limit
            assert (group / "cgroup.procs").read_text() == str(os.getpid())
    assert (top / "cgroup.subtree_control").read_text() == "+io"


@root
def test_throttle_says_when_the_kernel_cannot(tmp_path: Path) -> None:
    with LoopDevices(1, MIB) as loops:
        with pytest.raises(OSError, match="neither cgroup v1"):
            with throttle(loops.paths, read_bps=1, root=str(tmp_path)):
                pass
        with pytest.raises(OSError, match="no io controller"):
            with throttle(loops.paths, read_bps=1, root=str(fake_cgroup(tmp_path, "cpu"))):
                pass


# --- file systems, zram, ordinary users ---


@root
@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs"])
def test_mounted_file_system_is_there_and_gone(kind: str) -> None:
    with images.mounted(kind, size_bytes=320 * MIB) as folder:
        assert os.path.ismount(folder)
        (folder / "page").write_bytes(b"x" * 4096)
    assert not folder.exists()


@root
def test_full_file_system_has_no_space() -> None:
    with images.mounted("tmpfs", size_bytes=2 * MIB) as folder, images.full(folder):
        with pytest.raises(OSError, match="No space"):
            (folder / "more").write_bytes(bytes(4096))


@root
def test_formatted_device_carries_a_signature() -> None:
    with images.formatted("ext4", size_bytes=16 * MIB) as path, opened(path, os.O_RDONLY) as fd:
        assert os.pread(fd, 2, 1080) == b"\x53\xef"


def test_zram_device_takes_direct_io(zram: str) -> None:
    with opened(zram) as fd:
        assert write(fd, 0, b"z" * 4096) == 4096
        assert read(fd, 0, 4096) == b"z" * 4096


@root
def test_ordinary_user_has_no_privilege_and_the_given_limit() -> None:
    code = """
        import os, resource, kvio.testing
        capabilities = int(open("/proc/self/status").read().split("CapEff:")[1].split()[0], 16)
        print(os.getuid(), capabilities & ~4, *resource.getrlimit(resource.RLIMIT_MEMLOCK))
        try:
            kvio.testing.LoopDevices(1, 1 << 20)
        except PermissionError:
            print("refused")
    """
    outcome = run_as_user(textwrap.dedent(code), memlock_bytes=65536)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split() == [str(ordinary_user()[0]), "0", "65536", "65536", "refused"]
