# SPDX-License-Identifier: Apache-2.0
"""The caller's memory as the kernel is given it: views, vectors, structs behind pointers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvio.uring._liburing import ffi

Buffer = Any  # anything with the buffer protocol; typing has no name for it before Python 3.12
STATX_SIZE = 256
STATX_BASIC = 0x7FF
STATX_DIOALIGN = 0x2000


def view(buffer: Buffer, *, writable: bool = False) -> Any:
    """A cffi view of a contiguous buffer, which cannot be resized or freed as long as it lives.

    Raises
    ------
    TypeError, ValueError, BufferError
        Not a buffer, not contiguous, or read-only where the kernel is to write into it.
    """
    return ffi.from_buffer("char[]", buffer, require_writable=writable)


def address_of(buffer: Buffer) -> int:
    """Where a contiguous buffer lies in memory, for commands that carry addresses."""
    return int(ffi.cast("uintptr_t", view(buffer)))


def iovecs(memory: Sequence[Any]) -> Any:
    """A `struct iovec` array over views made by `view`; it does not keep them."""
    vectors = ffi.new("struct iovec[]", max(1, len(memory)))
    for vector, piece in zip(vectors, memory, strict=False):
        vector.iov_base, vector.iov_len = piece, len(piece)
    return vectors


def timespec(seconds: float) -> Any:
    if not 0 <= seconds < 1 << 40:
        raise ValueError(f"a timeout is a number of seconds >= 0, not {seconds!r}")
    spec = ffi.new("struct __kernel_timespec *")
    spec.tv_sec = int(seconds)
    spec.tv_nsec = min(int((seconds - int(seconds)) * 1e9), 999_999_999)
    return spec


@dataclass(frozen=True, slots=True)
class StatxResult:
    """What `prep_statx` left in its buffer.

    The two alignments are 0 where the file does not do direct I/O, and None where the kernel did
    not say.
    """

    mask: int
    mode: int
    size_bytes: int
    block_size_bytes: int
    dio_mem_align: int | None
    dio_offset_align: int | None

    @classmethod
    def parse(cls, buffer: Buffer) -> StatxResult:
        """Read a `struct statx` (offsets as in the kernel's `include/uapi/linux/stat.h`)."""
        raw = bytes(memoryview(buffer).cast("B")[:STATX_SIZE])
        mask, block_size = struct.unpack_from("=II", raw, 0)
        (mode,) = struct.unpack_from("=H", raw, 28)
        (size,) = struct.unpack_from("=Q", raw, 40)
        mem, offset = struct.unpack_from("=II", raw, 152)
        said = bool(mask & STATX_DIOALIGN)
        return cls(mask, mode, size, block_size, mem if said else None, offset if said else None)
