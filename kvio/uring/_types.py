# SPDX-License-Identifier: Apache-2.0
"""What the ring's parts share: completions, what a request holds on to, and errors."""

from __future__ import annotations

import errno
import math
import os
from typing import NamedTuple

from kvio.uring._liburing import ffi, lib

REAP_MAX = 256
"""Completions taken from the kernel's queue in one call."""


class Cqe(NamedTuple):
    """One completion.

    Attributes
    ----------
    user_data
        The object given when the request was prepared.
    res
        What the operation returned: bytes, a descriptor, 0, or -errno.
    flags
        `CqeFlags` as a plain integer; with `MORE` set, further completions follow.
    token
        What the preparing call returned.
    big
        The 16 extra bytes of a `CQE32` ring as two integers, else None.
    """

    user_data: object
    res: int
    flags: int
    token: int
    big: tuple[int, int] | None = None

    @property
    def error(self) -> OSError | None:
        """The failure as an exception, or None."""
        if self.res >= 0:
            return None
        return OSError(-self.res, f"io_uring request {self.user_data!r}: {os.strerror(-self.res)}")


class Request(NamedTuple):
    user_data: object
    keep: object


class CqeArrays:
    """Room for one reap; a CQE32 ring needs the extra bytes too."""

    def __init__(self, wide: bool) -> None:
        self.user_data = ffi.new("uint64_t[]", REAP_MAX)
        self.res = ffi.new("int32_t[]", REAP_MAX)
        self.flags = ffi.new("uint32_t[]", REAP_MAX)
        self.big = ffi.new("uint64_t[]", 2 * REAP_MAX) if wide else ffi.NULL


_ALIASES = {errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EAGAIN: "EAGAIN", errno.EDEADLK: "EDEADLK"}


def errno_name(number: int) -> str:
    """The name that Linux documentation uses: EOPNOTSUPP rather than ENOTSUP."""
    return _ALIASES.get(number) or errno.errorcode.get(number, f"errno {number}")


def failure(code: int, what: str, remedy: str = "") -> OSError:
    """An OSError (or its subclass for that errno) saying what failed and what to do."""
    number = abs(code)
    text = f"{what}: {os.strerror(number)} ({errno_name(number)})"
    return OSError(number, f"{text}; {remedy}" if remedy else text)


def timeout_ns(timeout: float | None) -> int:
    if timeout is None:
        return -1
    if not timeout >= 0 or math.isinf(timeout):
        raise ValueError(f"timeout must be None or a number of seconds >= 0, not {timeout!r}")
    return min(int(timeout * 1e9), (1 << 62))


REMEDIES = {
    errno.EEXIST: "the ring is SINGLE_ISSUER and belongs to another thread: use it from that one",
    errno.EBADFD: "the ring was made with R_DISABLED: call enable() first",
    errno.EBUSY: "completions have overflowed: take some with peek_cqes() and submit again",
    errno.EAGAIN: "the kernel is out of requests or memory: take completions and submit again",
    errno.EPERM: "a seccomp filter refuses io_uring_enter, or a restriction of the ring does",
    errno.ENOSYS: "a seccomp filter refuses io_uring_enter",
}


def version() -> str:
    """The version of the liburing inside, "" where the distribution does not say it."""
    return str(ffi.string(lib.kvio_uring_version).decode())
