"""What one job measured, in a form that travels between processes and adds up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Latency:
    """A latency distribution in nanoseconds; only buckets that hold something are kept.

    ``edge_ns`` is the last nanosecond of each bucket, so a percentile is never too low.
    """

    edge_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    count: int = 0
    min_ns: int = 0
    max_ns: int = 0
    sum_ns: float = 0.0
    sum_squares: float = 0.0

    @classmethod
    def from_histogram(cls, histogram: Any) -> Latency:
        """Convert a kvio.Histogram."""
        if not histogram.count:
            return cls()
        lower, counts = (np.asarray(part, np.int64) for part in histogram.buckets())
        used = np.flatnonzero(counts)
        lower, counts = lower[used], counts[used]
        # Buckets are log-linear, 32 to each power of two (kvio.Histogram).
        width = np.maximum(1, (1 << np.log2(np.maximum(lower, 1)).astype(np.int64)) >> 5)
        edge = lower + width - 1
        mean, deviation = float(histogram.mean_ns), float(histogram.stddev_ns)
        # A difference of two histograms has the extremes of both; its buckets know better.
        return cls(
            edge,
            counts,
            int(histogram.count),
            max(int(histogram.min_ns), int(lower[0])),
            min(int(histogram.max_ns), int(edge[-1])),
            mean * histogram.count,
            (deviation**2 + mean**2) * histogram.count,
        )

    @classmethod
    def merge(cls, parts: Iterable[Latency]) -> Latency:
        """The distribution of all samples together."""
        used = [part for part in parts if part.count]
        if len(used) < 2:
            return used[0] if used else cls()
        edge, where = np.unique(
            np.concatenate([part.edge_ns for part in used]), return_inverse=True
        )
        counts = np.zeros(edge.size, np.int64)
        np.add.at(counts, where, np.concatenate([part.counts for part in used]))
        return cls(
            edge,
            counts,
            sum(part.count for part in used),
            min(part.min_ns for part in used),
            max(part.max_ns for part in used),
            sum(part.sum_ns for part in used),
            sum(part.sum_squares for part in used),
        )

    @property
    def mean_ns(self) -> float:
        return self.sum_ns / self.count if self.count else 0.0

    @property
    def stddev_ns(self) -> float:
        if self.count < 2:
            return 0.0
        return math.sqrt(max(0.0, self.sum_squares / self.count - self.mean_ns**2))

    def percentile(self, percent: float) -> int:
        """The latency that ``percent`` of the samples do not exceed."""
        if not self.count or not self.counts.size:
            return 0
        rank = max(1, math.ceil(percent / 100 * int(self.counts.sum())))
        index = int(np.searchsorted(np.cumsum(self.counts), rank))
        return int(min(max(self.edge_ns[index], self.min_ns), self.max_ns))

    def share_between(self, low_ns: float, high_ns: float) -> float:
        """Percent of the samples in [low_ns, high_ns)."""
        if not self.count:
            return 0.0
        inside = self.counts[(self.edge_ns >= low_ns) & (self.edge_ns < high_ns)]
        return 100.0 * float(inside.sum()) / float(self.counts.sum())


@dataclass(slots=True)
class Sample:
    """One interval: when it ended (CLOCK_MONOTONIC), how long it was, what was moved in it."""

    end_s: float
    seconds: float
    read_bytes: int
    write_bytes: int
    read_ios: int
    write_ios: int
    in_flight: int


@dataclass(slots=True)
class Direction:
    """Reads or writes of one job."""

    ios: int = 0
    bytes: int = 0
    errors: int = 0
    short: int = 0
    runtime_s: float = 0.0
    latency: Latency = field(default_factory=Latency)

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.runtime_s if self.runtime_s > 0 else 0.0

    @property
    def ios_per_s(self) -> float:
        return self.ios / self.runtime_s if self.runtime_s > 0 else 0.0


@dataclass(slots=True)
class MemberResult:
    """What one member did."""

    path: str
    engine: str
    engine_reason: str
    direct: bool
    read_bytes: int = 0
    write_bytes: int = 0
    read_ios: int = 0
    write_ios: int = 0
    errors: int = 0
    retries: int = 0
    read_p99_ns: int = 0
    write_p99_ns: int = 0


@dataclass(slots=True)
class JobResult:
    """Everything that one copy of a job, or a merged group of copies, reports."""

    name: str
    group: int
    copies: int = 1
    error: int = 0  # errno of the first failure, 0 = none
    messages: list[str] = field(default_factory=list)
    interrupted: bool = False
    read: Direction = field(default_factory=Direction)
    write: Direction = field(default_factory=Direction)
    members: list[MemberResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    started_s: float = 0.0
    elapsed_s: float = 0.0
    usr_s: float = 0.0
    sys_s: float = 0.0
    context_switches: int = 0
    major_faults: int = 0
    minor_faults: int = 0
    iodepth: int = 1
    engine: str = ""
    capabilities: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    hugepages: str = ""
    buffers: str = ""
    verified: int = 0
    bad_blocks: int = 0

    @property
    def bytes(self) -> int:
        return self.read.bytes + self.write.bytes

    @property
    def cpu_s(self) -> float:
        return self.usr_s + self.sys_s

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.bytes / 1e9) if self.bytes else 0.0

    @property
    def ns_per_io(self) -> float:
        """CPU nanoseconds of one I/O, user and system."""
        ios = self.read.ios + self.write.ios
        return self.cpu_s * 1e9 / ios if ios else 0.0


def _merge_direction(parts: Sequence[Direction]) -> Direction:
    return Direction(
        sum(part.ios for part in parts),
        sum(part.bytes for part in parts),
        sum(part.errors for part in parts),
        sum(part.short for part in parts),
        max(part.runtime_s for part in parts),
        Latency.merge(part.latency for part in parts),
    )


def _merge_members(parts: Iterable[MemberResult]) -> list[MemberResult]:
    found: dict[str, MemberResult] = {}
    for part in parts:
        if part.path not in found:
            found[part.path] = MemberResult(part.path, part.engine, part.engine_reason, part.direct)
        into = found[part.path]
        for name in ("read_bytes", "write_bytes", "read_ios", "write_ios", "errors", "retries"):
            setattr(into, name, getattr(into, name) + getattr(part, name))
        into.read_p99_ns = max(into.read_p99_ns, part.read_p99_ns)
        into.write_p99_ns = max(into.write_p99_ns, part.write_p99_ns)
    return list(found.values())


def merge_samples(results: Sequence[JobResult], *, interval_s: float) -> list[Sample]:
    """Samples of several copies, summed on one time grid."""
    spread: dict[int, Sample] = {}
    origin = min((result.started_s for result in results), default=0.0)
    for result in results:
        for sample in result.samples:
            slot = round((sample.end_s - origin) / interval_s)
            if slot not in spread:
                spread[slot] = Sample(origin + slot * interval_s, 0.0, 0, 0, 0, 0, 0)
            into = spread[slot]
            into.seconds = max(into.seconds, sample.seconds)
            for name in ("read_bytes", "write_bytes", "read_ios", "write_ios", "in_flight"):
                setattr(into, name, getattr(into, name) + getattr(sample, name))
    return [spread[slot] for slot in sorted(spread)]


def merge_results(results: Sequence[JobResult], *, interval_s: float) -> JobResult:
    """One result for a group of jobs; the name is that of the first, as in fio."""
    if len(results) == 1:
        return results[0]
    first = results[0]
    counters: dict[str, int] = {}
    for result in results:
        for name, value in result.counters.items():
            counters[name] = counters.get(name, 0) + value
    started = min(result.started_s for result in results)
    return JobResult(
        name=first.name,
        group=first.group,
        copies=sum(result.copies for result in results),
        error=next((result.error for result in results if result.error), 0),
        messages=list(dict.fromkeys(text for result in results for text in result.messages)),
        interrupted=any(result.interrupted for result in results),
        read=_merge_direction([result.read for result in results]),
        write=_merge_direction([result.write for result in results]),
        members=_merge_members(member for result in results for member in result.members),
        samples=merge_samples(results, interval_s=interval_s),
        started_s=started,
        elapsed_s=max(result.started_s + result.elapsed_s for result in results) - started,
        usr_s=sum(result.usr_s for result in results),
        sys_s=sum(result.sys_s for result in results),
        context_switches=sum(result.context_switches for result in results),
        major_faults=sum(result.major_faults for result in results),
        minor_faults=sum(result.minor_faults for result in results),
        iodepth=first.iodepth,
        engine=first.engine,
        capabilities=first.capabilities,
        counters=counters,
        hugepages=first.hugepages,
        buffers=first.buffers,
        verified=sum(result.verified for result in results),
        bad_blocks=sum(result.bad_blocks for result in results),
    )
