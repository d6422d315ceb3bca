"""The verdict on what this machine has not got: device mapper, md, NVMe multipath, broken tables.

Method: a made-up /sys and /proc that describes a real loop device as something else. The same tree
without the trouble must give a clean verdict, so that each test can fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cdevice import loop_device
from tests.unit.test_safety import MIB, verdict


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    return path


class FakeRoot:
    """A directory with the parts of /sys and /proc that the inspection reads, for a real device."""

    def __init__(self, top: Path, device: str, name: str) -> None:
        self.top = top
        self.disk = top / "sys/devices/fake" / name
        self.write(self.disk / "uevent", f"DEVNAME={name}\n")
        self.write(self.disk / "size", str(64 * MIB // 512))
        self.write(self.disk / "ro", "0")
        self.write(self.disk / "hidden", "0")
        (self.disk / "holders").mkdir()
        (top / "sys/block").mkdir(parents=True)
        rdev = os.stat(device).st_rdev
        self.number(self.disk, os.major(rdev), os.minor(rdev))
        self.write(top / "proc/self/mountinfo", "")
        self.write(top / "proc/swaps", "Filename Type Size Used Priority\n")

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def number(self, directory: Path, major: int, minor: int) -> None:
        self.write(directory / "dev", f"{major}:{minor}\n")
        link = self.top / f"sys/dev/block/{major}:{minor}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)

    def mounts(self, *lines: str) -> None:
        self.write(self.top / "proc/self/mountinfo", "".join(f"{line}\n" for line in lines))


@pytest.fixture
def fake(image: Path, tmp_path: Path) -> Iterator[tuple[str, FakeRoot]]:
    with loop_device(image) as device:
        yield device, FakeRoot(tmp_path / "root", device, "nvme0n1")


@pytest.mark.root
def test_fake_tree_of_a_free_device_is_free(fake: tuple[str, FakeRoot]) -> None:
    device, root = fake
    assert verdict(device, root.top) == (set(), "")


@pytest.mark.root
@pytest.mark.parametrize(
    ("holder", "attribute", "value", "said"),
    [
        ("dm-3", "dm/name", "vg0-data", "dm-3 (vg0-data)"),
        ("md127", "md/level", "raid1", "md127 (raid1)"),
        ("bcache0", None, "", "bcache0"),
    ],
)
def test_holder_is_named(
    holder: str, attribute: str | None, value: str, said: str, fake: tuple[str, FakeRoot]
) -> None:
    device, root = fake
    (root.disk / "holders" / holder).mkdir()
    if attribute:
        root.write(root.top / "sys/block" / holder / attribute, f"{value}\n")
    reasons, text = verdict(device, root.top)
    assert reasons == {"HELD"}
    assert f"nvme0n1 is held by {said}" in text


@pytest.mark.root
def test_holder_of_a_partition_counts_for_the_disk(fake: tuple[str, FakeRoot]) -> None:
    device, root = fake
    part = root.disk / "nvme0n1p2"
    root.write(part / "partition", "2")
    root.write(part / "start", "2048")
    root.number(part, 259, 77)
    (part / "holders/dm-0").mkdir(parents=True)
    root.mounts("30 1 259:77 / /srv rw - xfs /dev/nvme0n1p2 rw")
    reasons, text = verdict(device, root.top)
    assert reasons == {"PARTITIONED", "PARTITION_MOUNTED", "HELD"}
    assert "nvme0n1p2 is held by dm-0" in text
    assert "nvme0n1p2 is mounted on /srv (xfs)" in text


@pytest.mark.root
@pytest.mark.parametrize("how", ["hidden", "name"])
def test_leg_of_a_multipath_head_is_refused(how: str, image: Path, tmp_path: Path) -> None:
    with loop_device(image) as device:
        root = FakeRoot(tmp_path / "root", device, "nvme0c1n1" if how == "name" else "nvme9n1")
        if how == "hidden":
            root.write(root.disk / "hidden", "1\n")
        reasons, text = verdict(device, root.top)
    assert reasons == {"HIDDEN_PATH"}
    assert "head" in text


@pytest.mark.root
def test_read_only_flag_of_sysfs_is_enough(fake: tuple[str, FakeRoot]) -> None:
    device, root = fake
    root.write(root.disk / "ro", "1\n")
    assert verdict(device, root.top)[0] == {"READ_ONLY"}


@pytest.mark.root
@pytest.mark.parametrize("missing", ["sys/dev", "proc/self/mountinfo", "sys/block"])
def test_what_cannot_be_looked_at_is_refused(missing: str, fake: tuple[str, FakeRoot]) -> None:
    device, root = fake
    victim = root.top / missing
    if victim.is_dir():
        shutil.rmtree(victim)
    else:
        victim.unlink()
    assert verdict(device, root.top)[0] == {"UNREADABLE"}


@pytest.mark.root
def test_kernel_without_swap_is_no_reason(fake: tuple[str, FakeRoot]) -> None:
    device, root = fake
    (root.top / "proc/swaps").unlink()
    assert verdict(device, root.top) == (set(), "")


@pytest.mark.root
def test_strange_lines_of_the_tables_do_no_harm(fake: tuple[str, FakeRoot]) -> None:
    device, root = fake
    root.mounts("", "30", "30 1 259", "30 1 259:0 / /x rw", "x y z - -", "1 2 3:4 / /a b - ", " - ")
    root.write(root.top / "proc/swaps", "Filename\n\n/\\\n/gone partition 1 0 -2\n/\\9 file\n")
    assert verdict(device, root.top) == (set(), "")


@pytest.mark.root
def test_more_reasons_than_fit_are_cut_at_a_line(fake: tuple[str, FakeRoot]) -> None:
    device, root = fake
    for number in range(400):
        (root.disk / "holders" / f"dm-{number}").mkdir()
    reasons, text = verdict(device, root.top)
    assert reasons == {"HELD"}
    assert len(text) < 2048
    assert all(line.startswith("nvme0n1 is held by dm-") for line in text.splitlines())
