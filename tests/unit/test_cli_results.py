"""Measured distributions: merging, percentiles, samples of several copies on one grid."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.cli.results import Direction, JobResult, Latency, MemberResult, Sample, merge_results


def lower_edge(ns: int) -> int:
    """The bucket scheme of kvio.Histogram: one a nanosecond below 64, then 32 to a power of two."""
    if ns < 64:
        return ns
    shift = ns.bit_length() - 6
    return ns >> shift << shift


def histogram(values: list[int]) -> SimpleNamespace:
    """A stand-in with the public face of kvio.Histogram."""
    lower, counts = np.unique([lower_edge(v) for v in values], return_counts=True)
    return SimpleNamespace(
        count=len(values), min_ns=min(values), max_ns=max(values), mean_ns=float(np.mean(values)),
        stddev_ns=float(np.std(values)), buckets=lambda: (lower, counts),
    )  # fmt: skip


times = st.lists(st.integers(1, 10**10), min_size=1, max_size=200)


@settings(deadline=None)
@given(times, st.floats(0.1, 100))
def test_percentiles_are_never_too_low_and_at_most_a_bucket_too_high(
    values: list[int], percent: float
) -> None:
    latency = Latency.from_histogram(histogram(values))
    exact = sorted(values)[max(1, int(np.ceil(percent / 100 * len(values)))) - 1]
    found = latency.percentile(percent)
    assert exact <= found <= exact * (1 + 1 / 31) + 1


@settings(deadline=None)
@given(times, times)
def test_merging_is_measuring_together(one: list[int], two: list[int]) -> None:
    merged = Latency.merge([Latency.from_histogram(histogram(one)), Latency(),
                            Latency.from_histogram(histogram(two))])  # fmt: skip
    whole = Latency.from_histogram(histogram(one + two))
    assert np.array_equal(merged.edge_ns, whole.edge_ns)
    assert np.array_equal(merged.counts, whole.counts)
    assert (merged.count, merged.min_ns, merged.max_ns) == (whole.count, whole.min_ns, whole.max_ns)
    assert merged.mean_ns == pytest.approx(whole.mean_ns)
    assert merged.stddev_ns == pytest.approx(whole.stddev_ns, rel=1e-4, abs=1e3)


def test_extremes_of_a_difference_come_from_its_buckets() -> None:
    # A difference of two histograms keeps the extremes of the whole time.
    part = histogram([1000, 2000])
    part.min_ns, part.max_ns = 1, 10**9
    latency = Latency.from_histogram(part)
    assert 900 < latency.min_ns <= 1000
    assert 2000 <= latency.max_ns < 2100


def test_nothing_measured_is_zero() -> None:
    empty = Latency.merge([Latency(), Latency()])
    assert (empty.count, empty.percentile(99), empty.mean_ns, empty.stddev_ns) == (0, 0, 0.0, 0.0)
    assert empty.share_between(0, 1e9) == 0.0
    assert Direction().bytes_per_s == 0.0


def test_shares_add_up() -> None:
    latency = Latency.from_histogram(histogram([500, 1500, 2500, 10**7]))
    assert latency.share_between(0, 1000) == 25.0
    assert latency.share_between(1000, 10_000) == 50.0
    assert latency.share_between(1e6, float("inf")) == 25.0


def result(name: str, started: float, mbytes: int) -> JobResult:
    return JobResult(
        name, 0, read=Direction(10, mbytes << 20, 0, 0, 2.0, Latency()), started_s=started,
        elapsed_s=2.0, usr_s=0.5, sys_s=1.0, counters={"bounced": 2},
        members=[MemberResult("/a", "io_uring", "why", True, mbytes << 20, 0, 10)],
        samples=[Sample(started + 0.5 * (i + 1), 0.5, mbytes << 18, 0, 2, 0, 4) for i in range(4)],
    )  # fmt: skip


def test_copies_add_up() -> None:
    merged = merge_results([result("a", 100.0, 64), result("b", 100.02, 32)], interval_s=0.5)
    assert merged.name == "a"
    assert merged.copies == 2
    assert merged.read.bytes == 96 << 20
    assert merged.read.runtime_s == 2.0
    assert merged.elapsed_s == pytest.approx(2.02)
    assert merged.cpu_s == 3.0
    assert merged.counters == {"bounced": 4}
    assert [(m.path, m.read_bytes) for m in merged.members] == [("/a", 96 << 20)]
    assert [sample.read_bytes for sample in merged.samples] == [24 << 20] * 4
    assert merged.samples[0].in_flight == 8


def test_an_error_of_one_copy_is_the_groups() -> None:
    good, bad = result("a", 0.0, 1), result("b", 0.0, 1)
    bad.error, bad.messages = 5, ["/a: EIO"]
    merged = merge_results([good, bad], interval_s=0.5)
    assert (merged.error, merged.messages) == (5, ["/a: EIO"])
