"""One copy of a job: opens the volume, runs, and reports over a pipe.

The same code runs in a forked process (as fio's jobs do) or in a thread (``thread``). Protocol,
worker's side: send READY, wait for GO, send PROGRESS while running, send DONE or FAILED last. A
STOP may arrive at any time; the worker then drains and sends what it has.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import kvio
from kvio.cli import session
from kvio.cli.common import BenchError, UsageError
from kvio.cli.flow import Check, Flow
from kvio.cli.jobs import Job
from kvio.cli.plan import READ, WRITE, Budget, OneWay, Paced, Plan, ReadBack, Written
from kvio.cli.results import JobResult, Latency, MemberResult, Sample
from kvio.cli.verify import Contents, make_contents

READY, GO, STOP, PROGRESS, DONE, FAILED = "ready", "go", "stop", "progress", "done", "failed"

_TICK_S = 0.25
_COUNTERS = (
    "retries",
    "short_reads",
    "bounced",
    "fixed_ops",
    "unfixed_ops",
    "direct_ops",
    "stale_completions",
    "quarantined_buffers",
    "quarantined_bytes",
    "deadline_exceeded",
    "poisoned_rings",
)


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is told to do."""

    job: Job
    group: int
    copy: int  # first copy that this worker runs
    copies: int  # more than 1 when copies share one volume
    cpu_share: float  # part of the process's CPU time that belongs to this worker
    allow_destroy: bool
    content_seed: int


@dataclass(slots=True)
class Usage:
    """A reading of the process's resource counters."""

    values: resource.struct_rusage = field(
        default_factory=lambda: resource.getrusage(resource.RUSAGE_SELF)
    )

    def since(self, start: Usage) -> dict[str, float]:
        now, then = self.values, start.values
        return {
            "usr_s": now.ru_utime - then.ru_utime,
            "sys_s": now.ru_stime - then.ru_stime,
            "context_switches": now.ru_nvcsw + now.ru_nivcsw - then.ru_nvcsw - then.ru_nivcsw,
            "major_faults": now.ru_majflt - then.ru_majflt,
            "minor_faults": now.ru_minflt - then.ru_minflt,
        }


def run_task(task: Task, link: Connection) -> None:
    """The worker's whole life; every failure ends as one FAILED message."""
    try:
        link.send((DONE, _Worker(task, link).run()))
    except (UsageError, BenchError) as error:
        link.send((FAILED, "usage" if isinstance(error, UsageError) else "io", str(error)))
    except kvio.KvioError as error:
        link.send((FAILED, "io", f"job {task.job.name}: {error}"))
    except MemoryError:
        link.send((FAILED, "io", f"job {task.job.name}: not enough memory for the buffers"))
    except OSError as error:
        link.send((FAILED, "io", f"job {task.job.name}: {error}"))
    finally:
        link.close()


class _StoppedError(Exception):
    """The parent told the worker to stop before it had started."""


class _Worker:
    def __init__(self, task: Task, link: Connection) -> None:
        self._task, self._job, self._link = task, task.job, link
        self._samples: list[Sample] = []
        self._interrupted = False
        self._base: Any = None  # statistics at the start of what is measured
        self._last: tuple[Any, float] = (None, 0.0)
        self._result = JobResult(
            task.job.name, task.group, copies=task.copies, iodepth=task.job.iodepth
        )
        self._sample_s = max(0.01, task.job.sample_ms / 1000)
        self._tick_s = min(_TICK_S, self._sample_s)

    def run(self) -> JobResult:
        job, task = self._job, self._task
        if job.nice and not job.thread:
            os.nice(job.nice)
        if job.cpus_allowed:
            os.sched_setaffinity(0, job.cpus_allowed)
        volume = session.open_volume(job, copies=task.copies, allow_destroy=task.allow_destroy)
        buffers, result, stuck = None, None, ""
        try:
            regions = [
                session.resolve_region(job, volume.size, task.copy + index)
                for index in range(task.copies)
            ]
            if job.changes_members:
                session.check_alignment(job, regions, volume)
            contents = make_contents(job, task.content_seed)
            largest = [member.max_io_bytes for member in volume.members]
            commands = session.commands_per_block(job, largest)
            limits = session.batch_limits(job, contents, commands=commands)
            buffers = session.Buffers(
                job,
                mem_align=max(member.mem_align for member in volume.members),
                slots=limits[0],
                largest_batch=limits[2],
                private=contents is not None,
            )
            session.write_contents(job, buffers)
            result = self._measure(volume, buffers, regions, contents, limits)
        finally:
            # The volume first: after a deadline its I/O may still land in the buffers.
            stuck = session.close_volume(volume, hurry=job.deadline_s is not None)
            if buffers is not None and not stuck:
                buffers.close()
        if stuck:
            result.error = result.error or errno.ETIME
            result.messages.append(stuck)
        return result

    def _measure(
        self,
        volume: Any,
        buffers: session.Buffers,
        regions: list[session.Region],
        contents: Contents | None,
        limits: tuple[int, int, int],
    ) -> JobResult:
        job = self._job
        flow = Flow(
            volume,
            buffers,
            # What is checked are the blocks that were written, and as such they are read.
            (job.write_bs if _reads_written(job) else job.read_bs, job.write_bs),
            slots=limits[0],
            largest_batch=limits[2],
            keep_going=_keep_going(job),
            tick=lambda now: self._tick(volume, now),
            tick_s=self._tick_s,
        )
        try:
            self._await_go(_budget(job, regions).nbytes)
        except _StoppedError:
            self._result.interrupted = True
            return self._result
        # Reads of a mix are not checked: their blocks may not have been written yet.
        writing = job.changes_members
        check = (
            None
            if contents is None
            else Check(contents, not (job.mixed and writing), writing, job.verify_fatal)
        )
        plan = self._plan(regions, limits)
        if job.ramp_s:
            plan.budget = Budget(None, None)
            flow.run(plan, until_s=time.monotonic() + job.ramp_s, check=check, drain=False)
            if not flow.stopped:
                flow.reset()
        plan.budget = _budget(job, regions)
        written = None
        if check is not None and writing and job.do_verify:
            spans = [(region.start, region.length) for region in regions]
            written = Written.over(spans, job.write_bs, batch=limits[1])
        self._run_phases(flow, volume, plan, check, written)
        self._finish(flow, volume, buffers)
        return self._result

    def _await_go(self, total_bytes: int | None) -> None:
        self._link.send((READY, total_bytes))
        if self._link.recv()[0] != GO:
            raise _StoppedError
        end = time.monotonic() + self._job.startdelay_s
        while (left := end - time.monotonic()) > 0:
            if self._link.poll(left) and self._link.recv()[0] == STOP:
                raise _StoppedError

    def _plan(self, regions: list[session.Region], limits: tuple[int, int, int]) -> Plan:
        job = self._job
        streams = session.make_streams(job, regions)
        budget = Budget(None, None)
        iops = session.iops_limits(job)
        blocks = (job.read_bs, job.write_bs)
        if _reads_written(job):
            # verify_only reads the blocks that the same job would write.
            streams, blocks = (streams[WRITE], streams[WRITE]), (job.write_bs, job.write_bs)
        writing = job.changes_members
        if session.is_paced(job):
            share = job.rwmixread / 100 if job.mixed and writing else 0.0 if writing else 1.0
            return Paced(streams, blocks, budget, batch=limits[1], share_read=share, iops=iops)
        direction = WRITE if writing else READ
        return OneWay(streams[direction], direction, blocks[direction], budget, limits[1:])

    def _run_phases(
        self,
        flow: Flow,
        volume: Any,
        plan: Plan,
        check: Check | None,
        written: Written | None,
    ) -> None:
        job = self._job
        self._base, usage = volume.stats(), Usage()
        self._last = (self._base, time.monotonic())
        self._result.started_s = start = time.monotonic()
        until = start + job.runtime_s if job.runtime_s else None
        flow.run(plan, until_s=until, check=check, written=written)
        if job.end_fsync and job.changes_members and not flow.error:
            volume.flush()
        elapsed = time.monotonic() - start
        self._result.read.runtime_s = elapsed if job.reads or job.verify_only else 0.0
        self._result.write.runtime_s = elapsed if job.changes_members else 0.0
        if written is not None and check is not None and not flow.stopped:
            begun = time.monotonic()
            check = Check(check.contents, reads=True, own=True, fatal=job.verify_fatal)
            flow.use_blocks((job.write_bs, job.write_bs))
            flow.run(ReadBack(written), check=check)
            self._result.read.runtime_s += time.monotonic() - begun
        self._sample(volume, time.monotonic())
        self._result.elapsed_s = time.monotonic() - start
        for name, value in Usage().since(usage).items():
            share = value * self._task.cpu_share
            setattr(self._result, name, share if name.endswith("_s") else int(share))

    def _tick(self, volume: Any, now: float) -> bool:
        """Sample, report progress, and look for a STOP. True when the job must end."""
        if self._base is not None:
            self._progress(volume, now)
        while self._link.poll(0):
            try:
                if self._link.recv()[0] == STOP:
                    self._interrupted = True
            except EOFError:
                self._interrupted = True  # the parent is gone
                break
        return self._interrupted

    def _progress(self, volume: Any, now: float) -> None:
        if now - self._last[1] >= self._sample_s - self._tick_s / 2:
            self._sample(volume, now)
        stats = volume.stats()
        done = stats.delta(self._base)
        try:
            self._link.send(
                (PROGRESS, now, done.read.bytes, done.write.bytes, done.read.ops, done.write.ops)
            )
        except OSError:
            self._interrupted = True

    def _sample(self, volume: Any, now: float) -> None:
        stats = volume.stats()
        last, then = self._last
        self._last = (stats, now)
        if now - then < self._sample_s * 0.2:
            return  # the rest of the run is too short to say anything
        part = stats.delta(last)
        flying = sum(member.in_flight for member in stats.members)
        self._samples.append(
            Sample(
                now,
                now - then,
                part.read.bytes,
                part.write.bytes,
                part.read.ops,
                part.write.ops,
                flying,
            )
        )

    def _finish(self, flow: Flow, volume: Any, buffers: session.Buffers) -> None:
        result, total = self._result, volume.stats().delta(self._base)
        for into, counted, engine in (
            (result.read, flow.counted[READ], total.read),
            (result.write, flow.counted[WRITE], total.write),
        ):
            into.ios, into.bytes = counted.ios, counted.bytes
            into.errors, into.short = counted.errors, counted.short
            into.latency = Latency.from_histogram(engine.latency)
            if not into.ios:
                into.runtime_s = 0.0
        result.samples = self._samples
        result.error, result.messages = flow.error, flow.messages
        result.verified, result.bad_blocks = flow.verified, flow.bad_count
        result.messages += [str(bad) for bad in flow.bad]
        result.interrupted = self._interrupted
        result.members = [
            _member(member, stats)
            for member, stats in zip(volume.members, total.members, strict=True)
        ]
        result.engine, result.capabilities = str(volume.engine), dict(volume.capabilities)
        result.counters = {name: int(getattr(total, name)) for name in _COUNTERS}
        result.hugepages = buffers.hugepages
        result.buffers = "registered pool" if self._job.fixedbufs else "plain memory"


def _reads_written(job: Job) -> bool:
    return job.verify_only and job.writes


def _keep_going(job: Job) -> tuple[bool, bool]:
    word = job.continue_on_error
    return word in ("read", "io", "all", "1"), word in ("write", "io", "all", "1")


def _budget(job: Job, regions: list[session.Region]) -> Budget:
    """How much a job has to move. A timed job has no end but its runtime."""
    if job.time_based:
        return Budget(None, job.number_ios)
    length = sum(region.length for region in regions)
    if job.io_size is not None:
        kind, amount = job.io_size
        length = length * amount // 100 if kind == "percent" else amount * len(regions)
    ios = None if job.number_ios is None else job.number_ios * len(regions)
    return Budget(length * job.loops, ios)


def _member(member: Any, stats: Any) -> MemberResult:
    return MemberResult(
        path=str(member.path),
        engine=str(member.engine),
        engine_reason=str(member.engine_reason),
        direct=bool(member.direct),
        read_bytes=stats.read.bytes,
        write_bytes=stats.write.bytes,
        read_ios=stats.read.ops,
        write_ios=stats.write.ops,
        errors=stats.read.errors + stats.write.errors,
        retries=stats.retries,
        read_p99_ns=Latency.from_histogram(stats.read.latency).percentile(99),
        write_p99_ns=Latency.from_histogram(stats.write.latency).percentile(99),
    )
