"""kvio does not write where a write would destroy something, and says what is there.

Method: the real thing: devices that are mounted, swapped on, partitioned, held with O_EXCL,
read-only, shared by loop devices. A refusal must name what was found. What needs hardware that is
not here is in test_safety_sysfs.py; what the bytes say, in test_signature.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cdevice import core, inspect, loop_device, mounted, run, tool

MIB = 1 << 20


def names(reasons: int) -> set[str]:
    """The reason bits as words: {"MOUNTED", "HELD"}."""
    lib = core().lib
    bits = ("MOUNTED", "PARTITION_MOUNTED", "HELD", "PARTITIONED", "SIGNATURE", "HIDDEN_PATH",
            "READ_ONLY", "UNREADABLE", "BACKING_FILE")  # fmt: skip
    return {bit for bit in bits if reasons & getattr(lib, f"KVIO_UNSAFE_{bit}")}


def verdict(path: str | Path, root: str | Path = "") -> tuple[set[str], str]:
    reasons, text = inspect(path, root)
    assert bool(reasons) == bool(text), "every refusal has a text, and nothing else has"
    return names(reasons), text


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    return path


@pytest.fixture
def where(tmp_path: Path) -> Path:
    path = tmp_path / "mount point"  # a blank: the kernel escapes it in its tables
    path.mkdir()
    return path


@contextlib.contextmanager
def partitions(device: str, *starts_mib: int) -> Iterator[list[str]]:
    """Partitions of 8 MiB each, made in the kernel without a table on the device."""
    addpart, delpart = tool("addpart"), tool("delpart")
    made = []
    try:
        for number, start in enumerate(starts_mib, 1):
            argv = [addpart, device, str(number), str(start * 2048), str(8 * 2048)]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no partitions on {device}: {done.stderr.strip()}")
            made.append(number)
        yield [f"{device}p{number}" for number in made]
    finally:
        for number in made:
            run(delpart, device, str(number))


# ---- real devices ------------------------------------------------------------------------------


@pytest.mark.root
def test_blank_loop_device_and_file_are_free(image: Path, tmp_path: Path) -> None:
    assert verdict(image) == (set(), "")
    with loop_device(image) as device:
        assert verdict(device) == (set(), "")
        link = tmp_path / "link"
        link.symlink_to(device)
        assert verdict(link) == (set(), "")


@pytest.mark.root
def test_mounted_device_and_the_file_under_it_are_refused(image: Path, where: Path) -> None:
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", image)
    with loop_device(image) as device:
        assert verdict(device)[0] == {"SIGNATURE"}
        with mounted(device, where):
            reasons, text = verdict(device)
            assert "MOUNTED" in reasons
            assert f"mounted on {where} (ext4)" in text
            reasons, text = verdict(image)
            assert {"MOUNTED", "BACKING_FILE"} <= reasons
            assert Path(device).name in text


@pytest.mark.root
def test_mount_of_another_namespace_is_seen_by_the_claim(image: Path, where: Path) -> None:
    """The mount table of this process does not list it; O_EXCL does not care."""
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", image)
    script = 'mount "$0" "$1" && echo ready && read -r line'
    with loop_device(image) as device:
        argv = [tool("unshare"), "-m", "sh", "-c", script, device, str(where)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            ready = other.stdout.readline()
            try:
                if ready == b"ready\n":
                    reasons, text = verdict(device)
                    assert "HELD" in reasons
                    assert "exclusively" in text
            finally:
                other.stdin.close()
        if ready != b"ready\n":
            pytest.skip("cannot mount in a namespace of its own")


@pytest.mark.root
def test_every_device_of_a_mounted_btrfs_is_refused(tmp_path: Path, where: Path) -> None:
    """btrfs mounts under a device number of its own and names one of its devices only."""
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        with file.open("wb") as out:
            out.truncate(160 * MIB)
    with loop_device(files[0]) as first, loop_device(files[1]) as second:
        run(tool("mkfs.btrfs"), "-q", "-f", first, second)
        run(tool("btrfs"), "device", "scan", first, second)
        with mounted(first, where):
            verdicts = [verdict(first), verdict(second)]
            assert all(reasons & {"MOUNTED", "HELD"} for reasons, _ in verdicts), verdicts
            assert any("(btrfs)" in text for _, text in verdicts)


@pytest.mark.root
def test_disk_with_a_mounted_partition_is_refused(image: Path, where: Path) -> None:
    with loop_device(image) as disk, partitions(disk, 8, 32) as (first, second):
        reasons, text = verdict(disk)
        assert "PARTITIONED" in reasons
        assert f"{Path(first).name} {Path(second).name}" in text
        assert verdict(second) == (set(), ""), "a free partition is a member like any other"
        run(tool("mke2fs"), "-q", "-F", "-t", "ext4", first)
        with mounted(first, where):
            reasons, text = verdict(disk)
            assert {"PARTITION_MOUNTED", "PARTITIONED"} <= reasons
            assert f"{Path(first).name} is mounted on {where} (ext4)" in text
            assert "MOUNTED" in verdict(first)[0]
            assert verdict(second) == (set(), "")
            assert "PARTITION_MOUNTED" in verdict(image)[0]


@pytest.mark.root
def test_partition_of_a_mounted_disk_is_refused(image: Path, where: Path) -> None:
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", image)
    with loop_device(image) as disk, partitions(disk, 8) as (part,), mounted(disk, where):
        reasons, text = verdict(part)
        assert "MOUNTED" in reasons
        assert f"{Path(disk).name} is mounted on {where}" in text


@pytest.mark.root
@pytest.mark.parametrize("on", ["device", "file"])
def test_swap_is_refused(on: str, image: Path) -> None:
    image.write_bytes(bytes(16 * MIB))  # no holes: the kernel swaps to blocks, not to a file
    run(tool("mkswap"), image)
    image.chmod(0o600)
    with loop_device(image) if on == "device" else contextlib.nullcontext(str(image)) as target:
        argv = [tool("swapon"), target]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot swap on a {on} here: {done.stderr.strip()}")
        try:
            for path in {str(target), str(image)}:
                reasons, text = verdict(path)
                assert "MOUNTED" in reasons
                assert "in use as swap" in text
        finally:
            run(tool("swapoff"), target)


@pytest.mark.root
def test_device_that_somebody_holds_is_refused(image: Path) -> None:
    with loop_device(image) as device:
        holder = os.open(device, os.O_RDONLY | os.O_EXCL)
        try:
            reasons, text = verdict(device)
            assert reasons == {"HELD"}
            assert "exclusively" in text
        finally:
            os.close(holder)
        assert verdict(device) == (set(), "")


@pytest.mark.root
def test_read_only_device_is_refused(image: Path) -> None:
    with loop_device(image, "--read-only") as device:
        assert "READ_ONLY" in verdict(device)[0]


@pytest.mark.root
def test_file_that_two_loop_devices_show_is_refused(image: Path) -> None:
    with loop_device(image) as first, loop_device(image) as second:
        for one, other in [(first, second), (second, first)]:
            reasons, text = verdict(one)
            assert reasons == {"BACKING_FILE"}
            assert Path(other).name in text
        reasons, text = verdict(image)
        assert reasons == {"BACKING_FILE"}
        assert Path(first).name in text
        assert Path(second).name in text


@pytest.mark.root
def test_loop_devices_over_different_parts_of_a_file_do_not_disturb_each_other(
    image: Path,
) -> None:
    half = str(32 * MIB)
    with loop_device(image, "--sizelimit", half) as low:
        with loop_device(image, "--offset", half) as high:
            assert verdict(low) == (set(), "")
            assert verdict(high) == (set(), "")
            with loop_device(image, "--offset", str(16 * MIB)) as across:
                assert verdict(low)[0] == verdict(high)[0] == {"BACKING_FILE"}
                assert verdict(across)[0] == {"BACKING_FILE"}


@pytest.mark.root
def test_unlinked_file_behind_two_loop_devices_is_still_one_file(image: Path) -> None:
    with loop_device(image) as first, loop_device(image) as second:
        image.unlink()
        assert Path(second).name in verdict(first)[1]


@pytest.mark.root
def test_loop_device_over_a_mounted_loop_device_is_refused(image: Path, where: Path) -> None:
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", image)
    with loop_device(image) as lower, loop_device(lower) as upper:
        assert "BACKING_FILE" in verdict(lower)[0]
        with mounted(lower, where):
            reasons, text = verdict(upper)
            assert "MOUNTED" in reasons
            assert f"{Path(lower).name} below it is mounted" in text


@pytest.mark.root
def test_loop_device_without_a_file_is_refused(image: Path) -> None:
    with loop_device(image) as device:
        pass
    reasons, text = verdict(device)
    assert reasons == {"UNREADABLE"}
    assert "no size" in text


def verdict_of_nobody(path: Path) -> str:
    """The reasons that user nobody gets, asked in a forked child."""
    core()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(write_end, " ".join(sorted(verdict(path)[0])).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.root
def test_file_that_this_user_may_not_write_is_refused(image: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become nobody")
    shared = Path("/dev/shm") / f"kvio-safety-{os.getpid()}"  # where nobody can reach it
    try:
        shutil.copy(image, shared)
        shared.chmod(0o444)
        assert verdict_of_nobody(shared) == "READ_ONLY"
        shared.chmod(0)
        assert verdict_of_nobody(shared) == "READ_ONLY UNREADABLE"
    finally:
        shared.unlink(missing_ok=True)


def test_zero_is_free_and_other_things_are_not_members(tmp_path: Path) -> None:
    assert verdict("/dev/zero") == (set(), "")
    os.mkfifo(tmp_path / "fifo")
    for path, error in [
        (tmp_path, IsADirectoryError),
        (tmp_path / "absent", FileNotFoundError),
        (tmp_path / "fifo", OSError),
        ("/dev/null", OSError),
    ]:
        with pytest.raises(error):
            inspect(path)
