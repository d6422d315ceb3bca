"""Large reads over all members, asyncio, and a second Python thread that burns CPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvio
from bench import work
from bench.harness import Result, Sample, Target, alternate, describe, keep, pairs, report, scaled
from kvio.testing import throttle

MIB = 1 << 20
KIB = 1 << 10
CAP = 250 * MIB


def test_one_16_mib_read_uses_all_members(
    benchmark: Any, request: pytest.FixtureRequest, four_loops: list[str]
) -> None:
    """One read of 16 MiB at a time over four members of 250 MiB/s each, against one of them."""
    page, ops = 16 * MIB, scaled(160)  # the kernel's throttle works in slices of 0.1 s
    with (
        throttle(four_loops, read_bps=CAP),
        kvio.Volume.open(four_loops) as four,
        kvio.Volume.open(four_loops[:1]) as one,
        work.page_memory(page) as memory,
    ):
        result = alternate(
            benchmark,
            lambda: work.one_by_one(one.pread, memory, one.size, page, max(ops // 4, 1)),
            lambda: work.one_by_one(four.pread, memory, four.size, page, ops),
        )
    keep(benchmark, result)
    report(request, "one 16 MiB read at a time, 4 members / 1", result.ratio(lambda s: s.gbps),
           Target(3.9), describe(result, "one member"))  # fmt: skip


@pytest.mark.parametrize("count", [4, 16])
@pytest.mark.parametrize("members", ["four_loops", "four_files"])
def test_asyncio_keeps_up_with_blocking_calls(
    benchmark: Any, request: pytest.FixtureRequest, members: str, count: int
) -> None:
    """64 tasks that await batches of 4 or 16 pages of 256 KiB, against blocking batches of all."""
    paths = request.getfixturevalue(members)
    block, in_flight = 256 * KIB, 64
    ops = scaled(24_576 if members == "four_loops" else 4096)
    with (
        kvio.Volume.open(paths) as vol,
        work.page_memory(in_flight * count * block) as memory,
    ):
        large = work.offset_table(vol.size, block, in_flight * count, members=4)
        small = work.offset_table(vol.size, block, count, members=4)
        result = alternate(
            benchmark,
            lambda: work.blocking(vol.read_batch, memory, large, block, ops),
            lambda: work.awaited(vol, memory, small, block, ops, in_flight=in_flight),
        )
    keep(benchmark, result)
    report(request, f"asyncio, 64 batches of {count} x 256 KiB, {members}, bandwidth / blocking",
           result.ratio(lambda s: s.gbps), Target(0.97), describe(result, "blocking"))  # fmt: skip


BURN = "while True: pass"


@contextlib.contextmanager
def burning_thread() -> Iterator[None]:
    """Another Python thread that never gives the GIL away by itself."""
    stop = False

    def burn() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=burn)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


@contextlib.contextmanager
def burning_process() -> Iterator[None]:
    """The same load on a processor, without the GIL of this process."""
    process = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def beside(load: Callable[[], Any], run: Callable[[], Sample]) -> Callable[[], Sample]:
    def loaded() -> Sample:
        with load():
            return run()

    return loaded


def test_reads_beside_a_busy_python_thread(
    benchmark: Any, request: pytest.FixtureRequest, four_loops: list[str]
) -> None:
    """1 MiB reads while another Python thread burns CPU, against the same load from a process.

    The members are capped at 250 MiB/s, so that what the burner takes from them (its processor is
    one that the loop devices' own threads would use) is not what is measured.
    """
    count, in_flight, ops = 8, 8, scaled(1500)
    with (
        throttle(four_loops, read_bps=CAP),
        kvio.Volume.open(four_loops) as vol,
        work.page_memory(count * in_flight * MIB) as memory,
    ):
        table = work.offset_table(vol.size, MIB, count, members=4)

        def read() -> Sample:
            return work.rolling(vol.submit_read, memory, table, MIB, ops, in_flight=in_flight)

        result = alternate(benchmark, beside(burning_process, read), beside(burning_thread, read))
        alone = pairs(read, beside(burning_thread, read), 3, settle=False)
    keep(benchmark, result)
    gbps: Callable[[Sample], float] = lambda sample: sample.gbps  # noqa: E731
    report(request, "1 MiB reads beside a burning thread / beside a burning process",
           result.ratio(gbps), Target(0.9), bandwidths(result, "process"))  # fmt: skip
    report(request, "1 MiB reads beside a burning thread / alone", alone.ratio(gbps),
           Target(0.9), bandwidths(alone, "alone"))  # fmt: skip


def bandwidths(result: Result, reference: str) -> str:
    return (
        f"{result.median('b', lambda s: s.gbps):.2f} GB/s, "
        f"{reference} {result.median('a', lambda s: s.gbps):.2f} GB/s"
    )


def test_reads_at_full_speed_beside_a_busy_python_thread(
    benchmark: Any, request: pytest.FixtureRequest, four_loops: list[str]
) -> None:
    """The same with members at full speed, where the hand-over of the GIL must be hidden by depth:
    it takes 5 ms, which is 40 MiB at 8 GB/s.
    """
    count, in_flight, ops = 32, 6, scaled(6000)
    with (
        kvio.Volume.open(four_loops) as vol,
        work.page_memory(count * in_flight * MIB) as memory,
    ):
        table = work.offset_table(vol.size, MIB, count, members=4)

        def read() -> Sample:
            return work.rolling(vol.submit_read, memory, table, MIB, ops, in_flight=in_flight)

        result = alternate(benchmark, beside(burning_process, read), beside(burning_thread, read))
    keep(benchmark, result)
    report(request, "1 MiB reads at full speed beside a burning thread / a burning process",
           result.ratio(lambda s: s.gbps), Target(0.9), bandwidths(result, "process"))  # fmt: skip
