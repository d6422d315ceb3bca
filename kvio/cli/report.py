"""The report that a person reads: one line a direction first, then where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvio.cli.common import (
    format_bytes,
    format_count,
    format_ns,
    format_rate,
    format_seconds,
    format_size,
)
from kvio.cli.jobs import Job
from kvio.cli.results import Direction, JobResult, MemberResult

_MANY_MEMBERS = 8


def report_text(
    reported: Sequence[tuple[Job, JobResult]], *, notes: Sequence[str], failures: Sequence[str]
) -> str:
    """The whole report, ending in a newline."""
    blocks = [_job_text(job, result) for job, result in reported]
    if notes:
        blocks.append("\n".join(f"note: {note}" for note in notes))
    if failures:
        blocks.append("\n".join(f"failed: {text}" for text in failures))
    return "\n\n".join(blocks) + "\n"


def describe(job: Job) -> str:
    """One line that says what was run."""
    sizes = format_size(job.read_bs) if job.reads else format_size(job.write_bs)
    if job.mixed and job.read_bs != job.write_bs:
        sizes += f"/{format_size(job.write_bs)}"
    spread = job.distribution.kind
    kind = (
        f", {spread}:{job.distribution.value:g}" if spread in ("zipf", "pareto", "normal") else ""
    )
    mix = f", {job.rwmixread} % reads" if job.mixed else ""
    copies = f" x {job.numjobs} jobs" if job.numjobs > 1 else ""
    return f"{job.rw} {sizes}, depth {job.iodepth}{copies}{kind}{mix}, {len(job.members)} member(s)"


def _job_text(job: Job, result: JobResult) -> str:
    head = f"{result.name}: {describe(job)}"
    if result.interrupted:
        head += " (interrupted, partial)"
    lines = [head]
    for word, direction in (("read", result.read), ("write", result.write)):
        if direction.ios:
            what = "check" if word == "read" and not job.reads else word
            lines += [
                _direction_line(what, direction),
                *_member_lines(word, direction, result.members),
            ]
    if not result.read.ios and not result.write.ios:
        lines.append("  no I/O was done")
    lines += _detail_lines(result)
    if result.verified or result.bad_blocks:
        verdict = f"{result.bad_blocks} BAD" if result.bad_blocks else "all good"
        lines.append(f"  verify   {format_count(result.verified)} block(s) checked, {verdict}")
    lines += [f"  error    {text}" for text in result.messages]
    return "\n".join(lines)


def _direction_line(word: str, direction: Direction) -> str:
    latency = direction.latency
    line = (
        f"  {word:<5} {format_rate(direction.bytes_per_s):>10}  "
        f"{format_count(direction.ios_per_s):>6} IOPS   "
        f"p50 {format_ns(latency.percentile(50))}  p99 {format_ns(latency.percentile(99))}  "
        f"max {format_ns(latency.max_ns)}   "
        f"{format_bytes(direction.bytes)} in {format_seconds(direction.runtime_s)}"
    )
    if direction.errors:
        line += f"   {direction.errors} ERROR(S)"
    if direction.short:
        line += f"   {direction.short} short"
    return line


def _member_lines(word: str, direction: Direction, members: Sequence[MemberResult]) -> list[str]:
    """Each member's share, so that a slow or idle one is seen at once."""
    total = sum(getattr(member, f"{word}_bytes") for member in members)
    if len(members) < 2 or not total or not direction.runtime_s:
        return []
    shown = list(members)
    shown.sort(key=lambda member: getattr(member, f"{word}_p99_ns"), reverse=True)
    left_out = max(0, len(shown) - _MANY_MEMBERS)
    keep = {id(member) for member in shown[:_MANY_MEMBERS]}
    width = max(len(member.path) for member in members if id(member) in keep)
    lines = []
    for member in members:
        if id(member) not in keep:
            continue
        moved = getattr(member, f"{word}_bytes")
        tail = f"p99 {format_ns(getattr(member, f'{word}_p99_ns'))}" if moved else "idle"
        line = (
            f"        {member.path:<{width}}  {format_rate(moved / direction.runtime_s):>9}  "
            f"{100 * moved / total:5.1f} %  {tail}"
        )
        if member.errors or member.retries:
            line += f"  {member.errors} error(s), {member.retries} retried"
        lines.append(line)
    if left_out:
        lines.append(f"        and {left_out} member(s) with lower p99 latency")
    return lines


def _detail_lines(result: JobResult) -> list[str]:
    if not result.members:
        return []
    lines = [f"  engine   {line}" for line in _engine_lines(result.members)]
    granted = _granted(result.capabilities)
    if granted:
        lines.append(f"  granted  {granted}")
    lines += [
        f"  refused  {name.removesuffix('_refused')}: {value}"
        for name, value in result.capabilities.items()
        if name.endswith("_refused") and isinstance(value, str) and value
    ]
    counters, ios = result.counters, result.read.ios + result.write.ios
    fixed = counters.get("fixed_ops", 0)
    issued = fixed + counters.get("unfixed_ops", 0)
    share = (
        f"{100 * fixed / issued:.0f} % of I/O on registered buffers"
        if issued
        else "no I/O on registered buffers"
    )
    huge = f", huge pages: {result.hugepages}" if result.buffers != "plain memory" else ""
    lines.append(
        f"  buffers  {result.buffers}{huge}; {share}; {counters.get('bounced', 0)} bounced"
    )
    odd = [f"{counters[name]} {name.replace('_', ' ')}" for name in _ODD if counters.get(name)]
    if odd:
        lines.append(f"  trouble  {', '.join(odd)}")
    if ios:
        busy = max(result.elapsed_s, 1e-9)
        lines.append(
            f"  cpu      {result.cpu_s_per_gb:.3f} s per GB, "
            f"{format_ns(result.ns_per_io)} per I/O; "
            f"user {100 * result.usr_s / busy:.0f} %, system {100 * result.sys_s / busy:.0f} %; "
            f"{format_count(result.context_switches)} context switches"
        )
    return lines


_ODD = (
    "retries",
    "short_reads",
    "stale_completions",
    "deadline_exceeded",
    "quarantined_buffers",
    "poisoned_rings",
)


def _engine_lines(members: Sequence[MemberResult]) -> list[str]:
    """One line for each kind of member: engine, how many, O_DIRECT, and why."""
    kinds: dict[tuple[str, bool, str], int] = {}
    for member in members:
        key = (member.engine, member.direct, member.engine_reason)
        kinds[key] = kinds.get(key, 0) + 1
    return [
        f"{engine} on {count} of {len(members)} member(s), O_DIRECT {'on' if direct else 'off'}"
        + (f": {reason}" if reason else "")
        for (engine, direct, reason), count in kinds.items()
    ]


def _granted(capabilities: dict[str, Any]) -> str:
    """The capabilities that are true, lists spelled out."""
    words = []
    for name, value in capabilities.items():
        if name in ("members", "engine"):
            continue
        if value is True:
            words.append(name)
        elif (
            isinstance(value, (list, tuple))
            and value
            and all(isinstance(item, str) for item in value)
        ):
            words.append(f"{name}: {' '.join(value)}")
    return ", ".join(words)
