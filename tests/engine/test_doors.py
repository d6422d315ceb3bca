"""What must not come in: members that are one storage, or in use, or hold something; offsets and
batches at the limits of what there is. Nothing is written and nothing stays open after a refusal.

Method: real devices and files. Arguments of the wrong type are in
tests/unit/test_core_arguments.py, the verdict about one device in tests/unit/test_safety.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import kvio
from kvio.testing import LoopDevice
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, Content, aligned, same, wait_until
from tests.support import images
from tests.unit.cdevice import loop_device, run, tool

MODES = pytest.mark.parametrize("mode", ["r", "rw"])
Mode = Literal["r", "rw"]


def digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refused(members: list[str], mode: Mode, **options: Any) -> kvio.KvioError:
    """The error of an open that must fail, and that must not have written anything."""
    before = [digest(path) for path in members]
    with pytest.raises(kvio.KvioError) as caught:
        kvio.Volume.open(members, **{"mode": mode, "direct": "prefer", **options})
    assert caught.value.op == "open"
    assert [digest(path) for path in members] == before
    return caught.value


# ---- one storage under two names --------------------------------------------------------------

NAMES: dict[str, Callable[[Path, str], list[str]]] = {
    "file twice": lambda folder, device: [str(folder / "a"), str(folder / "a")],
    "other spelling": lambda folder, device: [str(folder / "a"), f"{folder}/./x/../a"],
    "symlink": lambda folder, device: [str(folder / "a"), str(folder / "symlink")],
    "hard link": lambda folder, device: [str(folder / "hard"), str(folder / "a")],
    "among others": lambda folder, device: [str(folder / n) for n in ("a", "b", "hard")],
    "block device twice": lambda folder, device: [device, device],
    "symlink to the device": lambda folder, device: [device, str(folder / "to-device")],
    "other node of the device": lambda folder, device: [device, str(folder / "node")],
    "device and its file": lambda folder, device: [device, str(folder / "a")],
    "file and its device": lambda folder, device: [str(folder / "a"), device],
}


@pytest.fixture
def members(
    names: str, make_files: Callable[..., list[str]], require_root: None
) -> Iterator[list[str]]:
    """Files a and b and further names of a; where it is about devices, a loop device over a."""
    first = Path(make_files(2)[0])
    place = first.parent
    first.rename(place / "a")
    (place / "member1").rename(place / "b")
    (place / "x").mkdir()
    (place / "symlink").symlink_to("a")
    (place / "hard").hardlink_to(place / "a")
    if "device" not in names:
        yield NAMES[names](place, "")
        return
    with LoopDevice(place / "a") as loop:
        (place / "to-device").symlink_to(loop.path)
        os.mknod(place / "node", os.stat(loop.path).st_mode, os.stat(loop.path).st_rdev)
        yield NAMES[names](place, loop.path)


@pytest.mark.root
@MODES
@pytest.mark.parametrize("names", NAMES)
def test_same_storage_twice(names: str, mode: Mode, members: list[str]) -> None:
    """Refused also for reading: two members that are one would give every other unit twice."""
    under_device = mode == "rw" and names in ("device and its file", "file and its device")
    error = refused(members, mode)
    if under_device:  # the safety check finds it first, and may be overridden
        assert "behind the loop device" in str(error)
        error = refused(members, mode, allow_destroy=True)
    assert error.errno == errno.EEXIST, str(error)
    assert "list each member once" in str(error)
    assert members[0] in str(error)
    assert members[-1] in str(error)
    assert error.member == len(members) - 1
    again = refused(members, mode, allow_destroy=True)
    assert again.errno == errno.EEXIST, "no override makes one storage two"


@pytest.mark.root
def test_loop_devices_over_the_same_and_over_other_parts_of_a_file(
    make_files: Callable[..., list[str]], rng: np.random.Generator
) -> None:
    (path,) = make_files(1)
    half = str(2 * MIB)
    with loop_device(path, "--sizelimit", half) as low, loop_device(path, "--offset", half) as high:
        with kvio.Volume.open([low, high], mode="rw", stripe_unit=64 * KIB) as vol:
            Content(vol, rng).check(0, vol.size)  # the parts do not overlap
        with loop_device(path, "--offset", str(MIB)) as across:
            for members in ([low, across], [high, across], [across, path]):
                for mode in ("r", "rw"):
                    refused(members, mode)  # type: ignore[arg-type]
    with loop_device(path) as lower, loop_device(lower) as upper:
        refused([lower, upper], "r")
        refused([lower, upper], "rw")


@pytest.mark.root
def test_disk_and_its_partition(make_loops: Callable[..., list[str]]) -> None:
    (disk,) = make_loops(1, 16 * MIB)
    argv = [tool("addpart"), disk, "1", "2048", str(4 * 2048)]
    if (done := subprocess.run(argv, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no partitions on {disk}: {done.stderr.strip()}")
    try:
        part = f"{disk}p1"
        error = refused([disk, part], "r")
        assert error.errno == errno.EEXIST
        refused([disk, part], "rw")
        refused([disk], "rw")
        with kvio.Volume.open([part], mode="rw"):
            pass
    finally:
        remove = [tool("delpart"), disk, "1"]
        wait_until(lambda: subprocess.run(remove, check=False).returncode == 0, "it is removed")


# ---- members in use or with a content ---------------------------------------------------------


@pytest.mark.root
def test_mounted_device_is_for_reading_only(require_root: None) -> None:
    with images.formatted("ext4", size_bytes=16 * MIB) as device:
        with images.mounted("tmpfs", size_bytes=MIB) as where:
            run("mount", device, str(where))
            try:
                for options in ({}, {"allow_destroy": True}):
                    with pytest.raises(kvio.DeviceBusy, match=f"mounted on {where}") as caught:
                        kvio.Volume.open([device], mode="rw", **options)  # type: ignore[arg-type]
                    assert "nothing overrides" in str(caught.value)
                with kvio.Volume.open([device]) as vol:
                    assert vol.pread(aligned(MIB), 0) == MIB
            finally:
                run("umount", str(where))


@pytest.mark.root
def test_what_carries_a_signature_needs_the_word_for_it(
    make_loops: Callable[..., list[str]],
) -> None:
    """The refusal comes before anything is written to any member, also to the blank ones."""
    blank = make_loops(1)[0]
    with images.formatted("ext4", size_bytes=16 * MIB) as device:
        for members in ([device], [blank, device], [device, blank]):
            error = refused(members, "rw")
            assert isinstance(error, kvio.DeviceBusy)
            assert "ext" in str(error)
            assert "allow_destroy=True" in str(error)
            assert error.filename == device
            assert error.member == members.index(device)
        before = digest(device)
        with kvio.Volume.open([device, blank], mode="rw", allow_destroy=True) as vol:
            assert digest(device) == before, "opening alone destroys nothing"
            assert vol.pwrite(aligned(vol.size), 0) == vol.size
        assert digest(device) != before


@pytest.mark.root
def test_device_that_is_held(make_loops: Callable[..., list[str]], opened: Opener) -> None:
    """By somebody with O_EXCL, and by another volume of this process."""
    one, other = make_loops(2)
    holder = os.open(one, os.O_RDONLY | os.O_EXCL)
    try:
        for options in ({}, {"allow_destroy": True}):
            error = refused([other, one], "rw", **options)
            assert isinstance(error, kvio.DeviceBusy)
            assert (error.filename, error.member) == (one, 1)
        opened([other, one], mode="r").close()
    finally:
        os.close(holder)
    vol = opened([one, other])
    error = refused([other], "rw")
    assert isinstance(error, kvio.DeviceBusy)
    opened([other], mode="r").close()
    vol.close()
    opened([other])


@pytest.mark.root
def test_read_only_device(make_files: Callable[..., list[str]], opened: Opener) -> None:
    (path,) = make_files(1)
    with LoopDevice(path, read_only=True) as loop:
        for options in ({}, {"allow_destroy": True}):
            assert "read-only" in str(refused([loop.path], "rw", **options))
        vol = opened([loop.path], mode="r")
        assert vol.pread(aligned(4096), 0) == 4096
        vol.close()


@MODES
def test_things_that_are_no_members(
    mode: Mode, tmp_path: Path, make_files: Callable[..., list[str]]
) -> None:
    good = make_files(2)
    (tmp_path / "empty").touch()
    (tmp_path / "small").write_bytes(b"x" * 8192)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, words in [
            ("", "directory"),
            ("empty", "empty"),
            ("small", "less than one stripe unit"),
            ("fifo", "FIFO"),
            ("dangling", "No such file"),
            ("circle", "symbolic links"),
            ("socket", "socket"),
            ("member0/below", "Not a directory"),
            ("absent", "check the path"),
            ("/dev/null", "character device"),
            ("x" * 300, "File name too long"),
        ]:
            bad = str(tmp_path / name)
            with pytest.raises(kvio.KvioError, match=words) as caught:
                kvio.Volume.open([*good, bad], mode=mode, direct="prefer")
            assert bad in str(caught.value)
            assert caught.value.op == "open"
            if name != "small":  # compared with the others once all are open
                assert (caught.value.member, caught.value.filename) == (2, bad)
    with pytest.raises(kvio.KvioError, match="empty path"):
        kvio.Volume.open([*good, ""], mode=mode, direct="prefer")


def test_members_that_were_opened_before_the_bad_one_are_let_go(
    make_files: Callable[..., list[str]], tmp_path: Path
) -> None:
    good = make_files(3)
    for _ in range(50):  # descriptors are counted at the end of the test
        with pytest.raises(kvio.KvioError):
            kvio.Volume.open([*good, tmp_path / "absent"], mode="rw", direct="prefer")
    with kvio.Volume.open(good, mode="rw", direct="prefer"):
        pass


def test_as_many_members_as_there_can_be(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened(make_files(256, 16 * KIB), stripe_unit=4096)
    content = Content(vol, rng)
    places = rng.permutation(vol.size // 4096)[:500] * 4096
    into = aligned(500 * 4096)
    assert (vol.submit_read(places, into).wait(60) == 4096).all()
    expected = content.image.reshape(-1, 4096)[places // 4096]
    same(into, expected.reshape(-1), "pages of 256 members")
    content.check(0, vol.size)


# ---- offsets and batches at the limits --------------------------------------------------------


def test_offsets_up_to_the_largest_number(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened(make_files(2), stripe_unit=64 * KIB)
    content = Content(vol, rng)
    last = 2**63 - 1
    assert vol.pread(aligned(4096), last - 4096) == 0
    for offset in (last, last - 4095, last - 100):
        for call in (vol.pread, vol.pwrite):
            with pytest.raises((ValueError, kvio.KvioError)):
                call(aligned(8192), offset)
    for offset in (-1, -4096, -(2**63), 2**63, 2**64, 2**70):
        for call in (vol.pread, vol.pwrite):
            with pytest.raises(ValueError):
                call(aligned(4096), offset)
        for batch in (vol.read_batch, vol.submit_read, vol.write_batch, vol.submit_write):
            with pytest.raises((ValueError, OverflowError)):
                batch([0, offset], [aligned(4096), aligned(4096)])
    content.check(0, vol.size)


def test_length_beyond_the_end_is_cut_to_what_there_is(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    """Lengths of 2^62 bytes claimed for memory that holds the volume: nothing else is touched."""
    vol = opened(make_files(2), stripe_unit=64 * KIB)
    content = Content(vol, rng)
    memory = aligned(vol.size + 8192)
    memory[:] = 0xEE
    pair = (np.array([memory.ctypes.data], np.uint64), np.array([2**62], np.uint64))
    assert vol.read_batch([0], pair).tolist() == [vol.size]
    same(memory[: vol.size], content.image, "the whole volume")
    assert (memory[vol.size :] == 0xEE).all()
    assert vol.write_batch([0], pair).tolist() == [-errno.ENOSPC]
    content.check(0, vol.size)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("way", ["blocking", "submit"])
def test_batch_of_100_000_operations(
    way: str,
    engine: str,
    make_files: Callable[..., list[str]],
    opened: Opener,
    rng: np.random.Generator,
) -> None:
    """Every page many times over, in random order, a few of them beyond the end."""
    vol = opened(make_files(2, 2 * MIB), engine=engine, stripe_unit=64 * KIB, direct=False)
    content = Content(vol, rng)
    n, page = 100_000, 512
    places = rng.integers(0, vol.size // page, n) * page
    beyond = rng.choice(n, 100, replace=False)
    places[beyond] = vol.size + 4096
    into = aligned(n * page)
    if way == "blocking":
        got = vol.read_batch(places, into)
    else:
        got = vol.submit_read(places, into).wait(120)
    expected = np.full(n, page)
    expected[beyond] = 0
    assert np.array_equal(got, expected)
    kept = np.delete(np.arange(n), beyond)
    pages = content.image.reshape(-1, page)[places[kept] // page]
    assert np.array_equal(into.reshape(n, page)[kept], pages)
    stats = vol.stats()
    assert (stats.read.ops, stats.read.bytes) == (n, (n - 100) * page)


def test_100_000_failures_are_each_told(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    vol = opened(make_files(1))
    n = 100_000
    failed: list[kvio.KvioError] = []
    page = aligned(4096)
    pair = (np.full(n, page.ctypes.data, np.uint64), np.full(n, 4096, np.uint64))
    got = vol.write_batch(np.full(n, vol.size), pair, errors=failed)
    assert (got == -errno.ENOSPC).all()
    assert [error.index for error in failed] == list(range(n))


def test_disk_space_for_members_is_taken_at_once(tmp_path: Path, require_root: None) -> None:
    """create() on a file system that is too small leaves nothing behind."""
    with images.mounted("tmpfs", size_bytes=8 * MIB) as folder:
        with pytest.raises(kvio.KvioError) as caught:
            kvio.Volume.create([folder / "a", folder / "b", folder / "c"], size_bytes=3 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert list(folder.iterdir()) == []
        assert shutil.disk_usage(folder).used == 0
