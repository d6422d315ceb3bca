"""Immutable statistics of a volume, as ``Volume.stats()`` returns them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvio import _core

__all__ = ["Histogram", "MemberStats", "OpStats", "VolumeStats"]

_LOWER_NS: npt.NDArray[np.uint64] = _core.histogram_lower_bounds()


@dataclass(frozen=True, eq=False)
class Histogram:
    """Latencies in nanoseconds, in log-linear buckets at most 1/32 wide (``csrc/hist.h``).

    ``min_ns`` and ``max_ns`` are those since the volume was opened, also in a difference.
    """

    count: int
    min_ns: int
    max_ns: int
    sum_ns: int
    sum_squares: float
    counts: npt.NDArray[np.uint64]

    @property
    def mean_ns(self) -> float:
        """Arithmetic mean, 0 when empty."""
        return self.sum_ns / self.count if self.count else 0.0

    @property
    def stddev_ns(self) -> float:
        """Population standard deviation, 0 when empty."""
        if not self.count:
            return 0.0
        return math.sqrt(max(self.sum_squares / self.count - self.mean_ns**2, 0.0))

    def percentile(self, p: float) -> int:
        """Latency that ``p`` percent do not exceed, in ns, from the bucket's upper edge."""
        return self.percentiles([p])[0]

    def percentiles(self, ps: Sequence[float]) -> list[int]:
        """As :meth:`percentile` for several; 0 when empty."""
        if any(not 0 <= p <= 100 for p in ps):
            raise ValueError(f"percentiles lie between 0 and 100, got {list(ps)}")
        if not self.count:
            return [0 for _ in ps]
        total = np.cumsum(self.counts)
        out = []
        for p in ps:
            rank = max(1, math.ceil(p / 100 * int(total[-1])))
            index = int(np.searchsorted(total, rank))
            upper = int(_LOWER_NS[index + 1]) - 1 if index + 1 < len(_LOWER_NS) else self.max_ns
            out.append(max(min(upper, self.max_ns), self.min_ns))
        return out

    def buckets(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Lower edges in ns and counts of the buckets that are not empty."""
        used = np.flatnonzero(self.counts)
        return _LOWER_NS[used], self.counts[used]

    def subtract(self, older: Histogram) -> Histogram:
        """What was added since ``older``."""
        return Histogram(
            self.count - older.count,
            self.min_ns,
            self.max_ns,
            self.sum_ns - older.sum_ns,
            self.sum_squares - older.sum_squares,
            self.counts - older.counts,
        )

    @classmethod
    def merge(cls, parts: Iterable[Histogram]) -> Histogram:
        """All of them together (jobs of one run, members of one volume)."""
        items = list(parts)
        used = [h for h in items if h.count]
        counts = np.zeros(len(_LOWER_NS), np.uint64)
        for h in items:
            counts = counts + h.counts
        return cls(
            sum(h.count for h in items),
            min((h.min_ns for h in used), default=0),
            max((h.max_ns for h in used), default=0),
            sum(h.sum_ns for h in items),
            sum(h.sum_squares for h in items),
            counts,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able summary with the usual percentiles."""
        names = (50.0, 90.0, 99.0, 99.9, 99.99)
        values = self.percentiles(names)
        return {
            "count": self.count,
            "min_ns": self.min_ns,
            "max_ns": self.max_ns,
            "mean_ns": self.mean_ns,
            "stddev_ns": self.stddev_ns,
            "percentiles_ns": {str(n): v for n, v in zip(names, values, strict=True)},
        }


@dataclass(frozen=True)
class OpStats:
    """Operations of one direction: how many, bytes, failures, latencies."""

    ops: int
    bytes: int
    errors: int
    latency: Histogram

    def delta(self, older: OpStats) -> OpStats:
        """What was added since ``older``."""
        return OpStats(
            self.ops - older.ops,
            self.bytes - older.bytes,
            self.errors - older.errors,
            self.latency.subtract(older.latency),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "ops": self.ops,
            "bytes": self.bytes,
            "errors": self.errors,
            "latency": self.latency.to_dict(),
        }


@dataclass(frozen=True)
class MemberStats:
    """Commands to one member. ``suspect``: its last three or more deadlines passed unanswered."""

    path: str
    read: OpStats
    write: OpStats
    flushes: int
    discards: int
    retries: int
    in_flight: int
    suspect: bool

    def delta(self, older: MemberStats) -> MemberStats:
        """What was added since ``older``; ``in_flight`` and ``suspect`` as they are now."""
        return MemberStats(
            self.path,
            self.read.delta(older.read),
            self.write.delta(older.write),
            self.flushes - older.flushes,
            self.discards - older.discards,
            self.retries - older.retries,
            self.in_flight,
            self.suspect,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return _plain(self)


_GAUGES = {"quarantined_buffers", "quarantined_bytes", "lanes", "workers", "io_threads"}


@dataclass(frozen=True)
class VolumeStats:
    """Cumulative since open. Gauges (``quarantined_*``, ``lanes``, ``workers``, ``io_threads``)
    are as they are now.

    ``read`` and ``write`` count operations as the caller gave them, ``members`` the commands that
    these became. ``retries``: commands sent again after EINTR, EAGAIN or ENOMEM. ``short_reads``:
    commands that moved less than asked. ``bounced``: operations served through a bounce buffer.
    ``fixed_ops`` / ``unfixed_ops``: ring commands with and without registered memory.
    ``direct_ops``: commands done by preadv/pwritev. ``quarantined_*``: commands whose caller has
    given up and whose buffer the kernel may still use.
    """

    read: OpStats
    write: OpStats
    members: tuple[MemberStats, ...]
    retries: int
    short_reads: int
    bounced: int
    fixed_ops: int
    unfixed_ops: int
    direct_ops: int
    stale_completions: int
    poisoned_rings: int
    deadline_exceeded: int
    quarantined_buffers: int
    quarantined_bytes: int
    lanes: int
    workers: int
    io_threads: int

    def delta(self, older: VolumeStats) -> VolumeStats:
        """What was added since ``older``."""
        values: dict[str, Any] = {}
        for field in fields(self):
            new, old = getattr(self, field.name), getattr(older, field.name)
            if field.name == "members":
                values[field.name] = tuple(n.delta(o) for n, o in zip(new, old, strict=True))
            elif isinstance(new, OpStats):
                values[field.name] = new.delta(old)
            else:
                values[field.name] = new if field.name in _GAUGES else new - old
        return VolumeStats(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return _plain(self)


def _plain(record: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, tuple):
            value = [item.to_dict() for item in value]
        elif hasattr(value, "to_dict"):
            value = value.to_dict()
        out[field.name] = value
    return out
