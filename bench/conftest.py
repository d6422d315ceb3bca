"""Members for the benches, and GB/s in pytest-benchmark's reports.

    pytest bench/ --benchmark-only                       run, print
    pytest bench/ --benchmark-only --benchmark-autosave  keep this run under .benchmarks/
    pytest bench/ --benchmark-only --benchmark-compare   beside the last one that was kept

Bandwidth is under "extra info" (columns are seconds): 10^9 bytes a second of the median round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.harness import disk_files
from kvio.testing import LoopDevices

MIB = 1 << 20

Throughput = Callable[..., float]


@pytest.fixture(scope="module")
def four_loops() -> Iterator[list[str]]:
    """Four loop devices of 512 MiB with direct I/O over memory; needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root (loop devices)")
    with LoopDevices(4, 512 * MIB) as devices:
        yield devices.paths


@pytest.fixture(scope="module")
def four_files() -> Iterator[list[str]]:
    """Four preallocated files of 512 MiB on disk (KVIO_BENCH_DIR or the current folder)."""
    with disk_files(4, 512 * MIB) as paths:
        yield paths


@pytest.fixture
def throughput(benchmark: Any) -> Throughput:
    """Times ``func()``, which moves ``nbytes`` a call, and reports GB/s and operations a second.

    ``throughput(func, nbytes=..., ops=1, rounds=5)`` gives the GB/s of the median round; further
    keywords go into the report's extra info as they are.
    """

    def run(
        func: Callable[[], object], *, nbytes: int, ops: int = 1, rounds: int = 5, **info: object
    ) -> float:
        benchmark.pedantic(func, rounds=rounds, iterations=1, warmup_rounds=1)
        if benchmark.stats is None:  # --benchmark-disable: it ran once, unmeasured
            return 0.0
        seconds = benchmark.stats.stats.median
        benchmark.extra_info.update(
            {"GB/s": round(nbytes / seconds / 1e9, 3), "ops/s": round(ops / seconds), **info}
        )
        return nbytes / seconds / 1e9

    return run
