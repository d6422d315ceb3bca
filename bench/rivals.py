"""fio's side of the benches: the same job in each of the ways that fio offers, and the best one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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


# fio's memory is in 4 KiB pages, kvio's in huge ones, which some disks serve several times as fast.
# glibc gives fio transparent huge pages too, where its buffers are 2 MiB and more together.
_HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def fio(name: str, paths: Sequence[str], *, huge: bool = False, **options: Any) -> Rival:
    """A fio job as a rival; options as in :func:`bench.fio.run_fio`, huge: huge pages for it."""

    def run(seconds: float) -> Sample:
        with _environment(_HUGE if huge else {}):
            # fio cuts fractions of a second off, unless they are milliseconds
            return run_fio(paths, runtime=f"{seconds * 1e3:.0f}ms", **options).sample()

    return Rival(f"fio {name}{', huge pages' if huge else ''}", run)


def need_fio() -> None:
    """Skips the test, with the reason, where there is no fio."""
    try:
        fio_version()
    except FioMissingError as error:
        pytest.skip(str(error))


def fio_striped(
    paths: Sequence[str], *, rw: str, bs: str, depth: int, batch: int = 1
) -> list[Rival]:
    """A depth over all members: one job that visits them in turn, or as many jobs as members that
    share the depth; with and without registered files and buffers, and in huge pages where the
    buffers fill some. With batch, submissions and completions are in such groups.
    """
    common: dict[str, Any] = {"rw": rw, "bs": bs, "file_service_type": "roundrobin"}
    if batch > 1:
        common |= {"iodepth_batch_submit": batch, "iodepth_batch_complete_min": batch}
    one = {**common, "iodepth": depth}
    share = max(depth // len(paths), 1)
    each = {**common, "iodepth": share, "numjobs": len(paths)}
    rivals = [
        fio(f"1 job x {depth}", paths, **one),
        fio(f"1 job x {depth}, registered", paths, **one, **_FIXED),
        fio(f"{len(paths)} jobs x {share}", paths, **each),
        fio(f"{len(paths)} jobs x {share}, registered", paths, **each, **_FIXED),
    ]
    if batch == 1:
        rivals.append(fio(f"1 job x {depth}", paths, huge=True, **one))
        rivals.append(fio(f"1 job x {depth}, registered", paths, huge=True, **one, **_FIXED))
    return rivals


def best(rivals: Sequence[Rival]) -> Rival:
    """The fastest of them in short trials, each tried in turn."""
    speeds: Mapping[str, list[float]] = {rival.name: [] for rival in rivals}
    for _ in range(_TRIALS):
        for rival in rivals:
            speeds[rival.name].append(rival.run(_TRIAL_SECONDS).gbps)
    return max(rivals, key=lambda rival: statistics.median(speeds[rival.name]))
