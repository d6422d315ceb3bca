# SPDX-License-Identifier: Apache-2.0
"""What one file or device can be read with, found by reading it; and the word for a finding."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvio.uring._constants import SetupFlags
from kvio.uring._register import Ring
from kvio.uring._types import errno_name

_PROBE_READ_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Grant:
    """Whether one thing was granted when it was tried, and how the kernel put its refusal."""

    granted: bool
    errno: int | None = None
    detail: str = ""

    def __bool__(self) -> bool:
        return self.granted

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        name = None if self.errno is None else errno_name(self.errno)
        return {"granted": self.granted, "errno": name, "detail": self.detail}


def attempt(action: Callable[[], object]) -> Grant:
    """Do it, and say whether the kernel let it happen."""
    try:
        action()
    except OSError as error:
        return Grant(False, error.errno, error.strerror or str(error))
    return Grant(True)


@dataclass(frozen=True, slots=True)
class PathCapabilities:
    """What `path_capabilities` found for one file or device, each by a real read of 4 KiB.

    Attributes
    ----------
    direct
        O_DIRECT reads. The reads below are direct where this is granted.
    nowait
        RWF_NOWAIT reads. Refused with EOPNOTSUPP means that io_uring hands every read of this
        file to a kernel worker thread, and that plain preadv threads are faster.
    ring, fixed, iopoll
        A read through a ring, into a registered buffer, through an `IOPOLL` ring.
    """

    path: str
    direct: Grant
    nowait: Grant
    ring: Grant
    fixed: Grant
    iopoll: Grant

    @property
    def punted(self) -> bool:
        """True where the kernel cannot start reads without blocking, and uses its workers."""
        return self.nowait.errno == errno.EOPNOTSUPP

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("direct", "nowait", "ring", "fixed", "iopoll")
        grants = {name: getattr(self, name).to_dict() for name in names}
        return {"path": self.path, **grants, "punted": self.punted}


def path_capabilities(path: str | os.PathLike[str]) -> PathCapabilities:
    """Try the ways to read one file or block device. Reads at most 4 KiB, several times.

    Raises
    ------
    OSError
        It cannot be opened for reading, is neither a file nor a block device, or is empty.
    """
    name = os.fspath(path)
    # a FIFO would block here for ever without O_NONBLOCK; on files and devices it changes nothing
    common = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(name, common)
    buffer = mmap.mmap(-1, _PROBE_READ_BYTES)
    try:
        if not (stat.S_ISREG(os.fstat(fd).st_mode) or stat.S_ISBLK(os.fstat(fd).st_mode)):
            raise OSError(errno.EINVAL, "neither a regular file nor a block device", name)
        if not os.pread(fd, 1, 0):
            raise OSError(errno.ENODATA, "it is empty: reading it shows nothing", name)
        direct = attempt(lambda: _read_direct(name, common, buffer))
        if direct:
            os.close(fd)
            fd = os.open(name, common | os.O_DIRECT)
        return PathCapabilities(
            path=name,
            direct=direct,
            nowait=_nowait(fd, buffer),
            ring=attempt(lambda: _read_ring(fd, buffer, SetupFlags(0), fixed=False)),
            fixed=attempt(lambda: _read_ring(fd, buffer, SetupFlags(0), fixed=True)),
            iopoll=attempt(lambda: _read_ring(fd, buffer, SetupFlags.IOPOLL, fixed=False)),
        )
    finally:
        os.close(fd)


def _read_direct(name: str, common: int, buffer: mmap.mmap) -> None:
    fd = os.open(name, common | os.O_DIRECT)
    try:
        os.preadv(fd, [buffer], 0)
    finally:
        os.close(fd)


def _nowait(fd: int, buffer: mmap.mmap) -> Grant:
    try:
        os.preadv(fd, [buffer], 0, os.RWF_NOWAIT)
    except BlockingIOError:  # it would have had to wait, and could say so: that is the grant
        return Grant(True, errno.EAGAIN, "accepted; this read would have had to wait")
    except OSError as error:
        return Grant(False, error.errno, error.strerror or str(error))
    return Grant(True)


def _read_ring(fd: int, buffer: mmap.mmap, flags: SetupFlags, *, fixed: bool) -> None:
    with Ring(4, flags=flags) as ring:
        if fixed:
            ring.register_buffers([buffer])
            ring.prep_read_fixed(fd, buffer, 0, buf_index=0)
        else:
            ring.prep_read(fd, buffer, 0)
        ring.submit()
        failed = ring.wait_cqe().error
        if failed is not None:
            raise failed
