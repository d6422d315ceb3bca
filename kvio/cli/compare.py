"""``--compare-fio``: the same job under the fio that is installed, alternating with kvio."""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvio.cli import units
from kvio.cli.common import BenchError, UsageError, format_ns, format_rate
from kvio.cli.jobs import Job
from kvio.cli.results import JobResult, merge_results

if TYPE_CHECKING:
    from kvio.cli.runner import RunResult

# Options that are handed to fio as they were written.
_VERBATIM = (
    "bs",
    "numjobs",
    "thread",
    "rwmixread",
    "rwmixwrite",
    "random_distribution",
    "norandommap",
    "rate",
    "rate_iops",
    "runtime",
    "time_based",
    "ramp_time",
    "iodepth_batch",
    "iodepth_batch_complete_min",
    "iodepth_batch_complete_max",
    "fixedbufs",
    "registerfiles",
    "hipri",
    "sqthread_poll",
    "io_size",
    "number_ios",
    "loops",
    "end_fsync",
    "zero_buffers",
    "cpus_allowed",
    "nice",
    "kb_base",
)
_URING_ONLY = ("fixedbufs", "registerfiles", "hipri", "sqthread_poll")


@dataclass(frozen=True, slots=True)
class Figures:
    """One direction of one run."""

    bw_bytes: float
    iops: float
    p50_ns: float
    p99_ns: float


@dataclass(frozen=True, slots=True)
class Side:
    """One run of one program."""

    read: Figures
    write: Figures
    cpu_s_per_gb: float


@dataclass(slots=True)
class Comparison:
    """Pairs of runs: kvio, then fio, in turn."""

    job: str
    fio_version: str
    kvio: list[Side] = field(default_factory=list)
    fio: list[Side] = field(default_factory=list)

    def ratios(self, word: str) -> list[float]:
        """kvio's bandwidth over fio's, one for each pair."""
        pairs = zip(self.kvio, self.fio, strict=True)
        both = [
            (getattr(ours, word).bw_bytes, getattr(theirs, word).bw_bytes) for ours, theirs in pairs
        ]
        return [ours / theirs for ours, theirs in both if theirs]

    def text(self) -> str:
        """Lines for the report."""
        lines = [f"compared with {self.fio_version}, {len(self.fio)} pair(s), medians:"]
        for word in ("read", "write"):
            ratios = self.ratios(word)
            if not ratios:
                continue
            ours, theirs = self.median("kvio", word), self.median("fio", word)
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            lines.append(
                f"  {word:<5} kvio {format_rate(ours.bw_bytes)}, "
                f"fio {format_rate(theirs.bw_bytes)}: "
                f"ratio {statistics.median(ratios):.2f}{spread};  "
                f"p50 {format_ns(ours.p50_ns)} / {format_ns(theirs.p50_ns)}, "
                f"p99 {format_ns(ours.p99_ns)} / {format_ns(theirs.p99_ns)}"
            )
        ours_cpu, theirs_cpu = (
            statistics.median(side.cpu_s_per_gb for side in sides)
            for sides in (self.kvio, self.fio)
        )
        if theirs_cpu:
            lines.append(
                f"  cpu   kvio {ours_cpu:.3f} s per GB, fio {theirs_cpu:.3f}: "
                f"ratio {ours_cpu / theirs_cpu:.2f}"
            )
        return "\n".join(lines)

    def median(self, program: str, word: str) -> Figures:
        """The median of each figure over the pairs."""
        parts = [getattr(side, word) for side in getattr(self, program)]
        return Figures(
            *(
                statistics.median(getattr(part, name) for part in parts)
                for name in Figures.__slots__
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        ratios = {word: self.ratios(word) for word in ("read", "write")}
        return {
            "fio_version": self.fio_version,
            "fio_job": self.job,
            "ratio": {word: statistics.median(values) for word, values in ratios.items() if values},
            "pairs": [
                {"kvio": asdict(a), "fio": asdict(b)}
                for a, b in zip(self.kvio, self.fio, strict=True)
            ],
        }


def check_jobs(jobs: Sequence[Job]) -> None:
    """Refuse what cannot be compared, before anything runs.

    Raises
    ------
    UsageError
        There are several jobs, the job verifies, or fio is not installed.
    """
    if len(jobs) != 1:
        raise UsageError(
            f"--compare-fio compares one job, and there are {len(jobs)} (use --section)"
        )
    if jobs[0].verify:
        raise UsageError(
            "--compare-fio cannot compare a job that verifies: fio's headers differ from kvio's"
        )
    if any(not Path(path).exists() for path in jobs[0].members) and jobs[0].generated_members:
        raise UsageError(
            "--compare-fio needs a filename, so that both programs use the same members"
        )
    if shutil.which("fio") is None:
        raise UsageError(
            "--compare-fio needs fio, which is not installed (apt install fio, dnf install fio)"
        )


def fio_job(job: Job, *, direct: bool) -> str:
    """The job file for fio: the same work and the same depth in total over the members.

    fio's one job keeps its iodepth over all its files and takes them in turn, as the stripes do.
    """
    written = {**dict(job.global_settings), **dict(job.settings)}
    engine = written.get("ioengine", "io_uring")
    offset = job.offset[1]
    lines = [
        f"[{job.name}]",
        "filename=" + units.join_escaped(job.members, ":"),
        "file_service_type=roundrobin",
        f"rw={job.rw}",
        f"ioengine={engine}",
        f"iodepth={job.iodepth}",
        f"direct={int(direct)}",
        "group_reporting=1",
        "lat_percentiles=1",
        "clat_percentiles=0",
        "percentile_list=50:99",
        "invalidate=0",
    ]
    if job.size is not None:
        lines.append(f"size={job.size[1]}{'%' if job.size[0] == 'percent' else ''}")
    if offset:
        lines.append(
            f"offset={offset}%"
            if job.offset[0] == "percent"
            else f"offset={offset // len(job.members)}"
        )
    if "page_size" in written:
        lines.append(f"bs={job.read_bs}")
    for name in _VERBATIM:
        if name in written and (name not in _URING_ONLY or engine == "io_uring"):
            lines.append(f"{name}={written[name]}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class FioRun:
    """One run of fio: its JSON report, and the CPU time of all its threads.

    fio's own usr_cpu and sys_cpu are of the job's thread alone; large I/Os are done by kernel
    threads of the process, which it leaves out.
    """

    document: dict[str, Any]
    cpu_s: float


def fio_side(run: FioRun, *, ramp_s: float) -> Side:
    """The figures of a run of fio with one job."""
    found = run.document["jobs"][0]

    def figures(word: str) -> Figures:
        part = found[word]
        percentiles = part["lat_ns"].get("percentile", {})
        return Figures(
            float(part["bw_bytes"]),
            float(part["iops"]),
            float(percentiles.get("50.000000", 0)),
            float(percentiles.get("99.000000", 0)),
        )

    measured_s = max(found["read"]["runtime"], found["write"]["runtime"]) / 1000
    cpu_s = run.cpu_s * measured_s / (measured_s + ramp_s) if measured_s else 0.0
    moved = found["read"]["io_bytes"] + found["write"]["io_bytes"]
    return Side(figures("read"), figures("write"), cpu_s / (moved / 1e9) if moved else 0.0)


def kvio_side(result: JobResult) -> Side:
    """The same figures of a run of kvio."""

    def figures(word: str) -> Figures:
        part = getattr(result, word)
        latency = part.latency
        return Figures(
            part.bytes_per_s, part.ios_per_s, latency.percentile(50), latency.percentile(99)
        )

    return Side(figures("read"), figures("write"), result.cpu_s_per_gb)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_fio(job_text: str) -> FioRun:
    """Run a job file under fio.

    Raises
    ------
    BenchError
        fio failed; the message is the first line that it said.
    """
    with tempfile.TemporaryDirectory(prefix="kvio-fio-") as folder:
        job_file, report = Path(folder, "job.fio"), Path(folder, "report.json")
        job_file.write_text(job_text, encoding="utf-8")
        command = [
            "fio",
            "--eta=never",
            "--output-format=json",
            f"--output={report}",
            str(job_file),
        ]
        cpu_s = _children_cpu_s()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            document = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            document = {}
        if done.returncode or not document.get("jobs") or document["jobs"][0].get("error"):
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise BenchError(
                f"fio could not run the same job: {said[0] if said else 'it gave no reason'}"
            )
        return FioRun(document, _children_cpu_s() - cpu_s)


def compare(
    jobs: Sequence[Job], first: RunResult, run_once: Callable[[], RunResult], *, pairs: int
) -> Comparison:
    """Alternate runs of kvio and fio. ``first`` is the run of kvio that is reported."""
    job = jobs[0]
    direct = all(member.direct for result in first.results for member in result.members)
    comparison = Comparison(fio_job(job, direct=direct), "fio")
    for pair in range(pairs):
        run = first if pair == 0 else run_once()
        if not run.results or run.exit_code:
            raise BenchError(run.failures[0][1] if run.failures else "a repeated run failed")
        comparison.kvio.append(
            kvio_side(merge_results(run.results, interval_s=job.sample_ms / 1000))
        )
        fio_run = run_fio(comparison.job)
        comparison.fio_version = str(fio_run.document["fio version"])
        comparison.fio.append(fio_side(fio_run, ramp_s=job.ramp_s))
    return comparison
