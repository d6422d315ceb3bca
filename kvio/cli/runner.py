"""Runs jobs: one forked process (or thread) for each copy, groups one after the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from kvio.cli import disks, worker
from kvio.cli.common import EXIT_INTERRUPTED, EXIT_IO_ERROR, EXIT_OK, EXIT_USAGE, warn
from kvio.cli.jobs import Job
from kvio.cli.results import JobResult
from kvio.cli.worker import Task

_POLL_S = 0.25
_PATIENCE_S = 2.0


@dataclass(slots=True)
class RunResult:
    """What all jobs of a command did."""

    results: list[JobResult] = field(default_factory=list)  # one a copy, in order
    jobs: list[Job] = field(default_factory=list)  # the job of each result
    failures: list[tuple[str, str]] = field(default_factory=list)  # (usage or io, message)
    interrupted: bool = False
    disks: list[disks.DiskUse] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return EXIT_INTERRUPTED
        if any(kind == "usage" for kind, _ in self.failures):
            return EXIT_USAGE
        if self.failures or any(
            result.error or result.read.errors or result.write.errors for result in self.results
        ):
            return EXIT_IO_ERROR
        return EXIT_OK


@dataclass(slots=True)
class _Crew:
    """One worker as its parent sees it."""

    task: Task
    link: Connection
    process: Any  # a Process or a Thread
    ready: bool = False
    done: bool = False


def groups_of(jobs: Sequence[Job]) -> list[int]:
    """fio's group number of each job: stonewall and new_group start another one."""
    numbers, current = [], 0
    for index, job in enumerate(jobs):
        if index and (job.stonewall or job.new_group):
            current += 1
        numbers.append(current)
    return numbers


def waves_of(jobs: Sequence[Job]) -> list[list[int]]:
    """Indices of the jobs that run at the same time; stonewall starts another wave."""
    waves: list[list[int]] = []
    for index, job in enumerate(jobs):
        if not waves or job.stonewall:
            waves.append([])
        waves[-1].append(index)
    return waves


def shares_volume(job: Job) -> bool:
    """True when the copies of a job must share one open volume.

    A block device that is written is held exclusively, so a second process could not open it.
    """
    if job.numjobs == 1 or not job.changes_members:
        return False

    def is_block(path: str) -> bool:
        try:
            return not stat.S_ISREG(os.stat(path).st_mode)
        except OSError:
            return False

    return any(is_block(path) for path in job.members)


class Runner:
    """Runs waves of jobs and collects what they measured."""

    def __init__(
        self, *, allow_destroy: bool, progress: Callable[[list[Task], dict[int, Any], float], None]
    ) -> None:
        self._allow_destroy, self._progress = allow_destroy, progress
        self._content_seed = int.from_bytes(os.urandom(7), "little")
        self._signals = 0
        self._stopping = False
        self._patience_s = float("inf")
        self._result = RunResult()

    def run(self, jobs: Sequence[Job]) -> RunResult:
        """Run all jobs. Never raises for what a job meets; see RunResult.failures."""
        numbers = groups_of(jobs)
        before = disks.read([path for job in jobs for path in job.members])
        started = time.monotonic()
        with self._catch_sigint():
            for wave in waves_of(jobs):
                if self._signals or self._result.failures:
                    break
                self._run_wave([(jobs[index], numbers[index]) for index in wave])
        self._result.interrupted = self._signals > 0
        self._result.disks = disks.use_since(before, time.monotonic() - started)
        return self._result

    @contextmanager
    def _catch_sigint(self) -> Iterator[None]:
        def on_signal(number: int, frame: FrameType | None) -> None:
            del number, frame
            self._signals += 1

        old = signal.signal(signal.SIGINT, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, old)

    def _tasks(self, wave: list[tuple[Job, int]]) -> list[Task]:
        tasks = []
        for job, group in wave:
            shared = shares_volume(job)
            for index, copy in enumerate(job.copies()[:1] if shared else job.copies()):
                task = Task(
                    job=copy,
                    group=group,
                    copy=index,
                    copies=job.numjobs if shared else 1,
                    cpu_share=1.0,
                    allow_destroy=self._allow_destroy,
                    content_seed=self._content_seed,
                )
                tasks.append(task)
        threads = sum(task.job.thread for task in tasks)
        return [
            replace(task, cpu_share=1.0 / threads) if task.job.thread else task for task in tasks
        ]

    def _run_wave(self, wave: list[tuple[Job, int]]) -> None:
        crews: list[_Crew] = []
        self._stopping = False
        for task in self._tasks(wave):
            crews.append(self._start(task, [crew.link for crew in crews]))
        results: dict[int, JobResult] = {}
        latest: dict[int, Any] = {}
        going = False
        while not all(crew.done for crew in crews):
            links = {crew.link: index for index, crew in enumerate(crews) if not crew.done}
            for link in wait(list(links), timeout=_POLL_S):
                index = links[link]  # type: ignore[index]
                self._take(crews[index], index, results, latest)
            if (self._signals or self._result.failures) and not self._stopping:
                self._stop(crews)
            self._mind_signals(crews)
            if not going and all(crew.ready or crew.done for crew in crews):
                going = True
                for crew in crews:
                    if not crew.done and not self._stopping:
                        _send(crew.link, (worker.GO,))
            self._progress([crew.task for crew in crews], latest, time.monotonic())
        for index, crew in enumerate(crews):
            crew.process.join(timeout=5)
            crew.link.close()
            if index in results:
                self._result.results.append(results[index])
                self._result.jobs.append(crew.task.job)

    def _start(self, task: Task, others: list[Connection]) -> _Crew:
        ours, theirs = multiprocessing.Pipe()
        if task.job.thread:
            thread = threading.Thread(target=worker.run_task, args=(task, theirs), daemon=True)
            thread.start()
            return _Crew(task, ours, thread)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_child, args=(task, theirs, [ours, *others]), daemon=True)
        with warnings.catch_warnings():
            # numpy's idle BLAS threads: they hold no lock that a child needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return _Crew(task, ours, process)

    def _take(
        self, crew: _Crew, index: int, results: dict[int, JobResult], latest: dict[int, Any]
    ) -> None:
        try:
            message = crew.link.recv()
        except (EOFError, OSError):
            crew.done = True
            crew.process.join(timeout=5)
            code = getattr(crew.process, "exitcode", None)
            how = (
                f"was ended by signal {-code}"
                if code is not None and code < 0
                else "ended without a result"
            )
            self._result.failures.append(("io", f"job {crew.task.job.name}: its process {how}"))
            return
        kind = message[0]
        if kind == worker.READY:
            crew.ready = True
            latest[index] = message
        elif kind == worker.PROGRESS:
            latest[index] = message
        elif kind == worker.FAILED:
            crew.done = True
            if message[1:] not in self._result.failures:
                self._result.failures.append((message[1], message[2]))
        elif kind == worker.DONE:
            crew.done = True
            results[index] = message[1]
            if message[1].error and crew.task.job.exitall_on_error:
                self._result.failures.append(
                    ("io", f"job {crew.task.job.name} failed, and exitall_on_error is set")
                )

    def _stop(self, crews: list[_Crew]) -> None:
        self._stopping = True
        self._patience_s = time.monotonic() + _PATIENCE_S
        for crew in crews:
            if not crew.done:
                _send(crew.link, (worker.STOP,))

    def _mind_signals(self, crews: list[_Crew]) -> None:
        """Say that I/O is still awaited after a SIGINT; give up after the second."""
        if self._signals > 1:
            self._abandon(crews)
        elif self._signals and time.monotonic() > self._patience_s:
            self._patience_s = float("inf")
            warn("still waiting for I/O in flight; interrupt again to give up")

    def _abandon(self, crews: list[_Crew]) -> None:
        """A second SIGINT: do not wait for I/O that may never come back."""
        for crew in crews:
            if crew.done:
                continue
            crew.done = True
            warn(f"job {crew.task.job.name}: gave up waiting for its I/O in flight")
            if not crew.task.job.thread:
                crew.process.kill()


def _send(link: Connection, message: tuple[Any, ...]) -> None:
    try:
        link.send(message)
    except OSError:
        pass  # it has ended; its last message or the closed pipe says how


def _child(task: Task, link: Connection, inherited: list[Connection]) -> None:
    """Entry of a forked worker: Ctrl-C is the parent's to handle, and so is its report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in inherited:
        other.close()
    worker.run_task(task, link)
