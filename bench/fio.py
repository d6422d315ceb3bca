"""fio beside kvio: run a job and read its figures.

The ceiling that the benches measure against is what fio reaches with the same job on the same
members in the same minute; `harness.pairs` runs the two in turns.

    result = pairs(lambda: run_fio(paths, rw="randread", bs="1M", iodepth=32, runtime=2).sample(),
                   run_kvio)
    assert result.ratio(lambda sample: sample.gbps) >= 0.98
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import Meter, Sample

__all__ = ["Direction", "FioMissingError", "FioResult", "fio_version", "parse_report", "run_fio"]


class FioMissingError(RuntimeError):
    """fio is not installed, or has not got what the job asks for."""


@dataclasses.dataclass(frozen=True)
class Direction:
    """The read or the write half of fio's report."""

    bytes: int
    seconds: float
    bandwidth: float  # bytes/s
    iops: float
    total_ios: int
    lat_mean_ns: float
    percentiles_ns: Mapping[float, int]  # completion latency


@dataclasses.dataclass(frozen=True)
class FioResult:
    """One report. ``cpu_seconds`` is user + system of all its jobs, io-wq threads included."""

    read: Direction
    write: Direction
    cpu_seconds: float
    cpu_kernel: float  # of the kernel's threads meanwhile (those of loop devices among them)
    cpu_machine: float
    raw: Mapping[str, Any]

    def sample(self) -> Sample:
        """Both directions together, as the harness compares them."""
        main = max(self.read, self.write, key=lambda half: half.total_ios)
        return Sample(
            bytes=self.read.bytes + self.write.bytes,
            ops=self.read.total_ios + self.write.total_ios,
            seconds=max(self.read.seconds, self.write.seconds),
            cpu_own=self.cpu_seconds,
            cpu_kernel=self.cpu_kernel,
            cpu_machine=self.cpu_machine,
            p99_us=main.percentiles_ns.get(99.0, 0) / 1e3,
        )


def fio_version() -> str:
    """ "fio-3.33"; FioMissingError when it is not there."""
    program = shutil.which("fio")
    if program is None:
        raise FioMissingError("fio is not installed: apt-get install fio")
    return subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def run_fio(
    filenames: Sequence[str],
    *,
    rw: str,
    bs: int | str,
    iodepth: int = 1,
    numjobs: int = 1,
    runtime: float | None = None,
    size: int | str | None = None,
    ioengine: str = "io_uring",
    direct: bool = True,
    threads: bool = False,
    timeout: float = 120.0,
    **options: object,
) -> FioResult:
    """Runs one job over all the files and reads the report.

    Parameters
    ----------
    filenames
        Files or devices, used round robin as fio's ``filename=a:b:c`` does.
    rw, bs, iodepth, numjobs, size, ioengine, direct
        As fio's options of these names.
    runtime
        Seconds; time based. None: once over ``size``.
    threads
        Jobs are threads of one process instead of processes.
    timeout
        Seconds until fio is given up (TimeoutExpired).
    options
        Further fio options; ``True`` gives a bare ``--name``, underscores stay.

    Raises
    ------
    FioMissingError
        fio is missing, or refuses the job because of what it was built with.
    RuntimeError
        fio reports an error; its message is in it.
    """
    fio_version()
    words: dict[str, object] = {
        "name": "job", "filename": ":".join(path.replace(":", "\\:") for path in filenames),
        "rw": rw, "bs": bs, "iodepth": iodepth, "numjobs": numjobs, "ioengine": ioengine,
        "direct": int(direct), "group_reporting": True, "output-format": "json",
        "allow_file_create": 0, "randrepeat": 0, "norandommap": True, "thread": threads or None,
        "runtime": runtime, "time_based": runtime is not None or None, "size": size, **options,
    }  # fmt: skip
    command = ["fio"]
    for name, value in words.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command.append(f"--{name}={value}")
    meter = Meter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    machine = meter.stop(nbytes=0, ops=0)
    # fio prints notes before the report
    start = done.stdout.find("{")
    report = json.loads(done.stdout[start:]) if start >= 0 else None
    if done.returncode or report is None or report["jobs"][0]["error"]:
        message = (done.stderr.strip() or done.stdout.strip()).splitlines()
        text = f"fio failed ({done.returncode}): {' | '.join(message[-3:])}"
        if "engine" in text and "not loadable" in text:
            raise FioMissingError(text)
        raise RuntimeError(f"{text}; command: {' '.join(command)}")
    return dataclasses.replace(
        parse_report(report), cpu_kernel=machine.cpu_kernel, cpu_machine=machine.cpu_machine
    )


def parse_report(report: Mapping[str, Any]) -> FioResult:
    """Reads fio's JSON of a group-reported run; what the kernel's threads used it does not say."""
    job = report["jobs"][0]
    # the percentages are of job_runtime, which is the sum over the jobs of the group
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return FioResult(_direction(job["read"]), _direction(job["write"]), cpu, 0.0, 0.0, report)


def _direction(half: Mapping[str, Any]) -> Direction:
    latency = half["clat_ns"]
    return Direction(
        bytes=half["io_bytes"],
        seconds=half["runtime"] / 1e3,
        bandwidth=half["bw_bytes"],
        iops=half["iops"],
        total_ios=half["total_ios"],
        lat_mean_ns=half["lat_ns"]["mean"],
        percentiles_ns={float(p): int(ns) for p, ns in latency.get("percentile", {}).items()},
    )
