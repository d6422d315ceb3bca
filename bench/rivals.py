"""fio's side of the benches: the same job in each of the ways that fio offers, and the best one."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.fio import FioMissingError, fio_version, run_fio
from bench.harness import Sample

SECONDS = 1.5
_TRIAL_SECONDS = 0.5
_TRIALS = 3

_FIXED: dict[str, Any] = {"registerfiles": True, "fixedbufs": True}


@dataclasses.dataclass(frozen=True)
class Rival:
    """One way to do the job; calling it runs it."""

    name: str
    run: Callable[[float], Sample]

    def __call__(self) -> Sample:
        return self.run(SECONDS)


def fio(name: str, paths: Sequence[str], **options: Any) -> Rival:
    """A fio job as a rival; options as in :func:`bench.fio.run_fio`."""
    return Rival(
        f"fio {name}",
        # fio cuts fractions of a second off, unless they are milliseconds
        lambda seconds: run_fio(paths, runtime=f"{seconds * 1e3:.0f}ms", **options).sample(),
    )


def need_fio() -> None:
    """Skips the test, with the reason, where there is no fio."""
    try:
        fio_version()
    except FioMissingError as error:
        pytest.skip(str(error))


def fio_striped(
    paths: Sequence[str], *, rw: str, bs: str, depth: int, batch: int = 1
) -> list[Rival]:
    """A depth over all members: one job that visits them in turn or, where it need not submit in
    groups, one job for each member; with and without registered files and buffers, and in huge
    pages where the machine has some to spare.
    """
    common: dict[str, Any] = {"rw": rw, "bs": bs, "file_service_type": "roundrobin"}
    one = {**common, "iodepth": depth}
    if batch > 1:
        one |= {"iodepth_batch_submit": batch, "iodepth_batch_complete_min": batch}
    rivals = [
        fio(f"1 job x {depth}", paths, **one),
        fio(f"1 job x {depth}, registered", paths, **one, **_FIXED),
    ]
    if huge_pages_free() >= depth + 8:
        rivals.append(
            fio(f"1 job x {depth}, registered, hugetlb", paths, **one, **_FIXED, iomem="mmaphuge")
        )
    if batch == 1:
        share = max(depth // len(paths), 1)
        each = {**common, "iodepth": share, "numjobs": len(paths)}
        rivals.append(fio(f"{len(paths)} jobs x {share}", paths, **each))
        rivals.append(fio(f"{len(paths)} jobs x {share}, registered", paths, **each, **_FIXED))
    return rivals


def huge_pages_free() -> int:
    """Free hugetlb pages of 2 MiB."""
    pool = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(pool.read_text()) if pool.exists() else 0


def best(rivals: Sequence[Rival]) -> Rival:
    """The fastest of them in short trials, each tried in turn."""
    speeds: Mapping[str, list[float]] = {rival.name: [] for rival in rivals}
    for _ in range(_TRIALS):
        for rival in rivals:
            speeds[rival.name].append(rival.run(_TRIAL_SECONDS).gbps)
    return max(rivals, key=lambda rival: statistics.median(speeds[rival.name]))
