"""What every bench shares: one measured run, CPU accounting, and runs that alternate.

A figure from one run says little on a machine that does other things too. So a bench runs its
reference and kvio in turns, A B A B, at least five pairs, and reports the median of the ratios.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
PAIRS = max(int(os.environ.get("KVIO_BENCH_PAIRS", "5")), 1)
SCALE = float(os.environ.get("KVIO_BENCH_SCALE", "1"))


@dataclass(frozen=True)
class Sample:
    """What one run did. CPU in seconds: of the process, of it and the kernel's worker threads, and
    of the whole machine (which includes whatever else runs there).
    """

    bytes: int
    ops: int
    seconds: float
    cpu_own: float = 0.0
    cpu_kernel: float = 0.0
    cpu_machine: float = 0.0
    p99_us: float = 0.0

    @property
    def gbps(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def iops(self) -> float:
        return self.ops / self.seconds

    @property
    def ns_per_op(self) -> float:
        return self.seconds / self.ops * 1e9

    @property
    def own_per_gb(self) -> float:
        return self.cpu_own / (self.bytes / 1e9)

    @property
    def all_per_gb(self) -> float:
        """CPU seconds per GB, with the kernel threads that do part of the work (loop devices)."""
        return (self.cpu_own + self.cpu_kernel) / (self.bytes / 1e9)

    @property
    def machine_per_gb(self) -> float:
        return self.cpu_machine / (self.bytes / 1e9)


def machine_cpu() -> float:
    """Seconds that all processors have been busy since boot (user, nice, system, irq, softirq)."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (sum(int(word) for word in words[1:4]) + int(words[6]) + int(words[7])) / TICKS


def kernel_cpu() -> dict[int, float]:
    """CPU seconds of each kernel thread by its id (children of kthreadd)."""
    out = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue
        words = stat[stat.rindex(b")") + 2 :].split()
        if words[1] == b"2":
            out[int(entry.name)] = (int(words[11]) + int(words[12])) / TICKS
    return out


class Meter:
    """CPU of this process, of the kernel's threads and of the machine between two moments."""

    def __init__(self) -> None:
        self.kernel = kernel_cpu()
        self.machine = machine_cpu()
        self.own = resource.getrusage(resource.RUSAGE_SELF)
        self.start = time.perf_counter()

    def stop(self, *, nbytes: int, ops: int, p99_us: float = 0.0) -> Sample:
        seconds = time.perf_counter() - self.start
        own = resource.getrusage(resource.RUSAGE_SELF)
        machine = machine_cpu() - self.machine
        return Sample(
            nbytes,
            ops,
            seconds,
            cpu_own=own.ru_utime + own.ru_stime - self.own.ru_utime - self.own.ru_stime,
            cpu_kernel=grown(self.kernel, kernel_cpu()),
            cpu_machine=machine,
            p99_us=p99_us,
        )


def grown(before: dict[int, float], after: dict[int, float]) -> float:
    """Seconds that threads have used between two snapshots; one that ended meanwhile is lost."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


@dataclass(frozen=True)
class Result:
    """Pairs of runs of a reference (a) and of kvio (b)."""

    a: tuple[Sample, ...]
    b: tuple[Sample, ...]

    def ratio(self, figure: Callable[[Sample], float]) -> float:
        """The median of kvio's figure over the reference's, pair by pair."""
        return statistics.median(
            figure(b) / figure(a) for a, b in zip(self.a, self.b, strict=True) if figure(a) > 0
        )

    def median(self, side: str, figure: Callable[[Sample], float]) -> float:
        return statistics.median(figure(sample) for sample in getattr(self, side))


def pairs(
    a: Callable[[], Sample], b: Callable[[], Sample], n: int = PAIRS, *, settle: bool = True
) -> Result:
    """Runs a and b in turns n times, after one of each that does not count."""
    if settle:
        a(), b()
    runs = [(a(), b()) for _ in range(n)]
    return Result(tuple(run[0] for run in runs), tuple(run[1] for run in runs))


def alternate(
    benchmark: Any, reference: Callable[[], Sample], work: Callable[[], Sample]
) -> Result:
    """The same as :func:`pairs`, with kvio's runs under pytest-benchmark, so that they can be
    compared with those of another day.
    """
    a: list[Sample] = []
    b: list[Sample] = []
    if benchmark.enabled:
        reference(), work()
    benchmark.pedantic(
        lambda: b.append(work()),
        setup=lambda: a.append(reference()),
        rounds=PAIRS if benchmark.enabled else 1,
        iterations=1,
    )
    return Result(tuple(a[-len(b) :]), tuple(b))


@dataclass(frozen=True)
class Target:
    """What a ratio or a figure must reach: ``least`` or ``most``."""

    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def __str__(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


def report(request: Any, row: str, value: float, target: Target | None, text: str) -> None:
    """One line on the terminal: what was measured, beside what it must reach.

    A figure below its target fails the bench only with KVIO_BENCH_ENFORCE=1: a machine that does
    other things too must not fail anybody's work.
    """
    met = target is None or target.met(value)
    verdict = "" if target is None else f" (wanted {target}: {'ok' if met else 'MISSED'})"
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        writer = plugins.get_plugin("terminalreporter")
        writer.ensure_newline()
        writer.write_line(f"{row}: {value:.4g}{verdict}; {text}")
    if not met and os.environ.get("KVIO_BENCH_ENFORCE") == "1":
        raise AssertionError(f"{row}: {value:.4g}, wanted {target}")


def keep(benchmark: Any, result: Result) -> None:
    """The figures for pytest-benchmark's report: GB/s, IOPS, CPU, of both sides."""
    figures: dict[str, Callable[[Sample], float]] = {
        "GB/s": lambda sample: sample.gbps,
        "ops/s": lambda sample: sample.iops,
        "CPU s/GB": lambda sample: sample.own_per_gb,
        "CPU s/GB with kernel threads": lambda sample: sample.all_per_gb,
        "CPU s/GB of the machine": lambda sample: sample.machine_per_gb,
    }
    for name, figure in figures.items():
        benchmark.extra_info[name] = round(result.median("b", figure), 5)
        benchmark.extra_info[f"reference {name}"] = round(result.median("a", figure), 5)
    benchmark.extra_info["ratio"] = round(result.ratio(lambda sample: sample.gbps), 4)


def describe(result: Result, reference: str) -> str:
    """Both sides in words."""

    def side(name: str) -> str:
        return (
            f"{result.median(name, lambda s: s.gbps):.2f} GB/s, "
            f"{result.median(name, lambda s: s.iops):.0f} IOPS, CPU s/GB "
            f"{result.median(name, lambda s: s.own_per_gb):.4f} own, "
            f"{result.median(name, lambda s: s.all_per_gb):.4f} with kernel threads, "
            f"{result.median(name, lambda s: s.machine_per_gb):.4f} machine"
        )

    return f"kvio {side('b')}; {reference} {side('a')}"


@contextmanager
def disk_files(n: int, size_bytes: int, folder: str | None = None) -> Iterator[list[str]]:
    """N preallocated, written files on disk (KVIO_BENCH_DIR or the current directory)."""
    import shutil
    import tempfile

    import kvio

    parent = folder or os.environ.get("KVIO_BENCH_DIR") or os.getcwd()
    path = tempfile.mkdtemp(prefix="kvio-bench-", dir=parent)
    try:
        names = [os.path.join(path, f"member{i}") for i in range(n)]
        yield kvio.Volume.create(names, size_bytes=size_bytes)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def scaled(count: int) -> int:
    """A number of operations, multiplied by KVIO_BENCH_SCALE."""
    return max(int(count * SCALE), 1)


def with_p99(sample: Sample, latencies_us: Sequence[float]) -> Sample:
    ordered = sorted(latencies_us)
    return replace(sample, p99_us=ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)])
