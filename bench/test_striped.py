"""Four members from Python, beside fio with the same job on the same members."""

from __future__ import annotations

from typing import Any

import pytest

import kvio
from bench import work
from bench.harness import Target, alternate, describe, keep, report, scaled
from bench.rivals import best, fio, fio_striped, need_fio

MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture(params=["four_loops", "four_files"])
def members(request: pytest.FixtureRequest) -> list[str]:
    """Four members, as loop devices over memory and as files on disk."""
    need_fio()
    return request.getfixturevalue(request.param)


def speed_of(members: list[str]) -> int:
    """How much more work loop devices over memory can do than files on a disk."""
    return 8 if members[0].startswith("/dev/") else 1


@pytest.mark.parametrize("rw", ["randread", "randwrite"])
def test_1_mib_at_depth_32(
    benchmark: Any, request: pytest.FixtureRequest, members: list[str], rw: str
) -> None:
    """Random 1 MiB pages, 32 in flight over four members: bandwidth and CPU against fio.

    Two Python threads with batches of 16, so that one has reads in flight while the other's batch
    drains; with as much memory as fio has, since a larger working set leaves the cache.
    """
    ops = scaled(1250 * speed_of(members))
    rival = best(fio_striped(members, rw=rw, bs="1M", depth=32))
    with (
        kvio.Volume.open(
            members, mode="rw" if rw == "randwrite" else "r", max_inflight=16, allow_destroy=True
        ) as vol,
        work.page_memory(32 * MIB) as memory,
    ):
        table = work.offset_table(vol.size, MIB, 16, members=4)
        call = vol.write_batch if rw == "randwrite" else vol.read_batch
        result = alternate(
            benchmark,
            rival,
            lambda: work.batches_in_threads(call, memory, table, MIB, ops, 2),
        )
    keep(benchmark, result)
    name = f"{rw} 1 MiB, depth 32, {request.node.callspec.params['members']}"
    report(request, f"{name}, bandwidth / fio", result.ratio(lambda s: s.gbps), Target(0.98),
           describe(result, rival.name))  # fmt: skip
    report(request, f"{name}, CPU of the process / fio", result.ratio(lambda s: s.own_per_gb),
           Target(most=1.0), "CPU s/GB")  # fmt: skip
    report(request, f"{name}, CPU with kernel threads / fio", result.ratio(lambda s: s.all_per_gb),
           None, "CPU s/GB")  # fmt: skip


def test_4_kib_at_depth_128(
    benchmark: Any, request: pytest.FixtureRequest, members: list[str]
) -> None:
    """Random 4 KiB reads, 128 in flight in batches of 32: four Python threads with blocking
    batches, beside fio with one job of depth 128 or four of depth 32, in groups of 32 too.
    """
    ops = scaled(30_000 * speed_of(members))
    rival = best(fio_striped(members, rw="randread", bs="4k", depth=128, batch=32))
    with (
        kvio.Volume.open(members, max_inflight=32) as vol,
        work.page_memory(128 * 4 * KIB) as memory,
    ):
        table = work.offset_table(vol.size, 4 * KIB, 32, members=4)
        result = alternate(
            benchmark,
            rival,
            lambda: work.batches_in_threads(vol.read_batch, memory, table, 4 * KIB, ops, 4),
        )
    keep(benchmark, result)
    name = f"randread 4 KiB, depth 128 in batches of 32, {request.node.callspec.params['members']}"
    report(request, f"{name}, IOPS / fio", result.ratio(lambda s: s.iops), Target(1.2),
           describe(result, rival.name))  # fmt: skip


def test_128_kib_from_16_threads(
    benchmark: Any, request: pytest.FixtureRequest, members: list[str]
) -> None:
    """16 Python threads with blocking reads of 128 KiB, against 16 jobs of fio."""
    block = 128 * KIB
    ops = scaled(8000 * speed_of(members) // 2)
    job: dict[str, Any] = {"rw": "randread", "bs": block, "iodepth": 1, "numjobs": 16}
    fixed: dict[str, Any] = {"registerfiles": True, "fixedbufs": True}
    rival = best(
        [
            fio("16 jobs, psync", members, ioengine="psync", **job),
            fio("16 jobs, io_uring", members, **job),
            fio("16 jobs, io_uring, registered", members, **job, **fixed),
        ]
    )
    with kvio.Volume.open(members) as vol, work.page_memory(16 * block) as memory:
        result = alternate(
            benchmark,
            rival,
            lambda: work.in_threads(vol.pread, memory, vol.size, block, ops, 16),
        )
    keep(benchmark, result)
    name = f"randread 128 KiB, 16 threads, {request.node.callspec.params['members']}"
    report(request, f"{name}, bandwidth / fio numjobs=16", result.ratio(lambda s: s.gbps),
           Target(0.92), describe(result, rival.name))  # fmt: skip
