"""One member: where the kernel punts (zram), a file on ext4, CPU per GB, huge pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvio
from bench import work
from bench.harness import Sample, Target, alternate, describe, keep, report, scaled
from bench.rivals import Rival, best, fio, need_fio
from tests.support import zram

MIB = 1 << 20
KIB = 1 << 10
ZRAM_BYTES = 256 * MIB


@pytest.fixture(scope="module")
def zram_path() -> Iterator[str]:
    """A zram device full of what does not compress."""
    if os.geteuid() != 0:
        pytest.skip("needs root (zram)")
    reason = zram.unavailable()
    if reason:
        pytest.skip(reason)
    with zram.zram_device(ZRAM_BYTES) as path:
        rng = np.random.default_rng(3)
        with open(path, "wb", buffering=0) as device:
            for _ in range(ZRAM_BYTES // (8 * MIB)):
                device.write(rng.bytes(8 * MIB))
            os.fsync(device.fileno())
        yield path


@pytest.mark.parametrize("way", ["batches", "threads"])
def test_members_that_the_kernel_punts(
    benchmark: Any, request: pytest.FixtureRequest, zram_path: str, way: str
) -> None:
    """2 MiB x 16 from zram: `auto` must take threads, and keep up with 16 preadv threads, be it
    batches of 16 (against a ThreadPoolExecutor) or 16 threads that each read for themselves.
    """
    block, ops = 2 * MIB, scaled(1600)
    with (
        kvio.Volume.open([zram_path]) as vol,
        work.preadv_call(zram_path) as preadv,
        work.page_memory(16 * block) as memory,
    ):
        assert vol.engine == "threads", f"auto picked {vol.engine}: {vol.members[0].engine_reason}"
        table = work.offset_table(vol.size, block, 16)
        if way == "batches":
            result = alternate(
                benchmark,
                lambda: work.pooled(preadv, memory, table, block, ops),
                lambda: work.blocking(vol.read_batch, memory, table, block, ops),
            )
        else:
            result = alternate(
                benchmark,
                lambda: work.in_threads(preadv, memory, vol.size, block, ops, 16),
                lambda: work.in_threads(vol.pread, memory, vol.size, block, ops, 16),
            )
    keep(benchmark, result)
    report(request, f"zram, 2 MiB x 16, {way}, bandwidth / 16 preadv threads",
           result.ratio(lambda s: s.gbps), Target(1.0),
           describe(result, "16 preadv threads"))  # fmt: skip


Shape = tuple[float, int, Callable[[str], list[Rival]]]
_BLOCK = 256 * KIB
_JOB: dict[str, Any] = {"rw": "randread", "bs": _BLOCK}
_FIXED: dict[str, Any] = {"registerfiles": True, "fixedbufs": True}


def _fio_one(path: str) -> list[Rival]:
    return [
        fio("psync", [path], ioengine="psync", **_JOB),
        fio("io_uring", [path], **_JOB),
        fio("io_uring, registered", [path], **_JOB, **_FIXED),
    ]


def _fio_requesters(path: str) -> list[Rival]:
    return [
        fio("16 jobs, psync", [path], ioengine="psync", numjobs=16, **_JOB),
        fio("16 jobs, io_uring", [path], numjobs=16, **_JOB),
        fio("io_uring, depth 16, registered", [path], iodepth=16, huge=True, **_JOB, **_FIXED),
    ]


def _fio_batches(path: str) -> list[Rival]:
    group = {"iodepth_batch_submit": 16, "iodepth_batch_complete_min": 16}
    return [
        fio("io_uring, batches of 16", [path], iodepth=16, **group, **_JOB),
        fio(
            "io_uring, batches of 16, registered",
            [path],
            iodepth=16,
            huge=True,
            **group,
            **_JOB,
            **_FIXED,
        ),
        fio("io_uring, depth 16, registered", [path], iodepth=16, huge=True, **_JOB, **_FIXED),
    ]


SHAPES: dict[str, Shape] = {
    "one at a time": (0.25, 2500, _fio_one),
    "16 requesters": (0.10, 8000, _fio_requesters),
    "batches of 16": (0.10, 8000, _fio_batches),
}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_256_kib_from_one_file(
    benchmark: Any, request: pytest.FixtureRequest, four_files: list[str], shape: str
) -> None:
    """256 KiB reads of one file on disk, beside the best of fio and of a preadv loop."""
    need_fio()
    cpu_limit, count, fio_rivals = SHAPES[shape]
    ops = scaled(count)
    path = four_files[0]
    with (
        kvio.Volume.open([path]) as vol,
        work.preadv_call(path) as preadv,
        work.page_memory(16 * _BLOCK) as memory,
    ):
        table = work.offset_table(vol.size, _BLOCK, 16)
        jobs: dict[str, Callable[[], Sample]] = {
            "one at a time": lambda: work.one_by_one(vol.pread, memory, vol.size, _BLOCK, ops),
            "16 requesters": lambda: work.in_threads(vol.pread, memory, vol.size, _BLOCK, ops, 16),
            "batches of 16": lambda: work.blocking(vol.read_batch, memory, table, _BLOCK, ops),
        }

        def loop(seconds: float) -> Sample:
            share = max(int(ops * seconds), 16)
            if shape == "16 requesters":
                return work.in_threads(preadv, memory, vol.size, _BLOCK, share, 16)
            return work.one_by_one(preadv, memory, vol.size, _BLOCK, share)

        rival = best([*fio_rivals(path), Rival("preadv loop", loop)])
        result = alternate(benchmark, rival, jobs[shape])
    keep(benchmark, result)
    name = f"ext4 file, 256 KiB, {shape}"
    report(request, f"{name}, bandwidth / best of fio and preadv", result.ratio(lambda s: s.gbps),
           Target(0.95), describe(result, rival.name))  # fmt: skip
    report(request, f"{name}, CPU s/GB", result.median("b", lambda s: s.own_per_gb),
           Target(most=cpu_limit), "own")  # fmt: skip


@pytest.mark.parametrize("size_mib", [2, 16])
@pytest.mark.parametrize("members", ["four_loops", "four_files"])
def test_cpu_of_large_reads(
    benchmark: Any, request: pytest.FixtureRequest, members: str, size_mib: int
) -> None:
    """CPU seconds per GB of large reads, with what the kernel's threads use beside it; the
    reference is the same read into plain memory: 4 KiB pages, not registered.
    """
    paths = request.getfixturevalue(members)
    block = size_mib * MIB
    count = max(16 // size_mib, 1)
    ops = scaled((8000 if members == "four_loops" else 1500) * MIB // block)
    with kvio.Volume.open(paths) as vol, work.page_memory(count * block) as memory:
        plain = np.ones(count * block + 4096, np.uint8)
        start = -plain.ctypes.data % 4096
        plain = plain[start : start + count * block]
        table = work.offset_table(vol.size, block, count)
        result = alternate(
            benchmark,
            lambda: work.blocking(vol.read_batch, plain, table, block, ops),
            lambda: work.blocking(vol.read_batch, memory, table, block, ops),
        )
    keep(benchmark, result)
    name = f"{size_mib} MiB reads, {members}"
    report(request, f"{name}, CPU s/GB", result.median("b", lambda s: s.own_per_gb),
           Target(most=0.06), describe(result, "plain memory"))  # fmt: skip
    report(request, f"{name}, CPU registered huge pages / plain memory",
           result.ratio(lambda s: s.own_per_gb), Target(most=1.0), "CPU s/GB")  # fmt: skip
