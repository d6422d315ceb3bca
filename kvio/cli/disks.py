"""What the kernel counted on the block devices under the members (fio's disk_util)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_FIELDS = (
    "read_ios",
    "read_merges",
    "read_sectors",
    "read_ticks",
    "write_ios",
    "write_merges",
    "write_sectors",
    "write_ticks",
    "in_flight",
    "io_ticks",
    "in_queue",
)


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Counters of one block device over a run; ticks in milliseconds, util in percent."""

    name: str
    read_ios: int
    write_ios: int
    read_merges: int
    write_merges: int
    read_ticks: int
    write_ticks: int
    in_queue: int
    util: float


def _device_of(path: str) -> Path | None:
    """sysfs directory of the device that a path is, or lies on; a partition's whole disk."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    number = info.st_rdev if stat.S_ISBLK(info.st_mode) else info.st_dev
    found = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not found.exists():
        return None  # tmpfs, overlay, network file systems
    resolved = found.resolve()
    return resolved.parent if (resolved / "partition").exists() else resolved


def read(paths: Iterable[str]) -> dict[Path, dict[str, int]]:
    """The counters of every device under the paths."""
    found: dict[Path, dict[str, int]] = {}
    for path in paths:
        device = _device_of(path)
        if device is None or device in found:
            continue
        try:
            values = [int(word) for word in (device / "stat").read_text().split()]
        except (OSError, ValueError):
            continue
        found[device] = dict(zip(_FIELDS, values, strict=False))
    return found


def use_since(before: dict[Path, dict[str, int]], seconds: float) -> list[DiskUse]:
    """The difference to now."""
    uses = []
    for device, then in before.items():
        try:
            values = [int(word) for word in (device / "stat").read_text().split()]
        except (OSError, ValueError):
            continue
        now = dict(zip(_FIELDS, values, strict=False))
        part = {name: now[name] - then[name] for name in then}
        util = min(100.0, part["io_ticks"] / (seconds * 10)) if seconds > 0 else 0.0
        uses.append(
            DiskUse(
                device.name,
                part["read_ios"],
                part["write_ios"],
                part["read_merges"],
                part["write_merges"],
                part["read_ticks"],
                part["write_ticks"],
                part["in_queue"],
                util,
            )
        )
    return uses
