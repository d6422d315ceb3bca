"""kvio: striped, parallel, direct I/O for LLM KV-cache pages over many namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvio.errors import (
    CorruptPage,
    DeadlineExceeded,
    DeviceBusy,
    Fenced,
    GeometryMismatch,
    KvioError,
    NotFormatted,
    Unsupported,
)

if TYPE_CHECKING:
    from kvio.core import Batch, Buffer, BufferPool, Member, Volume
    from kvio.stats import Histogram, MemberStats, OpStats, VolumeStats

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Buffer",
    "BufferPool",
    "CorruptPage",
    "DeadlineExceeded",
    "DeviceBusy",
    "Fenced",
    "GeometryMismatch",
    "Histogram",
    "KvioError",
    "Member",
    "MemberStats",
    "NotFormatted",
    "OpStats",
    "Unsupported",
    "Volume",
    "VolumeStats",
    "__version__",
]

_CORE = {"Batch", "Buffer", "BufferPool", "Member", "Volume"}
_STATS = {"Histogram", "MemberStats", "OpStats", "VolumeStats"}


def __getattr__(name: str) -> Any:
    """The compiled part is loaded with its first use: `kvio doctor` works where it cannot be."""
    if name in _CORE:
        from kvio import core  # noqa: PLC0415

        return getattr(core, name)
    if name in _STATS:
        from kvio import stats  # noqa: PLC0415

        return getattr(stats, name)
    raise AttributeError(f"module 'kvio' has no attribute {name!r}")
