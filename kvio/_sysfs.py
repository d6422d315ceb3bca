"""Reading sysfs: one directory, its text files, its children. Absent is None, never an exception.

A device may vanish between two reads (a path that is lost, a loop device that is detached); what
cannot be read any more is absent.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["Directory", "children", "identifier"]


class Directory:
    """A directory of sysfs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    def __truediv__(self, name: str) -> Directory:
        return Directory(self.path / name)

    def exists(self, name: str) -> bool:
        """There is a file, a directory or a link of this name."""
        return (self.path / name).exists()

    def text(self, name: str) -> str | None:
        """Contents of a file without blanks around; None when absent or empty."""
        try:
            return (self.path / name).read_text(errors="replace").strip() or None
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Contents of a file as a decimal number; None when absent or something else."""
        try:
            return int(self.text(name) or "")
        except ValueError:
            return None

    def resolve(self, name: str) -> Directory | None:
        """The directory that a link points to."""
        link = self.path / name
        return Directory(link.resolve()) if link.exists() else None

    def parent(self) -> Directory:
        """The directory above, after following links: the disk of a partition."""
        return Directory(self.path.resolve().parent)

    def climb(self, name: str) -> int | None:
        """A number that this device, or a device above it, has."""
        for directory in (self.path.resolve(), *self.path.resolve().parents):
            if directory.name in ("devices", "sys"):
                break
            number = Directory(directory).number(name)
            if number is not None:
                return number
        return None

    def device_name(self) -> str:
        """What /dev calls it: DEVNAME of the uevent file, else the directory's name."""
        found = re.search(r"^DEVNAME=(.+)$", self.text("uevent") or "", re.MULTILINE)
        return found[1] if found else self.name


def _natural(name: str) -> list[tuple[int, str]]:
    """nvme2n1 before nvme10n1."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def children(path: Path, pattern: str) -> list[Directory]:
    """Sub-directories whose names match, in natural order."""
    try:
        names = [entry.name for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []
    return [
        Directory(path / name)
        for name in sorted(names, key=_natural)
        if re.fullmatch(pattern, name)
    ]


def identifier(text: str | None) -> str | None:
    """An NGUID, EUI-64 or UUID as printed; None for one of zeros, which means "none"."""
    return text if text and text.strip("0- :") else None
