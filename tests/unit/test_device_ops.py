"""What is done with open members: are two of them the same storage, discard, flush.

Method: files under several names, loop devices over parts of a file, partitions; then the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.cdevice import OFF, PREFER, core, loop_device, mounted, opened, tool
from tests.unit.test_safety import partitions

MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.write_bytes(os.urandom(MIB) * 8)
    return path


# ---- sameness ----------------------------------------------------------------------------------


def same(*paths: str | Path) -> bool:
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(opened(path, direct=PREFER)) for path in paths)
        forward, backward = core().lib.kvio_device_same(a, b), core().lib.kvio_device_same(b, a)
        assert forward == backward
        return bool(forward)


def test_one_file_under_two_names_is_the_same(image: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(image.read_bytes())
    (tmp_path / "symbolic").symlink_to(image)
    (tmp_path / "hard").hardlink_to(image)
    assert same(image, tmp_path / "symbolic")
    assert same(image, tmp_path / "hard")
    assert same(image, f"{tmp_path}/../{tmp_path.name}/image")
    assert not same(image, other)
    assert not same("/dev/zero", "/dev/zero")


@pytest.mark.root
def test_loop_devices_are_the_bytes_they_show(image: Path) -> None:
    half = str(4 * MIB)
    with loop_device(image) as whole, loop_device(image) as again:
        assert same(whole, whole)
        assert same(whole, again)
        assert same(whole, image)
        with loop_device(again, "--offset", half) as upper:
            assert same(whole, upper)
    with loop_device(image, "--sizelimit", half) as low:
        with loop_device(image, "--offset", half) as high:
            assert not same(low, high)
            assert same(low, image)
            assert same(high, image)


@pytest.mark.root
def test_partition_is_part_of_its_disk(tmp_path: Path) -> None:
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    with loop_device(image) as disk, partitions(disk, 8, 32) as (first, second):
        assert same(disk, first)
        assert same(disk, second)
        assert same(image, first)
        assert not same(first, second)


# ---- flush and discard -------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("on", ["device", "file"])
def test_discard_stays_within_its_range(on: str, image: Path) -> None:
    lib = core().lib
    before = image.read_bytes()
    with loop_device(image) if on == "device" else contextlib.nullcontext(image) as target:
        with opened(target, write=True, direct=PREFER) as dev:
            if not dev.can_discard:
                pytest.skip(f"no discard on this {on}")
            assert lib.kvio_device_discard(dev, MIB, MIB) == 0
            assert lib.kvio_device_flush(dev) == 0
            assert lib.kvio_device_discard(dev, 0, 0) == 0
            for offset, length in [(8 * MIB, 4096), (0, 8 * MIB + 1), (1 << 63, 1 << 63)]:
                assert lib.kvio_device_discard(dev, offset, length) == -errno.EINVAL
        with opened(target, direct=PREFER) as dev:
            assert lib.kvio_device_discard(dev, 0, 4096) == -errno.EBADF
    after = image.read_bytes()
    assert after[MIB : 2 * MIB] == bytes(MIB), "a hole reads as zeros"
    assert after[:MIB] + after[2 * MIB :] == before[:MIB] + before[2 * MIB :]


def test_discard_where_there_is_none_says_so() -> None:
    with opened("/dev/zero", write=True) as dev:
        assert core().lib.kvio_device_discard(dev, 0, 4096) == -errno.EOPNOTSUPP


@pytest.mark.root
def test_flush_error_comes_back(image: Path) -> None:
    """A full file system under a loop device: the write is accepted, the flush is not."""
    small = image.parent / "small"
    small.mkdir()
    with mounted("tmpfs", small, "-t", "tmpfs", "-o", "size=1m"):
        file = small / "file"
        with file.open("wb") as out:
            out.truncate(16 * MIB)
        with loop_device(file) as device, opened(device, write=True, direct=OFF) as dev:
            os.pwrite(dev.fd, b"x" * 4 * MIB, 0)
            assert core().lib.kvio_device_flush(dev) in (-errno.ENOSPC, -errno.EIO)
            subprocess.run([tool("blockdev"), "--flushbufs", device], check=False)
