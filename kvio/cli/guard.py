"""Before a bench writes: make what is missing, refuse what may hold somebody's data.

fio overwrites whatever it is given. kvio bench writes only to
  G1  files that kvio bench made (it marks them with the extended attribute ``user.kvio.bench``),
  G2  files that hold nothing but zeros or holes,
  G3  block devices on which neither the volume's own safety check nor samples of the whole device
      find anything but zeros,
unless --allow-destroy is given. What is mounted, held or read-only is refused even then, by
kvio.Volume.open.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence

import kvio
from kvio import devices
from kvio.cli.common import BenchError, UsageError, format_size
from kvio.cli.jobs import Job

MARK = "user.kvio.bench"
_STEP = 1 << 20
_BLOCK = 4096  # members are made in whole blocks
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_SCAN_LIMIT = 64 << 30


def prepare_members(
    jobs: Sequence[Job], *, allow_destroy: bool, readonly: bool, say: Callable[[str], None]
) -> list[str]:
    """Make missing members and check the others. Returns the paths that were made.

    Raises
    ------
    UsageError
        A member is missing and cannot be made from what the job says.
    BenchError
        A member would be overwritten without --allow-destroy.
    """
    made: list[str] = []
    for job in jobs:
        for copy in job.copies():
            missing = [path for path in copy.members if not os.path.exists(path)]
            if missing:
                _make(copy, missing, readonly, say)
                made += missing
    checked: set[str] = set(made)
    for job in jobs:
        for copy in job.copies() if job.changes_members and not job.create_only else ():
            for path in copy.members:
                if path not in checked:
                    checked.add(path)
                    _check_writable(copy, path, allow_destroy, say)
    return made


def _make(job: Job, missing: list[str], readonly: bool, say: Callable[[str], None]) -> None:
    first = missing[0]
    if first.startswith("/dev/"):
        raise BenchError(f"job {job.name}: {first}: no such device")
    if readonly or not job.allow_file_create:
        why = "--readonly" if readonly else "allow_file_create=0"
        raise BenchError(f"job {job.name}: {first} does not exist, and {why} forbids making it")
    size = _member_bytes(job)
    try:
        kvio.Volume.create(missing, size_bytes=size)
    except (kvio.KvioError, OSError) as error:
        raise BenchError(f"job {job.name}: cannot make {', '.join(missing)}: {error}") from None
    except ValueError as error:
        raise UsageError(f"job {job.name}: {error}") from None
    for path in missing:
        _mark(path)
    say(
        f"job {job.name}: made {len(missing)} member(s) of {format_size(size)}: "
        f"{', '.join(missing)}"
    )


def _member_bytes(job: Job) -> int:
    """Size of a member that has to be made: its share of the region, in whole stripe units."""
    if job.filesize is not None:
        return -(-job.filesize // _BLOCK) * _BLOCK
    if job.size is None or job.size[0] != "bytes":
        raise UsageError(
            f"job {job.name}: size (in bytes) or filesize is needed to make "
            f"{', '.join(job.members)}"
        )
    end = job.size[1] + job.offset_increment * (job.numjobs - 1)
    if job.offset[0] == "bytes":
        end += job.offset[1]
    if len(job.members) == 1:
        return -(-end // _BLOCK) * _BLOCK
    return -(-end // (len(job.members) * job.stripe_unit)) * job.stripe_unit


def _mark(path: str) -> None:
    try:
        os.setxattr(path, MARK, b"1")
    except OSError:
        pass  # then G2 or --allow-destroy decides when the file is used again


def _is_marked(path: str) -> bool:
    try:
        return os.getxattr(path, MARK) == b"1"
    except OSError:
        return False


def _check_writable(job: Job, path: str, allow_destroy: bool, say: Callable[[str], None]) -> None:
    try:
        mode = os.stat(path).st_mode
        block = _block_device(path, mode)
        if stat.S_ISREG(mode):
            if _is_marked(path):
                return
            found = first_data(path)
        elif block:
            found = sample_device(block)
        else:
            return
    except OSError as error:
        raise BenchError(f"job {job.name}: {path}: {error.strerror}") from None
    if not found:
        return
    if not allow_destroy:
        raise BenchError(
            f"job {job.name}: refusing to write to {path}: it holds data ({found}); "
            "use --allow-destroy to overwrite it"
        )
    reasons = devices.describe(block).verdict.details if block else ()
    what = "; ".join((found, *reasons))
    say(f"job {job.name}: overwriting {path} ({what}), as --allow-destroy says")


def _block_device(path: str, mode: int) -> str | None:
    """The block device to look at: the path itself, or that of an NVMe generic device."""
    if stat.S_ISBLK(mode):
        return path
    match = re.fullmatch(r"(.*/)ng(\d+n\d+)", path)
    if match and stat.S_ISCHR(mode):
        sibling = f"{match[1]}nvme{match[2]}"
        return sibling if os.path.exists(sibling) else None
    return None


def first_data(path: str) -> str:
    """Where a file first differs from zeros, '' when it does not, or why that is not certain."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, offset, read = os.fstat(fd).st_size, 0, 0
        while offset < size:
            try:
                offset = os.lseek(fd, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return ""  # only holes from here on
            if read >= _SCAN_LIMIT:
                return f"only its first {format_size(_SCAN_LIMIT)} were looked at"
            part = os.pread(fd, _STEP, offset)
            if not part:
                return ""
            if found := _first_nonzero(part):
                return f"byte {offset + found[0]} is {found[1]:#04x}"
            offset += len(part)
            read += len(part)
        return ""
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def sample_device(path: str) -> str:
    """Where a block device differs from zeros: its first and last MiB, and samples between."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        places = [(0, _STEP), (max(0, size - _STEP), _STEP)]
        places += [(size * i // _SAMPLES // 4096 * 4096, _SAMPLE_BYTES) for i in range(1, _SAMPLES)]
        for offset, length in places:
            if found := _first_nonzero(os.pread(fd, length, offset)):
                return f"byte {offset + found[0]} is {found[1]:#04x}"
        return ""
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _first_nonzero(part: bytes) -> tuple[int, int] | None:
    rest = part.lstrip(b"\0")
    return (len(part) - len(rest), rest[0]) if rest else None


def unlink_members(paths: Iterable[str]) -> None:
    """Remove members that this run made."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError as error:
            raise BenchError(f"cannot remove {path}: {error.strerror}") from None
