"""The exceptions of kvio: one family, one class per decision that a caller can take."""

from __future__ import annotations

import errno as _errno
import os

__all__ = [
    "CorruptPage",
    "DeadlineExceeded",
    "DeviceBusy",
    "Fenced",
    "GeometryMismatch",
    "KvioError",
    "NotFormatted",
    "Unsupported",
    "make_error",
]


class KvioError(OSError):
    """An operation on a volume, a member or a store failed.

    Attributes
    ----------
    errno, strerror : int, str
        As of every ``OSError``; ``strerror`` says what happened, where, and what to do.
    filename : str or None
        Path of the member concerned.
    member : int
        Its index, -1 when no single member is concerned.
    offset, length : int
        Where, in bytes: on the member, or in the volume when ``member`` is -1.
    op : str
        ``read``, ``write``, ``flush``, ``discard``, ``open``, ``close``, ``create``, ``register``
        or ``unregister``.
    error_class : str
        What the block layer means by the errno: ``media``, ``timeout``, ``deadline``,
        ``protection``, ``reservation``, ``transport``, ``target``, ``gone``, ``space``, ``usage``,
        ``shutdown``, ``unsupported`` or ``unknown`` (Linux ``block/blk-core.c``, table
        ``blk_errors``).
    """

    member: int = -1
    offset: int = 0
    length: int = 0
    op: str = ""
    error_class: str = "unknown"

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class CorruptPage(KvioError):  # noqa: N818
    """A page's bytes do not match their checksum or header. It counts as a miss."""


class DeviceBusy(KvioError):  # noqa: N818
    """The member is in use, or holds data that a write would destroy."""


class NotFormatted(KvioError):  # noqa: N818
    """The members carry no kvio store."""


class GeometryMismatch(KvioError):  # noqa: N818
    """The members do not belong together, or were formatted differently."""


class Fenced(KvioError):  # noqa: N818
    """Another host took the members over: stop writing."""


class DeadlineExceeded(KvioError, TimeoutError):  # noqa: N818
    """kvio's own deadline passed (errno ``ETIME``); the member may still answer later."""


class Unsupported(KvioError):  # noqa: N818
    """This kernel, device or file system cannot do what was asked for."""


_BY_ERRNO: dict[int, type[KvioError]] = {
    _errno.ETIME: DeadlineExceeded,
    _errno.EBUSY: DeviceBusy,
    _errno.EBADE: Fenced,
    _errno.EOPNOTSUPP: Unsupported,
    _errno.ENOSYS: Unsupported,
    _errno.EBADMSG: CorruptPage,
}


def make_error(
    code: int,
    message: str,
    *,
    path: str | None = None,
    member: int = -1,
    offset: int = 0,
    length: int = 0,
    op: str = "",
    error_class: str = "unknown",
) -> KvioError:
    """Build the exception for an errno (either sign) of the C core."""
    number = abs(code)
    cls = _BY_ERRNO.get(number, KvioError)
    error = cls(number, message or os.strerror(number))
    error.filename = path
    error.member = member
    error.offset = offset
    error.length = length
    error.op = op
    error.error_class = error_class
    return error
