"""What a volume tells of itself: its members, and what the kernel granted."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Member", "describe"]


@dataclass(frozen=True)
class Member:
    """One member as it was opened. Sizes and alignments in bytes.

    ``mem_align`` is of buffer addresses, ``offset_align`` of a read's offset and length,
    ``write_align`` of a write's. ``direct`` is what the kernel reports after the open.
    ``engine_reason`` says why ``engine`` was picked. ``nowait_read``: the kernel serves reads
    without handing them to io-wq. ``sparse``: a file with holes, where writes are slow at first.
    ``max_io_bytes`` is the largest single command on memory in huge pages, and
    ``max_io_bytes_small_pages`` on other memory. ``overridden`` names what ``allow_destroy`` let
    kvio write over, one reason a line.
    """

    path: str
    size_bytes: int
    logical_block: int
    physical_block: int
    mem_align: int
    offset_align: int
    write_align: int
    max_io_bytes: int
    max_io_bytes_small_pages: int
    direct: bool
    engine: str
    engine_reason: str
    nowait_read: bool
    volatile_cache: bool
    can_discard: bool
    sparse: bool
    identity: str
    overridden: str


_PLAIN = (
    "read_align",
    "write_align",
    "mem_align",
    "queue_depth",
    "max_inflight",
    "workers",
    "io_threads",
    "registered_files",
    "registered_buffers",
    "regions",
)


def describe(info: dict[str, Any], members: Sequence[Member]) -> dict[str, Any]:
    """What was granted, and why not where it was not, as a JSON-able dict."""
    out: dict[str, Any] = {name: info[name] for name in _PLAIN}
    out["io_uring"] = bool(info["uring"])
    out["io_uring_refused"] = _reason(info["uring_errno"])
    out["register_refused"] = _register_reason(info["register_errno"])
    out["setup_flags"] = _setup_flags(info["ring_flags"]) if info["uring"] else []
    out["direct"] = all(member.direct for member in members)
    out["members"] = {
        member.path: {
            "engine": member.engine,
            "reason": member.engine_reason,
            "direct": member.direct,
            "overridden": member.overridden,
        }
        for member in members
    }
    return out


def _reason(number: int) -> str:
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}" if number else ""


def _register_reason(number: int) -> str:
    if number != errno.ENOMEM:
        return _reason(number)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return (
        f"ENOMEM: more than RLIMIT_MEMLOCK allows ({soft} bytes); raise it with `ulimit -l` or "
        f"LimitMEMLOCK="
    )


_SETUP_FLAGS = (
    "IOPOLL",
    "SQPOLL",
    "SQ_AFF",
    "CQSIZE",
    "CLAMP",
    "ATTACH_WQ",
    "R_DISABLED",
    "SUBMIT_ALL",
    "COOP_TASKRUN",
    "TASKRUN_FLAG",
    "SQE128",
    "CQE32",
    "SINGLE_ISSUER",
    "DEFER_TASKRUN",
)


def _setup_flags(bits: int) -> list[str]:
    return [name for i, name in enumerate(_SETUP_FLAGS) if bits >> i & 1]
