"""fio's JSON report, key for key (fio 3.33), with everything of kvio's own under one ``kvio`` key.

What kvio does not measure is present with fio's value for "not measured": zeros. That is slat_ns
(there is one latency, from submission to completion), the submit and complete depths, and
everything about trims.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvio.cli.jobs import Job
from kvio.cli.results import Direction, JobResult, Latency, Sample
from kvio.cli.runner import RunResult

_DEPTHS = (1, 2, 4, 8, 16, 32)
_LATENCY_STEPS = (2, 4, 10, 20, 50, 100, 250, 500, 750, 1000)


def _spread(
    latency: Latency, *, percentiles: Sequence[float] | None = None, bins: bool = False
) -> dict[str, Any]:
    out: dict[str, Any] = {
        "min": latency.min_ns,
        "max": latency.max_ns,
        "mean": round(latency.mean_ns, 6),
        "stddev": round(latency.stddev_ns, 6),
        "N": latency.count,
    }
    if percentiles is not None and latency.count:
        out["percentile"] = {
            f"{percent:.6f}": latency.percentile(percent) for percent in percentiles
        }
        if bins:
            out["bins"] = {
                str(low): int(n) for low, n in zip(latency.edge_ns, latency.counts, strict=True)
            }
    return out


def _samples(values: Sequence[float], prefix: str, share: float | None) -> dict[str, Any]:
    mean = statistics.fmean(values) if values else 0.0
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    out: dict[str, Any] = {
        f"{prefix}_min": int(min(values, default=0)),
        f"{prefix}_max": int(max(values, default=0)),
    }
    if share is not None:
        out[f"{prefix}_agg"] = round(share, 6)
    out[f"{prefix}_mean"] = round(mean, 6)
    out[f"{prefix}_dev" if prefix == "bw" else f"{prefix}_stddev"] = round(deviation, 6)
    out[f"{prefix}_samples"] = len(values)
    return out


def _direction(
    direction: Direction,
    samples: Sequence[Sample],
    word: str,
    *,
    job: Job,
    group_bw: float,
    bins: bool,
) -> dict[str, Any]:
    total = direction.latency
    bandwidths = [getattr(s, f"{word}_bytes") / s.seconds / 1024 for s in samples if direction.ios]
    iops = [getattr(s, f"{word}_ios") / s.seconds for s in samples if direction.ios]
    share = min(100.0, 100 * direction.bytes_per_s / group_bw) if group_bw and bandwidths else 0.0
    return {
        "io_bytes": direction.bytes,
        "io_kbytes": direction.bytes // 1024,
        "bw_bytes": int(direction.bytes_per_s),
        "bw": int(direction.bytes_per_s / 1024),
        "iops": round(direction.ios_per_s, 6),
        "runtime": round(direction.runtime_s * 1000),
        "total_ios": direction.ios,
        "short_ios": direction.short,
        "drop_ios": 0,
        "slat_ns": _spread(Latency()),
        "clat_ns": _spread(total, percentiles=job.percentiles, bins=bins),
        "lat_ns": _spread(total),
        **_samples(bandwidths, "bw", share),
        **_samples(iops, "iops", None),
    }


def _depth_levels(result: JobResult) -> dict[str, float]:
    """Shares of the samples at which so many I/Os were in flight."""
    names = [str(depth) for depth in _DEPTHS] + [">=64"]
    levels = dict.fromkeys(names, 0.0)
    depths = [sample.in_flight for sample in result.samples if sample.in_flight]
    for depth in depths or ([result.iodepth] if result.read.ios + result.write.ios else []):
        at = next(
            (
                name
                for low, name in reversed(list(zip((*_DEPTHS, 64), names, strict=True)))
                if depth >= low
            ),
            "1",
        )
        levels[at] += 100.0 / max(1, len(depths))
    return {name: round(value, 6) for name, value in levels.items()}


def _latency_tables(latency: Latency) -> dict[str, dict[str, float]]:
    tables: dict[str, dict[str, float]] = {}
    for unit, scale in (("ns", 1), ("us", 1000), ("ms", 1_000_000)):
        steps = [*_LATENCY_STEPS, 2000] if unit == "ms" else list(_LATENCY_STEPS)
        low, table = 0.0 if unit == "ns" else float(scale), {}
        for step in steps:
            table[str(step)] = round(latency.share_between(low, step * scale), 6)
            low = step * scale
        if unit == "ms":
            table[">=2000"] = round(latency.share_between(low, float("inf")), 6)
        tables[f"latency_{unit}"] = table
    return tables


def job_json(
    job: Job, result: JobResult, *, group_bw: tuple[float, float], bins: bool
) -> dict[str, Any]:
    """One element of fio's ``jobs`` list."""
    latency = Latency.merge([result.read.latency, result.write.latency])
    busy = max(result.elapsed_s, 1e-9) * result.copies
    nothing = Direction()
    depths = dict.fromkeys(["0", "4", "8", "16", "32", "64", ">=64"], 0.0)
    out: dict[str, Any] = {
        "jobname": result.name,
        "groupid": result.group,
        "error": result.error,
        "eta": 0,
        "elapsed": int(result.elapsed_s + 1),
        "job options": dict(job.settings),
        "read": _direction(
            result.read, result.samples, "read", job=job, group_bw=group_bw[0], bins=bins
        ),
        "write": _direction(
            result.write, result.samples, "write", job=job, group_bw=group_bw[1], bins=bins
        ),
        "trim": _direction(nothing, [], "read", job=job, group_bw=0.0, bins=bins),
        "sync": {"total_ios": 0, "lat_ns": _spread(Latency())},
        "job_runtime": round(result.elapsed_s * 1000) * result.copies,
        "usr_cpu": round(100 * result.usr_s / busy, 6),
        "sys_cpu": round(100 * result.sys_s / busy, 6),
        "ctx": result.context_switches,
        "majf": result.major_faults,
        "minf": result.minor_faults,
        "iodepth_level": _depth_levels(result),
        "iodepth_submit": depths,
        "iodepth_complete": dict(depths),
        **_latency_tables(latency),
        "latency_depth": result.iodepth,
        "latency_target": 0,
        "latency_percentile": 100.0,
        "latency_window": 0,
    }
    if job.description:
        out["desc"] = job.description
    return out


def _own_job(result: JobResult) -> dict[str, Any]:
    seconds = max(result.read.runtime_s, result.write.runtime_s, 1e-9)
    members = []
    for member in result.members:
        entry = asdict(member)
        entry["read_bw_bytes"] = int(member.read_bytes / (result.read.runtime_s or seconds))
        entry["write_bw_bytes"] = int(member.write_bytes / (result.write.runtime_s or seconds))
        members.append(entry)
    return {
        "jobname": result.name,
        "groupid": result.group,
        "copies": result.copies,
        "engine": result.engine,
        "capabilities": result.capabilities,
        "buffers": result.buffers,
        "hugepages": result.hugepages,
        "counters": result.counters,
        "cpu_seconds": round(result.cpu_s, 6),
        "cpu_seconds_per_gb": round(result.cpu_s_per_gb, 6),
        "cpu_ns_per_io": round(result.ns_per_io, 1),
        "errors": {
            "read": result.read.errors,
            "write": result.write.errors,
            "messages": result.messages,
        },
        "verify": {"checked": result.verified, "bad": result.bad_blocks},
        "interrupted": result.interrupted,
        "members": members,
        "samples": [
            {
                "time_s": round(sample.end_s - result.started_s, 4),
                "seconds": round(sample.seconds, 4),
                "read_bytes": sample.read_bytes,
                "write_bytes": sample.write_bytes,
                "read_ios": sample.read_ios,
                "write_ios": sample.write_ios,
                "in_flight": sample.in_flight,
            }
            for sample in result.samples
        ],
    }


def report_json(
    run: RunResult,
    reported: Sequence[tuple[Job, JobResult]],
    *,
    version: str,
    notes: Sequence[str],
    bins: bool,
    comparison: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole document. ``reported`` holds one entry a copy, or one a group."""
    group_bw: dict[int, tuple[float, float]] = {}
    for _, result in reported:
        read, write = group_bw.get(result.group, (0.0, 0.0))
        group_bw[result.group] = (read + result.read.bytes_per_s, write + result.write.bytes_per_s)
    now = time.time()
    shared = dict(next((job.global_settings for job, _ in reported if job.global_settings), ()))
    out: dict[str, Any] = {
        "fio version": f"fio-3.33-schema kvio-{version}",
        "timestamp": int(now),
        "timestamp_ms": int(now * 1000),
        "time": time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(now)),
    }
    if shared:
        out["global options"] = shared
    out["jobs"] = [
        job_json(job, result, group_bw=group_bw[result.group], bins=bins)
        for job, result in reported
    ]
    if any(job.disk_util for job, _ in reported):
        out["disk_util"] = [asdict(use) for use in run.disks]
    out["kvio"] = {
        "version": version,
        "notes": list(notes),
        "failures": [text for _, text in run.failures],
        "interrupted": run.interrupted,
        "jobs": [_own_job(result) for _, result in reported],
        **({"compare_fio": comparison} if comparison else {}),
    }
    return out
